"""A trainer's state as a snapshot: model, optimizer state and step, and how a joiner gets it from the newest donor."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from swarm.dht.schemas import Schema, addresses, integer, only_subkey
from swarm.endpoint import Endpoint
from swarm.errors import SchemaMismatchError, SwarmError
from swarm.events import Event
from swarm.net.transport import Contact
from swarm.state.transfer import PartialSnapshot, Snapshot, fetch_snapshot
from swarm.tensors.schema import check_finite

PARAMETER, BUFFER, OPTIMIZER = "param/", "buffer/", "optim/"
MAX_STEP = 1 << 62
MAX_DONORS = 16
"""Donors that a joiner asks, newest first, before it begins by itself."""
DOWNLOAD_TIMEOUT_S = 3600.0
"""Cap of one download; a donor that stalls is given up much earlier."""


@dataclass(frozen=True, slots=True)
class StateLoaded(Event):
    """This trainer begins with the state of another."""

    key: str
    donor: str
    step: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StateNotLoaded(Event):
    """Others have state, but it could not be had; this trainer begins with its own weights."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class DonorPassedOver(Event):
    """A donor's state could not be had or does not fit; the next donor is asked."""

    key: str
    donor: str
    reason: str


@dataclass(frozen=True, slots=True)
class StateNotAnnounced(Event):
    """The record that offers our state could not be written."""

    key: str
    reason: str


STATE = "state"
"""The namespace of donors' records."""
STATE_SCHEMA = Schema(
    required={"addresses": addresses(), "step": integer(0, MAX_STEP)},
    place=only_subkey(""),
)
"""What is kept there: where a donor is, and how many steps its state has seen."""


def state_key(key: str) -> str:
    """Where donors of an averaging key are found, in the DHT and in their snapshot stores."""
    return f"{STATE}/{key}"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that travel, by name, in the model's order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def build_snapshot(
    model: nn.Module, optimizer: Optimizer, step: int, values: Sequence[Tensor] | None = None
) -> Snapshot:
    """Copy what a joiner needs. Call it on the training thread, between steps.

    Args:
        values: Parameter values to use instead of the model's, in the order of `trainable`.
    """
    parameters = trainable(model)
    chosen = values if values is not None else list(parameters.values())
    tensors: dict[str, Tensor] = {PARAMETER + n: v for n, v in zip(parameters, chosen, strict=True)}
    tensors.update({BUFFER + name: buffer for name, buffer in model.named_buffers()})
    plain: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{name}/{key}"] = value
            elif isinstance(value, bool | int | float | str):
                plain.setdefault(name, {})[key] = value
    return Snapshot.build(tensors, {"step": step, "optimizer": plain})


def load_snapshot(snapshot: Snapshot, model: nn.Module, optimizer: Optimizer) -> int:
    """Copy a snapshot's values into the model and the optimizer's state, in place; returns its step.

    Raises:
        SchemaMismatchError: The donor trains other parameters, or with another optimizer. Nothing was changed.
    """
    parameters, buffers = trainable(model), dict(model.named_buffers())
    wanted = {PARAMETER + n: p for n, p in parameters.items()} | {BUFFER + n: b for n, b in buffers.items()}
    offered = {n: t for n, t in snapshot.tensors.items() if n.startswith((PARAMETER, BUFFER))}
    _check_same(wanted, offered)
    step = snapshot.metadata.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise SchemaMismatchError("The state names no step.")
    optimized = {p for group in optimizer.param_groups for p in group["params"]}
    plain = snapshot.metadata.get("optimizer")
    states: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if parameter not in optimized:
            continue
        prefix = f"{OPTIMIZER}{name}/"
        given: dict[str, Any] = {
            full[len(prefix) :]: value
            for full, value in snapshot.tensors.items()
            if full.startswith(prefix) and "/" not in full[len(prefix) :]
        }
        if isinstance(plain, dict) and isinstance(plain.get(name), dict):
            given.update(plain[name])
        if given:
            _check_state(name, given, _usual_state(optimizer, parameter))
            states[name] = given
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(offered[name])
    for name, given in states.items():
        parameter = parameters[name]
        own = optimizer.state[parameter]
        for key, value in given.items():
            own[key] = _placed(value, parameter, key, optimizer) if isinstance(value, Tensor) else value
    return step


def _usual_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any] | None:
    """What the optimizer keeps for a parameter, if need be found out on zeros; none if that cannot be done."""
    if optimizer.state.get(parameter):
        return dict(optimizer.state[parameter])
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    twin = copy.copy(optimizer)
    zeros = nn.Parameter(torch.zeros_like(parameter))
    zeros.grad = torch.zeros_like(parameter)
    twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [zeros]}]
    try:
        twin.step()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None  # an optimizer of its own kind: one that wants a closure, or more than its documented state
    return dict(twin.state[zeros])


def _check_state(name: str, given: Mapping[str, Any], usual: Mapping[str, Any] | None) -> None:
    """Refuse what the optimizer would stumble over at its next step."""
    if usual is None:
        return

    def form(state: Mapping[str, Any]) -> dict[str, object]:
        return {
            key: (value.shape, value.is_floating_point()) if isinstance(value, Tensor) else type(value)
            for key, value in state.items()
            if isinstance(value, Tensor | bool | int | float | str)
        }

    if form(given) != form(usual):
        raise SchemaMismatchError(
            f"The optimizer state of {name!r} in the run's state is not what this optimizer keeps.",
            fix="Use the optimizer that the other trainers use, or another key.",
        )


def _check_same(wanted: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> None:
    missing = [n for n in wanted if n not in offered] + [n for n in offered if n not in wanted]
    if missing:
        raise SchemaMismatchError(
            f"The run's state has other tensors than this model, for example {missing[0]!r}.",
            fix="Build the model as the other trainers do, or use another key.",
        )
    for name, tensor in wanted.items():
        if tensor.shape != offered[name].shape or tensor.dtype != offered[name].dtype:
            raise SchemaMismatchError(
                f"{name!r} is {offered[name].dtype}{list(offered[name].shape)} in the run's state "
                f"and {tensor.dtype}{list(tensor.shape)} in this model.",
                fix="Build the model as the other trainers do, or use another key.",
            )


def _placed(value: Tensor, parameter: nn.Parameter, key: str, optimizer: Optimizer) -> Tensor:
    """Where torch keeps it: counters on the CPU unless fused or captured, the rest with the parameter."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    stays = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value.clone() if stays else value.to(parameter.device, copy=True)


def _check_finite(snapshot: Snapshot) -> None:
    for name, tensor in snapshot.tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            check_finite(tensor, f"state {name!r}")


async def announced(endpoint: Endpoint, key: str) -> list[Contact]:
    """Who announces state under a key, the newest state first. Raises what `Dht.get` raises."""
    entries = await endpoint.dht.get(state_key(key), fresh=True)
    donors: list[tuple[int, Contact]] = []
    for entry in entries:
        if entry.author == endpoint.peer_id or entry.subkey or STATE_SCHEMA.complaint(entry.body) is not None:
            continue
        donors.append((entry.body["step"], Contact(entry.author, tuple(entry.body["addresses"]))))
    donors.sort(key=lambda donor: -donor[0])
    return [donor for _, donor in donors]


async def _donors(endpoint: Endpoint, key: str) -> list[Contact]:
    try:
        return (await announced(endpoint, key))[:MAX_DONORS]
    except SwarmError as error:
        endpoint.runtime.emit(StateNotLoaded(key, error.message))
        return []


async def _download(endpoint: Endpoint, key: str, donor: Contact) -> Snapshot:
    """One donor's state, of finite values. Raises what `fetch_snapshot` raises, and `NonFiniteError`."""
    partial = PartialSnapshot()
    try:
        snapshot = await fetch_snapshot(endpoint, donor, state_key(key), timeout_s=DOWNLOAD_TIMEOUT_S, resume=partial)
    except SwarmError:
        if not partial.done_bytes:
            raise
        snapshot = await fetch_snapshot(endpoint, donor, state_key(key), timeout_s=DOWNLOAD_TIMEOUT_S, resume=partial)
    await endpoint.runtime.offload(_check_finite, snapshot)
    return snapshot


def load_newest(endpoint: Endpoint, key: str, model: nn.Module, optimizer: Optimizer) -> StateLoaded | None:
    """Begin with the newest state that a donor announces under a key and that fits; none if nobody gave any.

    Donors are asked in order; one that cannot give its state, whose state holds NaN or infinity, or belongs to another
    model is passed over, because a single one of those must not keep everybody out. Call it on the training thread.

    Raises:
        SchemaMismatchError: No donor's state fits, and at least one has the state of another model or optimizer.
            Nothing was changed.
    """
    passed_over: list[str] = []
    mismatch: SchemaMismatchError | None = None
    for donor in endpoint.run_sync(_donors(endpoint, key)):
        try:
            snapshot = endpoint.run_sync(_download(endpoint, key, donor))
            step = load_snapshot(snapshot, model, optimizer)
        except SwarmError as error:
            if isinstance(error, SchemaMismatchError):
                mismatch = mismatch or error
            passed_over.append(f"{donor.peer_id.short}: {error.message}")
            endpoint.runtime.emit(DonorPassedOver(key, str(donor.peer_id), error.message))
            continue
        loaded = StateLoaded(key, str(donor.peer_id), step, snapshot.nbytes)
        endpoint.runtime.emit(loaded)
        return loaded
    if mismatch is not None:
        raise mismatch
    if passed_over:
        endpoint.runtime.emit(StateNotLoaded(key, "; ".join(passed_over)[:500]))
    return None
