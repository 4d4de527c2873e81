"""Framing of tensors, without I/O: how call metadata and tensors become a sequence of `bytes` messages, and back.

A frame is

```
magic "SWT1" | u32 little-endian header size | msgpack header | payload of tensor 0 | payload of tensor 1 | ...
header = {"meta": {...}, "tensors": [[dtype, shape, codec, nbytes], ...]}
```

and message boundaries may fall anywhere in it. The reader trusts nothing: every field is checked and every size
bounded by `Limits` before memory is allocated; whatever is wrong raises a `WireError`. Tensors with codec `none` are
copied once on each side: into the `bytes` message that gRPC wants, and out of it into the tensor's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from swarm.config import HEADER_SHARE
from swarm.errors import FrameTooLargeError, MalformedFrameError, SwarmError, TruncatedStreamError
from swarm.tensors.codecs import Codec, codec, device_flat
from swarm.tensors.header import DEFAULT_LIMITS, MAGIC, PREFIX, Limits, TensorHeader, pack_header, parse_header
from swarm.tensors.memory import allocate, keep_freed_memory

__all__ = ["DEFAULT_CHUNK_BYTES", "DEFAULT_LIMITS", "FrameReader", "Limits", "encode", "from_frame", "to_frame"]

DEFAULT_CHUNK_BYTES = 1 << 20
Admit = Callable[[int], None]
"""Gets the bytes of memory that a frame's tensors will take, before any is allocated; raises to refuse the frame."""
_STAGE_BYTES = 1 << 20
_COPIED_BYTES = 1 << 18
_WIDEST = 4


def _codecs_of(tensors: Sequence[Tensor], codecs: str | Sequence[str]) -> list[Codec]:
    if isinstance(codecs, str):
        return [codec(codecs)] * len(tensors)
    if len(codecs) != len(tensors):
        raise ValueError(f"{len(codecs)} codecs for {len(tensors)} tensors.")
    return [codec(name) for name in codecs]


def units_within(piece_bytes: int, with_codec: Codec, dtype: torch.dtype) -> int:
    """Units converted at a time, at least one: so many encoded bytes, but at most four times as many of the tensor.

    A megabyte of top-k stands for 64 megabytes of a tensor, which would occupy a thread and its memory for long.
    """
    unit = with_codec.unit_elements
    encoded, decoded = with_codec.encoded_nbytes(unit, dtype), unit * dtype.itemsize
    return max(1, min(piece_bytes // encoded, _WIDEST * piece_bytes // decoded))


def _payload(tensor: Tensor, with_codec: Codec, piece_bytes: int) -> Iterator[memoryview]:
    """The encoded tensor in pieces; conversions happen one piece at a time."""
    numel = tensor.numel()
    if numel == 0:
        return
    if with_codec.is_copy:
        yield with_codec.encode(tensor)
        return
    unit = with_codec.unit_elements
    step = units_within(piece_bytes, with_codec, tensor.dtype) * unit
    if numel <= step:
        yield with_codec.encode(tensor)
        return
    flat = device_flat(tensor)
    for start in range(0, numel, step):
        yield with_codec.encode(flat[start : start + step])


def encode(
    meta: dict[str, Any],
    tensors: Sequence[Tensor],
    codecs: str | Sequence[str] = "none",
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Iterator[bytes]:
    """Encode metadata and tensors as messages of about `chunk_bytes`.

    Everything is checked at once; tensors are read and converted while the result is iterated, so they must not change
    until then. A message holds at most `chunk_bytes` of header or payload, but for the first one, which also carries a
    header of up to a sixteenth of that: a message of its own would cost more than its bytes.

    Args:
        meta: msgpack-able values.
        tensors: Dense tensors of any layout, on any device.
        codecs: One codec name for all tensors, or one each.
        chunk_bytes: Largest message, give or take that sixteenth.

    Raises:
        UnsupportedDtypeError: A dtype or codec is unknown or they do not go together.
        MalformedFrameError: `meta` holds something that msgpack cannot carry.
    """
    by_tensor = _codecs_of(tensors, codecs)
    header, total = pack_header(meta, tensors, by_tensor)
    return _messages(header, total, tensors, by_tensor, chunk_bytes)


def _messages(
    header: bytes, total: int, tensors: Sequence[Tensor], codecs: Sequence[Codec], chunk_bytes: int
) -> Iterator[bytes]:
    if len(header) + total <= chunk_bytes:
        yield _join(header, tensors, codecs)
        return
    keep_freed_memory()
    parts: list[bytes | memoryview] = []
    if len(header) * HEADER_SHARE <= chunk_bytes:
        parts.append(header)
    else:
        for start in range(0, len(header), chunk_bytes):
            yield header[start : start + chunk_bytes]
    room = chunk_bytes
    for tensor, with_codec in zip(tensors, codecs, strict=True):
        for piece in _payload(tensor, with_codec, chunk_bytes):
            start, size = 0, len(piece)
            while size - start >= room:
                parts.append(piece[start : start + room])
                yield b"".join(parts)
                parts.clear()
                start += room
                room = chunk_bytes
            if start < size:
                parts.append(piece[start:])
                room -= size - start
    if parts:
        yield b"".join(parts)


def _join(header: bytes, tensors: Sequence[Tensor], codecs: Sequence[Codec]) -> bytes:
    return b"".join([header, *(c.encode(t) for t, c in zip(tensors, codecs, strict=True))])


def to_frame(meta: dict[str, Any], tensors: Sequence[Tensor], codecs: str | Sequence[str] = "none") -> bytes:
    """A whole frame as one message, for small unary calls. Raises what `encode` raises."""
    by_tensor = _codecs_of(tensors, codecs)
    return _join(pack_header(meta, tensors, by_tensor)[0], tensors, by_tensor)


def from_frame(
    data: bytes, limits: Limits = DEFAULT_LIMITS, admit: Admit | None = None
) -> tuple[dict[str, Any], list[Tensor]]:
    """Decode a whole frame. The tensors are on the CPU, writable, in memory of their own.

    Raises `WireError`, and what `admit` raises.
    """
    view = memoryview(data)
    if len(view) >= PREFIX.size:
        start = _header_end(view, limits)
        if len(view) >= start:
            meta, specs = parse_header(view[PREFIX.size : start], limits)
            if admit is not None:
                admit(sum([spec.memory_bytes for spec in specs]))
                admit = None
            tensors = _copied(view[start:], specs)
            if tensors is not None:
                return meta, tensors
    reader = FrameReader(limits, admit)
    reader.feed(data)
    return reader.meta, reader.tensors()


def _copied(payload: memoryview, specs: Sequence[TensorHeader]) -> list[Tensor] | None:
    """The tensors of a small frame that need no decoding, or none: the reader takes anything, in many more steps."""
    if len(payload) > _COPIED_BYTES or sum([spec.nbytes for spec in specs]) != len(payload):
        return None
    tensors = []
    start = 0
    for spec in specs:
        if not spec.codec.is_copy or not spec.nbytes or spec.dtype is torch.bool:
            return None
        end = start + spec.nbytes
        tensors.append(torch.frombuffer(bytearray(payload[start:end]), dtype=spec.dtype).view(spec.shape))
        start = end
    return tensors


def _header_end(data: bytes | bytearray | memoryview, limits: Limits) -> int:
    magic, size = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise MalformedFrameError("This is no tensor frame: the first bytes are wrong.")
    if size > limits.max_header_bytes:
        raise FrameTooLargeError(
            f"A frame announces a header of {size} bytes; at most {limits.max_header_bytes} are accepted."
        )
    return PREFIX.size + int(size)


class FrameReader:
    """Reads one frame from messages cut anywhere. Memory of a tensor is allocated when its first byte arrives.

    After an error the reader stays unusable and raises the same error again.

    Args:
        limits: What is accepted in one frame.
        admit: Called once, when the header has arrived and before memory is allocated; may refuse the frame.
    """

    __slots__ = (
        "_admit",
        "_buffer",
        "_decoded",
        "_error",
        "_filled",
        "_flat",
        "_limits",
        "_meta",
        "_raw",
        "_specs",
        "_target",
        "_tensors",
    )

    def __init__(self, limits: Limits = DEFAULT_LIMITS, admit: Admit | None = None) -> None:
        self._limits = limits
        self._admit = admit
        self._buffer = bytearray()
        self._meta: dict[str, Any] | None = None
        self._specs: list[TensorHeader] = []
        self._tensors: list[Tensor] = []
        self._error: SwarmError | None = None
        # The tensor that is arriving: its bytes (codec none) or a staging window of encoded bytes.
        self._target: memoryview | None = None
        self._raw: Tensor | None = None
        self._flat: Tensor | None = None
        self._filled = 0
        self._decoded = 0

    @property
    def has_header(self) -> bool:
        """Whether the header has arrived."""
        return self._meta is not None

    @property
    def complete(self) -> bool:
        """Whether the whole frame has arrived."""
        return self._meta is not None and len(self._tensors) == len(self._specs) and self._error is None

    @property
    def meta(self) -> dict[str, Any]:
        """The call's metadata. Raises `TruncatedStreamError` before the header has arrived."""
        if self._meta is None:
            raise TruncatedStreamError("The stream ended before the header of a frame had arrived.")
        return self._meta

    @property
    def payload_bytes(self) -> int:
        """Encoded size of all announced tensors; 0 before the header has arrived."""
        return sum(spec.nbytes for spec in self._specs)

    @property
    def memory_bytes(self) -> int:
        """What all announced tensors take here, encoded or decoded; 0 before the header has arrived."""
        return sum(spec.memory_bytes for spec in self._specs)

    @property
    def converts(self) -> bool:
        """Whether feeding does more than copy memory: some announced tensor needs decoding or checking."""
        return any(not spec.codec.is_copy or spec.dtype is torch.bool for spec in self._specs)

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take the next message. Raises `WireError` for what is not part of one frame, and what `admit` raises."""
        if self._error is not None:
            raise self._error
        try:
            self._feed(memoryview(chunk))
        except SwarmError as error:
            self._error = error
            raise

    def finish(self) -> None:
        """Raise `TruncatedStreamError` unless the whole frame has arrived (or the error met before)."""
        if self._error is not None:
            raise self._error
        if not self.complete:
            raise TruncatedStreamError(
                f"The stream ended after {len(self._tensors)} of {len(self._specs)} announced tensors."
                if self._meta is not None
                else "The stream ended before the header of a frame had arrived."
            )

    def tensors(self) -> list[Tensor]:
        """The tensors of the complete frame. Raises what `finish` raises."""
        self.finish()
        return self._tensors

    def _feed(self, view: memoryview) -> None:
        if self._meta is None:
            rest = self._feed_header(view)
            if rest is None:
                return
            view = rest
        position, size = 0, len(view)
        while position < size:
            target = self._target
            if target is None:
                raise MalformedFrameError(f"{size - position} bytes follow the end of a frame.")
            filled = self._filled
            count = min(size - position, len(target) - filled)
            target[filled : filled + count] = view[position : position + count]
            position += count
            self._filled = filled + count
            if self._filled == len(target):
                self._target_full()

    def _feed_header(self, view: memoryview) -> memoryview | None:
        """Collect the header; the rest of the message once it is complete."""
        buffer = self._buffer
        if not buffer and len(view) >= PREFIX.size:
            end = _header_end(view, self._limits)
            if len(view) >= end:
                self._open(view[PREFIX.size : end])
                return view[end:]
        if len(buffer) < PREFIX.size:
            missing = PREFIX.size - len(buffer)
            buffer += view[:missing]
            view = view[missing:]
            if not MAGIC.startswith(buffer[: len(MAGIC)]):
                raise MalformedFrameError("This is no tensor frame: the first bytes are wrong.")
            if len(buffer) < PREFIX.size:
                return None
        missing = _header_end(buffer, self._limits) - len(buffer)
        buffer += view[:missing]
        if len(view) < missing:
            return None
        self._open(memoryview(buffer)[PREFIX.size :])
        self._buffer = bytearray()
        return view[missing:]

    def _open(self, header: memoryview) -> None:
        meta, specs = parse_header(header, self._limits)
        if self._admit is not None:
            self._admit(sum(spec.memory_bytes for spec in specs))
        self._specs = specs
        self._meta = meta
        if self.payload_bytes > DEFAULT_CHUNK_BYTES:
            keep_freed_memory()
        self._next_tensor()

    def _next_tensor(self) -> None:
        """Prepare memory for the next tensor that has a payload."""
        self._target = self._raw = self._flat = None
        self._filled = self._decoded = 0
        while len(self._tensors) < len(self._specs):
            spec = self._specs[len(self._tensors)]
            if spec.nbytes == 0:
                self._tensors.append(torch.empty(spec.shape, dtype=spec.dtype))
                continue
            if spec.codec.is_copy:
                self._raw = allocate(spec.nbytes)
                self._target = self._raw.numpy().data
            else:
                self._flat = allocate(prod(spec.shape) * spec.dtype.itemsize).view(spec.dtype)
                unit_bytes = spec.codec.encoded_nbytes(spec.codec.unit_elements, spec.dtype)
                window = units_within(_STAGE_BYTES, spec.codec, spec.dtype) * unit_bytes
                self._raw = torch.empty(min(spec.nbytes, window), dtype=torch.uint8)
                self._target = self._raw.numpy().data
            return

    def _target_full(self) -> None:
        spec, raw = self._specs[len(self._tensors)], self._raw
        assert raw is not None
        if spec.codec.is_copy:
            if spec.dtype is torch.bool and int(raw.max()) > 1:
                raise MalformedFrameError("A bool tensor holds bytes other than 0 and 1.")
            self._tensors.append((raw if spec.dtype is torch.uint8 else raw.view(spec.dtype)).view(spec.shape))
            self._next_tensor()
            return
        flat = self._flat
        assert flat is not None
        unit = spec.codec.unit_elements
        units = -(-self._filled // spec.codec.encoded_nbytes(unit, spec.dtype))
        count = min(units * unit, flat.numel() - self._decoded)
        spec.codec.decode_into(raw[: self._filled], flat[self._decoded : self._decoded + count])
        self._decoded += count
        if self._decoded == flat.numel():
            self._tensors.append(flat.view(spec.shape))
            self._next_tensor()
            return
        self._filled = 0
        left = spec.codec.encoded_nbytes(flat.numel() - self._decoded, spec.dtype)
        assert self._target is not None
        self._target = self._target[: min(len(self._target), left)]
