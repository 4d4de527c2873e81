"""The flat vector that a group averages: how tensors lie in it, and how it is cut into chunks that travel.

Tensors of one dtype and codec form a segment. A vector has memory of its own, or lies over the tensors themselves, so
that a round works in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.errors import UnsupportedDtypeError
from swarm.tensors.codecs import NONE, Codec
from swarm.tensors.memory import allocate, keep_freed_memory
from swarm.tensors.schema import TensorMeta
from swarm.tensors.staging import copy_all

MIN_CHUNK_ELEMENTS = 64 * 1024
"""Below this a message costs more than what is in it."""
MAX_CHUNK_ELEMENTS = 1024 * 1024
"""What a reducer widens and sums at a time, however few bytes that is on the wire."""
CHUNKS_PER_PART = 8
"""A part is cut into at least so many chunks, so that sending, reducing and receiving overlap."""
_SMALLEST_ITEM_BYTES = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements `start` to `stop` of one segment of the flat vector: what one message carries."""

    segment: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Segment:
    """All elements of one dtype that travel with one codec."""

    dtype: torch.dtype
    codec: Codec
    numel: int

    def elements_per_chunk(self, part: int, chunk_bytes: int) -> int:
        """Elements of this segment that one message carries, within a part of `part` elements. Whole units."""
        unit = self.codec.unit_elements
        fitting = chunk_bytes * unit // max(1, self.codec.encoded_nbytes(unit, self.dtype))
        wanted = max(MIN_CHUNK_ELEMENTS, -(-part // CHUNKS_PER_PART))
        return max(unit, min(wanted, fitting, MAX_CHUNK_ELEMENTS) // unit * unit)


class FlatVector:
    """All averaged tensors end to end: 1-d CPU segments by dtype and codec, in order of first appearance.

    Costs one copy of the tensors in memory, or nothing where it lies over them.

    Args:
        metas: Of the tensors, in order.
        codecs: One for each tensor; by default all travel as they are.
        over: Contiguous CPU tensors like `metas` to use as its memory (see `fits_over`).
        pinned: Take page-locked memory, for tensors on a CUDA device.

    Raises:
        UnsupportedDtypeError: A tensor is not of a floating dtype of two bytes or more, or its codec cannot carry it.
    """

    def __init__(
        self,
        metas: Sequence[TensorMeta],
        codecs: Sequence[Codec] | None = None,
        over: Sequence[Tensor] | None = None,
        pinned: bool = False,
    ) -> None:
        self.metas = tuple(metas)
        self.codecs = tuple(codecs) if codecs is not None else (NONE,) * len(self.metas)
        kinds: dict[tuple[torch.dtype, str], int] = {}
        sizes: list[int] = []
        found: list[Codec] = []
        self._places: list[tuple[int, int]] = []
        for meta, codec in zip(self.metas, self.codecs, strict=True):
            if not meta.dtype.is_floating_point or meta.dtype.itemsize < _SMALLEST_ITEM_BYTES:
                raise UnsupportedDtypeError(f"{meta.dtype} cannot be averaged.", fix="Average float tensors only.")
            codec.check(meta.dtype)
            index = kinds.setdefault((meta.dtype, codec.name), len(sizes))
            if index == len(sizes):
                sizes.append(0)
                found.append(codec)
            self._places.append((index, sizes[index]))
            sizes[index] += meta.numel
        dtypes = [dtype for dtype, _ in kinds]
        self.segments = [Segment(d, c, n) for d, c, n in zip(dtypes, found, sizes, strict=True)]
        self.numel = sum(sizes)
        self.in_place = over is not None
        self._pieces: list[list[tuple[int, Tensor]]]
        """Of each segment: where in it a piece of memory begins, and the piece (1-d)."""
        if over is None:
            self._pieces = [[(0, allocate(s.numel * s.dtype.itemsize, pinned).view(s.dtype))] for s in self.segments]
        else:
            keep_freed_memory()  # for the chunks
            self._pieces = [[] for _ in self.segments]
            for (index, offset), tensor in zip(self._places, over, strict=True):
                if tensor.numel():
                    self._pieces[index].append((offset, tensor.detach().view(-1)))

    @staticmethod
    def fits_over(tensors: Sequence[Tensor]) -> bool:
        """Whether a vector can lie over these tensors."""
        return all(t.device.type == "cpu" and t.is_contiguous() and not t.is_neg() for t in tensors)

    def views(self) -> list[Tensor]:
        """Each tensor's values inside this vector, in its shape; writable, not copied."""
        return [
            self._piece(index, offset, offset + meta.numel).view(meta.shape)
            for (index, offset), meta in zip(self._places, self.metas, strict=True)
        ]

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors' values in, unless this vector lies over them."""
        copy_all((view, tensor) for view, tensor in self._apart(tensors))

    def store(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values back into the tensors, in place, unless this vector lies over them."""
        copy_all((tensor, view) for view, tensor in self._apart(tensors))

    def _apart(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Views and tensors that do not lie over each other."""
        for view, tensor in zip(self.views(), tensors, strict=True):
            if view.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
                yield view, tensor

    def copy_from(self, other: FlatVector) -> None:
        """Take the values of a vector of the same layout."""
        for mine, theirs in zip(self.views(), other.views(), strict=True):
            mine.copy_(theirs)

    def flat(self) -> Tensor:
        """All values in one new 1-d tensor, segment by segment, in fp32 (fp64 if there is any)."""
        wide = torch.float64 if any(s.dtype == torch.float64 for s in self.segments) else torch.float32
        return torch.cat([piece.to(wide) for pieces in self._pieces for _, piece in pieces] or [torch.empty(0)])

    # Chunks ----------------------------------------------------------------------------------------------------------

    def chunks(self, start: int, stop: int, chunk_bytes: int) -> list[Chunk]:
        """Cut elements `start` to `stop` of the whole vector into chunks of at most `chunk_bytes` on the wire.

        (A chunk is at least a unit of its codec, whatever that takes.)
        """
        result: list[Chunk] = []
        base = 0
        for index, segment in enumerate(self.segments):
            first, last = max(start, base) - base, min(stop, base + segment.numel) - base
            step = segment.elements_per_chunk(stop - start, chunk_bytes)
            result.extend(Chunk(index, at, min(at + step, last)) for at in range(first, last, step))
            base += segment.numel
        return result

    def read(self, chunk: Chunk) -> Tensor:
        """A chunk's values (1-d), only for reading: a view where its memory is of one piece, else a copy."""
        pieces = list(self._covering(chunk))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def view(self, chunk: Chunk) -> Tensor | None:
        """A chunk's own memory (1-d, writable), if it is of one piece."""
        pieces = list(self._covering(chunk))
        return pieces[0] if len(pieces) == 1 else None

    def decode(self, chunk: Chunk, encoded: Tensor) -> None:
        """Replace a chunk's values by what bytes of its codec (1-d uint8) decode to.

        Raises:
            MalformedFrameError: No encoder writes such bytes. The values are as they were.
        """
        segment = self.segments[chunk.segment]
        values = segment.codec.elements(encoded, segment.dtype)
        if values is None:
            view = self.view(chunk)
            values = view if view is not None else torch.empty(chunk.numel, dtype=segment.dtype)
            segment.codec.decode_into(encoded, values)
            if view is not None:
                return
        self.write(chunk, values)

    def write(self, chunk: Chunk, values: Tensor) -> None:
        """Replace a chunk's values (1-d, of any float dtype that the segment's holds)."""
        start = 0
        with torch.no_grad():
            for piece in self._covering(chunk):
                piece.copy_(values[start : start + piece.numel()])
                start += piece.numel()

    def _covering(self, chunk: Chunk) -> Iterator[Tensor]:
        for offset, piece in self._pieces[chunk.segment]:
            first, last = max(chunk.start - offset, 0), min(chunk.stop - offset, piece.numel())
            if first < last:
                yield piece[first:last]

    def _piece(self, index: int, start: int, stop: int) -> Tensor:
        for offset, piece in self._pieces[index]:
            if offset <= start and stop <= offset + piece.numel():
                return piece[start - offset : stop - offset]
        return torch.empty(0, dtype=self.segments[index].dtype)  # a tensor without elements
