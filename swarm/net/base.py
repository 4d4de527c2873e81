"""What both transports share: dispatch, sessions, authorisation, hello, deadlines, retries after a lost session.

A transport below only moves bytes: it opens a hello line, exchanges one request for one response, and opens streams.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from swarm.config import PeerConfig
from swarm.errors import (
    AdmissionRefusedError,
    CallTimeoutError,
    ClosedError,
    FrameTooLargeError,
    IdentityMismatchError,
    MalformedFrameError,
    MethodNotServedError,
    PeerUnreachableError,
    RateLimitedError,
    RemoteFailureError,
    SwarmError,
    UnknownSessionError,
    WireError,
)
from swarm.events import Event
from swarm.identity import KeyPair, PeerId
from swarm.net.deadlines import Deadlines
from swarm.net.hello import HELLO_LIFETIME_S, DialerHello, ListenerHello, Met
from swarm.net.pacing import UploadPacer
from swarm.net.security import Authorizer
from swarm.net.sessions import MAX_STREAMS_PER_PEER, RateLimit, Session, SessionTable
from swarm.net.transport import (
    CallContext,
    Contact,
    Request,
    Response,
    StreamHandler,
    StreamMethod,
    Transport,
    TransportStats,
    UnaryHandler,
    UnaryMethod,
)
from swarm.runtime import Runtime

M = TypeVar("M")

SESSION_KEY = "swarm-session-bin"
MAX_PENDING_HELLOS = 1024
MAX_HELD_SESSIONS = 16384
_HELLO_COST_CALLS = 4.0
_MALFORMED_COST_CALLS = 20.0
_STAGGER_S = 0.3


@dataclass(frozen=True, slots=True)
class HelloRefused(Event):
    """A peer that said hello to us was not let in."""

    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class HandlerFailed(Event):
    """A handler raised something that it did not foresee; the caller got `RemoteFailureError`."""

    path: str
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class SessionsEnded(Event):
    """All sessions and streams of a peer were ended."""

    peer: str
    sessions: int


@dataclass(slots=True, eq=False)
class HeldSession:
    """A session that another peer has granted to us, and where it was granted."""

    peer_id: PeerId
    address: str
    token: bytes
    addresses: tuple[str, ...]
    pin: Any = None
    """The certificate that connections to the peer are pinned to, where the transport has certificates."""
    metadata: tuple[tuple[str, bytes], ...] = ()
    """The token as gRPC metadata, built once."""

    def __post_init__(self) -> None:
        self.metadata = ((SESSION_KEY, self.token),)


class HelloLine(Protocol):
    """A byte-message line to whoever answers at an address, for the time of a hello."""

    peer_id: PeerId
    """Identity that the certificate carries."""
    certificate_hash: bytes
    pin: Any
    """What later connections are pinned to."""

    async def send(self, message: bytes) -> None: ...

    async def receive(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ServedUnary:
    method: UnaryMethod[Any, Any]
    handler: UnaryHandler
    max_bytes: int


@dataclass(frozen=True, slots=True)
class ServedStream:
    method: StreamMethod
    handler: StreamHandler


def encode_message(kind: type[Any], message: Any, max_bytes: int) -> bytes:
    """Bytes of an outgoing message. Raises `TypeError` (our own mistake), `FrameTooLargeError`."""
    if kind is bytes:
        if not isinstance(message, bytes | bytearray | memoryview):
            raise TypeError(f"expected bytes, got {type(message).__name__}")
        data = message if isinstance(message, bytes) else bytes(message)
    else:
        if not isinstance(message, kind):
            raise TypeError(f"expected {kind.__name__}, got {type(message).__name__}")
        assert isinstance(message, Message)
        data = message.SerializeToString()
    if len(data) > max_bytes:
        raise FrameTooLargeError(f"A message of {len(data)} bytes exceeds the limit of {max_bytes}.")
    return data


def decode_message(kind: type[Any], data: bytes, max_bytes: int) -> Any:
    """An incoming message. Raises `FrameTooLargeError`, `MalformedFrameError`."""
    if len(data) > max_bytes:
        raise FrameTooLargeError(f"A message of {len(data)} bytes exceeds the limit of {max_bytes}.")
    if kind is bytes:
        return data
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedFrameError(f"The bytes received are not a {kind.__name__}.") from error


class BaseTransport(Transport):
    """Everything about a transport but the moving of bytes.

    Args:
        identity: Our key pair.
        authorizer: Our policy.
        config: The peer's settings.
        runtime: Clock, randomness, events.
    """

    def __init__(self, identity: KeyPair, authorizer: Authorizer, config: PeerConfig, runtime: Runtime) -> None:
        self.identity = identity
        self.authorizer = authorizer
        self.run_id = authorizer.run_id
        self.roles = authorizer.roles
        self.config = config
        self.runtime = runtime
        self.deadlines = Deadlines(config.deadline)
        self.stats = TransportStats()
        self.sessions = SessionTable(config.transport.session_idle_s, config.transport.max_calls_per_s, runtime.clock)
        self._unary: dict[str, ServedUnary] = {}
        self._streams: dict[str, ServedStream] = {}
        self._held: OrderedDict[PeerId, HeldSession] = OrderedDict()
        self._connecting: dict[PeerId, asyncio.Task[HeldSession]] = {}
        self.pacer = UploadPacer(config.transport.max_upload_bytes_s, runtime.clock)
        self._pending_hellos = 0
        self._closed = False

    # -- to be provided by the transport below ---------------------------------------------------------------------

    @property
    @abstractmethod
    def certificate_hash(self) -> bytes:
        """SHA-256 of the certificate that we present."""

    @abstractmethod
    def _open_hello(self, address: str, expect: PeerId | None) -> AbstractAsyncContextManager[HelloLine]:
        """Connect to an address for a hello. Raises `PeerUnreachableError`, `IdentityMismatchError`."""

    @abstractmethod
    async def _exchange(self, held: HeldSession, path: str, data: bytes, budget_s: float) -> bytes:
        """Send one request, return the response. Raises what `Transport.call` says."""

    @abstractmethod
    def _drop_connection(self, peer_id: PeerId) -> None:
        """Close our connection to a peer, and our streams to it."""

    # -- serving ---------------------------------------------------------------------------------------------------

    def serve(self, method: UnaryMethod[Any, Any], handler: UnaryHandler) -> None:
        self._unary[method.path] = ServedUnary(method, handler, self._limit(method))

    def serve_stream(self, method: StreamMethod, handler: StreamHandler) -> None:
        self._streams[method.path] = ServedStream(method, handler)

    def _limit(self, method: UnaryMethod[Any, Any]) -> int:
        return method.max_bytes or self.config.transport.max_control_bytes

    async def _answer(self, path: str, token: bytes | None, data: bytes) -> bytes:
        """Run a unary handler. Raises only `SwarmError`, whatever the handler does."""
        session = self.sessions.find(token)
        self._account(session.rate)
        served = self._unary.get(path)
        if served is None:
            raise self._not_served(path)
        method = served.method
        self.authorizer.authorize(session.context, method.roles)
        stats = self.stats
        stats.calls_served += 1
        stats.received_bytes += len(data)
        try:
            request = decode_message(method.request, data, served.max_bytes)
        except WireError:
            session.rate.charge(_MALFORMED_COST_CALLS)
            raise
        try:
            response = encode_message(method.response, await served.handler(session.context, request), served.max_bytes)
        except Exception as error:
            raise self._handler_error(path, session.context, error) from error
        stats.sent_bytes += len(response)
        return response

    def _enter_stream(self, path: str, token: bytes | None) -> tuple[Session, ServedStream]:
        """Check that a stream may be opened. Raises `SwarmError`."""
        session = self.sessions.find(token)
        self._account(session.rate)
        served = self._streams.get(path)
        if served is None:
            raise self._not_served(path)
        self.authorizer.authorize(session.context, served.method.roles)
        if self.sessions.open_streams(session.context.peer_id) >= MAX_STREAMS_PER_PEER:
            raise RateLimitedError(
                f"This peer holds {MAX_STREAMS_PER_PEER} streams open already.", fix="Finish some of them first."
            )
        self.stats.calls_served += 1
        return session, served

    def _account(self, rate: RateLimit, cost: float = 1.0) -> None:
        """Take from a peer's rate. Raises `RateLimitedError`, counted."""
        try:
            rate.take(cost)
        except RateLimitedError:
            self.stats.rate_limited += 1
            raise

    def _handler_error(self, path: str, context: CallContext, error: Exception) -> SwarmError:
        """The error that the caller gets. `UnknownSessionError` always means: rejected before execution."""
        if isinstance(error, SwarmError) and not isinstance(error, UnknownSessionError):
            return error
        self.runtime.emit(HandlerFailed(path, str(context.peer_id), repr(error)))
        return RemoteFailureError(f"The handler of {path} failed with {type(error).__name__}.")

    def _not_served(self, path: str) -> MethodNotServedError:
        return MethodNotServedError(f"{path} is not served here.", fix="Ask a peer with another role or version.")

    # -- hello -----------------------------------------------------------------------------------------------------

    async def dial(self, address: str, expect: PeerId | None = None) -> Contact:
        self._check_open()
        held = await self._hello(address, expect)
        return Contact(held.peer_id, tuple(dict.fromkeys((held.address, *held.addresses))))

    def reached(self, peer_id: PeerId) -> Contact | None:
        held = self._held.get(peer_id)
        if held is None:
            return None
        known = held.addresses if held.address in held.addresses else (held.address, *held.addresses)
        return Contact(peer_id, known)

    async def _hello(self, address: str, expect: PeerId | None) -> HeldSession:
        patience_s = self.config.transport.connect_timeout_s
        try:
            async with asyncio.timeout(patience_s), self._open_hello(address, expect) as line:
                if expect is not None and line.peer_id != expect:
                    raise identity_mismatch(address, expect, line.peer_id)
                hello = DialerHello(self.identity, self.authorizer, line.peer_id, line.certificate_hash)
                await line.send(hello.opening())
                await line.send(hello.answer(await line.receive()))
                welcomed = hello.finish(await line.receive())
        except TimeoutError as error:
            raise PeerUnreachableError(f"No hello with {address} within {patience_s:g} s.") from error
        return self._hold(HeldSession(line.peer_id, address, welcomed.token, welcomed.addresses, line.pin))

    def _hold(self, held: HeldSession) -> HeldSession:
        """Remember a session that a hello has yielded."""
        self.stats.hellos += 1
        self._held[held.peer_id] = held
        self._held.move_to_end(held.peer_id)
        if len(self._held) > MAX_HELD_SESSIONS:
            self._held.popitem(last=False)
        return held

    def _listen_to_hello(self, address: str) -> HelloService:
        """The serving side of one hello. Raises `RateLimitedError`."""
        if self._pending_hellos >= MAX_PENDING_HELLOS:
            raise RateLimitedError("Too many peers say hello at once.", fix="Retry after a pause.")
        return HelloService(self, address)

    def _connect_task(self, to: Contact) -> asyncio.Task[HeldSession]:
        """One attempt to connect per peer at a time, shared by everybody who needs it."""
        task = self._connecting.get(to.peer_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._connect(to), name=f"connect {to.peer_id.short}")
            self._connecting[to.peer_id] = task
            task.add_done_callback(lambda done: self._connected(to.peer_id, done))
        return task

    def _connected(self, peer_id: PeerId, task: asyncio.Task[HeldSession]) -> None:
        self._connecting.pop(peer_id, None)
        if not task.cancelled():
            task.exception()  # whoever still waits gets it; nobody may be left

    async def _session_for(self, to: Contact, timeout_s: float | None) -> HeldSession:
        """A new session with a peer."""
        task = self._connect_task(to)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise PeerUnreachableError(f"No connection to peer {to.peer_id.short} within {timeout_s:g} s.") from error
        except asyncio.CancelledError:
            if self._closed and task.cancelled():
                raise ClosedError("The transport was closed.") from None
            raise

    async def _connect(self, to: Contact) -> HeldSession:
        """Say hello at the first address that works; a further one is tried when the one before fails or dallies."""
        if not to.addresses:
            raise PeerUnreachableError(f"No address of peer {to.peer_id.short} is known.")
        if len(to.addresses) == 1:
            return await self._hello(to.addresses[0], to.peer_id)
        attempts: list[asyncio.Task[HeldSession]] = []
        loop = asyncio.get_running_loop()
        try:
            for address in to.addresses:
                attempts.append(loop.create_task(self._hello(address, to.peer_id), name=f"hello {address}"))
                last = address == to.addresses[-1]
                end = None if last else loop.time() + _STAGGER_S
                while pending := [a for a in attempts if not a.done()]:
                    left = None if end is None else max(0.0, end - loop.time())
                    await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                    for attempt in attempts:
                        if attempt.done() and attempt.exception() is None:
                            return attempt.result()
                    if end is not None and loop.time() >= end:
                        break
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        errors = [a.exception() for a in attempts if not a.cancelled()]
        reasons = "; ".join(f"{a}: {e}" for a, e in zip(to.addresses, errors, strict=False))
        refusals = [e for e in errors if isinstance(e, SwarmError) and not isinstance(e, PeerUnreachableError)]
        if refusals:
            raise refusals[0]
        raise PeerUnreachableError(f"No address of peer {to.peer_id.short} works: {reasons}.")

    # -- calling ---------------------------------------------------------------------------------------------------

    async def call(
        self, to: Contact, method: UnaryMethod[Request, Response], request: Request, *, timeout_s: float | None = None
    ) -> Response:
        self._check_open()
        max_bytes = self._limit(method)
        data = encode_message(method.request, request, max_bytes)
        peer_id, path, size = to.peer_id, method.path, len(data)
        clock, deadlines, stats = self.runtime.clock.time, self.deadlines, self.stats
        end = None if timeout_s is None else clock() + timeout_s
        retried = False
        while True:
            held = self._held.get(peer_id)
            fresh = held is None
            if held is None:
                held = await self._session_for(to, None if end is None else max(0.0, end - clock()))
            begun = clock()
            adaptive = method.adaptive or end is None
            learned_s = deadlines.budget_s(peer_id, path, size) if adaptive else math.inf
            budget_s = learned_s if end is None else min(learned_s, end - begun)
            if budget_s <= 0:
                raise PeerUnreachableError(f"No time was left for {path} after connecting to peer {peer_id.short}.")
            stats.calls_made += 1
            stats.sent_bytes += size
            try:
                reply = await self._exchange(held, path, data, budget_s)
            except CallTimeoutError as error:
                if budget_s >= learned_s and error.remote is None:
                    deadlines.record_timeout(peer_id, path, size)
                raise
            except UnknownSessionError:
                # The peer has forgotten us (it restarted, or we were idle) and did not run the call.
                self._forget(held)
                if retried:
                    raise
                retried = True
            except PeerUnreachableError as error:
                # The connection we had leads nowhere any more; nothing was sent. Where it leads now, hello finds out.
                if error.remote is None:
                    self._forget(held)
                    self._drop_connection(peer_id)
                if fresh or retried or error.remote is not None:
                    raise
                retried = True
            else:
                if adaptive:
                    deadlines.record(peer_id, path, size, clock() - begun)
                stats.received_bytes += len(reply)
                response: Response = decode_message(method.response, reply, max_bytes)
                return response

    def _forget(self, held: HeldSession) -> None:
        """Drop a session that turned out to be worthless, unless a newer one has replaced it."""
        if self._held.get(held.peer_id) is held:
            del self._held[held.peer_id]

    # -- ending ----------------------------------------------------------------------------------------------------

    def end_sessions(self, peer_id: PeerId) -> None:
        ended = self.sessions.end_peer(peer_id)
        self._held.pop(peer_id, None)
        self._drop_connection(peer_id)
        self.runtime.emit(SessionsEnded(str(peer_id), ended))

    async def _cancel_connecting(self) -> None:
        tasks = list(self._connecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The transport is closed.", fix="Start a new peer.")


class HelloService:
    """The serving side of one hello: give it each message, send what it returns. Always `close` it."""

    def __init__(self, transport: BaseTransport, address: str) -> None:
        self._transport = transport
        self._address = address
        self._hello = ListenerHello(
            transport.identity, transport.authorizer, transport.certificate_hash, transport.contact.addresses
        )
        self._challenged = False
        self._end_s = transport.runtime.clock.time() + HELLO_LIFETIME_S
        self._open = True
        transport._pending_hellos += 1

    def step(self, message: bytes) -> bytes:
        """The answer to a message. Raises the `SwarmError` that refuses the hello."""
        transport = self._transport
        with self._refusing():
            if not self._challenged:
                self._challenged = True
                return self._hello.challenge(message)
            met = self._hello.accept(message)
            transport._account(transport.sessions.rate(met.peer_id), _HELLO_COST_CALLS)
        return self._hello.welcome(self._grant(met), transport.config.transport.session_idle_s)

    def take_for_granted(self, run_id: bytes, public_key: bytes, credential: bytes) -> bytes:
        """The token of a session for a dialer of proven identity, as after `step`. Raises what `step` raises.

        For networks inside one process that do without signatures.
        """
        transport = self._transport
        with self._refusing():
            met = self._hello.meet(run_id, public_key, credential)
            transport._account(transport.sessions.rate(met.peer_id), _HELLO_COST_CALLS)
        return self._grant(met)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Check the time, and tell of a refusal."""
        transport = self._transport
        try:
            if transport.runtime.clock.time() > self._end_s:
                raise CallTimeoutError(f"Hello took more than {HELLO_LIFETIME_S:g} s.")
            yield
        except SwarmError as error:
            transport.runtime.emit(HelloRefused(self._address, str(error)))
            raise

    def _grant(self, met: Met) -> bytes:
        return self._transport.sessions.grant(met, self._address)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._transport._pending_hellos -= 1


def identity_mismatch(address: str, expected: PeerId, found: PeerId) -> IdentityMismatchError:
    """The error for an address at which somebody else answers."""
    return IdentityMismatchError(
        f"Peer {found.short} answers at {address} instead of peer {expected.short}.",
        fix="Get a fresh ticket or invite; if it persists, somebody may be in the middle of the connection.",
    )


def guard_stream_chunk(chunk: bytes | bytearray | memoryview, max_bytes: int) -> bytes:
    """A chunk as bytes, within the limit. Raises `TypeError`, `FrameTooLargeError`."""
    if not isinstance(chunk, bytes):
        if not isinstance(chunk, bytearray | memoryview):
            raise TypeError(f"expected bytes, got {type(chunk).__name__}")
        chunk = bytes(chunk)
    if len(chunk) > max_bytes:
        raise FrameTooLargeError(f"A chunk of {len(chunk)} bytes exceeds the limit of {max_bytes}.")
    return chunk


def sessions_revoked() -> AdmissionRefusedError:
    """The error that ends the open streams of a peer whose sessions are ended."""
    return AdmissionRefusedError("The peer has ended our sessions.", fix="Ask the run's owner for a new invite.")
