"""Butterfly all-reduce without I/O: how the vector is laid out and cut, and what a reducer does with what arrives.

Each of n members reduces one part of the flat vector. Members send the other parts to their reducers, chunk by chunk,
and receive averages. The reducer encodes an average once and everybody, itself included, decodes that encoding, so
that all members hold the same bits. A sender that stalls is dropped for the chunks that it did not send; a reducer
that dies costs its part. A chunk holds either the survivors' weighted mean or the local values, never a mix.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from swarm.errors import MalformedFrameError, UnsupportedDtypeError, UsageError
from swarm.identity import PeerId
from swarm.tensors.codecs import Codec, tensor_bytes
from swarm.tensors.codecs import codec as find_codec
from swarm.tensors.memory import allocate
from swarm.tensors.partition import split
from swarm.tensors.schema import TensorMeta, is_finite

NO_VALUES = b"\0"
"""Stands for a chunk without values. No chunk is that short: the smallest averaged element takes two bytes."""
WINDOW_CHUNKS = 8
"""How far a reducer reads a fast sender ahead of the slowest one."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Strategy: everybody in a group gets the group's weighted mean, in one exchange.

    Attributes:
        min_group: Fewer members do not average.
        max_group: A group is sealed at once when it has so many.
        codec: `none` sends every dtype as it is, `fp16` and `bf16` halve fp32. Sums are always in fp32 or better.
    """

    min_group: int = 2
    max_group: int = 16
    codec: str = "none"

    def __post_init__(self) -> None:
        if not 2 <= self.min_group <= self.max_group <= 256:
            raise UsageError("An averaging group has 2 to 256 members.", fix="Use 2 <= min_group <= max_group <= 256.")
        find_codec(self.codec)


def equal_parts(numel: int, members: int) -> list[int]:
    """Elements that each of `members` reduces."""
    return [len(part) for part in split(numel, [1.0] * members)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements `start` to `stop` of one segment of the flat vector: what one message carries."""

    segment: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class FlatVector:
    """All averaged tensors end to end, one 1-d CPU segment per dtype, in order of first appearance.

    Costs one copy of the averaged tensors in memory.

    Raises:
        UnsupportedDtypeError: A tensor is not of a floating dtype of two bytes or more.
    """

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        sizes: dict[torch.dtype, int] = {}
        self._places: list[tuple[torch.dtype, int, TensorMeta]] = []
        for meta in metas:
            if not meta.dtype.is_floating_point or meta.dtype.itemsize < len(NO_VALUES) + 1:
                raise UnsupportedDtypeError(f"{meta.dtype} cannot be averaged.", fix="Average float tensors only.")
            offset = sizes.get(meta.dtype, 0)
            self._places.append((meta.dtype, offset, meta))
            sizes[meta.dtype] = offset + meta.numel
        self.metas = tuple(metas)
        self.segments = [allocate(size * dtype.itemsize).view(dtype) for dtype, size in sizes.items()]
        self._order = {dtype: index for index, dtype in enumerate(sizes)}
        self.numel = sum(sizes.values())

    def views(self) -> list[Tensor]:
        """Each tensor's values inside this vector, in its shape; writable, not copied."""
        return [self.segments[self._order[d]][o : o + m.numel].view(m.shape) for d, o, m in self._places]

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors' values in."""
        with torch.no_grad():
            for view, tensor in zip(self.views(), tensors, strict=True):
                view.copy_(tensor.detach())

    def store(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values back into the tensors, in place."""
        with torch.no_grad():
            for view, tensor in zip(self.views(), tensors, strict=True):
                tensor.copy_(view)

    def copy_from(self, other: FlatVector) -> None:
        for mine, theirs in zip(self.segments, other.segments, strict=True):
            mine.copy_(theirs)

    def flat(self) -> Tensor:
        """All values in one new 1-d tensor, segment by segment, in fp32 (fp64 if there is any)."""
        wide = torch.float64 if torch.float64 in self._order else torch.float32
        return torch.cat([segment.to(wide) for segment in self.segments])

    def chunks(self, start: int, stop: int, codec: Codec, chunk_bytes: int) -> list[Chunk]:
        """Cut elements `start` to `stop` of the whole vector into chunks of at most `chunk_bytes` on the wire."""
        result: list[Chunk] = []
        base = 0
        for index, segment in enumerate(self.segments):
            first, last = max(start, base) - base, min(stop, base + segment.numel()) - base
            step = max(1, chunk_bytes // max(1, codec.encoded_nbytes(1, segment.dtype)))
            result.extend(Chunk(index, at, min(at + step, last)) for at in range(first, last, step))
            base += segment.numel()
        return result

    def view(self, chunk: Chunk) -> Tensor:
        return self.segments[chunk.segment][chunk.start : chunk.stop]


@dataclass(slots=True)
class _Sender:
    weight: float
    next_index: int = 0
    held: dict[int, bytes] = field(default_factory=dict)
    lost: str | None = None


class PartReduction:
    """Which chunks of one part have arrived from whom, and which is due. Chunks are reduced in order.

    Args:
        chunks: How many chunks the part has.
        senders: The other members that contribute, with their weights.
    """

    def __init__(self, chunks: int, senders: Sequence[tuple[PeerId, float]], window: int = WINDOW_CHUNKS) -> None:
        self.chunks = chunks
        self.cursor = 0
        self._window = window
        self._senders = {peer: _Sender(weight) for peer, weight in senders}

    @property
    def done(self) -> bool:
        return self.cursor >= self.chunks

    def wants(self, peer: PeerId) -> bool:
        """Whether the peer's next chunk may be read now; a fast sender waits for the slowest."""
        return self._senders[peer].next_index < self.cursor + self._window

    def arrived(self, peer: PeerId, payload: bytes) -> None:
        """The peer's next chunk, in order. Chunks that were reduced without it are forgotten."""
        sender = self._senders[peer]
        index, sender.next_index = sender.next_index, sender.next_index + 1
        if index >= self.cursor and sender.lost is None:
            sender.held[index] = payload

    def lose(self, peer: PeerId, reason: str) -> bool:
        """Drop a sender for every chunk that it did not send; what it sent counts. True if that was news."""
        sender = self._senders.get(peer)
        if sender is None or sender.lost is not None or sender.next_index >= self.chunks:
            return False
        sender.lost = reason
        return True

    def missing(self) -> list[PeerId]:
        """Senders that hold up the next chunk."""
        return [p for p, s in self._senders.items() if s.lost is None and self.cursor not in s.held]

    def take(self) -> list[tuple[PeerId, float, bytes]]:
        """What arrived for the next chunk; nobody may be missing. Moves on to the following chunk."""
        assert not self.done
        assert not self.missing()
        arrived = [(p, s.weight, s.held.pop(self.cursor)) for p, s in self._senders.items() if self.cursor in s.held]
        self.cursor += 1
        return [(peer, weight, payload) for peer, weight, payload in arrived if payload != NO_VALUES]


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduced chunk.

    Attributes:
        encoded: The average as everybody decodes it; none where local values stand.
        contributors: Whose values are in it (None stands for the reducer's own).
        offenders: Whose values were not finite, or could not be summed.
    """

    encoded: bytes | None
    contributors: tuple[PeerId | None, ...]
    offenders: tuple[PeerId | None, ...]


class ChunkReducer:
    """Averages chunks, one at a time, with scratch memory of two chunks that it keeps."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._scratch: dict[str, Tensor] = {}

    def check_size(self, chunk: Chunk, dtype: torch.dtype, payload: bytes) -> None:
        """Raise `MalformedFrameError` unless the payload is a chunk of this size, or stands for none."""
        needed = self._codec.encoded_nbytes(chunk.numel, dtype)
        if len(payload) != needed and payload != NO_VALUES:
            raise MalformedFrameError(f"A chunk has {len(payload)} bytes where {needed} are needed.")

    def reduce(self, own: Tensor, own_weight: float, arrived: Sequence[tuple[PeerId, float, bytes]]) -> Reduced:
        """Average and write the decoded average into `own`, or leave `own` as it is.

        Args:
            own: This member's values (1-d); replaced by the average.
            own_weight: Their weight; 0 leaves them out.
            arrived: Sender, weight, encoded values.
        """
        rows: list[tuple[PeerId | None, float, bytes | None]] = [(None, own_weight, None), *arrived]
        rows = [row for row in rows if row[1] > 0]
        mean = self._mean(own, rows)
        offenders: tuple[PeerId | None, ...] = ()
        if mean is not None and not is_finite(mean):
            bad = [row for row in rows if not is_finite(self._values(own, row[2]))]
            offenders = tuple(row[0] for row in bad)
            rows = [row for row in rows if row[0] not in offenders]
            mean = self._mean(own, rows) if bad else None
            if mean is not None and not is_finite(mean):
                mean = None
        if mean is None:
            return Reduced(None, (), offenders)
        encoded_view = self._codec.encode(mean.to(own.dtype))
        encoded = bytes(encoded_view)
        self._codec.decode_into(torch.frombuffer(encoded_view, dtype=torch.uint8), own)
        return Reduced(encoded, tuple(row[0] for row in rows), offenders)

    def _mean(self, own: Tensor, rows: Sequence[tuple[PeerId | None, float, bytes | None]]) -> Tensor | None:
        total = sum(weight for _, weight, _ in rows)
        if not rows or not total > 0:
            return None
        if total == math.inf:  # each weight is finite, their sum need not be
            return self._mean(own, [(peer, weight / len(rows) / 2, payload) for peer, weight, payload in rows])
        wide = torch.float64 if own.dtype == torch.float64 else torch.float32
        acc = self._take("sum", own.numel(), wide)
        uniform = all(weight == rows[0][1] for _, weight, _ in rows)
        for index, (_, weight, payload) in enumerate(rows):
            values = self._values(own, payload)
            if index == 0:
                acc.copy_(values)
                if not uniform:
                    acc.mul_(weight / total)
            else:
                acc.add_(values, alpha=1.0 if uniform else weight / total)
        return acc.mul_(1.0 / len(rows)) if uniform and len(rows) > 1 else acc

    def _values(self, own: Tensor, payload: bytes | None) -> Tensor:
        if payload is None:
            return own
        received = _peek(payload)
        if self._codec.is_copy:
            return received.view(own.dtype)
        decoded = self._take("decoded", own.numel(), own.dtype)
        self._codec.decode_into(received, decoded)
        return decoded

    def _take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        key = f"{name}/{dtype}"
        held = self._scratch.get(key)
        if held is None or held.numel() < numel:
            held = self._scratch[key] = torch.empty(numel, dtype=dtype)
        return held[:numel]


def encode_chunk(codec: Codec, values: Tensor) -> bytes:
    """The bytes of one chunk as it travels."""
    return bytes(codec.encode(values))


def decode_chunk(codec: Codec, payload: bytes, out: Tensor) -> None:
    """Write a received average into `out` (1-d CPU). The size was checked."""
    if codec.is_copy:
        tensor_bytes(out)[:] = payload
        return
    codec.decode_into(_peek(payload), out)


def _peek(payload: bytes) -> Tensor:
    """The payload's own memory as a 1-d uint8 tensor: only for reading, and only while the payload is held.

    torch takes no read-only buffers without a warning, and a copy of every chunk costs as much as its conversion.
    """
    pointer = ctypes.cast(ctypes.c_char_p(payload), ctypes.POINTER(ctypes.c_uint8))
    return torch.from_numpy(np.ctypeslib.as_array(pointer, shape=(len(payload),)))
