"""Faults, determinism and cost of the in-memory network. Memory only: real networks have no such switches."""

from __future__ import annotations

import asyncio

import pytest

from swarm.config import PeerConfig
from swarm.errors import (
    AdmissionRefusedError,
    BadSignatureError,
    CallTimeoutError,
    ClosedError,
    ConnectionLostError,
    IdentityMismatchError,
    MalformedFrameError,
    PeerUnreachableError,
    SwarmError,
    WrongRunError,
)
from swarm.identity import PeerId
from swarm.net.base import HelloRefused
from swarm.net.hello import HELLO_PATH
from swarm.net.memory import MemoryTransport
from swarm.net.security import Admission, OpenAuthorizer
from swarm.net.transport import ByteStream, CallContext, StreamMethod, UnaryMethod
from swarm.pb import hello_pb2 as pb
from swarm.roles import ALL_ROLES
from tests.support import RUN_ID, MemoryWorld

ECHO = UnaryMethod("/swarm.pb.Test/Echo", bytes, bytes)
TYPED = UnaryMethod("/swarm.pb.Test/Typed", pb.Welcome, pb.Welcome)
PIPE = StreamMethod("/swarm.pb.Test/Pipe")


async def echo(context: CallContext, request: bytes) -> bytes:
    return request


async def echo_stream(context: CallContext, stream: ByteStream) -> None:
    async for chunk in stream:
        await stream.send(chunk)


async def serving(world: MemoryWorld) -> MemoryTransport:
    transport = await world.transport()
    assert isinstance(transport, MemoryTransport)
    transport.serve(ECHO, echo)
    transport.serve(TYPED, echo)
    transport.serve_stream(PIPE, echo_stream)
    return transport


def test_latency_is_counted_in_round_trips(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        memory_world.network.latency = 0.05
        a, b = await serving(memory_world), await serving(memory_world)
        await a.call(b.contact, ECHO, b"")
        assert memory_world.loop.time() == pytest.approx(6 * 0.1)  # three to connect, two for hello, one for the call
        await a.call(b.contact, ECHO, b"")
        assert memory_world.loop.time() == pytest.approx(7 * 0.1)

    memory_world.run(main)


def test_latency_can_depend_on_the_pair_and_bandwidth_on_the_size(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        network = memory_world.network
        a, b = await serving(memory_world), await serving(memory_world)
        await a.call(b.contact, ECHO, b"")
        network.latency = lambda source, target, rng: 0.5 if source == a.peer_id else 1.0
        began = memory_world.loop.time()
        await a.call(b.contact, ECHO, b"")
        assert memory_world.loop.time() - began == pytest.approx(1.5)
        network.latency, network.bandwidth_bytes_s = 0.0, 1e6
        began = memory_world.loop.time()
        await a.call(b.contact, ECHO, bytes(500_000))
        assert memory_world.loop.time() - began == pytest.approx(1.0)

    memory_world.run(main)


def test_lost_messages_cost_the_deadline(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        a, b = await serving(memory_world), await serving(memory_world)
        await a.call(b.contact, ECHO, b"")
        memory_world.network.drop_probability = 0.5
        failed = 0
        for _ in range(50):
            try:
                await a.call(b.contact, ECHO, b"", timeout_s=1.0)
            except CallTimeoutError:
                failed += 1
        assert 25 < failed < 48  # either of two messages may be lost: three quarters of the calls fail

    memory_world.run(main)


def test_partition_and_healing(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        a, b, c = [await serving(memory_world) for _ in range(3)]
        await a.call(b.contact, ECHO, b"")
        memory_world.network.partition([[a.peer_id], [b.peer_id]])
        with pytest.raises(CallTimeoutError):
            await a.call(b.contact, ECHO, b"", timeout_s=1.0)
        with pytest.raises(PeerUnreachableError):
            await c.call(a.contact, ECHO, b"")
        memory_world.network.partition([[a.peer_id, c.peer_id], [b.peer_id]])
        await c.call(a.contact, ECHO, b"")
        memory_world.network.partition(None)
        assert await a.call(b.contact, ECHO, b"again") == b"again"

    memory_world.run(main)


def test_frozen_peer_answers_late(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        a, b = await serving(memory_world), await serving(memory_world)
        await a.call(b.contact, ECHO, b"")
        memory_world.network.freeze(b.peer_id)
        with pytest.raises(CallTimeoutError):
            await a.call(b.contact, ECHO, b"", timeout_s=1.0)
        call = asyncio.create_task(a.call(b.contact, ECHO, b"late", timeout_s=60.0))
        async with a.stream(b.contact, PIPE, timeout_s=60) as stream:
            for n in range(3):
                await stream.send(bytes([n]))
            await stream.finish()
            await asyncio.sleep(2)
            assert not call.done()
            memory_world.network.thaw(b.peer_id)
            assert await call == b"late"
            assert [chunk async for chunk in stream] == [b"\0", b"\1", b"\2"]

    memory_world.run(main)


def test_killed_peer_breaks_calls_and_streams_and_may_come_back(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        a, b = await serving(memory_world), await serving(memory_world)
        running = asyncio.Event()

        async def slow(context: CallContext, request: bytes) -> bytes:
            running.set()
            await asyncio.sleep(1e6)
            return b""

        b.serve(ECHO, slow)
        call = asyncio.create_task(a.call(b.contact, ECHO, b"", timeout_s=60))
        async with a.stream(b.contact, PIPE, timeout_s=60) as stream:
            await stream.send(b"x")
            assert await stream.receive() == b"x"
            await running.wait()
            memory_world.network.kill(b.peer_id)
            with pytest.raises(ConnectionLostError):
                await stream.receive()
        with pytest.raises(ConnectionLostError):
            await call
        with pytest.raises(PeerUnreachableError):
            await a.call(b.contact, ECHO, b"")
        with pytest.raises(SwarmError):
            await b.call(a.contact, ECHO, b"", timeout_s=1.0)
        port = int(b.contact.addresses[0].rpartition(":")[2])
        config = PeerConfig.preset("local", transport={"port": port})
        again = await memory_world.transport(identity=b.identity, config=config)
        again.serve(ECHO, echo)
        assert await a.call(again.contact, ECHO, b"back") == b"back"

    memory_world.run(main)


def test_killed_peer_stops_working(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        a, b, c = [await serving(memory_world) for _ in range(3)]
        ended, rounds = [], []

        async def work() -> None:
            try:
                while True:
                    await b.call(a.contact, ECHO, b"")
                    rounds.append(b.runtime.clock.time())
                    await asyncio.sleep(1.0)
            finally:
                ended.append(True)

        async def serve_slowly(context: CallContext, request: bytes) -> bytes:
            await asyncio.sleep(10.0)
            ended.append(False)
            return b""

        b.serve(ECHO, serve_slowly)
        b.runtime.spawn(work(), "work")
        call = asyncio.create_task(a.call(b.contact, ECHO, b"", timeout_s=60))
        await asyncio.sleep(2.0)
        connecting = asyncio.create_task(b.call(c.contact, ECHO, b""))
        await asyncio.sleep(0)
        assert rounds
        assert not ended
        memory_world.network.kill(b.peer_id)
        before, messages = len(rounds), memory_world.network.messages
        with pytest.raises(ConnectionLostError):
            await call
        with pytest.raises(ClosedError):
            await connecting
        await asyncio.sleep(60.0)
        assert ended == [True]
        assert len(rounds) == before
        assert memory_world.network.messages == messages
        with pytest.raises(ClosedError):
            await b.call(a.contact, ECHO, b"")

    memory_world.run(main)


def test_peer_whose_machine_is_gone_costs_its_callers_their_patience(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        a, b, c = [await serving(memory_world) for _ in range(3)]

        async def slow(context: CallContext, request: bytes) -> bytes:
            await asyncio.sleep(1e6)
            return b""

        b.serve(ECHO, slow)
        call = asyncio.create_task(a.call(b.contact, ECHO, b"", timeout_s=2.5))
        await asyncio.sleep(1.0)
        memory_world.network.kill(b.peer_id, silent=True)
        with pytest.raises(CallTimeoutError):
            await call
        assert memory_world.loop.time() == pytest.approx(2.5)
        with pytest.raises(CallTimeoutError):
            await a.call(b.contact, ECHO, b"", timeout_s=2.0)
        assert memory_world.loop.time() == pytest.approx(4.5)
        with pytest.raises(PeerUnreachableError):
            await c.call(b.contact, ECHO, b"")
        assert memory_world.loop.time() == pytest.approx(4.5 + c.config.transport.connect_timeout_s)
        again = await memory_world.transport(identity=b.identity, config=b.config)
        again.serve(ECHO, echo)
        assert await c.call(again.contact, ECHO, b"back") == b"back"

    memory_world.run(main)


def test_lost_calls_time_out_and_half_of_them_were_served(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        a, b = await serving(memory_world), await serving(memory_world)
        await a.call(b.contact, ECHO, b"")
        memory_world.network.call_loss = 0.2
        served, failed = b.stats.calls_served, 0
        for _ in range(500):
            begun = memory_world.loop.time()
            try:
                await a.call(b.contact, ECHO, b"", timeout_s=1.0)
            except CallTimeoutError:
                failed += 1
                assert memory_world.loop.time() - begun >= 0.2  # as long as an adaptive deadline, not at once
        assert 70 < failed < 130
        assert 0.3 * failed < 500 - (b.stats.calls_served - served) < 0.7 * failed

    memory_world.run(main)


def test_handler_that_takes_too_long_is_cancelled_and_may_clean_up(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        a, b = await serving(memory_world), await serving(memory_world)
        cleaned = []

        async def slow(context: CallContext, request: bytes) -> bytes:
            try:
                await asyncio.sleep(1e6)
            finally:
                await asyncio.sleep(0.5)
                cleaned.append(memory_world.loop.time())
            return b""

        b.serve(ECHO, slow)
        with pytest.raises(CallTimeoutError):
            await a.call(b.contact, ECHO, b"", timeout_s=2.0)
        assert cleaned == [pytest.approx(2.5)]
        task = asyncio.create_task(a.call(b.contact, ECHO, b"", timeout_s=60.0))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(cleaned) == 2

    memory_world.run(main)


def test_modelled_hello_takes_as_long_and_refuses_the_same(memory_world: MemoryWorld) -> None:
    class Picky(OpenAuthorizer):
        """Admits only one peer."""

        welcome: PeerId | None = None

        def admit(self, peer_id: PeerId, public_key: bytes, credential: bytes) -> Admission:
            assert PeerId.of(public_key) == peer_id
            if peer_id != self.welcome:
                raise AdmissionRefusedError("not you")
            return super().admit(peer_id, public_key, credential)

    async def main() -> None:
        network = memory_world.network
        network.modelled_hello, network.latency = True, 0.05
        a, b = await serving(memory_world), await serving(memory_world)
        assert await a.call(b.contact, ECHO, b"x") == b"x"
        assert memory_world.loop.time() == pytest.approx(6 * 0.1)
        assert network.messages == 12
        assert a.stats.hellos == 1
        assert len(b.sessions) == 1
        with pytest.raises(IdentityMismatchError):
            await a.dial(b.contact.addresses[0], a.peer_id)
        with pytest.raises(PeerUnreachableError):
            await a.dial("10.9.9.9:1")
        stranger = await memory_world.transport(run_id=bytes(32))
        with pytest.raises(WrongRunError):
            await stranger.call(b.contact, ECHO, b"")
        assert b.runtime.events.count(HelloRefused) == 1
        picky = Picky(RUN_ID, ALL_ROLES)
        door = await memory_world.transport(authorizer=picky)
        door.serve(ECHO, echo)
        with pytest.raises(AdmissionRefusedError, match="not you"):
            await a.call(door.contact, ECHO, b"")  # the listener refuses
        with pytest.raises(AdmissionRefusedError, match="not you"):
            await door.call(a.contact, ECHO, b"")  # the dialer refuses
        picky.welcome = a.peer_id
        assert await a.call(door.contact, ECHO, b"x") == b"x"
        b.end_sessions(a.peer_id)
        assert await a.call(b.contact, ECHO, b"again") == b"again"
        assert a.stats.hellos == 3
        network.kill(b.peer_id, silent=True)
        began = memory_world.loop.time()
        with pytest.raises(PeerUnreachableError):
            await door.dial(b.contact.addresses[0])
        assert memory_world.loop.time() - began == pytest.approx(door.config.transport.connect_timeout_s)

    memory_world.run(main)


def test_corruption_is_detected(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        a, b, c = [await serving(memory_world) for _ in range(3)]
        await a.call(b.contact, ECHO, b"")

        def flip(source: PeerId, target: PeerId, path: str, data: bytes) -> bytes:
            return bytes(byte ^ 0xFF for byte in data) if path == TYPED.path else data

        memory_world.network.corrupt = flip
        with pytest.raises(MalformedFrameError):
            await a.call(b.contact, TYPED, pb.Welcome(token=b"token"))
        memory_world.network.corrupt = lambda source, target, path, data: (
            data[:-1] + bytes([data[-1] ^ 1]) if path == HELLO_PATH else data
        )
        with pytest.raises((MalformedFrameError, BadSignatureError)):
            await c.call(b.contact, ECHO, b"")
        memory_world.network.corrupt = None
        assert await c.call(b.contact, ECHO, b"fine") == b"fine"

    memory_world.run(main)


def scenario(seed: int, extra: bytes = b"") -> tuple[str, int]:
    """Twenty peers that call each other over a jittery, lossy network; returns the network's digest."""
    world = MemoryWorld(seed)

    async def main() -> None:
        network = world.network
        network.latency = lambda source, target, rng: rng.uniform(0.001, 0.1)
        network.drop_probability = 0.01
        peers = [await serving(world) for _ in range(20)]

        async def busy(peer: MemoryTransport) -> None:
            for _ in range(20):
                other = peer.runtime.rng.choice(peers)
                try:
                    await peer.call(other.contact, ECHO, bytes(peer.runtime.rng.randrange(1000)) + extra)
                except SwarmError:
                    await asyncio.sleep(peer.runtime.rng.random())

        async with asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(busy(peer))

    world.run(main)
    result = world.network.digest(), world.network.messages
    world.close()
    return result


def test_same_seed_same_digest() -> None:
    first = scenario(1)
    assert scenario(1) == first
    assert scenario(2)[0] != first[0]
    assert scenario(1, b"!")[0] != first[0]
    assert first[1] > 800


def test_tie_of_arrival_times_keeps_the_order_of_a_stream(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        memory_world.network.latency = 0.0
        a, b = await serving(memory_world), await serving(memory_world)
        async with a.stream(b.contact, PIPE, timeout_s=10) as stream:
            chunks = [bytes([n]) for n in range(200)]
            for chunk in chunks:
                await stream.send(chunk)
            await stream.finish()
            assert [chunk async for chunk in stream] == chunks

    memory_world.run(main)
