"""The state of an expert's replica as a snapshot: what other hosts copy or merge, and what goes to disk.

A snapshot holds the weights of an agreement (`swarm.experts.agreement`) with which replicas start or go on, the
optimizer's state, and which agreement that is. What strangers gave is checked completely before anything changes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, no_grad

from swarm.errors import SchemaMismatchError
from swarm.experts.agreement import MAX_CONTAINED, Agreement, AgreementId, Capture, State
from swarm.experts.backend import ExpertBackend
from swarm.state.transfer import Snapshot
from swarm.tensors.schema import check_finite
from swarm.tensors.wire import Limits

OptimizerState = dict[int, dict[str, Any]]
"""What an optimizer keeps, by the parameter's position: tensors and numbers."""
MAX_STEPS = 1 << 62
_MAX_DIGEST_BYTES = 32
_SLOWEST_BYTES_S = 256 * 1024
_TRANSFER_FLOOR_S = 10.0
_OPTIMIZER_NAME = re.compile(r"optimizer\.(0|[1-9][0-9]{0,5})\.([a-z_][a-z0-9_]{0,40})")
_NEVER_NEGATIVE = frozenset(
    (
        *("step", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "mu_product"),
        *("row_var", "col_var", "variance", "eta", "mu", "step_size"),
    )
)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A snapshot that has been found to hold the state of an expert."""

    agreement: Agreement
    optimizer: OptimizerState


def capture(backend: ExpertBackend, base: Agreement | None = None) -> Snapshot:
    """The state of an expert, copied. Runs on the device's thread.

    Args:
        base: Take the weights of this agreement; by default the live ones, as an agreement of their own.
    """
    if base is None:
        version = backend.weight_version
        base = Agreement(AgreementId(version, secrets.token_bytes(_MAX_DIGEST_BYTES)), model_state(backend), version)
    metadata = {
        "weight_version": base.weight_version,
        "agreement": id_to_json(base.id),
        "contained": [[holder.hex(), number] for holder, number in base.contained.items()],
    }
    return _snapshot(backend, base.weights, metadata)


def captured(backend: ExpertBackend, own: Capture) -> Snapshot:
    """What a holder hands to a coordinator. Runs on the device's thread."""
    counts = {"number": own.number, "samples": own.samples, "steps": own.steps}
    return _snapshot(backend, own.weights, {"agreement": id_to_json(own.base), **counts})


def _snapshot(backend: ExpertBackend, weights: State, metadata: dict[str, Any]) -> Snapshot:
    tensors = {f"model.{name}": t for name, t in weights.items()}
    scalars: dict[str, dict[str, float | int | bool]] = {}
    for index, state in backend.stepper.state().items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            elif isinstance(value, bool | int | float):
                scalars.setdefault(str(index), {})[name] = value
    return Snapshot.build(tensors, {"uid": backend.uid, "scalars": scalars, **metadata})


def transfer_bounds(backend: ExpertBackend) -> tuple[Limits, float]:
    """What a snapshot of this expert may take when it travels: bytes, and seconds."""
    # the optimizers at hand hold up to three values per parameter besides it
    nbytes = 5 * backend.profile.parameter_bytes + (1 << 20)
    limits = Limits(max_header_bytes=4 << 20, max_tensors=65536, max_payload_bytes=nbytes)
    return limits, _TRANSFER_FLOOR_S + nbytes / _SLOWEST_BYTES_S


def id_to_json(id_: AgreementId) -> list[Any]:
    """An agreement's id as it travels."""
    return [id_.steps, id_.coordinator.hex()]


def id_from_json(value: Any) -> AgreementId:
    """Read what `id_to_json` wrote. Raises `SchemaMismatchError`."""
    if isinstance(value, list) and len(value) == 2 and is_count(value[0]):
        return AgreementId(value[0], _digest(value[1]))
    raise SchemaMismatchError("This is not the id of an agreement.")


def is_count(value: object, most: int = MAX_STEPS) -> TypeGuard[int]:
    """Whether a stranger's value is a whole number from 0 to `most`."""
    return type(value) is int and 0 <= value < most


def _digest(value: Any) -> bytes:
    if isinstance(value, str) and len(value) <= 2 * _MAX_DIGEST_BYTES and re.fullmatch("(?:[0-9a-f]{2})*", value):
        return bytes.fromhex(value)
    raise SchemaMismatchError("This is not a peer's digest.")


def model_state(backend: ExpertBackend) -> dict[str, Tensor]:
    """The live weights and buffers, not copied."""
    return {name: t.detach() for name, t in backend.module.state_dict().items() if isinstance(t, Tensor)}


def host_state(backend: ExpertBackend) -> dict[str, Tensor]:
    """A copy of the weights and buffers on the CPU. Runs on the device's thread."""
    return {name: t.to("cpu", copy=True) for name, t in model_state(backend).items()}


def host_optimizer(backend: ExpertBackend) -> OptimizerState:
    """A copy of the optimizer's state on the CPU. Runs on the device's thread."""
    return {
        index: {name: v.to("cpu", copy=True) if isinstance(v, Tensor) else v for name, v in values.items()}
        for index, values in backend.stepper.state().items()
    }


def write_weights(backend: ExpertBackend, weights: State) -> None:
    """Replace the weights and buffers, in place. Runs on the device's thread."""
    with no_grad():
        for name, tensor in model_state(backend).items():
            tensor.copy_(weights[name])


def restore(backend: ExpertBackend, snapshot: Snapshot) -> ReplicaState:
    """Make the expert a copy of a snapshot that another host gave. Runs on the device's thread.

    Everything is checked before anything changes.

    Raises:
        SchemaMismatchError: It belongs to another expert or class.
        NonFiniteError: It holds NaN or infinity.
    """
    state = checked(backend, snapshot)
    write_weights(backend, state.agreement.weights)
    backend.stepper.set_state(state.optimizer)
    backend.weight_version = state.agreement.weight_version
    return state


def checked(backend: ExpertBackend, snapshot: Snapshot) -> ReplicaState:
    """What a snapshot that another host gave holds. Raises as `restore`."""
    weights, optimizer = _content(backend, snapshot)
    metadata = snapshot.metadata
    version, contained = metadata.get("weight_version"), metadata.get("contained", [])
    if not is_count(version) or not isinstance(contained, list) or len(contained) > MAX_CONTAINED:
        raise SchemaMismatchError(f"The snapshot does not hold the state of {backend.uid}.")
    holders: dict[bytes, int] = {}
    for line in contained:
        if not isinstance(line, list) or len(line) != 2 or not is_count(line[1]):
            raise SchemaMismatchError(f"The snapshot of {backend.uid} holds a malformed agreement.")
        holders[_digest(line[0])] = line[1]
    id_ = id_from_json(metadata.get("agreement"))
    if id_.steps != version:
        raise SchemaMismatchError(f"The snapshot of {backend.uid} holds a malformed agreement.")
    return ReplicaState(Agreement(id_, weights, version, holders), optimizer)


def checked_capture(backend: ExpertBackend, snapshot: Snapshot, holder: bytes) -> tuple[Capture, OptimizerState]:
    """What a holder's capture holds. Raises as `restore`."""
    weights, optimizer = _content(backend, snapshot)
    number, samples, steps = (snapshot.metadata.get(name) for name in ("number", "samples", "steps"))
    if not (is_count(number) and is_count(samples) and is_count(steps)):
        raise SchemaMismatchError(f"The snapshot of {backend.uid} holds a malformed capture.")
    return Capture(holder, number, id_from_json(snapshot.metadata.get("agreement")), samples, steps, weights), optimizer


def _content(backend: ExpertBackend, snapshot: Snapshot) -> tuple[State, OptimizerState]:
    scalars = snapshot.metadata.get("scalars", {})
    if snapshot.metadata.get("uid") != backend.uid:
        raise SchemaMismatchError(f"The snapshot does not hold the state of {backend.uid}.")
    model = model_state(backend)
    given = {name.removeprefix("model."): t for name, t in snapshot.tensors.items() if name.startswith("model.")}
    if list(given) != list(model) or any(
        given[n].shape != t.shape or given[n].dtype != t.dtype for n, t in model.items()
    ):
        raise SchemaMismatchError(f"The snapshot of {backend.uid} holds other tensors than its class.")
    for name, tensor in snapshot.tensors.items():
        check_finite(tensor, f"{name} of {backend.uid}")
    return given, _optimizer_state(backend, snapshot.tensors, scalars)


def merged_optimizer(states: Sequence[tuple[int, OptimizerState]]) -> OptimizerState:
    """Optimizer states weighted by samples: moments averaged in fp32, `step` and whole numbers their maximum.

    A lone contributor's is taken as it is. What one state lacks is averaged over those that have it.
    """
    working = [(samples, state) for samples, state in states if samples > 0]
    if len(working) == 1:
        return working[0][1]
    merged: OptimizerState = {}
    for index in sorted({i for _, state in working for i in state}):
        having = [(n, state[index]) for n, state in working if index in state]
        merged[index] = {name: _merged_value(name, [(n, v[name]) for n, v in having]) for name in having[0][1]}
    return merged


def _merged_value(name: str, values: Sequence[tuple[int, Any]]) -> Any:
    first = values[0][1]
    if not isinstance(first, Tensor):
        return max(value for _, value in values)
    if name == "step" or not first.is_floating_point():
        return torch.stack([value.to(first.device) for _, value in values]).amax(0)
    total = sum(n for n, _ in values)
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    mean = torch.zeros(first.shape, dtype=wide, device=first.device)
    for n, value in values:
        mean.add_(value.to(mean.device, wide), alpha=n / total)
    return mean.to(first.dtype)


def _optimizer_state(backend: ExpertBackend, tensors: Mapping[str, Tensor], scalars: Any) -> OptimizerState:
    """A stranger's optimizer state by parameter; complete and of the sizes that our own optimizer will look for."""
    expected = backend.stepper.expected_state()
    state: OptimizerState = {}
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
