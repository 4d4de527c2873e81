"""Hello, sessions and authorisation, on both transports."""

from __future__ import annotations

import asyncio
import hashlib
import secrets

import pytest

from swarm.config import PeerConfig
from swarm.errors import (
    AdmissionRefusedError,
    BadSignatureError,
    ConnectionLostError,
    ExpiredInviteError,
    IdentityMismatchError,
    MalformedFrameError,
    NotAuthorizedError,
    ProtocolVersionError,
    UnknownSessionError,
    WrongRunError,
)
from swarm.identity import KeyPair, PeerId
from swarm.net.base import BaseTransport, HelloRefused
from swarm.net.hello import DialerHello
from swarm.net.security import Admission, OpenAuthorizer
from swarm.net.transport import ByteStream, CallContext, StreamMethod, Transport, UnaryMethod
from swarm.pb import hello_pb2 as pb
from swarm.roles import ALL_ROLES, Role
from tests.support import RUN_ID, World

ECHO = UnaryMethod("/swarm.pb.Test/Echo", bytes, bytes)
HOSTS_ONLY = UnaryMethod("/swarm.pb.Test/HostsOnly", bytes, bytes, roles=frozenset({Role.HOST}))
PIPE = StreamMethod("/swarm.pb.Test/Pipe")


async def echo(context: CallContext, request: bytes) -> bytes:
    return request


async def echo_stream(context: CallContext, stream: ByteStream) -> None:
    async for chunk in stream:
        await stream.send(chunk)


async def serving(world: World, **settings: object) -> BaseTransport:
    transport = await world.transport(**settings)  # type: ignore[arg-type]
    assert isinstance(transport, BaseTransport)
    transport.serve(ECHO, echo)
    transport.serve(HOSTS_ONLY, echo)
    transport.serve_stream(PIPE, echo_stream)
    return transport


async def pair(world: World) -> tuple[BaseTransport, BaseTransport]:
    return await serving(world), await serving(world)


async def assert_alive(caller: Transport, peer: Transport) -> None:
    assert await caller.call(peer.contact, ECHO, b"alive?", timeout_s=5) == b"alive?"


async def say(dialer: BaseTransport, listener: BaseTransport, *messages: bytes) -> bytes:
    """Send raw hello messages; returns the answer to the last."""
    answer = b""
    async with dialer._open_hello(listener.contact.addresses[0], listener.peer_id) as line:
        for message in messages:
            await line.send(message)
            answer = await line.receive()
    return answer


async def hello_as(identity: KeyPair, dialer: BaseTransport, listener: BaseTransport) -> list[bytes]:
    """Say hello with an identity, over the dialer's connection; returns what was sent."""
    async with dialer._open_hello(listener.contact.addresses[0], listener.peer_id) as line:
        hello = DialerHello(identity, dialer.authorizer, line.peer_id, line.certificate_hash)
        sent = [hello.opening()]
        await line.send(sent[0])
        sent.append(hello.answer(await line.receive()))
        await line.send(sent[1])
        hello.finish(await line.receive())
    return sent


def test_dial_finds_out_who_answers(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        contact = await a.dial(b.contact.addresses[0])
        assert contact == b.contact
        assert await a.dial(b.contact.addresses[0], b.peer_id) == b.contact
        await assert_alive(a, b)
        assert a.stats.hellos == 2

    world.run(main)


def test_one_hello_serves_many_calls_made_at_once(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(a.call(b.contact, ECHO, bytes([n]))) for n in range(20)]
        assert [call.result() for call in calls] == [bytes([n]) for n in range(20)]
        assert a.stats.hellos == 1

    world.run(main)


def test_handlers_learn_who_calls(world: World) -> None:
    async def main() -> None:
        a = await serving(world, roles=[Role.TRAINER, Role.MONITOR])
        b = await serving(world)
        seen: list[CallContext] = []

        async def remember(context: CallContext, request: bytes) -> bytes:
            seen.append(context)
            return b""

        b.serve(ECHO, remember)
        await a.call(b.contact, ECHO, b"")
        assert (seen[0].peer_id, seen[0].roles) == (a.peer_id, frozenset({Role.TRAINER, Role.MONITOR}))

    world.run(main)


def test_another_run_is_refused(world: World) -> None:
    async def main() -> None:
        stranger = await serving(world, run_id=hashlib.sha256(b"another run").digest())
        a, b = await pair(world)
        with pytest.raises(WrongRunError, match="belongs to run") as caught:
            await stranger.call(b.contact, ECHO, b"")
        assert caught.value.remote == str(b.peer_id)
        assert caught.value.fix
        assert b.runtime.events.count(HelloRefused) == 1
        await assert_alive(a, b)

    world.run(main)


def test_forged_signature_is_refused(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        thief = KeyPair.generate()
        thief.public_key = a.identity.public_key  # claims to be a, cannot sign as a
        with pytest.raises(BadSignatureError) as caught:
            await hello_as(thief, a, b)
        assert caught.value.remote == str(b.peer_id)
        assert len(b.sessions) == 0
        await assert_alive(a, b)

    world.run(main)


def test_replayed_hello_is_refused(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        overheard = await hello_as(a.identity, a, b)
        eavesdropper = await serving(world)
        with pytest.raises(BadSignatureError):
            await say(eavesdropper, b, *overheard)
        await assert_alive(a, b)

    world.run(main)


def test_man_in_the_middle_with_another_identity_is_refused(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        middle = await serving(world)
        with pytest.raises(IdentityMismatchError, match="instead of peer"):
            await a.dial(middle.contact.addresses[0], b.peer_id)
        await assert_alive(a, b)

    world.run(main)


def test_relayed_hello_is_worthless_to_whoever_terminates_tls(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        middle = await serving(world)
        # The dialer is connected to `middle`, which passes every message on to b and b's answers back.
        hello = DialerHello(a.identity, a.authorizer, b.peer_id, middle.certificate_hash)
        challenge = await say(middle, b, hello.opening())
        with pytest.raises(BadSignatureError):
            hello.answer(challenge)
        assert len(b.sessions) == 0

    world.run(main)


def test_other_protocol_version_is_refused_with_the_upgrade_command(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        opening = pb.Opening(
            protocol_version=2, run_id=RUN_ID, public_key=a.identity.public_key, nonce=secrets.token_bytes(32)
        )
        with pytest.raises(ProtocolVersionError, match="pip install --upgrade"):
            await say(a, b, pb.HelloFromDialer(opening=opening).SerializeToString())
        await assert_alive(a, b)

    world.run(main)


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 40, b"", b"x" * 20_000, pb.HelloFromDialer(proof=pb.Proof(signature=b"1")).SerializeToString()],
    ids=["noise", "empty", "large", "wrong step"],
)
def test_garbage_in_hello_is_refused(world: World, garbage: bytes) -> None:
    async def main() -> None:
        a, b = await pair(world)
        with pytest.raises(MalformedFrameError):
            await say(a, b, garbage)
        await assert_alive(a, b)
        assert b._pending_hellos == 0

    world.run(main)


class Picky(OpenAuthorizer):
    """Admits nobody in `refused`; admissions end at `expires_wall_s`."""

    def __init__(self, refused: list[PeerId], expires_wall_s: float | None = None) -> None:
        super().__init__(RUN_ID, ALL_ROLES)
        self.refused = refused
        self.expires_wall_s = expires_wall_s

    def admit(self, peer_id: PeerId, public_key: bytes, credential: bytes) -> Admission:
        if peer_id in self.refused:
            raise AdmissionRefusedError("You are not on the list.", fix="Ask the owner.")
        return Admission(super().admit(peer_id, public_key, credential).roles, self.expires_wall_s)


def test_refused_credential(world: World) -> None:
    async def main() -> None:
        a, c = await pair(world)
        b = await serving(world, authorizer=Picky([a.peer_id]))
        with pytest.raises(AdmissionRefusedError, match="not on the list") as caught:
            await a.call(b.contact, ECHO, b"")
        assert caught.value.remote == str(b.peer_id)
        with pytest.raises(AdmissionRefusedError) as local:  # the same policy, applied by the dialer
            await b.call(a.contact, ECHO, b"")
        assert local.value.remote is None
        await assert_alive(c, b)

    world.run(main)


def test_expired_credential_ends_the_session(world: World) -> None:
    async def main() -> None:
        a = await serving(world)
        b = await serving(world, authorizer=Picky([], expires_wall_s=1.0))
        with pytest.raises(ExpiredInviteError):
            await a.call(b.contact, ECHO, b"")
        assert len(b.sessions) == 0

    world.run(main)


def test_role_must_allow_the_method(world: World) -> None:
    async def main() -> None:
        trainer = await serving(world, roles=[Role.TRAINER])
        host = await serving(world, roles=[Role.HOST])
        with pytest.raises(NotAuthorizedError, match="trainer"):
            await trainer.call(host.contact, HOSTS_ONLY, b"x")
        assert await host.call(trainer.contact, HOSTS_ONLY, b"x") == b"x"
        await assert_alive(trainer, host)

    world.run(main)


def test_unknown_token_is_rejected_before_execution_and_healed_by_one_hello(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        await assert_alive(a, b)
        served = b.stats.calls_served
        held = a._held[b.peer_id]
        b.sessions.end_peer(a.peer_id)
        with pytest.raises(UnknownSessionError):
            await a._exchange(held, ECHO.path, b"", 5.0)
        assert b.stats.calls_served == served
        await assert_alive(a, b)
        assert a.stats.hellos == 2

    world.run(main)


def test_token_of_another_server_opens_nothing(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        c = await serving(world)
        await assert_alive(a, b)
        await assert_alive(a, c)
        stolen = a._held[b.peer_id]
        stolen.token, stolen.metadata = a._held[c.peer_id].token, a._held[c.peer_id].metadata
        with pytest.raises(UnknownSessionError):
            await a._exchange(stolen, ECHO.path, b"", 5.0)
        await assert_alive(a, b)

    world.run(main)


def test_call_without_session_is_rejected_also_for_unknown_methods(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        await assert_alive(a, b)
        held = a._held[b.peer_id]
        held.token, held.metadata = b"", ()
        for path in (ECHO.path, "/swarm.pb.Test/Nothing"):
            with pytest.raises(UnknownSessionError):
                await a._exchange(held, path, b"", 5.0)

    world.run(main)


def test_tokens_are_stored_hashed(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        await assert_alive(a, b)
        token = a._held[b.peer_id].token
        assert len(token) == 32
        assert list(b.sessions._sessions) == [hashlib.sha256(token).digest()]

    world.run(main)


def test_idle_session_ends_and_is_renewed(world: World) -> None:
    async def main() -> None:
        a, b = (
            await serving(world),
            await serving(world, config=PeerConfig.preset("local", transport={"session_idle_s": 0.2})),
        )
        await assert_alive(a, b)
        await asyncio.sleep(0.5)
        b.sessions.sweep()
        assert len(b.sessions) == 0
        await assert_alive(a, b)
        assert a.stats.hellos == 2

    world.run(main)


def test_revocation_ends_sessions_and_open_streams(world: World) -> None:
    async def main() -> None:
        a = await serving(world)
        policy = Picky([])
        b = await serving(world, authorizer=policy)
        async with a.stream(b.contact, PIPE, timeout_s=20) as stream:
            await stream.send(b"one")
            assert await stream.receive() == b"one"
            policy.refused.append(a.peer_id)
            b.end_sessions(a.peer_id)
            with pytest.raises(AdmissionRefusedError, match="ended our sessions"):
                await stream.receive()
        with pytest.raises(AdmissionRefusedError, match="not on the list"):
            await a.call(b.contact, ECHO, b"")
        assert len(b.sessions) == 0

    world.run(main)


def test_revocation_ends_our_own_streams_to_the_peer(world: World) -> None:
    async def main() -> None:
        a, b = await pair(world)
        async with a.stream(b.contact, PIPE, timeout_s=20) as stream:
            await stream.send(b"one")
            assert await stream.receive() == b"one"
            a.end_sessions(b.peer_id)
            with pytest.raises(ConnectionLostError, match="closed"):
                await stream.receive()
        await assert_alive(a, b)

    world.run(main)
