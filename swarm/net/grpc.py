"""`Transport` over gRPC: TLS pinned to identities, control and bulk traffic on channels of their own.

Connection to a peer: fetch its certificate by a TLS handshake, check the identity inside, pin it as the only root of a
gRPC channel, say hello on that channel. See `swarm.net.tls` and `swarm.net.hello`.
"""

# ruff: noqa: E402
from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from swarm.net.loop import disable_grpc_fork_handlers

disable_grpc_fork_handlers()  # before the first import of grpc

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from swarm.config import KIB, PeerConfig
from swarm.errors import (
    CallTimeoutError,
    ConnectionLostError,
    IdentityMismatchError,
    PortInUseError,
    SwarmError,
    TruncatedStreamError,
)
from swarm.identity import KeyPair, PeerId
from swarm.net.addresses import LoopbackOnly, announced_addresses, is_loopback, join_address, split_address
from swarm.net.base import SESSION_KEY, BaseTransport, HeldSession, identity_mismatch, sessions_revoked
from swarm.net.grpc_channels import Link, Options
from swarm.net.grpc_status import Ending, abort, is_pin_mismatch, typed_error
from swarm.net.grpc_stream import ACCEPTED_METADATA, ClientStream, ServerStream
from swarm.net.hello import HELLO_LIFETIME_S, HELLO_PATH
from swarm.net.security import Authorizer
from swarm.net.tls import PinnedCertificate, TlsIdentity, fetch_certificate
from swarm.net.transport import ByteStream, Contact, StreamHandler, StreamMethod, UnaryHandler, UnaryMethod
from swarm.runtime import Runtime

_FRAME_SLACK_BYTES = 64 * KIB


class _Line:
    """A hello line over a gRPC stream."""

    def __init__(self, call: Any, certificate: PinnedCertificate, address: str, timeout_s: float) -> None:
        self.peer_id = certificate.peer_id
        self.certificate_hash = certificate.sha256
        self.pin = certificate
        self._call = call
        self._ending = Ending(call)
        self._address = address
        self._timeout_s = timeout_s

    async def send(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except (aio.AioRpcError, aio.InternalError, asyncio.InvalidStateError) as error:
            raise await self._typed() from error

    async def receive(self) -> bytes:
        try:
            message = await self._call.read()
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._typed() from error
        if message is aio.EOF:
            raise TruncatedStreamError(f"{self._address} ended the hello early.")
        assert isinstance(message, bytes)
        return message

    async def _typed(self) -> SwarmError:
        error = await self._ending.wait()
        if error is None:
            return TruncatedStreamError(f"{self._address} ended the hello early.")
        if is_pin_mismatch(error):
            return IdentityMismatchError(
                f"Somebody else answers at {self._address} than a moment ago.",
                fix="Retry; if it persists, somebody may be in the middle of the connection.",
            )
        return typed_error(error, self.peer_id, HELLO_PATH, self._timeout_s)


class _Handlers(grpc.GenericRpcHandler):
    """Finds the handler of a path; unknown paths get one that checks the session before it says so."""

    def __init__(self, unknown: Callable[[str], Any]) -> None:
        self.by_path: dict[str, Any] = {}
        self._unknown = unknown

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method
        return self.by_path.get(path) or self._unknown(path)


class GrpcTransport(BaseTransport):
    """A `Transport` over TLS and HTTP/2. Lives on the process's loop thread.

    The TLS key is kept in `config.data_dir`, where there is one, because others pin it.
    """

    def __init__(self, identity: KeyPair, authorizer: Authorizer, config: PeerConfig, runtime: Runtime) -> None:
        super().__init__(identity, authorizer, config, runtime)
        if config.data_dir is None:
            self._tls = TlsIdentity.generate(identity)
        else:
            self._tls = TlsIdentity.load_or_create(config.data_dir / "tls.pem", identity)
        self._handlers = _Handlers(self._unknown_handler)
        self._handlers.by_path[HELLO_PATH] = grpc.stream_stream_rpc_method_handler(self._serve_hello)
        self._server: aio.Server | None = None
        self._health = health.HealthServicer()
        self._addresses: tuple[str, ...] = ()
        self._links: OrderedDict[PeerId, Link] = OrderedDict()
        self._closing: dict[asyncio.Task[None], None] = {}
        limits = config.transport
        largest = max(limits.max_control_bytes, limits.max_stream_chunk_bytes) + _FRAME_SLACK_BYTES
        self._options: Options = [
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.max_pings_without_data", 0),
        ]

    @property
    def contact(self) -> Contact:
        return Contact(self.peer_id, self._addresses)

    @property
    def certificate_hash(self) -> bytes:
        return self._tls.certificate.sha256

    # -- serving ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._check_open()
        settings = self.config.transport
        server = aio.server(
            options=[
                *self._options,
                ("grpc.so_reuseport", 0),  # else a second peer on the same port gets half of the connections
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ]
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_generic_rpc_handlers((self._handlers,))
        credentials = grpc.ssl_server_credentials([(self._tls.key_pem, self._tls.certificate.pem)])
        where = join_address(settings.listen_host, settings.port)
        try:
            port = server.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise PortInUseError(
                f"{where} cannot be listened on: the port is taken, or the address is not this machine's.",
                fix="Choose another port (0 takes a free one), or end the process that uses it.",
            ) from error
        self._addresses = announced_addresses(settings, port)
        if all(map(is_loopback, self._addresses)):
            self.runtime.emit(LoopbackOnly(self._addresses, "no other address to announce"))
        await server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._server = server

    def serve(self, method: UnaryMethod[Any, Any], handler: UnaryHandler) -> None:
        super().serve(method, handler)
        path = method.path

        async def handle(data: bytes, context: aio.ServicerContext[Any, Any]) -> bytes:
            try:
                return await self._answer(path, _token(context), data)
            except SwarmError as error:
                await abort(context, error)

        self._handlers.by_path[path] = grpc.unary_unary_rpc_method_handler(handle)

    def serve_stream(self, method: StreamMethod, handler: StreamHandler) -> None:
        super().serve_stream(method, handler)
        path = method.path

        async def handle(_: Any, context: aio.ServicerContext[Any, Any]) -> None:
            await self._serve_stream(path, context)

        self._handlers.by_path[path] = grpc.stream_stream_rpc_method_handler(handle)

    async def _serve_stream(self, path: str, context: aio.ServicerContext[Any, Any]) -> None:
        try:
            session, served = self._enter_stream(path, _token(context))
        except SwarmError as error:
            await abort(context, error)
        task = asyncio.current_task()
        assert task is not None
        key, revoked = object(), False

        def end() -> None:
            nonlocal revoked
            revoked = True
            task.cancel()

        session.on_end[key] = end  # at once: open streams are counted by it
        try:
            await context.send_initial_metadata(ACCEPTED_METADATA)
            await served.handler(session.context, ServerStream(self, context))
        except asyncio.CancelledError:
            if not revoked:
                raise
            task.uncancel()
            await abort(context, sessions_revoked())
        except Exception as error:  # noqa: BLE001 - the caller gets a typed error, the rest is an event
            await abort(context, self._handler_error(path, session.context, error))
        finally:
            session.on_end.pop(key, None)

    def _unknown_handler(self, path: str) -> Any:
        async def handle(_: Any, context: aio.ServicerContext[Any, Any]) -> None:
            try:
                self.sessions.find(_token(context)).rate.take()
            except SwarmError as error:
                await abort(context, error)
            await abort(context, self._not_served(path))

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _serve_hello(self, _: Any, context: aio.ServicerContext[Any, Any]) -> None:
        try:
            service = self._listen_to_hello(context.peer())
        except SwarmError as error:
            await abort(context, error)
        try:
            async with asyncio.timeout(HELLO_LIFETIME_S):
                for _step in range(2):
                    message = await context.read()
                    if message is aio.EOF:
                        return
                    assert isinstance(message, bytes)
                    await context.write(service.step(message))
        except TimeoutError:
            await abort(context, CallTimeoutError(f"Hello took more than {HELLO_LIFETIME_S:g} s."))
        except SwarmError as error:
            await abort(context, error)
        finally:
            service.close()

    # -- calling ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open_hello(self, address: str, expect: PeerId | None) -> AsyncIterator[_Line]:
        host, port = split_address(address)
        certificate = await fetch_certificate(host, port, expect)
        peer_id = certificate.peer_id
        if expect is not None and peer_id != expect:
            raise identity_mismatch(address, expect, peer_id)
        timeout_s = self.config.transport.connect_timeout_s
        # A connection of its own: the one in use, if any, may carry streams and lead to another address.
        link = self._new_link(address, certificate)
        link.active += 1
        call: Any = link.control.channel.stream_stream(HELLO_PATH)(timeout=timeout_s)
        good = False
        try:
            yield _Line(call, certificate, address, timeout_s)
            good = True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if call.cancelled() and not (task is not None and task.cancelling()):
                raise ConnectionLostError(f"The connection to {address} was closed during hello.") from None
            raise
        finally:
            link.active -= 1
            call.cancel()
            known = self._links.get(peer_id)
            if not good or (known is not None and known.certificate == certificate):
                self._drop_link(link)
            else:
                if known is not None:  # the peer has a new certificate: it was restarted
                    self._drop_link(known)
                self._use_link(link)

    async def _exchange(self, held: HeldSession, path: str, data: bytes, budget_s: float) -> bytes:
        link = self._link(held)
        road, heard = link.control, None
        call = road.unary(path)(data, timeout=budget_s, metadata=held.metadata)
        link.begin(road)
        try:
            reply: bytes = await call
            heard = True
            return reply
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                heard = error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
            raise typed_error(error, held.peer_id, path, budget_s) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if call.cancelled() and not (task is not None and task.cancelling()):
                raise ConnectionLostError(f"The connection to peer {held.peer_id.short} was closed.") from None
            raise
        finally:
            link.end(road, heard)

    @asynccontextmanager
    async def stream(self, to: Contact, method: StreamMethod, *, timeout_s: float) -> AsyncIterator[ByteStream]:
        self._check_open()
        stream = ClientStream(self, to, method.path, timeout_s)
        try:
            await stream.open()
            yield stream
        finally:
            stream.cancel()

    def _link(self, held: HeldSession) -> Link:
        """The channels to a peer; opened here where there are none (gRPC connects on the first call)."""
        link = self._links.get(held.peer_id)
        if link is not None:
            self._links.move_to_end(held.peer_id)
            return link
        return self._use_link(self._new_link(held.address, held.pin))

    def _new_link(self, address: str, certificate: PinnedCertificate) -> Link:
        options: Options = [
            *self._options,
            ("grpc.use_local_subchannel_pool", 1),  # else control and bulk would share one connection
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        return Link(address, certificate, options, self.config.transport.bulk_connections, self._close_soon)

    def _use_link(self, link: Link) -> Link:
        """Make a link the one to its peer; closes the least recently used idle ones beyond the limit."""
        self._links[link.peer_id] = link
        total = sum(each.channels for each in self._links.values())
        for old in list(self._links.values())[:-1]:
            if total <= self.config.transport.max_channels:
                break
            if old.active == 0:
                total -= old.channels
                self._drop_link(old)
        return link

    def _drop_connection(self, peer_id: PeerId) -> None:
        link = self._links.get(peer_id)
        if link is not None:
            self._drop_link(link)

    def _drop_link(self, link: Link) -> None:
        if self._links.get(link.peer_id) is link:
            del self._links[link.peer_id]
        self._close_soon(link.close(), f"close link {link.peer_id.short}")

    def _close_soon(self, closing: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(closing, name=name)
        self._closing[task] = None
        task.add_done_callback(lambda done: self._closing.pop(done, None))

    async def close(self, grace_s: float = 1.0) -> None:
        if self._closed:
            return
        self._closed = True
        await self._cancel_connecting()
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(grace_s)
        for link in list(self._links.values()):
            self._drop_link(link)
        await asyncio.gather(*self._closing, return_exceptions=True)


def _token(context: aio.ServicerContext[Any, Any]) -> bytes | None:
    for key, value in context.invocation_metadata() or ():
        if key == SESSION_KEY:
            return value if isinstance(value, bytes) else None
    return None
