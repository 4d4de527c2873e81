"""Tensors over a `ByteStream`: encoding, sending, receiving and decoding overlap.

Copies of memory run on the loop (0.1 ms per message). Whatever costs more, conversions and tensors on an accelerator,
runs on the codec pool while the network carries the message before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from swarm.errors import TruncatedStreamError
from swarm.net.transport import ByteStream
from swarm.runtime import Runtime
from swarm.tensors.wire import DEFAULT_CHUNK_BYTES, DEFAULT_LIMITS, Admit, FrameReader, Limits, encode

INLINE_BYTES = 128 * 1024
"""Conversions of less than this take under 0.2 ms and run on the loop."""


def _is_cheap(tensors: Sequence[Tensor], codecs: str | Sequence[str]) -> bool:
    names = [codecs] * len(tensors) if isinstance(codecs, str) else codecs
    converted = 0
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.device.type != "cpu":
            return False
        if name != "none" or not tensor.is_contiguous():
            converted += tensor.nbytes
    return converted <= INLINE_BYTES


async def send_tensors(
    stream: ByteStream,
    runtime: Runtime,
    meta: dict[str, Any],
    tensors: Sequence[Tensor],
    codecs: str | Sequence[str] = "none",
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> None:
    """Send one frame. The tensors must not change until this returns; the stream stays open for more.

    Raises:
        UnsupportedDtypeError, MalformedFrameError: The frame cannot be encoded; nothing was sent.
        NetworkError, SwarmError: What `stream.send` raises.
    """
    chunks = encode(meta, tensors, codecs, chunk_bytes)
    if _is_cheap(tensors, codecs):
        for chunk in chunks:
            await stream.send(chunk)
        return
    following = _encode_next(runtime, chunks)
    try:
        while (ready := await asyncio.shield(following)) is not None:
            following = _encode_next(runtime, chunks)
            await stream.send(ready)
    finally:
        # The pool may still be reading the tensors: they are the caller's again only after that.
        if not following.done():
            await asyncio.wait([following])
        if not following.cancelled():
            following.exception()  # after an error of the stream nobody else looks at it


def _encode_next(runtime: Runtime, chunks: Iterator[bytes]) -> asyncio.Task[bytes | None]:
    return asyncio.get_running_loop().create_task(runtime.offload(next, chunks, None), name="encode")


async def receive_tensors(
    stream: ByteStream, runtime: Runtime, limits: Limits = DEFAULT_LIMITS, admit: Admit | None = None
) -> tuple[dict[str, Any], list[Tensor]]:
    """Receive one frame; returns its metadata and its tensors (CPU, writable, own memory).

    Reads exactly one frame: messages after it belong to the next. `admit` gets the tensors' size in memory when the
    header has arrived, before any of it is allocated; what it raises refuses the frame.

    Raises:
        TruncatedStreamError: The stream ended before the frame was complete.
        WireError: The frame is malformed or exceeds the limits.
        NetworkError, SwarmError: What `stream.receive` raises.
    """
    reader = FrameReader(limits, admit)
    offloaded = False
    while not reader.complete:
        chunk = await stream.receive()
        if chunk is None:
            reader.finish()
            raise TruncatedStreamError("The stream ended before a frame had arrived.")
        if offloaded:
            await runtime.offload(reader.feed, chunk)
        else:
            reader.feed(chunk)
            offloaded = reader.has_header and reader.converts and reader.memory_bytes > INLINE_BYTES
    return reader.meta, reader.tensors()
