"""What only the gRPC transport has: channels, pins, health, TLS on the wire."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc
import psutil
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swarm.config import PeerConfig
from swarm.errors import ConfigError, IdentityMismatchError, PeerUnreachableError
from swarm.net.addresses import LoopbackOnly, announced_addresses, is_loopback, join_address, split_address
from swarm.net.grpc import GrpcTransport
from swarm.net.tls import TlsIdentity
from swarm.net.transport import ByteStream, CallContext, Contact, StreamMethod, UnaryMethod
from tests.support import GrpcWorld, deterministic_identity

ECHO = UnaryMethod("/swarm.pb.Test/Echo", bytes, bytes)
PIPE = StreamMethod("/swarm.pb.Test/Pipe")


async def echo(context: CallContext, request: bytes) -> bytes:
    return request


async def echo_stream(context: CallContext, stream: ByteStream) -> None:
    async for chunk in stream:
        await stream.send(chunk)


def local(**transport: object) -> PeerConfig:
    return PeerConfig.preset("local", transport=transport)


async def serving(world: GrpcWorld, **settings: object) -> GrpcTransport:
    transport = await world.transport(**settings)  # type: ignore[arg-type]
    assert isinstance(transport, GrpcTransport)
    transport.serve(ECHO, echo)
    transport.serve_stream(PIPE, echo_stream)
    return transport


async def stream_once(a: GrpcTransport, b: GrpcTransport) -> None:
    async with a.stream(b.contact, PIPE, timeout_s=10) as stream:
        await stream.send(b"x")
        await stream.finish()
        assert [chunk async for chunk in stream] == [b"x"]


def test_control_and_bulk_have_connections_of_their_own(grpc_world: GrpcWorld) -> None:
    async def main() -> None:
        a = await serving(grpc_world, config=local(bulk_connections=2))
        b = await serving(grpc_world)
        await a.call(b.contact, ECHO, b"")
        assert a._links[b.peer_id].channels == 1
        for _ in range(4):
            await stream_once(a, b)
        assert a._links[b.peer_id].channels == 3
        port = split_address(b.contact.addresses[0])[1]
        established = [
            c
            for c in psutil.net_connections(kind="tcp")
            if c.raddr and c.raddr.port == port and c.status == psutil.CONN_ESTABLISHED
        ]
        assert len(established) == 3

    grpc_world.run(main)


def test_least_recently_used_idle_connections_are_closed_and_come_back_without_hello(grpc_world: GrpcWorld) -> None:
    async def main() -> None:
        a = await serving(grpc_world, config=local(max_channels=2))
        others = [await serving(grpc_world) for _ in range(4)]
        async with a.stream(others[0].contact, PIPE, timeout_s=20) as stream:  # busy: not closed
            for other in others:
                await a.call(other.contact, ECHO, b"")
            assert others[0].peer_id in a._links
            assert others[1].peer_id not in a._links
            assert sum(link.channels for link in a._links.values()) <= 3
            await stream.send(b"x")
            assert await stream.receive() == b"x"
        for other in others:
            assert await a.call(other.contact, ECHO, b"again") == b"again"
        assert a.stats.hellos == 4

    grpc_world.run(main)


def test_other_identity_on_a_known_address_is_refused(grpc_world: GrpcWorld) -> None:
    async def main() -> None:
        a, b = await serving(grpc_world), await serving(grpc_world)
        await a.call(b.contact, ECHO, b"")
        port = int(b.contact.addresses[0].rpartition(":")[2])
        await b.close(0)
        impostor = await serving(grpc_world, config=local(port=port))
        assert impostor.contact.addresses == b.contact.addresses
        with pytest.raises(IdentityMismatchError):
            await a.call(b.contact, ECHO, b"secret", timeout_s=10)
        assert impostor.stats.calls_served == 0

    grpc_world.run(main)


def test_new_certificate_of_the_same_identity_is_accepted(grpc_world: GrpcWorld) -> None:
    async def main() -> None:
        identity = deterministic_identity("new certificate")
        a, b = await serving(grpc_world), await serving(grpc_world, identity=identity)
        await a.call(b.contact, ECHO, b"")
        port = int(b.contact.addresses[0].rpartition(":")[2])
        await b.close(0)
        again = await serving(grpc_world, identity=identity, config=local(port=port))
        assert again.certificate_hash != b.certificate_hash
        assert await a.call(b.contact, ECHO, b"x", timeout_s=10) == b"x"

    grpc_world.run(main)


def test_tls_key_is_kept_in_the_data_folder(grpc_world: GrpcWorld, tmp_path: Path) -> None:
    async def main() -> None:
        identity = deterministic_identity("kept")
        config = PeerConfig.preset("local", data_dir=tmp_path)
        first = await serving(grpc_world, identity=identity, config=config)
        second = await serving(grpc_world, identity=identity, config=config)
        assert first.certificate_hash == second.certificate_hash

    grpc_world.run(main)


def test_health_is_served_without_a_session(grpc_world: GrpcWorld) -> None:
    async def main() -> None:
        b = await serving(grpc_world)
        host_port = b.contact.addresses[0]
        credentials = grpc.ssl_channel_credentials(b._tls.certificate.pem)
        options = [("grpc.ssl_target_name_override", str(b.peer_id))]
        async with aio.secure_channel(host_port, credentials, options=options) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(aio.AioRpcError) as caught:
                await channel.unary_unary(ECHO.path)(b"", timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    grpc_world.run(main)


def test_plain_text_and_other_roots_do_not_get_through(grpc_world: GrpcWorld) -> None:
    async def main() -> None:
        b = await serving(grpc_world)
        address = b.contact.addresses[0]
        async with aio.insecure_channel(address) as channel:
            with pytest.raises(aio.AioRpcError):
                await channel.unary_unary(ECHO.path)(b"", timeout=5)
        other = TlsIdentity.generate(deterministic_identity("other root")).certificate
        options = [("grpc.ssl_target_name_override", str(b.peer_id))]
        credentials = grpc.ssl_channel_credentials(other.pem)
        async with aio.secure_channel(address, credentials, options=options) as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await channel.unary_unary(ECHO.path)(b"", timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    grpc_world.run(main)


def test_noise_on_the_port_does_not_hurt(grpc_world: GrpcWorld) -> None:
    async def main() -> None:
        a, b = await serving(grpc_world), await serving(grpc_world)
        host, port = split_address(b.contact.addresses[0])
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\xff" * 500):
            _, writer = await asyncio.open_connection(host, port)
            writer.write(noise)
            await writer.drain()
            writer.close()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname="x")
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000)
        await writer.drain()
        writer.transport.abort()
        assert await a.call(b.contact, ECHO, b"alive", timeout_s=5) == b"alive"

    grpc_world.run(main)


def test_peer_that_accepts_but_never_answers_is_unreachable_in_bounded_time(grpc_world: GrpcWorld) -> None:
    async def main() -> None:
        a = await serving(grpc_world, config=local(connect_timeout_s=0.3))

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(PeerUnreachableError, match="within"):
            await a.dial(address)
        with pytest.raises(PeerUnreachableError, match="within"):
            await a.call(Contact(deterministic_identity("silent").peer_id, (address,)), ECHO, b"", timeout_s=0.1)
        server.close()

    grpc_world.run(main)


def test_loopback_only_is_announced_with_a_warning(grpc_world: GrpcWorld) -> None:
    async def main() -> None:
        b = await serving(grpc_world)
        assert is_loopback(b.contact.addresses[0])
        assert b.runtime.events.count(LoopbackOnly) == 1
        open_peer = await serving(grpc_world, config=local(announce=("peer.example.org:7000",)))
        assert open_peer.contact.addresses == ("peer.example.org:7000",)
        assert open_peer.runtime.events.count(LoopbackOnly) == 0

    grpc_world.run(main)


def test_addresses_are_announced_that_others_can_dial() -> None:
    addresses = announced_addresses(PeerConfig().transport, 7000)
    assert addresses
    assert all(split_address(a)[1] == 7000 for a in addresses)
    assert len(addresses) == 1 or not any(map(is_loopback, addresses))
    assert not any(split_address(a)[0] == "0.0.0.0" for a in addresses)
    listening = local(listen_host="::1").transport
    assert announced_addresses(listening, 7000) == ("[::1]:7000",)
    with pytest.raises(ConfigError, match="announce"):
        announced_addresses(local(announce=("nonsense",)).transport, 7000)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1x",
        "::1:80",
        "[host]:1",
        "unix:/x:1",
        "a/b:1",
    ],
)
def test_malformed_addresses_are_typed(address: str) -> None:
    with pytest.raises(PeerUnreachableError, match="not an address"):
        split_address(address)


@pytest.mark.parametrize("address", ["10.0.0.1:1", "[::1]:65535", "peer.example.org:7000"])
def test_addresses_split_and_join(address: str) -> None:
    assert join_address(*split_address(address)) == address
