"""Agreement of an expert's replicas that all make steps: merged states, and what a holder keeps of its own. No I/O.

Every holder keeps `sync`, the weights of the last agreement that it has adopted. A coordinator collects *captures*
(numbered copies of holders' weights, all on one base) and makes an `Agreement` of them: the base and the deltas, each
weighted by its samples. The agreement says for every holder the last capture that it contains. From that a holder that
adopts it, however late and from whomever, knows what to add of its own:

- its outstanding capture is contained: what it has done since that capture (`now - captured`);
- it is not: all that it has done since its base (`now - sync`), the capture's part among it.

A capture that has been handed out stays as it is until an agreement contains it, so that a second coordinator gets the
same one (moved to its base): two results cannot hold different parts of one delta. So none counts twice, and no step is
lost as long as the agreements follow one another. Of two on one base (coordinators that could not see each other) the
one with more steps wins, and a holder whose capture is in the other one alone is told how many steps that costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from swarm.errors import NonFiniteError, SchemaMismatchError
from swarm.tensors.schema import is_finite

State = Mapping[str, Tensor]

MAX_CONTAINED = 128
"""Holders whose last capture an agreement remembers; those that have given none for longest are forgotten."""


@dataclass(frozen=True, slots=True, order=True)
class AgreementId:
    """Which agreement, in an order that all holders share: of two on one base the one that holds more steps is newer.

    Attributes:
        steps: Steps from the initial weights that are in it.
        coordinator: Who made it (a peer's digest, or random bytes): tells two with as many steps apart.
    """

    steps: int = 0
    coordinator: bytes = b""


@dataclass(frozen=True, slots=True)
class Capture:
    """A holder's weights at one moment. `samples` and `steps` count what it has done since `base`."""

    holder: bytes
    number: int
    base: AgreementId
    samples: int
    steps: int
    weights: State


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all holders go on from.

    Attributes:
        contained: The last capture of each holder that is in the weights, by this agreement or one before.
        weight_version: Steps from the initial weights that are in it.
    """

    id: AgreementId
    weights: State
    weight_version: int
    contained: Mapping[bytes, int] = field(default_factory=dict)


def check_like(given: State, own: State, what: str) -> None:
    """Refuse a state that is not one of the same expert.

    Raises:
        SchemaMismatchError: Other names, sizes or types.
        NonFiniteError: NaN or infinity.
    """
    if list(given) != list(own) or any(given[n].shape != t.shape or given[n].dtype != t.dtype for n, t in own.items()):
        raise SchemaMismatchError(f"{what} holds other tensors than the expert.")
    for name, tensor in given.items():
        if not is_finite(tensor):
            raise NonFiniteError(f"{name} of {what} holds NaN or infinity.")


def merged_weights(sync: State, captures: Sequence[Capture]) -> dict[str, Tensor]:
    """`sync + sum(n_i (w_i - sync)) / sum(n_i)`, in fp32 (fp64 for fp64); a lone contributor bit for bit.

    Captures without samples weigh nothing. Tensors that are not floating-point are counters: the largest is taken.
    """
    working = [c for c in captures if c.samples > 0]
    if not working:
        return {name: tensor.clone() for name, tensor in sync.items()}
    if len(working) == 1:
        return {name: working[0].weights[name].clone() for name in sync}
    total = sum(c.samples for c in working)
    merged: dict[str, Tensor] = {}
    for name, base in sync.items():
        if not base.is_floating_point():
            largest = working[0].weights[name].clone()
            for one in working[1:]:
                largest = torch.maximum(largest, one.weights[name])
            merged[name] = largest
            continue
        wide = base.to(_wide(base.dtype))
        sum_ = torch.zeros_like(wide)
        for one in working:
            sum_.add_(one.weights[name].to(wide.dtype) - wide, alpha=one.samples / total)
        merged[name] = (wide + sum_).to(base.dtype)
    return merged


def agree(base: Agreement, captures: Sequence[Capture], coordinator: bytes) -> Agreement | None:
    """The agreement on `base` that contains these captures; none if nobody has made a step.

    Raises:
        SchemaMismatchError: A capture has another base, counts that cannot be, or other tensors.
        NonFiniteError: A capture holds NaN or infinity.
    """
    for one in captures:
        if one.base != base.id or one.samples < 0 or one.steps < 0 or one.number <= base.contained.get(one.holder, 0):
            raise SchemaMismatchError("A replica's capture does not belong to this agreement.")
        check_like(one.weights, base.weights, "a replica's capture")
    if len({c.holder for c in captures}) != len(captures):
        raise SchemaMismatchError("A replica has given two captures.")
    if not any(c.steps for c in captures):
        return None
    version = base.weight_version + sum(c.steps for c in captures)
    taken = {c.holder: c.number for c in captures}
    contained = {**{h: n for h, n in base.contained.items() if h not in taken}, **taken}
    latest = dict(list(contained.items())[-MAX_CONTAINED:])
    return Agreement(AgreementId(version, coordinator), merged_weights(base.weights, captures), version, latest)


@dataclass(frozen=True, slots=True)
class Rebased:
    """A holder's weights on a new agreement; `own_steps` are those that are not in the agreement yet."""

    weights: dict[str, Tensor]
    weight_version: int
    own_steps: int
    lost_steps: int


class AgreementHolder:
    """One holder's part; see the module's docstring. The live weights stay with the caller.

    Args:
        me: The holder.
        base: The agreement (or first state) that its weights start from.
    """

    def __init__(self, me: bytes, base: Agreement) -> None:
        self._me = me
        self.base = base
        self.samples = 0
        self.steps = 0
        self._capture: Capture | None = None
        self._last = base.contained.get(me, 0)
        # what the last agreement has taken over: its number and steps
        self._taken = (self._last, 0)

    @property
    def weight_version(self) -> int:
        """Steps in the live weights."""
        return self.base.weight_version + self.steps

    def made(self, steps: int, samples: int) -> None:
        """Note steps just made on the live weights."""
        self.steps += steps
        self.samples += samples

    def capture(self, now: State) -> Capture | None:
        """What to hand to a coordinator on our base: the outstanding capture, else a new one; none without steps."""
        if self._capture is None and self.steps:
            self._last += 1
            weights = {name: tensor.clone() for name, tensor in now.items()}
            self._capture = Capture(self._me, self._last, self.base.id, self.samples, self.steps, weights)
        return self._capture

    def adopt(self, new: Agreement, now: State) -> Rebased | None:
        """Go on from a newer agreement; none if it is not newer. Nothing changes if it is refused.

        Raises:
            SchemaMismatchError, NonFiniteError: It is no state of this expert.
        """
        if new.id <= self.base.id:
            return None
        check_like(new.weights, self.base.weights, "an agreement")
        contained, own = new.contained.get(self._me, 0), self._capture
        lost = self._taken[1] if contained < self._taken[0] else 0
        self._capture = None
        if own is not None and contained >= own.number:
            start: State = own.weights
            self.steps -= own.steps
            self.samples -= own.samples
            self._taken = (own.number, own.steps)
        else:
            start = self.base.weights
            if own is not None:
                # the same delta on the new base: another agreement that has taken it may still prevail
                moved = {name: _moved(tensor, own.weights[name], start[name]) for name, tensor in new.weights.items()}
                self._capture = replace(own, base=new.id, weights=moved)
        # numbers are never used again, also those of captures that no agreement has taken
        self._last = max(self._last, contained)
        weights = {name: _moved(tensor, now[name], start[name]) for name, tensor in new.weights.items()}
        # versions only rise, also where a holder with steps of its own has been ahead of a lone result
        self.base = new
        return Rebased(weights, self.weight_version, self.steps, lost)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _moved(new: Tensor, now: Tensor, start: Tensor) -> Tensor:
    """`new + (now - start)`; exactly `new` where nothing has been added, exactly `now` where nobody else has."""
    if torch.equal(new, start):
        return now.clone()
    if not new.is_floating_point():
        return torch.maximum(new, now)
    if torch.equal(now, start):
        return new.clone()
    wide = _wide(new.dtype)
    return (new.to(wide) + (now.to(wide) - start.to(wide))).to(new.dtype)
