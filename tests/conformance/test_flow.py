"""Flow control: large transfers in both directions at once, and pacing."""

from __future__ import annotations

import asyncio
import hashlib

from swarm.config import MIB, PeerConfig
from swarm.net.transport import ByteStream, CallContext, StreamMethod
from tests.support import World

PIPE = StreamMethod("/swarm.pb.Test/Pipe")
TOTAL = 64


def test_64_mib_both_ways_at_once(world: World) -> None:
    """Each side writes 64 MiB and reads 64 MiB, in two tasks; neither waits for the other to begin."""
    chunk = bytes(range(256)) * (MIB // 256)
    expected = hashlib.sha256(chunk * TOTAL).hexdigest()

    async def exchange(stream: ByteStream) -> str:
        digest = hashlib.sha256()

        async def send() -> None:
            for _ in range(TOTAL):
                await stream.send(chunk)
            await stream.finish()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            received = 0
            while received < TOTAL * MIB:
                part = await stream.receive()
                assert part is not None
                digest.update(part)
                received += len(part)
        return digest.hexdigest()

    async def main() -> None:
        a, b = await world.transport(), await world.transport()
        served: list[str] = []

        async def handler(context: CallContext, stream: ByteStream) -> None:
            served.append(await exchange(stream))

        b.serve_stream(PIPE, handler)
        async with a.stream(b.contact, PIPE, timeout_s=40) as stream:
            assert await exchange(stream) == expected
            assert await stream.receive() is None
        assert served == [expected]
        assert a.stats.sent_bytes == b.stats.received_bytes == TOTAL * MIB

    world.run(main)


def test_upload_limit_is_kept(world: World) -> None:
    rate, total = 4 * MIB, 4 * MIB

    async def main() -> None:
        config = PeerConfig.preset("local", transport={"max_upload_bytes_s": rate})
        a, b = await world.transport(config=config), await world.transport()

        async def sink(context: CallContext, stream: ByteStream) -> None:
            async for _ in stream:
                pass

        b.serve_stream(PIPE, sink)
        began = a.runtime.clock.time()
        async with a.stream(b.contact, PIPE, timeout_s=20) as stream:
            for _ in range(total // (MIB // 4)):
                await stream.send(bytes(MIB // 4))
            await stream.finish()
            assert await stream.receive() is None
        took_s = a.runtime.clock.time() - began
        assert took_s >= total / rate - 0.21  # all but the last 200 ms' worth had to wait

    world.run(main)


def test_control_calls_are_not_held_up_by_a_stream_that_nobody_reads(world: World) -> None:
    from swarm.net.transport import UnaryMethod

    echo_method = UnaryMethod("/swarm.pb.Test/Echo", bytes, bytes)

    async def main() -> None:
        a, b = await world.transport(), await world.transport()
        release = asyncio.Event()

        async def stuck(context: CallContext, stream: ByteStream) -> None:
            await release.wait()

        async def echo(context: CallContext, request: bytes) -> bytes:
            return request

        b.serve_stream(PIPE, stuck)
        b.serve(echo_method, echo)

        async def fill(stream: ByteStream) -> None:
            while True:
                await stream.send(bytes(MIB))

        async with a.stream(b.contact, PIPE, timeout_s=20) as stream:
            filling = asyncio.create_task(fill(stream))
            await asyncio.sleep(0.3)  # by now every window of the bulk connection is full
            for n in range(20):
                assert await a.call(b.contact, echo_method, bytes([n]), timeout_s=5) == bytes([n])
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
            release.set()

    world.run(main)
