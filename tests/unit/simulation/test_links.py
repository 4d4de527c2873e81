"""Links on real sockets of one loop. Times are only bounded from below: machines are busy."""

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from swarm.errors import UsageError
from swarm.simulation.links import BUFFER_BYTES, Link
from swarm.simulation.proxy import Proxy, execute, free_port
from swarm.simulation.shaping import Shape
from tests.support import eventually

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Behind:
    """A server behind a link: keeps its ends of connections, and echoes if it should."""

    def __init__(self, echo: bool = True) -> None:
        self.ends: list[Ends] = []
        self.echo = echo
        self.errors: list[OSError] = []
        self.port = 0

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=16 * 1024)
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ends.append((reader, writer))
        try:
            while self.echo and (data := await reader.read(65536)):
                writer.write(data)
                await writer.drain()
        except OSError as error:
            self.errors.append(error)
        if self.echo:
            writer.close()

    async def close(self) -> None:
        self.server.close()
        for _, writer in self.ends:
            writer.transport.abort()
        await asyncio.sleep(0.01)


dialled: list[asyncio.StreamWriter] = []


async def dial(link: Link) -> Ends:
    host, port = link.address.split(":")
    ends = await asyncio.open_connection(host, int(port))
    dialled.append(ends[1])
    return ends


async def hang_up() -> None:
    """Leave no socket to the garbage collector."""
    for writer in dialled:
        writer.transport.abort()
    dialled.clear()
    await asyncio.sleep(0.01)


def scenario(body: Callable[[Behind, Link], Awaitable[None]], shape: Shape | None = None, *, echo: bool = True) -> None:
    async def main() -> None:
        behind = Behind(echo)
        await behind.start()
        link = Link(f"127.0.0.1:{behind.port}", shape)
        await link.start()
        try:
            async with asyncio.timeout(30):
                await body(behind, link)
        finally:
            await link.close()
            await hang_up()
            await behind.close()
        assert not link.connections

    asyncio.run(main())


async def echoed(ends: Ends, data: bytes) -> float:
    """Send data, read it back, return how long that took."""
    loop = asyncio.get_running_loop()
    begun = loop.time()

    async def send() -> None:
        ends[1].write(data)
        await ends[1].drain()

    sending = asyncio.ensure_future(send())
    assert await ends[0].readexactly(len(data)) == data
    await sending
    return loop.time() - begun


def test_bytes_arrive_in_order_and_ends_are_passed_on() -> None:
    async def body(behind: Behind, link: Link) -> None:
        ends = await dial(link)
        await echoed(ends, os.urandom(3_000_000))
        ends[1].write_eof()
        assert await ends[0].read() == b""
        await eventually(lambda: not link.connections)
        assert (link.accepted, link.up.nbytes, link.down.nbytes) == (1, 3_000_000, 3_000_000)

    scenario(body, Shape(jitter_ms=2.0))


def test_latency_and_bandwidth_are_really_added_and_can_change() -> None:
    async def body(behind: Behind, link: Link) -> None:
        ends = await dial(link)
        assert await echoed(ends, b"x") >= 0.040
        link.change(latency_ms=0.0, up_mbit=8.0, down_mbit=16.0)
        assert await echoed(ends, bytes(200_000)) >= 0.200  # up is the slower way
        link.change(up_mbit=None, down_mbit=None)
        await echoed(ends, bytes(200_000))
        with pytest.raises(UsageError, match="speed"):
            link.change(speed=1)

    scenario(body, Shape(latency_ms=20.0))


def test_connections_of_a_peer_share_its_bandwidth() -> None:
    async def body(behind: Behind, link: Link) -> None:
        begun = asyncio.get_running_loop().time()
        connections = [await dial(link) for _ in range(4)]
        await asyncio.gather(*(echoed(ends, bytes(100_000)) for ends in connections))
        assert asyncio.get_running_loop().time() - begun >= 0.4  # 400 kB at 1 MB/s

    scenario(body, Shape(down_mbit=8.0))


def test_connections_that_a_known_peer_opens_pass_its_own_link_too() -> None:
    async def body(behind: Behind, link: Link) -> None:
        mine = Link("127.0.0.1:1", Shape(latency_ms=20.0, up_mbit=8.0))

        async def source(client: tuple[str, int], port: int) -> Link:
            return mine

        other = Link(f"127.0.0.1:{behind.port}", source=source)
        await other.start()
        ends = await dial(other)
        assert await echoed(ends, bytes(100_000)) >= 0.140
        assert (mine.up.nbytes, mine.down.nbytes) == (100_000, 100_000)
        assert mine.reset() == 1
        with pytest.raises(ConnectionResetError):
            await ends[0].readexactly(1)
        await other.close()

    scenario(body)


def test_a_stall_lets_nothing_pass_until_it_ends() -> None:
    async def body(behind: Behind, link: Link) -> None:
        ends = await dial(link)
        await echoed(ends, b"x")
        link.stall(0.1)
        assert await echoed(ends, b"y") >= 0.099
        link.stall()
        ends[1].write(b"z")
        await asyncio.sleep(0.05)
        assert link.down.nbytes == 3  # it is taken, and goes no further
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ends[0].readexactly(1)
        link.resume()
        assert await ends[0].readexactly(1) == b"z"

    scenario(body)


def test_a_reset_breaks_both_ends_and_new_connections_work() -> None:
    async def body(behind: Behind, link: Link) -> None:
        ends = await dial(link)
        await echoed(ends, b"x")
        assert link.reset() == 1
        with pytest.raises(ConnectionResetError):
            await ends[0].readexactly(1)
        await eventually(lambda: bool(behind.errors))
        again = await dial(link)
        await echoed(again, b"x")
        link.change(refuse=True)
        with pytest.raises(ConnectionError):
            await (await dial(link))[0].readexactly(1)

    scenario(body)


def test_a_half_open_connection_tells_the_far_end_nothing() -> None:
    async def body(behind: Behind, link: Link) -> None:
        ends = await dial(link)
        await echoed(ends, b"x")
        assert link.half_open() == 1
        await eventually(lambda: bool(behind.errors))
        ends[1].write(bytes(5_000_000))
        await ends[1].drain()  # it is taken, and lost
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ends[0].read(1)
        ends[1].close()
        await eventually(lambda: not link.connections)

    scenario(body)


def test_what_is_swallowed_is_lost_and_only_connections_that_lost_something_stay_silent() -> None:
    async def body(behind: Behind, link: Link) -> None:
        used, idle = await dial(link), await dial(link)
        await echoed(used, b"x")
        await echoed(idle, b"x")
        link.swallow(direction="up")
        used[1].write(b"y")
        await eventually(lambda: any(way.lost for c in link.connections for way in c._ways))
        link.heal()
        used[1].write(b"z")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await used[0].read(1)
        await echoed(idle, b"w")
        await echoed(await dial(link), b"v")
        assert not behind.errors
        link.swallow(seconds=0.05)
        await eventually(lambda: not link.up.swallows and not link.down.swallows)
        await echoed(idle, b"u")
        used[1].close()
        idle[1].close()
        behind.ends[0][1].close()  # it was not told that the other end went
        await eventually(lambda: len(link.connections) == 1)

    scenario(body)


def test_a_black_hole_accepts_and_never_reaches_anybody() -> None:
    async def body(behind: Behind, link: Link) -> None:
        ends = await dial(link)
        ends[1].write(b"hello")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ends[0].read(1)
        assert not behind.ends

    scenario(body, Shape(blackhole=True))


def test_a_receiver_that_does_not_read_stops_its_sender_within_bounds() -> None:
    async def body(behind: Behind, link: Link) -> None:
        ends = await dial(link)
        sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                ends[1].write(bytes(256 * 1024))
                await ends[1].drain()
                sent += 256 * 1024

        sending = asyncio.ensure_future(send())
        before = -1
        while sent != before:  # until it stands still
            before = sent
            await asyncio.sleep(0.3)
        assert BUFFER_BYTES < sent < 64 * 1024 * 1024
        assert link.buffered_bytes <= BUFFER_BYTES + 64 * 1024
        reader = behind.ends[0][0]
        taken = 0
        while taken <= before:
            taken += len(await reader.read(1 << 20))
        await eventually(lambda: sent > before)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    scenario(body, echo=False)


def test_damage_is_the_same_for_the_same_seed() -> None:
    received = []

    async def body(behind: Behind, link: Link) -> None:
        ends = await dial(link)
        ends[1].write(bytes(100_000))
        received.append(await ends[0].readexactly(100_000))

    for _ in range(2):
        scenario(body, Shape(corrupt_per_mb=200.0))
    assert received[0].count(0) < 100_000
    damaged = [[i for i, byte in enumerate(data) if byte] for data in received]
    assert damaged[0] == pytest.approx(damaged[1], abs=1)


def test_a_dead_peer_behind_a_link_is_seen_as_one() -> None:
    async def main() -> None:
        link = Link(f"127.0.0.1:{free_port()}")
        await link.start()
        ends = await dial(link)
        with pytest.raises(ConnectionResetError):
            await ends[0].readexactly(1)
        await link.close()
        await link.close()
        with pytest.raises(ConnectionRefusedError):
            await dial(link)
        await hang_up()

    asyncio.run(main())


def test_commands_of_a_proxy_process() -> None:
    async def body(behind: Behind, link: Link) -> None:
        proxy = Proxy(seed=3)
        added = {"do": "add", "name": "a", "target": f"127.0.0.1:{behind.port}", "latency_ms": 1.0, "pid": os.getpid()}
        address = (await execute(proxy, added))["address"]
        assert address == proxy.link("a").address
        ends = await dial(proxy.link("a"))
        await echoed(ends, b"hello")
        stats = await execute(proxy, {"do": "stats", "name": "a"})
        assert (stats["accepted"], stats["connections"], stats["up_bytes"], stats["down_bytes"]) == (1, 1, 5, 5)
        await execute(proxy, {"do": "change", "name": "a", "up_mbit": 3.0})
        assert proxy.link("a").shape == Shape(latency_ms=1.0, up_mbit=3.0)
        await execute(proxy, {"do": "stall", "name": "a", "seconds": 60})
        assert not proxy.link("a").flowing.is_set()
        await execute(proxy, {"do": "resume", "name": "a"})
        await execute(proxy, {"do": "swallow", "name": "a", "seconds": 60, "direction": "down"})
        assert (proxy.link("a").up.swallows, proxy.link("a").down.swallows) == (False, True)
        await execute(proxy, {"do": "heal", "name": "a"})
        assert not proxy.link("a").down.swallows
        assert await execute(proxy, {"do": "half_open", "name": "a"}) == {"connections": 1}
        await eventually(lambda: bool(behind.errors))
        assert await execute(proxy, {"do": "reset", "name": "a"}) == {"connections": 1}
        with pytest.raises(UsageError, match="already"):
            await execute(proxy, added)
        with pytest.raises(UsageError, match="no link"):
            await execute(proxy, {"do": "reset", "name": "b"})
        with pytest.raises(UsageError, match="fly"):
            await execute(proxy, {"do": "fly"})
        await proxy.close()

    scenario(body)
