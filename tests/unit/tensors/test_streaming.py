"""Sending and receiving over a byte stream: order, overlap, typed failures. The stream is a queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarm.errors import ConnectionLostError, FrameTooLargeError, MalformedFrameError, TruncatedStreamError
from swarm.net.transport import ByteStream
from swarm.runtime import Runtime
from swarm.tensors.streaming import receive_tensors, send_tensors
from swarm.tensors.wire import Limits, encode


class QueueStream(ByteStream):
    """Everything that is sent can be received, in order."""

    def __init__(self, break_after: int | None = None) -> None:
        self.sent: list[bytes] = []
        self.break_after = break_after
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send(self, chunk: bytes) -> None:
        assert type(chunk) is bytes
        if self.break_after is not None and len(self.sent) >= self.break_after:
            raise ConnectionLostError("The stream broke.")
        self.sent.append(chunk)
        self._queue.put_nowait(chunk)
        await asyncio.sleep(0)

    async def finish(self) -> None:
        self._queue.put_nowait(None)

    async def receive(self) -> bytes | None:
        return await self._queue.get()


class CountingRuntime(Runtime):
    """Counts what went to the codec pool."""

    offloaded = 0

    async def offload(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.offloaded += 1
        return await super().offload(fn, *args, **kwargs)


LARGE = torch.randn(300_000, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("chunk_bytes", [10_000, 1 << 20])
def test_round_trip(codec: str, chunk_bytes: int) -> None:
    async def main() -> None:
        stream, runtime = QueueStream(), CountingRuntime()
        await send_tensors(stream, runtime, {"a": 1}, [LARGE, torch.ones(2)], codec, chunk_bytes)
        assert (runtime.offloaded > 0) == (codec != "none")
        runtime.offloaded = 0
        meta, [large, small] = await receive_tensors(stream, runtime)
        assert meta == {"a": 1}
        half = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[codec]
        assert torch.equal(large, LARGE.to(half).float())
        assert torch.equal(small, torch.ones(2))
        if chunk_bytes == 10_000:
            assert (runtime.offloaded > 0) == (codec != "none")

    asyncio.run(main())


def test_small_conversions_stay_on_the_loop() -> None:
    async def main() -> None:
        stream, runtime = QueueStream(), CountingRuntime()
        await send_tensors(stream, runtime, {}, [torch.ones(4, 1024)], "bf16")
        await receive_tensors(stream, runtime)
        assert runtime.offloaded == 0
        assert len(stream.sent) == 1

    asyncio.run(main())


def test_frames_follow_each_other_on_one_stream() -> None:
    async def main() -> None:
        stream, runtime = QueueStream(), Runtime()
        for index in range(3):
            await send_tensors(stream, runtime, {"i": index}, [torch.full((5000,), float(index))], chunk_bytes=4096)
        for index in range(3):
            meta, [tensor] = await receive_tensors(stream, runtime)
            assert meta == {"i": index}
            assert tensor[4999] == index

    asyncio.run(main())


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_stream_that_ends_early(kept: int) -> None:
    async def main() -> None:
        stream = QueueStream()
        for chunk in list(encode({}, [LARGE], "fp16", 100_000))[:kept]:
            await stream.send(chunk)
        await stream.finish()
        with pytest.raises(TruncatedStreamError):
            await receive_tensors(stream, Runtime())

    asyncio.run(main())


def test_limits_and_garbage() -> None:
    async def main() -> None:
        stream, runtime = QueueStream(), Runtime()
        await send_tensors(stream, runtime, {}, [LARGE])
        with pytest.raises(FrameTooLargeError):
            await receive_tensors(stream, runtime, Limits(max_payload_bytes=1000))
        stream = QueueStream()
        await stream.send(b"no frame at all")
        with pytest.raises(MalformedFrameError):
            await receive_tensors(stream, runtime)

    asyncio.run(main())


def test_an_error_of_the_stream_reaches_the_sender_and_leaves_no_task() -> None:
    async def main() -> None:
        stream = QueueStream(break_after=2)
        with pytest.raises(ConnectionLostError):
            await send_tensors(stream, Runtime(), {}, [LARGE], "fp16", 100_000)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_cancelled_sender_leaves_no_task() -> None:
    class Stuck(QueueStream):
        async def send(self, chunk: bytes) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        sending = asyncio.ensure_future(send_tensors(Stuck(), Runtime(), {}, [LARGE], "bf16", 100_000))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_cancelled_sender_waits_until_the_pool_no_longer_reads_the_tensors() -> None:
    gate, ended = threading.Event(), threading.Event()

    class Gated(Runtime):
        async def offload(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            def gated() -> Any:
                gate.wait(20)
                result = fn(*args, **kwargs)
                ended.set()
                return result

            return await super().offload(gated)

    async def main() -> None:
        sending = asyncio.ensure_future(send_tensors(QueueStream(), Gated(), {}, [LARGE], "bf16", 100_000))
        await asyncio.sleep(0.01)
        sending.cancel()
        asyncio.get_running_loop().call_later(0.05, gate.set)
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert ended.is_set()

    asyncio.run(main())


def test_nothing_is_sent_of_a_frame_that_cannot_be_encoded() -> None:
    async def main() -> None:
        stream = QueueStream()
        with pytest.raises(MalformedFrameError):
            await send_tensors(stream, Runtime(), {"x": object()}, [torch.ones(1)])
        assert stream.sent == []

    asyncio.run(main())
