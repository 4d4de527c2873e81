"""Replicas of an expert: its state as a snapshot, offered to other hosts on request and copied from them.

The holder with the highest `weight_version` is right; the others copy it, all of it: weights, optimizer state, version.
A snapshot is made when somebody asks for it (`OFFER`), not in advance, so that experts nobody copies cost nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, no_grad

from swarm.endpoint import Endpoint
from swarm.errors import (
    MalformedFrameError,
    NoDonorError,
    SchemaMismatchError,
    SwarmError,
    UnknownExpertError,
)
from swarm.events import Event
from swarm.experts.backend import ExpertBackend
from swarm.experts.protocol import OFFER
from swarm.experts.records import HostRecord, snapshot_key
from swarm.experts.spec import parse_uid
from swarm.experts.workers import Worker
from swarm.net.transport import CallContext, Contact
from swarm.state.transfer import Snapshot, SnapshotStore, fetch_snapshot
from swarm.tensors.schema import check_finite
from swarm.tensors.wire import Limits, from_frame, to_frame

NEVER = -1
"""The `have` of a host that has no version of the expert yet."""
_OPTIMIZER_NAME = re.compile(r"optimizer\.(0|[1-9][0-9]{0,5})\.([a-z_][a-z0-9_]{0,40})")
_NEVER_NEGATIVE = frozenset(
    (
        *("step", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "mu_product"),
        *("row_var", "col_var", "variance", "eta", "mu", "step_size"),
    )
)
_FRAME_LIMITS = Limits(max_header_bytes=4096, max_tensors=0, max_payload_bytes=0)
_KEEP_OFFERS_S = 60.0
_SLOWEST_BYTES_S = 256 * 1024
_TRANSFER_FLOOR_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplicaSynced(Event):
    """This host's replica was behind and is now a copy of `donor`'s; `lost_steps` of its own were replaced."""

    uid: str
    donor: str
    from_version: int
    to_version: int
    lost_steps: int


@dataclass(frozen=True, slots=True)
class ReplicaSyncFailed(Event):
    """A holder could not be copied from; another is tried, or this one again later."""

    uid: str
    donor: str
    reason: str


def capture(backend: ExpertBackend) -> Snapshot:
    """The expert's state at this moment, copied. Runs on the device's thread."""
    tensors = {f"model.{name}": t for name, t in _model_state(backend).items()}
    scalars: dict[str, dict[str, float | int | bool]] = {}
    for index, state in backend.stepper.state().items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            elif isinstance(value, bool | int | float):
                scalars.setdefault(str(index), {})[name] = value
    metadata = {"uid": backend.uid, "weight_version": backend.weight_version, "scalars": scalars}
    snapshot = Snapshot.build(tensors, metadata)
    backend.own_steps = 0
    return snapshot


def _model_state(backend: ExpertBackend) -> dict[str, Tensor]:
    return {name: t for name, t in backend.module.state_dict().items() if isinstance(t, Tensor)}


def restore(backend: ExpertBackend, snapshot: Snapshot) -> None:
    """Make the expert a copy of a snapshot that another host gave. Runs on the device's thread.

    Everything is checked before anything changes.

    Raises:
        SchemaMismatchError: It belongs to another expert or class.
        NonFiniteError: It holds NaN or infinity.
    """
    version, scalars = snapshot.metadata.get("weight_version"), snapshot.metadata.get("scalars", {})
    if snapshot.metadata.get("uid") != backend.uid or type(version) is not int or not 0 <= version < 1 << 62:
        raise SchemaMismatchError(f"The snapshot does not hold the state of {backend.uid}.")
    model = _model_state(backend)
    given = {name.removeprefix("model."): t for name, t in snapshot.tensors.items() if name.startswith("model.")}
    if list(given) != list(model) or any(
        given[n].shape != t.shape or given[n].dtype != t.dtype for n, t in model.items()
    ):
        raise SchemaMismatchError(f"The snapshot of {backend.uid} holds other tensors than its class.")
    for name, tensor in snapshot.tensors.items():
        check_finite(tensor, f"{name} of {backend.uid}")
    optimizer_state = _optimizer_state(backend, snapshot.tensors, scalars)
    with no_grad():
        for name, tensor in model.items():
            tensor.copy_(given[name])
    backend.stepper.set_state(optimizer_state)
    backend.weight_version = version
    backend.own_steps = 0


def _optimizer_state(backend: ExpertBackend, tensors: Mapping[str, Tensor], scalars: Any) -> dict[int, dict[str, Any]]:
    """A stranger's optimizer state by parameter; complete and of the sizes that our own optimizer will look for."""
    expected = backend.stepper.expected_state()
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        match = _OPTIMIZER_NAME.fullmatch(name)
        if match is None:
            if name.startswith("model."):
                continue
            raise SchemaMismatchError(f"The snapshot of {backend.uid} holds an unknown tensor {name[:60]!r}.")
        index = int(match.group(1))
        value = expected[index].get(match.group(2)) if index < len(expected) else None
        if not isinstance(value, Tensor):
            raise SchemaMismatchError(f"The snapshot of {backend.uid} holds optimizer state of another class.")
        if tensor.shape != value.shape or tensor.is_floating_point() != value.is_floating_point():
            raise SchemaMismatchError(f"The snapshot of {backend.uid} holds optimizer state of another size or type.")
        if match.group(2) in _NEVER_NEGATIVE and tensor.numel() and bool((tensor < 0).any()):
            raise SchemaMismatchError(f"The snapshot of {backend.uid} holds negative squares or steps.")
        # a copy, so that the snapshot's memory as a whole can go
        state.setdefault(index, {})[match.group(2)] = tensor.clone()
    if not isinstance(scalars, dict):
        raise SchemaMismatchError(f"The snapshot of {backend.uid} holds malformed optimizer state.")
    by_text = {str(index): values for index, values in state.items()}
    for index_text, given in scalars.items():
        if index_text not in by_text or not isinstance(given, dict):
            raise SchemaMismatchError(f"The snapshot of {backend.uid} holds malformed optimizer state.")
        for name, number in given.items():
            usual = expected[int(index_text)].get(name)
            if type(number) is not type(usual) or not isinstance(number, bool | int | float):
                raise SchemaMismatchError(f"The snapshot of {backend.uid} holds malformed optimizer state.")
            by_text[index_text][name] = number
    wanted = [{n for n, v in e.items() if isinstance(v, Tensor | bool | int | float)} for e in expected]
    if any(values.keys() != wanted[index] for index, values in state.items()):
        raise SchemaMismatchError(f"The snapshot of {backend.uid} holds incomplete optimizer state.")
    return state


@dataclass(slots=True)
class _Offer:
    weight_version: int
    made_s: float
    asked_s: float


class ReplicaExchange:
    """Offers the states of the held experts to other hosts, and copies states from them.

    Args:
        experts: The held experts; the host changes it.
        refresh_s: A snapshot younger than this is offered again although the weights have moved on.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        store: SnapshotStore,
        worker: Worker,
        experts: Mapping[str, ExpertBackend],
        refresh_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._runtime = endpoint.runtime
        self._store = store
        self._worker = worker
        self._experts = experts
        self._refresh_s = refresh_s
        self._offers: dict[str, _Offer] = {}
        self._making: dict[str, asyncio.Lock] = {}
        endpoint.transport.serve(OFFER, self._offer)

    async def _offer(self, context: CallContext, data: bytes) -> bytes:
        meta, _ = from_frame(data, _FRAME_LIMITS)
        uid, have = meta.get("uid"), meta.get("have")
        if not isinstance(uid, str) or type(have) is not int:
            raise MalformedFrameError("An offer request needs a uid and a version.")
        parse_uid(uid)
        backend = self._experts.get(uid)
        if backend is None:
            raise UnknownExpertError(f"This host does not hold {uid}.")
        if backend.weight_version > have:
            async with self._making.setdefault(uid, asyncio.Lock()):
                await self._publish(backend, have)
        return to_frame({"uid": uid, "weight_version": backend.weight_version}, [])

    async def _publish(self, backend: ExpertBackend, have: int) -> None:
        now_s = self._runtime.clock.time()
        offer = self._offers.get(backend.uid)
        if offer is not None and offer.weight_version > have:
            offer.asked_s = now_s
            if offer.weight_version == backend.weight_version or now_s - offer.made_s < self._refresh_s:
                return
        snapshot = await self._worker.call(lambda: capture(backend))
        self._store.publish(snapshot_key(backend.uid), snapshot)
        self._offers[backend.uid] = _Offer(snapshot.metadata["weight_version"], now_s, now_s)

    def sweep(self) -> None:
        """Withdraw snapshots that nobody has asked for lately, and those of experts given up."""
        now_s = self._runtime.clock.time()
        for uid, offer in list(self._offers.items()):
            if uid not in self._experts or now_s - offer.asked_s > _KEEP_OFFERS_S:
                self.forget(uid)

    def forget(self, uid: str) -> None:
        """Stop offering an expert."""
        self._making.pop(uid, None)
        if self._offers.pop(uid, None) is not None:
            self._store.withdraw(snapshot_key(uid))

    async def version_at(self, host: HostRecord, uid: str, have: int) -> int:
        """The version that a host holds; it publishes its state if that is newer than `have`.

        Raises:
            UnknownExpertError: It does not hold the expert. NetworkError: It could not be asked.
        """
        contact = Contact(host.peer_id, host.addresses)
        data = await self._endpoint.transport.call(contact, OFFER, to_frame({"uid": uid, "have": have}, []))
        meta, _ = from_frame(data, _FRAME_LIMITS)
        version = meta.get("weight_version")
        if type(version) is not int or version < 0:
            raise MalformedFrameError("The answer to an offer request names no version.")
        return version

    async def copy(self, backend: ExpertBackend, donors: Sequence[HostRecord], have: int) -> HostRecord | None:
        """Copy the state of the first donor that can give one newer than `have`; none if no donor is ahead.

        Raises:
            NoDonorError: Every donor failed (each failure is an event).
        """
        failed = ""
        for donor in donors:
            try:
                if await self.version_at(donor, backend.uid, have) <= have:
                    continue
                snapshot = await self._fetch(backend, donor)
                await self._worker.call(partial(restore, backend, snapshot))
            except SwarmError as error:
                failed = error.message
                self._runtime.emit(ReplicaSyncFailed(backend.uid, str(donor.peer_id), failed))
                continue
            return donor
        if failed:
            raise NoDonorError(f"No holder of {backend.uid} could give its state: {failed}", fix="It is tried again.")
        return None

    async def _fetch(self, backend: ExpertBackend, donor: HostRecord) -> Snapshot:
        # the optimizers at hand hold up to three values per parameter besides it
        nbytes = 5 * backend.profile.parameter_bytes + (1 << 20)
        limits = Limits(max_header_bytes=4 << 20, max_tensors=65536, max_payload_bytes=nbytes)
        return await fetch_snapshot(
            self._endpoint,
            Contact(donor.peer_id, donor.addresses),
            snapshot_key(backend.uid),
            limits=limits,
            timeout_s=_TRANSFER_FLOOR_S + nbytes / _SLOWEST_BYTES_S,
        )
