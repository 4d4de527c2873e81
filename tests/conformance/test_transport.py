"""Unary calls and streams, their failures and limits, on both transports."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from swarm.config import MIB, PeerConfig
from swarm.errors import (
    CallTimeoutError,
    ClosedError,
    FrameTooLargeError,
    HostBusyError,
    MalformedFrameError,
    MethodNotServedError,
    PeerUnreachableError,
    PortInUseError,
    RateLimitedError,
    RemoteFailureError,
    SwarmError,
    UnknownSessionError,
)
from swarm.net.base import HandlerFailed
from swarm.net.sessions import MAX_STREAMS_PER_PEER
from swarm.net.transport import ByteStream, CallContext, Contact, StreamMethod, Transport, UnaryMethod
from swarm.pb import hello_pb2 as pb
from tests.support import World, deterministic_identity, eventually

ECHO = UnaryMethod("/swarm.pb.Test/Echo", bytes, bytes)
TYPED = UnaryMethod("/swarm.pb.Test/Typed", pb.Welcome, pb.Welcome)
TYPED_RAW = UnaryMethod("/swarm.pb.Test/Typed", bytes, bytes, max_bytes=3 * MIB)
PIPE = StreamMethod("/swarm.pb.Test/Pipe")


async def echo(context: CallContext, request: bytes) -> bytes:
    return request


async def double_idle(context: CallContext, request: pb.Welcome) -> pb.Welcome:
    return pb.Welcome(token=request.token, idle_s=2 * request.idle_s)


async def echo_stream(context: CallContext, stream: ByteStream) -> None:
    async for chunk in stream:
        await stream.send(chunk)


def local(**transport: object) -> PeerConfig:
    return PeerConfig.preset("local", transport=transport)


async def serving(world: World, **settings: object) -> Transport:
    transport = await world.transport(**settings)  # type: ignore[arg-type]
    transport.serve(ECHO, echo)
    transport.serve(TYPED, double_idle)
    transport.serve_stream(PIPE, echo_stream)
    return transport


async def pair(world: World) -> tuple[Transport, Transport]:
    return await serving(world), await serving(world)


async def exchange(stream: ByteStream, chunk: bytes) -> bytes | None:
    await stream.send(chunk)
    return await stream.receive()


async def call_often(caller: Transport, peer: Transport, times: int) -> None:
    for _ in range(times):
        await caller.call(peer.contact, ECHO, b"")


async def assert_alive(caller: Transport, peer: Transport) -> None:
    assert await caller.call(peer.contact, ECHO, b"alive?", timeout_s=5) == b"alive?"
    async with caller.stream(peer.contact, PIPE, timeout_s=5) as stream:
        await stream.send(b"alive?")
        await stream.finish()
        assert [chunk async for chunk in stream] == [b"alive?"]


def test_messages_and_bytes_arrive(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        answer = await a.call(b.contact, TYPED, pb.Welcome(token=b"t", idle_s=2.5))
        assert (answer.token, answer.idle_s) == (b"t", 5.0)
        big = bytes(1024) * 1000
        assert await a.call(b.contact, ECHO, big) == big
        assert a.stats.calls_made == b.stats.calls_served == 2
        assert a.stats.sent_bytes == b.stats.received_bytes > len(big)

    world.run(main)


def test_stream_carries_chunks_in_order_also_empty_ones(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        chunks = [b"one", b"", b"x" * MIB, b"two"]
        async with a.stream(b.contact, PIPE, timeout_s=10) as stream:
            for chunk in chunks:
                await stream.send(chunk)
            await stream.finish()
            assert [chunk async for chunk in stream] == chunks
            assert await stream.receive() is None

    world.run(main)


def test_handlers_can_be_replaced_while_serving(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        await assert_alive(a, b)

        async def reversed_echo(context: CallContext, request: bytes) -> bytes:
            return request[::-1]

        b.serve(ECHO, reversed_echo)
        assert await a.call(b.contact, ECHO, b"abc") == b"cba"

    world.run(main)


def test_typed_errors_cross_the_wire(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)

        async def busy(context: CallContext, request: bytes) -> bytes:
            raise HostBusyError("The queue is full.", fix="Ask another host.")

        async def busy_stream(context: CallContext, stream: ByteStream) -> None:
            await stream.send(b"first")
            raise HostBusyError("The queue is full.", fix="Ask another host.")

        b.serve(ECHO, busy)
        b.serve_stream(PIPE, busy_stream)
        with pytest.raises(HostBusyError, match="queue is full") as caught:
            await a.call(b.contact, ECHO, b"")
        assert (caught.value.remote, caught.value.fix) == (str(b.peer_id), "Ask another host.")
        async with a.stream(b.contact, PIPE, timeout_s=5) as stream:
            assert await stream.receive() == b"first"
            with pytest.raises(HostBusyError, match="queue is full"):
                await stream.receive()

    world.run(main)


def test_unforeseen_failure_becomes_typed_and_an_event_and_the_peer_lives(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)

        async def broken(context: CallContext, request: bytes) -> bytes:
            return {}["secret"]  # type: ignore[no-any-return]

        async def broken_stream(context: CallContext, stream: ByteStream) -> None:
            raise ZeroDivisionError

        async def wrong_type(context: CallContext, request: bytes) -> bytes:
            return "text"  # type: ignore[return-value]

        for handler in (broken, wrong_type):
            b.serve(ECHO, handler)
            with pytest.raises(RemoteFailureError, match=r"KeyError|TypeError") as caught:
                await a.call(b.contact, ECHO, b"")
            assert "secret" not in str(caught.value)
        b.serve_stream(PIPE, broken_stream)
        async with a.stream(b.contact, PIPE, timeout_s=5) as stream:
            with pytest.raises(RemoteFailureError, match="ZeroDivisionError"):
                await stream.receive()
        assert b.runtime.events.count(HandlerFailed) == 3
        b.serve(ECHO, echo)
        b.serve_stream(PIPE, echo_stream)
        await assert_alive(a, b)

    world.run(main)


def test_lost_session_inside_a_handler_does_not_repeat_the_call(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        runs = []

        async def nested(context: CallContext, request: bytes) -> bytes:
            runs.append(1)
            raise UnknownSessionError("that of a call the handler made")

        b.serve(ECHO, nested)
        with pytest.raises(RemoteFailureError):
            await a.call(b.contact, ECHO, b"")
        assert len(runs) == 1

    world.run(main)


def test_deadline_ends_the_call_and_the_handler(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        ended = []

        async def slow(context: CallContext, request: bytes) -> bytes:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended.append("unary")
                raise
            return b""

        async def slow_stream(context: CallContext, stream: ByteStream) -> None:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended.append("stream")
                raise

        await assert_alive(a, b)
        b.serve(ECHO, slow)
        b.serve_stream(PIPE, slow_stream)
        with pytest.raises(CallTimeoutError) as caught:
            await a.call(b.contact, ECHO, b"", timeout_s=0.2)
        assert caught.value.ambiguous
        with pytest.raises(CallTimeoutError):
            async with a.stream(b.contact, PIPE, timeout_s=0.2) as stream:
                await stream.receive()
        await eventually(lambda: ended == ["unary", "stream"])

    world.run(main)


def test_adaptive_deadline_applies_below_the_callers_cap(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        for _ in range(16):
            await a.call(b.contact, ECHO, b"")

        async def stalls(context: CallContext, request: bytes) -> bytes:
            await asyncio.sleep(30)
            return b""

        b.serve(ECHO, stalls)
        began = a.runtime.clock.time()
        with pytest.raises(CallTimeoutError):
            await a.call(b.contact, ECHO, b"", timeout_s=30)
        assert a.runtime.clock.time() - began < 5  # the learned deadline: the floor of the preset is 0.25 s

    world.run(main)


def test_caller_that_leaves_cancels_the_handler(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        started, ended = asyncio.Event(), asyncio.Event()

        async def slow(context: CallContext, request: bytes) -> bytes:
            started.set()
            try:
                await asyncio.sleep(30)
            finally:
                ended.set()
            return b""

        async def slow_stream(context: CallContext, stream: ByteStream) -> None:
            await slow(context, b"")

        b.serve(ECHO, slow)
        b.serve_stream(PIPE, slow_stream)
        task = asyncio.create_task(a.call(b.contact, ECHO, b"", timeout_s=20))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await ended.wait()
        started.clear()
        ended.clear()
        async with a.stream(b.contact, PIPE, timeout_s=20):
            await started.wait()
        async with asyncio.timeout(5):
            await ended.wait()

    world.run(main)


def test_stream_ends_when_the_handler_returns_early(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)

        async def take_one(context: CallContext, stream: ByteStream) -> None:
            await stream.send(await stream.receive() or b"nothing")

        b.serve_stream(PIPE, take_one)
        async with a.stream(b.contact, PIPE, timeout_s=10) as stream:
            await stream.send(b"one")
            assert [chunk async for chunk in stream] == [b"one"]
            await stream.send(b"too late, and that is no error")
            await stream.finish()

    world.run(main)


@pytest.mark.parametrize("garbage", [b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x7f"], ids=["noise", "huge length"])
def test_garbage_message_is_refused_and_the_peer_lives(world: World, garbage: bytes) -> None:
    async def main() -> None:
        a, b = await pair(world)
        with pytest.raises(MalformedFrameError) as caught:
            await a.call(b.contact, TYPED_RAW, garbage)
        assert caught.value.remote == str(b.peer_id)
        await assert_alive(a, b)

    world.run(main)


def test_garbage_answer_is_refused_by_the_caller(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        b.serve(UnaryMethod(TYPED.path, pb.Welcome, bytes), lambda context, request: echo(context, b"\xff" * 50))
        with pytest.raises(MalformedFrameError):
            await a.call(b.contact, TYPED, pb.Welcome())

    world.run(main)


def test_oversized_messages_are_refused_on_both_sides_and_the_peer_lives(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        with pytest.raises(FrameTooLargeError) as sending:
            await a.call(b.contact, ECHO, bytes(2 * MIB))
        assert sending.value.remote is None
        with pytest.raises(FrameTooLargeError):
            await a.call(b.contact, TYPED_RAW, bytes(2 * MIB))
        b.serve(UnaryMethod(ECHO.path, bytes, bytes, max_bytes=3 * MIB), lambda c, r: echo(c, bytes(2 * MIB)))
        with pytest.raises(FrameTooLargeError):
            await a.call(b.contact, ECHO, b"")
        b.serve(ECHO, echo)
        await assert_alive(a, b)

    world.run(main)


def test_message_beyond_every_limit_is_refused_and_the_peer_lives(world: World) -> None:
    async def main() -> None:
        a = await serving(world, config=local(max_stream_chunk_bytes=64 * MIB))
        b = await serving(world)
        with pytest.raises(FrameTooLargeError):
            await a.call(b.contact, UnaryMethod(ECHO.path, bytes, bytes, max_bytes=64 * MIB), bytes(8 * MIB))
        async with a.stream(b.contact, PIPE, timeout_s=10) as stream:
            with pytest.raises(FrameTooLargeError):
                await exchange(stream, bytes(8 * MIB))
        async with b.stream(a.contact, PIPE, timeout_s=10) as stream:
            with pytest.raises(FrameTooLargeError):
                await stream.send(bytes(8 * MIB))
        await assert_alive(a, b)

    world.run(main)


def test_wrong_type_of_our_own_message_is_a_type_error(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        with pytest.raises(TypeError, match="expected Welcome"):
            await a.call(b.contact, TYPED, pb.Proof())  # type: ignore[misc]
        with pytest.raises(TypeError, match="expected bytes"):
            await a.call(b.contact, ECHO, "text")  # type: ignore[type-var]
        async with a.stream(b.contact, PIPE, timeout_s=5) as stream:
            with pytest.raises(TypeError, match="expected bytes"):
                await stream.send("text")  # type: ignore[arg-type]

    world.run(main)


def test_method_that_is_not_served(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        with pytest.raises(MethodNotServedError):
            await a.call(b.contact, UnaryMethod("/swarm.pb.Test/Nothing", bytes, bytes), b"")
        async with a.stream(b.contact, StreamMethod("/swarm.pb.Test/Nothing"), timeout_s=5) as stream:
            with pytest.raises(MethodNotServedError):
                await stream.receive()
        await assert_alive(a, b)

    world.run(main)


def test_rate_limit_goes_by_peer_id(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        c = await serving(world, config=local(max_calls_per_s=10))
        with pytest.raises(RateLimitedError):
            await call_often(a, c, 40)
        assert c.stats.rate_limited >= 1
        await b.call(c.contact, ECHO, b"")  # others are not affected
        await asyncio.sleep(0.5)
        await a.call(c.contact, ECHO, b"")  # and neither is it, after a pause

    world.run(main)


def test_a_peer_cannot_hold_streams_open_without_end(world: World) -> None:
    async def main() -> None:
        server, caller = await pair(world)
        other = await world.transport()
        async with AsyncExitStack() as held:
            streams = [
                await held.enter_async_context(caller.stream(server.contact, PIPE, timeout_s=30.0))
                for _ in range(MAX_STREAMS_PER_PEER + 5)
            ]
            answers = await asyncio.gather(*(exchange(s, b"x") for s in streams), return_exceptions=True)
            assert answers.count(b"x") == MAX_STREAMS_PER_PEER
            assert sum(isinstance(a, RateLimitedError) for a in answers) == 5
            async with other.stream(server.contact, PIPE, timeout_s=5.0) as stream:
                assert await exchange(stream, b"y") == b"y"
        await eventually(lambda: server.sessions.open_streams(caller.peer_id) == 0)  # type: ignore[attr-defined]
        async with caller.stream(server.contact, PIPE, timeout_s=5.0) as stream:
            assert await exchange(stream, b"z") == b"z"

    world.run(main)


def test_port_in_use(world: World) -> None:
    async def main() -> None:
        a = await serving(world)
        port = int(a.contact.addresses[0].rpartition(":")[2])
        with pytest.raises(PortInUseError, match=str(port)) as caught:
            await world.transport(config=local(port=port))
        assert caught.value.fix
        await assert_alive(await serving(world), a)

    world.run(main)


def test_unreachable_peer(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        gone = b.contact
        await b.close()
        with pytest.raises(PeerUnreachableError):
            await a.dial(gone.addresses[0])
        with pytest.raises(PeerUnreachableError):
            await a.call(gone, ECHO, b"")
        with pytest.raises(PeerUnreachableError):
            async with a.stream(gone, PIPE, timeout_s=5):
                pass
        with pytest.raises(PeerUnreachableError, match="No address"):
            await a.call(Contact(gone.peer_id, ()), ECHO, b"")

    world.run(main)


def test_peer_that_goes_away_between_calls(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        await assert_alive(a, b)
        await b.close()
        with pytest.raises(SwarmError) as caught:
            await a.call(b.contact, ECHO, b"")
        assert caught.value.exit_code == 3
        with pytest.raises(PeerUnreachableError):
            await a.call(b.contact, ECHO, b"")

    world.run(main)


def test_second_address_works_when_the_first_is_dead(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        dead = await serving(world)
        await dead.close()
        contact = Contact(b.peer_id, (dead.contact.addresses[0], *b.contact.addresses))
        assert await a.call(contact, ECHO, b"x") == b"x"
        c = await serving(world)
        with pytest.raises(PeerUnreachableError, match="No address of peer"):
            await a.call(Contact(c.peer_id, (dead.contact.addresses[0], "127.0.0.1:1")), ECHO, b"x")

    world.run(main)


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_restarted_peer_is_met_again_without_an_error(world: World, kind: str) -> None:
    async def main() -> None:
        identity = deterministic_identity("restarts")
        a, b = await serving(world), await serving(world, identity=identity)
        port = int(b.contact.addresses[0].rpartition(":")[2])
        await assert_alive(a, b)
        await b.close(0)
        await asyncio.sleep(0.1)
        again = await serving(world, identity=identity, config=local(port=port))
        assert again.contact == b.contact
        if kind == "unary":
            assert await a.call(again.contact, ECHO, b"hello again", timeout_s=10) == b"hello again"
        else:
            async with a.stream(again.contact, PIPE, timeout_s=10) as stream:
                for number in range(5):
                    await stream.send(bytes([number]) * 1000)
                await stream.finish()
                assert [chunk async for chunk in stream] == [bytes([n]) * 1000 for n in range(5)]

    world.run(main)


def test_forgotten_session_does_not_disturb_a_stream(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        await assert_alive(a, b)
        b.sessions.end_peer(a.peer_id)  # type: ignore[attr-defined]
        chunks = [bytes([n]) * MIB for n in range(20)]

        async def send(stream: ByteStream) -> None:
            for chunk in chunks:
                await stream.send(chunk)
            await stream.finish()

        async with a.stream(b.contact, PIPE, timeout_s=20) as stream, asyncio.TaskGroup() as group:
            group.create_task(send(stream))
            assert [chunk async for chunk in stream] == chunks

    world.run(main)


def test_close_lets_running_handlers_finish(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        started = asyncio.Event()

        async def takes_a_while(context: CallContext, request: bytes) -> bytes:
            started.set()
            await asyncio.sleep(0.2)
            return b"done"

        b.serve(ECHO, takes_a_while)
        task = asyncio.create_task(a.call(b.contact, ECHO, b""))
        await started.wait()
        await b.close(grace_s=5.0)
        assert await task == b"done"
        await b.close()
        with pytest.raises(ClosedError):
            await b.call(a.contact, ECHO, b"")

    world.run(main)


def test_close_is_bounded(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        started = asyncio.Event()

        async def never(context: CallContext, request: bytes) -> bytes:
            started.set()
            await asyncio.Event().wait()
            return b""

        b.serve(ECHO, never)
        task = asyncio.create_task(a.call(b.contact, ECHO, b"", timeout_s=30))
        await started.wait()
        began = b.runtime.clock.time()
        await b.close(grace_s=0.2)
        assert b.runtime.clock.time() - began < 5
        with pytest.raises(SwarmError) as caught:
            await task
        assert caught.value.ambiguous

    world.run(main)


def test_dialling_another_address_does_not_disturb_open_streams(world: World) -> None:
    async def main() -> None:
        a = await serving(world)
        b = await serving(world, config=local(listen_host="127.0.0.1"))
        async with a.stream(b.contact, PIPE, timeout_s=10) as stream:
            await stream.send(b"one")
            assert await stream.receive() == b"one"
            await a.dial(b.contact.addresses[0], b.peer_id)
            await a.dial(b.contact.addresses[0])
            await stream.send(b"two")
            assert await stream.receive() == b"two"

    world.run(main)


def test_malformed_messages_cost_their_sender(world: World) -> None:
    async def main() -> None:
        a = await serving(world)
        b = await serving(world, config=local(max_calls_per_s=20))
        outcomes = []
        for _ in range(6):
            try:
                await a.call(b.contact, TYPED_RAW, b"\xff" * 10)
            except SwarmError as error:
                outcomes.append(type(error))
        assert outcomes[0] is MalformedFrameError
        assert outcomes[-1] is RateLimitedError

    world.run(main)
