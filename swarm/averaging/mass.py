"""The values that go with push-sum's weights: shares as encoded chunks, the sum of what waits, and its absorption.

x = w z is never stored: z are the tensors. What training adds to them between two steps moves x by w times that, and w
is all that is here by then: values that waited to be taken in are moved along, in proportion to the time for which they
were here. (Else every step would undo training in part, by as much as waits.) A share is z as its receiver decodes it;
what a lossy codec leaves out stays with the sender's x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.averaging.vector import Chunk, FlatVector
from swarm.errors import MalformedFrameError, NonFiniteError
from swarm.tensors.memory import peek
from swarm.tensors.schema import is_finite


class Mass:
    """What waits to be added to one peer's values: the sum of w z over shares that arrived or came back.

    Costs a copy of the tensors, and another one in fp32 (fp64 for fp64) once something has arrived.

    Args:
        layout: A vector of the layout of all vectors and shares that it is used with; its values do not matter.
        chunk_bytes: Largest message of a share.
    """

    def __init__(self, layout: FlatVector, chunk_bytes: int) -> None:
        self.chunks: list[Chunk] = layout.chunks(0, layout.numel, chunk_bytes)
        self.segments = layout.segments
        self._sums: list[Tensor] | None = None
        self._base: list[Tensor] = []
        """The values at the end of the last step, chunk by chunk."""

    def encoded_nbytes(self, index: int) -> int:
        """Size of a share's chunk as it travels."""
        segment = self.segments[self.chunks[index].segment]
        return segment.codec.encoded_nbytes(self.chunks[index].numel, segment.dtype)

    @property
    def nbytes(self) -> int:
        """Memory of the values that a share stands for."""
        return sum(segment.numel * segment.dtype.itemsize for segment in self.segments)

    def encode(self, vector: FlatVector, copies: int) -> list[bytes]:
        """The values as they travel to so many peers; errors of rounding are moved into what the sender keeps.

        `copies` equal shares leave and one stays, so that the one that stays takes up all their errors.
        """
        encoded: list[bytes] = []
        for chunk in self.chunks:
            segment = self.segments[chunk.segment]
            values = vector.read(chunk)
            payload = segment.codec.encode_bytes(values)
            encoded.append(payload)
            if not segment.codec.exact(segment.dtype):
                decoded = torch.empty_like(values)
                segment.codec.decode_into(peek(payload), decoded)
                vector.write(chunk, values + copies * (values - decoded))
        return encoded

    def check(self, index: int, payload: bytes) -> None:
        """Raise `MalformedFrameError` or `NonFiniteError` unless this may be a share's chunk."""
        chunk = self.chunks[index]
        segment = self.segments[chunk.segment]
        if len(payload) != self.encoded_nbytes(index):
            raise MalformedFrameError(
                f"A chunk has {len(payload)} bytes where {self.encoded_nbytes(index)} are needed."
            )
        if segment.codec.is_copy:
            values = peek(payload).view(segment.dtype)
        else:
            values = torch.empty(chunk.numel, dtype=segment.dtype)
            segment.codec.decode_into(peek(payload), values)
        if not is_finite(values):
            raise NonFiniteError("A share holds NaN or infinity.")

    def add(self, weight: float, payloads: Sequence[bytes]) -> None:
        """Let a whole share wait, each of its chunks checked before."""
        if self._sums is None:
            self._sums = [torch.zeros(s.numel, dtype=_wide(s.dtype)) for s in self.segments]
        for chunk, payload in zip(self.chunks, payloads, strict=True):
            segment = self.segments[chunk.segment]
            total = self._sums[chunk.segment][chunk.start : chunk.stop]
            segment.codec.decode_add(peek(payload), segment.dtype, total, weight)

    def absorb(self, vector: FlatVector, weight: float, waiting: float, moved: float) -> int:
        """Make z of what waits and of the vector's own values, which weigh `weight`.

        Args:
            waiting: The weight of what waits.
            moved: How much of that moves along with what training changed since the last step.

        Returns:
            Chunks that keep local values because the sum is not finite.
        """
        if self._sums is None:
            return 0
        spoilt = 0
        for index, chunk in enumerate(self.chunks):
            arrived = self._sums[chunk.segment][chunk.start : chunk.stop]
            mixed = vector.read(chunk).to(arrived.dtype, copy=True)
            if self._base:
                arrived.add_(mixed - self._base[index], alpha=moved)
            mixed.mul_(weight / (weight + waiting)).add_(arrived, alpha=1.0 / (weight + waiting))
            narrowed = mixed.to(self.segments[chunk.segment].dtype)
            if is_finite(narrowed):
                vector.write(chunk, narrowed)
            else:
                spoilt += 1
            arrived.zero_()
        return spoilt

    def stepped(self, vector: FlatVector) -> None:
        """The step is over with these values; what changes in them from now on is training."""
        if not self._base:
            self._base = [torch.empty(chunk.numel, dtype=self.segments[chunk.segment].dtype) for chunk in self.chunks]
        for base, chunk in zip(self._base, self.chunks, strict=True):
            base.copy_(vector.read(chunk))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
