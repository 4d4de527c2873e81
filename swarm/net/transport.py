"""The interface that all protocol code is written against: methods, contacts, calls and byte streams.

`GrpcTransport` (swarm.net.grpc) speaks it over TLS, `MemoryTransport` (swarm.net.memory) inside one process, in real or
virtual time. Both run the same hello, sessions, authorisation and error mapping.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from swarm.config import PeerConfig
from swarm.identity import KeyPair, PeerId
from swarm.net.deadlines import Deadlines
from swarm.roles import ALL_ROLES, Role
from swarm.runtime import Runtime

PROTOCOL_VERSION = 1

Request = TypeVar("Request", bound=Message | bytes)
Response = TypeVar("Response", bound=Message | bytes)


@dataclass(frozen=True, slots=True)
class Contact:
    """How to reach a peer: its id and `host:port` addresses, best first. A hint; hello confirms it."""

    peer_id: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnaryMethod(Generic[Request, Response]):
    """One request, one response. `bytes` as a type means raw bytes (a frame of tensors) instead of protobuf."""

    path: str
    """Full gRPC name, e.g. `/swarm.pb.Dht/Find`."""
    request: type[Request]
    response: type[Response]
    roles: frozenset[Role] = ALL_ROLES
    """Roles that may call it."""
    max_bytes: int | None = None
    """Largest request and response; none takes `TransportConfig.max_control_bytes`."""
    adaptive: bool = True
    """Learn a deadline below the caller's; False where callers learn their own from what they know about the work."""


@dataclass(frozen=True, slots=True)
class StreamMethod:
    """A bidirectional stream of raw `bytes` messages, on the bulk channel."""

    path: str
    roles: frozenset[Role] = ALL_ROLES


@dataclass(frozen=True, slots=True)
class CallContext:
    """Who is calling a handler."""

    peer_id: PeerId
    roles: frozenset[Role]
    address: str
    """Where the call came from, for logs only."""


class ByteStream(ABC):
    """One side of a bidirectional stream. Send and receive in two tasks when both directions are large."""

    @abstractmethod
    async def send(self, chunk: bytes) -> None:
        """Send one message of at most `max_stream_chunk_bytes`; waits while the other side is slow."""

    @abstractmethod
    async def finish(self) -> None:
        """Say that nothing more will be sent. A server-side stream also finishes when its handler returns."""

    @abstractmethod
    async def receive(self) -> bytes | None:
        """The next message, or none at the end. Raises the remote handler's typed error, or a `NetworkError`."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self.receive()) is not None:
            yield chunk


UnaryHandler = Callable[[CallContext, Any], Awaitable[Any]]
StreamHandler = Callable[[CallContext, ByteStream], Awaitable[None]]


@dataclass(slots=True)
class TransportStats:
    """Totals since the start."""

    sent_bytes: int = 0
    received_bytes: int = 0
    calls_made: int = 0
    calls_served: int = 0
    hellos: int = 0
    rate_limited: int = 0
    """Calls, streams and hellos of others that were refused because they came too fast."""


class Transport(ABC):
    """A peer's connection to all others. Use it on the event loop it was started on.

    Attributes:
        identity: The peer's key pair.
        run_id: The run whose peers this transport admits (its authorizer's run id).
        roles: What we may do in the run, as our own credential says.
        deadlines: Adaptive deadlines per (peer, method, size class).
        stats: Totals.
    """

    identity: KeyPair
    run_id: bytes
    roles: frozenset[Role]
    config: PeerConfig
    runtime: Runtime
    deadlines: Deadlines
    stats: TransportStats

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    @abstractmethod
    def contact(self) -> Contact:
        """How others can reach this peer. Valid after `start`."""

    @abstractmethod
    def serve(self, method: UnaryMethod[Any, Any], handler: UnaryHandler) -> None:
        """Answer `method` with `await handler(context, request)`. A `SwarmError` it raises reaches the caller typed.

        Methods may be added and replaced at any time, before or after `start`.
        """

    @abstractmethod
    def serve_stream(self, method: StreamMethod, handler: StreamHandler) -> None:
        """Answer `method` with `await handler(context, stream)`. The handler is cancelled when the caller goes away."""

    @abstractmethod
    async def start(self) -> None:
        """Listen. Raises `PortInUseError`, `ConfigError`."""

    @abstractmethod
    async def dial(self, address: str, expect: PeerId | None = None) -> Contact:
        """Say hello to whoever answers at `host:port` and return its contact.

        Raises:
            PeerUnreachableError: Nobody answers there.
            IdentityMismatchError: Somebody other than `expect` answers.
            SecurityError: One side does not admit the other (the subclass says why).
        """

    @abstractmethod
    def reached(self, peer_id: PeerId) -> Contact | None:
        """Where we have reached a peer: what it said of itself in the last hello, led by the address that we dialled
        if that is not among it. None where there is no session.
        """

    @abstractmethod
    async def call(
        self, to: Contact, method: UnaryMethod[Request, Response], request: Request, *, timeout_s: float | None = None
    ) -> Response:
        """Make one call, with a hello first where there is no session.

        Args:
            timeout_s: The caller's cap; the adaptive deadline applies below it. None: the adaptive deadline alone.

        Raises:
            PeerUnreachableError: Not sent. CallTimeoutError, ConnectionLostError: sent, outcome unknown.
            SwarmError: What the remote handler raised, with `remote` set.
        """

    @abstractmethod
    def stream(self, to: Contact, method: StreamMethod, *, timeout_s: float) -> AbstractAsyncContextManager[ByteStream]:
        """Open a stream, with a hello first where there is no session; leaving the context cancels what is unfinished.

        Args:
            timeout_s: Deadline of the whole exchange; raises `CallTimeoutError` from `send` and `receive`.
        """

    @abstractmethod
    def end_sessions(self, peer_id: PeerId) -> None:
        """End every session and open stream of a peer, both ways (revocation)."""

    @abstractmethod
    async def close(self, grace_s: float = 1.0) -> None:
        """Stop listening, let running handlers finish for `grace_s`, drop all channels. Idempotent."""
