"""Error feedback: what a lossy codec left out of one round is sent in the next, so that the long-run mean is exact.

Residuals are kept as *mass*, value times weight, because that is what averaging conserves. With W the total weight of
those whose values are in an average a, and m_i the mass that member i holds back, after any number of rounds and for
every element

    sum over rounds of W * a  +  sum over members of m_i  =  sum over rounds of the contributors' w_i * x_i

whatever fails in between, since a residual changes only together with the average that it belongs to:

- A sender sends encode(x + m/w). When it knows that the chunk was counted, m becomes w (x + m/w - decoded). Until then
  m stays, and so does its local value.
- A reducer adds m/W to the mean, sends encode(mean), and m becomes W (mean - decoded).

An answer lost on the way back leaves open whether the chunk was counted. It is then taken for not counted: the member
sends the same residual again, which is wrong by no more than the residual, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarm.errors import SchemaMismatchError
from swarm.tensors.codecs import Codec
from swarm.tensors.codecs.scratch import scratch
from swarm.tensors.memory import allocate
from swarm.tensors.schema import is_finite

_LAYOUT = "layout"
_SMALLEST_WEIGHT, _LARGEST_WEIGHT = 1e-15, 1e15


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which values of a dtype are summed: fp32, or fp64."""
    return torch.promote_types(dtype, torch.float32)


class ErrorFeedback:
    """The residuals of one member over its flat vector.

    Costs one fp32 number for every element of the segments that it covers, on the CPU. Different chunks may be handled
    by different threads at once; one chunk only by one at a time. Residuals are always finite. Masses are fp32: rounds
    with weights outside 1e-15 to 1e15 go without feedback and leave it as it is.

    Args:
        sizes: Elements of each segment of the flat vector; 0 where the codec is exact and nothing is held back.
        layout: Identifies tensors and codecs (a schema hash): residuals fit only this layout.
    """

    def __init__(self, sizes: Sequence[int], layout: bytes = b"") -> None:
        self.layout = layout
        self.sizes = tuple(sizes)
        self._residuals = [allocate(4 * size).view(torch.float32).zero_() for size in self.sizes]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(residual.nbytes for residual in self._residuals)

    def covers(self, segment: int) -> bool:
        """Whether anything is held back in this segment. Elsewhere the methods below change nothing."""
        return self.sizes[segment] > 0

    def residual(self, segment: int, start: int, stop: int) -> Tensor:
        """The mass held back for elements `start` to `stop` of a segment: a view, fp32."""
        return self._residuals[segment][start:stop]

    def compensated(self, segment: int, start: int, values: Tensor, weight: float, out: Tensor | None = None) -> Tensor:
        """What a sender encodes: its values and what it holds back, at least fp32 (1-d). Changes nothing.

        Args:
            values: A chunk of the segment from element `start` on (1-d CPU).
            weight: Of this member in this round, more than 0.
            out: Memory for the sum (of the dtype of `wide`), where there is one.
        """
        if not self._takes(segment, weight):
            return values
        held = self.residual(segment, start, start + values.numel())
        return torch.add(values, held, alpha=1.0 / weight, out=out)

    def counted(
        self, segment: int, start: int, values: Tensor, weight: float, with_codec: Codec, encoded: Tensor
    ) -> None:
        """A sender learnt that the chunk is in the average: hold back what its encoding left out.

        Call it once, before the average overwrites `values`, and only for a chunk that was counted. Where a tile of it
        has no finite result (values that are not, and so were left out), what is held there stays as it was.

        Args:
            values, weight: As given to `compensated`.
            encoded: What was sent (1-d uint8).
        """
        if not self._takes(segment, weight):
            return
        held = self.residual(segment, start, start + values.numel())
        for _, span, place in with_codec.spans(values.numel(), values.dtype):
            part = values[span]
            after = torch.add(held[span], part, alpha=weight, out=scratch("after", part.numel(), wide(part.dtype)))
            after = after.float()
            with_codec.decode_add(encoded[place], part.dtype, after, -weight)
            if is_finite(after):
                held[span].copy_(after)

    def add_to_mean(self, segment: int, start: int, mean: Tensor, total_weight: float) -> None:
        """A reducer adds what it holds back to the weighted mean (1-d, fp32 or fp64) before it encodes that."""
        if self._takes(segment, total_weight):
            mean.add_(self.residual(segment, start, start + mean.numel()), alpha=1.0 / total_weight)

    def reduced(self, segment: int, start: int, mean: Tensor, total_weight: float, applied: Tensor) -> None:
        """A reducer has encoded the mean: hold back what the encoding left out.

        Args:
            mean: After `add_to_mean`, as it was encoded. Overwritten.
            total_weight: As given to `add_to_mean`.
            applied: The decoded average, as all members write it into their vectors.
        """
        if not self._takes(segment, total_weight):
            return
        held = self.residual(segment, start, start + mean.numel())
        left = mean.sub_(applied).mul_(total_weight).float()
        if is_finite(left):
            held.copy_(left)
        else:
            held.zero_()  # of no use to anybody: beyond the range of fp32

    def _takes(self, segment: int, weight: float) -> bool:
        return self.covers(segment) and _SMALLEST_WEIGHT <= weight <= _LARGEST_WEIGHT

    def reset(self) -> None:
        """Hold nothing back."""
        for residual in self._residuals:
            residual.zero_()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs: live tensors, to be saved or copied before the next round."""
        layout = torch.frombuffer(bytearray(self.layout), dtype=torch.uint8) if self.layout else torch.empty(0).byte()
        return {_LAYOUT: layout, **{f"residual.{i}": r for i, r in enumerate(self._residuals)}}

    def restore(self, state: Mapping[str, Tensor]) -> bool:
        """Take the residuals of a checkpoint. False if they belong to another layout: then nothing is held back.

        Raises:
            SchemaMismatchError: The layout is this one, but the tensors do not fit it. Then nothing is held back.
        """
        self.reset()
        layout = state.get(_LAYOUT)
        if layout is None or bytes(layout.tolist()) != self.layout:
            return False
        for index, residual in enumerate(self._residuals):
            saved = state.get(f"residual.{index}")
            if saved is None or saved.shape != residual.shape or not is_finite(saved):
                self.reset()
                raise SchemaMismatchError("The saved residuals have other sizes than their layout, or are not finite.")
            residual.copy_(saved)
        return True
