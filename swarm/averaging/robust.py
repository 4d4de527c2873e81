"""Averages that a minority of lying members cannot move far: CenteredClip, coordinate median, trimmed mean.

They see one chunk of all members at once, as a matrix [members, elements], and work on it in place. All hold as long
as fewer than half of a group lie (`TrimmedMean`: no more than `beta`). A member's weight is its own word, so that here
none counts more than twice the median one: who claims a million samples is not heard a million times.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from swarm.errors import UsageError

LARGEST_WEIGHT = 2.0
"""Times the median weight: heavier members count so much."""
BLOCK_ELEMENTS = 16 * 1024
"""Columns that are sorted at a time: a block of all members fits the cache."""
_WILD = 1e6
"""Deviations are cut off at so many times the usual largest one, so that their squares are finite."""


class RobustReducer(ABC):
    """How a reducer turns its members' values into an average that a minority cannot move far. Part of the strategy."""

    __slots__ = ()

    @property
    @abstractmethod
    def spec(self) -> str:
        """Name and settings; members agree on them."""

    @abstractmethod
    def combine(self, rows: Tensor, weights: Sequence[float], out: Tensor) -> None:
        """Average the rows.

        Args:
            rows: Finite values, fp32 or fp64 [members, elements]. Overwritten.
            weights: Of the members, positive; taken as they are (see `bounded_weights`).
            out: Takes the average [elements], of the rows' dtype.
        """


@dataclass(frozen=True, slots=True)
class Median(RobustReducer):
    """The weighted median of every coordinate: among honest values whatever a minority sends; noisier than a mean."""

    @property
    def spec(self) -> str:
        return "median"

    def combine(self, rows: Tensor, weights: Sequence[float], out: Tensor) -> None:
        members = len(rows)
        if _all_equal(weights):
            low, high = (members - 1) // 2, members // 2
            for block, into in _blocks(rows, out):
                ordered = _sorted_rows(block, (low, high))
                torch.mul(ordered[low], 0.5, out=into).add_(ordered[high], alpha=0.5)
            return
        # The lower median is where half of the weight is reached, the upper one where it is exceeded.
        reach, exceed = 0.5 * sum(weights) * (1 - 1e-6), 0.5 * sum(weights) * (1 + 1e-6)
        for block, into in _blocks(rows, out):
            ordered, heavy = _sorted_with_weights(block, weights, range(members))
            passed, picked, share = torch.zeros_like(into), torch.zeros_like(into), torch.empty_like(into)
            into.zero_()
            for values, weight in zip(ordered, heavy, strict=True):
                passed.add_(weight)
                torch.ge(passed, reach, out=share)
                share.add_(torch.gt(passed, exceed, out=weight))  # 0, 1 or 2 medians are at this value or below
                into.addcmul_(values, torch.sub(share, picked, out=weight), value=0.5)
                picked, share = share, picked


@dataclass(frozen=True, slots=True)
class TrimmedMean(RobustReducer):
    """The weighted mean of every coordinate without its lowest and highest values.

    Attributes:
        beta: The part of the members (rounded up) left out at each end: as many liars are harmless. At least one value
            (of an even number two) stays. Groups of two are plain means.
    """

    beta: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 0.5:
            raise UsageError("A trimmed mean leaves out less than half at each end.", fix="Use 0 <= beta < 0.5.")

    @property
    def spec(self) -> str:
        return f"trimmed_mean:{self.beta!r}"

    def trimmed(self, members: int) -> int:
        """Values left out at each end."""
        exact = self.beta * members
        return min(int(exact) + (exact - int(exact) > 1e-9), (members - 1) // 2)

    def combine(self, rows: Tensor, weights: Sequence[float], out: Tensor) -> None:
        members, cut = len(rows), self.trimmed(len(rows))
        kept = range(cut, members - cut)
        if _all_equal(weights):
            for block, into in _blocks(rows, out):
                ordered = _sorted_rows(block, kept)
                into.zero_()
                for index in kept:
                    into.add_(ordered[index], alpha=1.0 / len(kept))
            return
        for block, into in _blocks(rows, out):
            ordered, heavy = _sorted_with_weights(block, weights, kept)
            total = torch.stack([heavy[index] for index in kept]).sum(0)
            into.zero_()
            for index in kept:
                into.add_(ordered[index] * (heavy[index] / total))


@dataclass(frozen=True, slots=True)
class CenteredClip(RobustReducer):
    """A mean in which nobody pulls harder than a typical member (Karimireddy et al. 2021). The default choice.

    From the coordinate median v on: v += sum_i w_i min(1, r / |x_i - v|) (x_i - v) / sum w, where the radius r is `tau`
    times the median of |x_i - v|. So `tau` needs no knowledge of scales, which differ between tensors and fall as
    training goes on, and where more than half of the members are equal, they win.

    The norms are those of a chunk, not of the whole vector: chunks are reduced as they arrive, and who puts all
    deviation into one place is measured against what is usual there. Over all chunks liars gain no more than against
    one norm, since the radii's squares add up.

    Attributes:
        tau: Radius of clipping. Smaller is closer to a median, larger to the mean.
        iterations: Steps from the median; they cost little, see `combine`.
    """

    tau: float = 1.0
    iterations: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.tau <= 1e6 or not 1 <= self.iterations <= 1000:
            raise UsageError(
                "CenteredClip needs a radius and some steps.", fix="Use 0 < tau <= 1e6 and 1 <= iterations <= 1000."
            )

    @property
    def spec(self) -> str:
        return f"centered_clip:{self.tau!r}:{self.iterations}"

    def combine(self, rows: Tensor, weights: Sequence[float], out: Tensor) -> None:
        """See `RobustReducer`. All v lie in the plane of the rows: steps need only the rows' products, not the rows."""
        Median().combine(rows.clone(), [1.0] * len(rows), out)
        deviations = rows.sub_(out)
        unit = _median([max(abs(float(edge)) for edge in row.aminmax()) for row in deviations])
        if not 0 < unit < math.inf:
            return  # more than half are the median itself, or as far from it as can be
        deviations.div_(unit).clamp_(-_WILD, _WILD)
        products = (deviations @ deviations.T).double()
        pull = torch.tensor(weights, dtype=torch.float64)
        pull /= pull.sum()
        at = torch.zeros(len(rows), dtype=torch.float64)  # v = median + at @ deviations
        for _ in range(self.iterations):
            squares = products.diagonal() - 2 * (products @ at) + at @ products @ at
            distances = squares.clamp_(min=0).sqrt_()
            radius = self.tau * _median(distances.tolist())
            force = pull * torch.where(distances > radius, radius / distances, 1.0)
            at = at * (1 - force.sum()) + force
        out.add_((at.to(out.dtype) @ deviations), alpha=unit)


Reducer = Literal["mean"] | RobustReducer
"""How values become an average: `"mean"`, or one of the reducers of this module."""


def check_reducer(reducer: Reducer) -> None:
    """Raise `UsageError` unless it is a reducer."""
    if reducer != "mean" and not isinstance(reducer, RobustReducer):
        raise UsageError(
            f"There is no reducer {reducer!r}.", fix='Use "mean", CenteredClip(), Median() or TrimmedMean().'
        )


def bounded_weights(weights: Sequence[float]) -> list[float]:
    """Weights relative to the (lower) median one, at most `LARGEST_WEIGHT`. All must be positive.

    While fewer than half lie, the median is between honest weights, whatever the others claim.
    """
    usual = statistics.median_low(weights)
    return [max(min(weight / usual, LARGEST_WEIGHT), 1e-30) for weight in weights]


# Sorting columns -----------------------------------------------------------------------------------------------------


def _all_equal(weights: Sequence[float]) -> bool:
    return all(weight == weights[0] for weight in weights)


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _blocks(rows: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor]]:
    places = range(0, rows.shape[1], BLOCK_ELEMENTS)
    return [(rows[:, at : at + BLOCK_ELEMENTS], out[at : at + BLOCK_ELEMENTS]) for at in places]


@lru_cache(maxsize=64)
def _comparators(count: int, wanted: tuple[int, ...]) -> tuple[tuple[int, int, bool, bool], ...]:
    """Batcher's odd-even merge sort for `count` rows, without what the wanted ranks do not need.

    Each entry: two rows, and whether the smaller and the larger of them are needed.
    """
    pairs: list[tuple[int, int]] = []
    size = 1
    while size < count:
        step = size
        while step >= 1:
            for start in range(step % size, count - step, 2 * step):
                for low in range(start, min(start + step, count - step)):
                    if low // (2 * size) == (low + step) // (2 * size):
                        pairs.append((low, low + step))
            step //= 2
        size *= 2
    needed = set(wanted)
    kept: list[tuple[int, int, bool, bool]] = []
    for low, high in reversed(pairs):
        if low in needed or high in needed:
            kept.append((low, high, low in needed, high in needed))
            needed.update((low, high))
    return tuple(reversed(kept))


def _sorted_rows(block: Tensor, wanted: Sequence[int]) -> list[Tensor]:
    """The wanted ranks of every column, by min and max of whole rows: many times as fast as `torch.sort`."""
    rows = list(block.unbind(0))
    spare = torch.empty_like(rows[0])
    for low, high, smaller, larger in _comparators(len(rows), tuple(wanted)):
        a, b = rows[low], rows[high]
        if smaller and larger:
            torch.minimum(a, b, out=spare)
            torch.maximum(a, b, out=b)
            rows[low], spare = spare, a
        elif smaller:
            torch.minimum(a, b, out=a)
        else:
            torch.maximum(a, b, out=b)
    return rows


def _sorted_with_weights(
    block: Tensor, weights: Sequence[float], wanted: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """The wanted ranks of every column, and the weights that came with the values."""
    rows = list(block.unbind(0))
    heavy = [torch.full_like(rows[0], weight) for weight in weights]
    swap, spare = torch.empty_like(rows[0]), torch.empty_like(rows[0])
    for low, high, _, _ in _comparators(len(rows), tuple(wanted)):
        a, b = rows[low], rows[high]
        torch.gt(a, b, out=swap)  # 0 or 1 in the rows' dtype: lerp then picks, many times as fast as `where`
        torch.minimum(a, b, out=spare)
        torch.maximum(a, b, out=b)
        rows[low], spare = spare, a
        first, second = heavy[low], heavy[high]
        torch.lerp(first, second, swap, out=spare)
        torch.lerp(second, first, swap, out=second)
        heavy[low], spare = spare, first
    return rows, heavy
