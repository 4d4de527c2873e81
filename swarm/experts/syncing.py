"""Keeps the replicas of the held experts in agreement, and gives their state to hosts that take an expert.

Any replica may make steps. At intervals the first live holder in rendezvous order coordinates: it asks the others for
captures (`CAPTURE`), merges them with its own (`swarm.experts.agreement`) and goes on from the result; the others ask
it, or whoever announces more steps than their base has, for the newest agreement (`OFFER`), and go on from that.
Snapshots are made when somebody asks, not in advance, so that experts nobody copies cost nothing. Where nobody has made
a step, nothing is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swarm.endpoint import Endpoint
from swarm.errors import MalformedFrameError, NoDonorError, SwarmError, UnknownExpertError
from swarm.events import Event
from swarm.experts.agreement import Agreement, AgreementId, Capture, agree
from swarm.experts.backend import ExpertBackend
from swarm.experts.protocol import CAPTURE, OFFER
from swarm.experts.records import HostRecord, rendezvous_order, snapshot_key
from swarm.experts.replicas import (
    OptimizerState,
    capture,
    captured,
    checked,
    checked_capture,
    host_optimizer,
    host_state,
    id_from_json,
    id_to_json,
    is_count,
    merged_optimizer,
    restore,
    transfer_bounds,
)
from swarm.experts.spec import parse_uid
from swarm.experts.tracking import Held, HeldReplicas
from swarm.experts.workers import Worker
from swarm.net.transport import CallContext, Contact
from swarm.state.transfer import Snapshot, SnapshotStore, fetch_snapshot
from swarm.tensors.wire import Limits, from_frame, to_frame

NEVER = -1
"""The `have` of a host that has no version of the expert yet."""
_FRAME_LIMITS = Limits(max_header_bytes=4096, max_tensors=0, max_payload_bytes=0)
_KEEP_OFFERS_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicasAgreed(Event):
    """This host has merged the replicas of an expert: `steps` of `contributors` hosts, to `weight_version`."""

    uid: str
    weight_version: int
    contributors: int
    steps: int


@dataclass(frozen=True, slots=True)
class ReplicaSynced(Event):
    """This host's replica goes on from the newest agreement, which `donor` gave; its own newer steps are kept.

    `lost_steps` of its own are in none of the weights any more: another agreement than theirs has prevailed.
    """

    uid: str
    donor: str
    from_version: int
    to_version: int
    lost_steps: int


@dataclass(frozen=True, slots=True)
class ReplicaSyncFailed(Event):
    """A holder could not be copied from, or gave no capture that can be used; it is tried again later."""

    uid: str
    donor: str
    reason: str


@dataclass(slots=True)
class _Offer:
    version: int
    made_s: float
    asked_s: float


class ReplicaExchange:
    """See the module's docstring. Weights are read and written on the device's thread.

    Args:
        experts: The held experts; the host changes it.
        refresh_s: A lone holder's snapshot younger than this is offered again although the weights have moved on.
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
        self._held = HeldReplicas(endpoint.peer_id)
        self._offers: dict[str, _Offer] = {}
        self._captures: dict[str, int] = {}
        self._making: dict[str, asyncio.Lock] = {}
        self._hosts: Sequence[HostRecord] = ()
        endpoint.transport.serve(OFFER, self._offer)
        endpoint.transport.serve(CAPTURE, self._hand_out)

    # ---- what is held

    def observe(self, hosts: Sequence[HostRecord]) -> None:
        """What the other hosts announce now."""
        self._hosts = hosts

    def _holders(self, uid: str) -> list[HostRecord]:
        return [host for host in self._hosts if uid in host.experts]

    async def track(self, backend: ExpertBackend) -> None:
        """Note where a new replica starts from, before it makes steps. Costs a copy of the weights on the CPU."""
        await self._worker.call(partial(self._held.of, backend))

    async def start_from(self, backend: ExpertBackend, snapshot: Snapshot) -> None:
        """Make a replica a copy of a snapshot, and go on from there. Raises as `restore`."""

        def run() -> None:
            found = restore(backend, snapshot).agreement
            # memory of its own, so that the snapshot's as a whole can go
            weights = {name: tensor.clone() for name, tensor in found.weights.items()}
            self._held.begin(backend, replace(found, weights=weights))

        await self._worker.call(run)
        self._withdraw(backend.uid)

    async def unsynced(self, backend: ExpertBackend) -> int:
        """Steps of this replica that no agreement is known to hold."""
        return await self._worker.call(lambda: self._held.of(backend).holder.steps)

    async def base_version(self, backend: ExpertBackend) -> int:
        """The version of the agreement that this replica goes on from."""
        return await self._worker.call(lambda: self._held.of(backend).holder.base.weight_version)

    # ---- what others ask for

    async def _offer(self, context: CallContext, data: bytes) -> bytes:
        """Publish the newest agreement if it is ahead of what the caller has."""
        meta, _ = from_frame(data, _FRAME_LIMITS)
        have = meta.get("have")
        if type(have) is not int:
            raise MalformedFrameError("An offer request needs a version.")
        backend = self._asked_for(meta)
        async with self._making.setdefault(backend.uid, asyncio.Lock()):
            version = await self._publish(backend, have)
        return to_frame({"uid": backend.uid, "weight_version": version}, [])

    def _asked_for(self, meta: Mapping[str, Any]) -> ExpertBackend:
        uid = meta.get("uid")
        if not isinstance(uid, str):
            raise MalformedFrameError("A request for a replica needs a uid.")
        parse_uid(uid)
        backend = self._experts.get(uid)
        if backend is None:
            raise UnknownExpertError(f"This host does not hold {uid}.")
        return backend

    async def _publish(self, backend: ExpertBackend, have: int) -> int:
        now_s, uid = self._runtime.clock.time(), backend.uid
        # a newcomer gets all that a lone holder has; other holders' steps are merged by whoever coordinates
        alone = have == NEVER and not self._holders(uid)
        offer = self._offers.get(uid)
        if offer is not None and offer.version > have:
            offer.asked_s = now_s
            if alone and (backend.weight_version == offer.version or now_s - offer.made_s < self._refresh_s):
                return offer.version

        def make() -> tuple[int, Snapshot | None]:
            held = self._held.of(backend)
            if alone:
                self._held.agree_alone(held)
            version = held.holder.base.weight_version
            current = offer is not None and offer.version == version and self._store.get(snapshot_key(uid)) is not None
            return version, None if version <= have or current else capture(backend, held.holder.base)

        version, snapshot = await self._worker.call(make)
        if snapshot is not None:
            self._show(uid, snapshot)
        return version

    def _show(self, uid: str, snapshot: Snapshot) -> None:
        now_s = self._runtime.clock.time()
        self._store.publish(snapshot_key(uid), snapshot)
        self._offers[uid] = _Offer(snapshot.metadata["weight_version"], now_s, now_s)

    async def _hand_out(self, context: CallContext, data: bytes) -> bytes:
        """Publish a capture for a coordinator on our base; in any case say what our base is."""
        meta, _ = from_frame(data, _FRAME_LIMITS)
        backend, base = self._asked_for(meta), id_from_json(meta.get("agreement"))
        uid, key = backend.uid, capture_key(backend.uid)

        def make() -> tuple[Held, Capture | None, Snapshot | None]:
            held = self._held.of(backend)
            if held.holder.base.id != base:
                return held, None, None
            own = held.holder.capture(host_state(backend))
            known = own is not None and self._captures.get(uid) == own.number and self._store.get(key) is not None
            return held, own, None if own is None or known else captured(backend, own)

        async with self._making.setdefault(uid, asyncio.Lock()):
            held, own, snapshot = await self._worker.call(make)
            if own is not None and snapshot is not None:
                self._store.publish(key, snapshot)
                self._captures[uid] = own.number
        answer = {"agreement": id_to_json(held.holder.base.id), "steps": own.steps if own is not None else 0}
        return to_frame({"uid": uid, **answer}, [])

    def sweep(self) -> None:
        """Withdraw snapshots that nobody has asked for lately, and forget experts given up."""
        now_s = self._runtime.clock.time()
        for uid in [*self._held.gone(self._experts), *(uid for uid in self._offers if uid not in self._experts)]:
            self.forget(uid)
        for uid, offer in list(self._offers.items()):
            if now_s - offer.asked_s > _KEEP_OFFERS_S:
                self._withdraw(uid)

    def forget(self, uid: str) -> None:
        """Stop offering an expert, and taking part in its agreements."""
        self._making.pop(uid, None)
        self._held.forget(uid)
        self._withdraw(uid)
        self._withdraw_capture(uid)

    def _withdraw(self, uid: str) -> None:
        if self._offers.pop(uid, None) is not None:
            self._store.withdraw(snapshot_key(uid))

    def _withdraw_capture(self, uid: str) -> None:
        if self._captures.pop(uid, None) is not None:
            self._store.withdraw(capture_key(uid))

    # ---- asking others

    async def version_at(self, host: HostRecord, uid: str, have: int) -> int:
        """The version of a host's newest agreement; it publishes that if it is newer than `have`.

        Raises:
            UnknownExpertError: It does not hold the expert. NetworkError: It could not be asked.
        """
        contact = Contact(host.peer_id, host.addresses)
        data = await self._endpoint.transport.call(contact, OFFER, to_frame({"uid": uid, "have": have}, []))
        meta, _ = from_frame(data, _FRAME_LIMITS)
        version = meta.get("weight_version")
        if not is_count(version):
            raise MalformedFrameError("The answer to an offer request names no version.")
        return version

    async def copy(self, backend: ExpertBackend, donors: Sequence[HostRecord], have: int) -> HostRecord | None:
        """Start from the newest agreement of the first donor whose is newer than `have`; none if no donor is ahead.

        Raises:
            NoDonorError: Every donor failed (each failure is an event).
        """
        failed = ""
        for donor in donors:
            try:
                if await self.version_at(donor, backend.uid, have) <= have:
                    continue
                await self.start_from(backend, await self._fetch(backend, donor, snapshot_key(backend.uid)))
            except SwarmError as error:
                failed = error.message
                self._runtime.emit(ReplicaSyncFailed(backend.uid, str(donor.peer_id), failed))
                continue
            return donor
        if failed:
            raise NoDonorError(f"No holder of {backend.uid} could give its state: {failed}", fix="It is tried again.")
        return None

    async def _fetch(self, backend: ExpertBackend, donor: HostRecord, key: str) -> Snapshot:
        limits, patience_s = transfer_bounds(backend)
        contact = Contact(donor.peer_id, donor.addresses)
        return await fetch_snapshot(self._endpoint, contact, key, limits=limits, timeout_s=patience_s)

    # ---- agreeing

    async def synchronise(self, *, leaving: bool = False) -> list[str]:
        """Bring every held expert that others hold as well to the newest agreement, and make one where that is due.

        Args:
            leaving: This host hands its experts over: others coordinate, if there are any that stay.

        Returns:
            The experts whose weights have changed.
        """
        self.sweep()
        changed: list[str] = []
        for uid, backend in sorted(self._experts.items()):
            others = self._holders(uid)
            if others and await self._synchronise_one(backend, others, leaving):
                changed.append(uid)
        return changed

    async def _synchronise_one(self, backend: ExpertBackend, others: Sequence[HostRecord], leaving: bool) -> bool:
        uid = backend.uid
        base, steps = await self._worker.call(lambda: _position(self._held.of(backend)))
        ahead = [host for host in others if host.experts[uid] > base.steps]
        if not ahead and not steps:
            return False
        staying = [host.peer_id for host in others if not host.leaving]
        me = self._endpoint.peer_id
        candidates = staying if leaving and staying else [*staying, me]
        first = rendezvous_order(uid, candidates)[0]
        if first == me:
            return await self._coordinate(backend, base, others)
        # whoever coordinates may have agreed upon our steps without having announced it yet
        donors = [h for h in others if h.peer_id == first and steps] or [h for h in ahead if h.peer_id == first]
        return await self._follow(backend, [*donors, *(h for h in ahead if h.peer_id != first)], base)

    async def _follow(self, backend: ExpertBackend, donors: Sequence[HostRecord], base: AgreementId) -> bool:
        """Go on from the newest agreement of the first donor that has a newer one than ours."""
        for donor in donors:
            try:
                if await self.version_at(donor, backend.uid, base.steps) <= base.steps:
                    continue
                snapshot = await self._fetch(backend, donor, snapshot_key(backend.uid))
                found = await self._runtime.offload(checked, backend, snapshot)
                return await self._adopt(backend, found.agreement, found.optimizer, str(donor.peer_id))
            except SwarmError as error:
                self._runtime.emit(ReplicaSyncFailed(backend.uid, str(donor.peer_id), error.message))
        return False

    async def _adopt(self, backend: ExpertBackend, new: Agreement, optimizer: OptimizerState, donor: str) -> bool:
        """Go on from an agreement. Returns whether the weights have changed. Raises as `restore`."""
        before = backend.weight_version
        weights = {name: tensor.clone() for name, tensor in new.weights.items()}
        moved = await self._worker.call(partial(self._held.adopt, backend, replace(new, weights=weights), optimizer))
        if moved.newer:
            self._withdraw_capture(backend.uid)
            if donor:
                self._runtime.emit(ReplicaSynced(backend.uid, donor, before, backend.weight_version, moved.lost_steps))
        return moved.changed

    async def _coordinate(self, backend: ExpertBackend, base: AgreementId, others: Sequence[HostRecord]) -> bool:
        """Collect captures, merge them, and go on from the result."""
        answers = await asyncio.gather(*(self._ask(backend, host, base) for host in others))
        theirs = [(host, *answer) for host, answer in zip(others, answers, strict=True) if answer is not None]
        newer = [host for host, id_, _ in theirs if id_ > base]
        if newer:
            return await self._follow(backend, newer, base)
        givers = [host for host, id_, steps in theirs if id_ == base and steps]
        found = await asyncio.gather(*(self._collect(backend, host, base) for host in givers))
        given = [one for one in found if one is not None]

        def own() -> tuple[Agreement, Capture | None, OptimizerState]:
            held = self._held.of(backend)
            mine = held.holder.capture(host_state(backend))
            return held.holder.base, mine, host_optimizer(backend)

        agreement, mine, state = await self._worker.call(own)
        if agreement.id != base:
            return False  # restored from elsewhere meanwhile
        captures = [one for one, _ in given] + ([mine] if mine is not None else [])
        try:
            merged = await self._runtime.offload(agree, agreement, captures, self._held.me)
        except SwarmError as error:
            self._runtime.emit(ReplicaSyncFailed(backend.uid, str(self._endpoint.peer_id), error.message))
            return False
        if merged is None:
            return False
        states = [(one.samples, optimizer) for one, optimizer in given] + ([(mine.samples, state)] if mine else [])
        optimizer = await self._runtime.offload(merged_optimizer, states)
        changed = await self._adopt(backend, merged, optimizer, "")
        steps = sum(one.steps for one in captures)
        self._runtime.emit(ReplicasAgreed(backend.uid, merged.weight_version, len(captures), steps))
        async with self._making.setdefault(backend.uid, asyncio.Lock()):
            # at once, so that the others get the merged moments and not those of later steps
            snapshot = await self._worker.call(lambda: capture(backend, self._held.of(backend).holder.base))
            self._show(backend.uid, snapshot)
        return changed

    async def _ask(self, backend: ExpertBackend, host: HostRecord, base: AgreementId) -> tuple[AgreementId, int] | None:
        """A holder's base, and the steps that it has published a capture of; none if it does not answer."""
        contact, uid = Contact(host.peer_id, host.addresses), backend.uid
        try:
            request = to_frame({"uid": uid, "agreement": id_to_json(base)}, [])
            meta, _ = from_frame(await self._endpoint.transport.call(contact, CAPTURE, request), _FRAME_LIMITS)
            steps = meta.get("steps")
            if not is_count(steps):
                raise MalformedFrameError("The answer to a capture request names no steps.")
            return id_from_json(meta.get("agreement")), steps
        except SwarmError as error:
            self._runtime.emit(ReplicaSyncFailed(uid, str(host.peer_id), error.message))
            return None

    async def _collect(
        self, backend: ExpertBackend, host: HostRecord, base: AgreementId
    ) -> tuple[Capture, OptimizerState] | None:
        """A holder's capture; none if it cannot be used."""
        try:
            snapshot = await self._fetch(backend, host, capture_key(backend.uid))
            own, optimizer = await self._runtime.offload(checked_capture, backend, snapshot, host.peer_id.digest)
            agreement = await self._worker.call(lambda: self._held.of(backend).holder.base)
            if own.base != base or own.number <= agreement.contained.get(own.holder, 0) or own.steps < 1:
                raise MalformedFrameError("The capture does not belong to this agreement.")
        except SwarmError as error:
            self._runtime.emit(ReplicaSyncFailed(backend.uid, str(host.peer_id), error.message))
            return None
        return own, optimizer


def _position(held: Held) -> tuple[AgreementId, int]:
    return held.holder.base.id, held.holder.steps


def capture_key(uid: str) -> str:
    """The key under which a holder publishes its capture of an expert for a coordinator."""
    return f"capture/{uid}"
