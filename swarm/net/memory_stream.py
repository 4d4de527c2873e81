"""Bidirectional streams of the in-memory network: two ordered pipes with a window, latency and faults."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm.config import MIB
from swarm.errors import CallTimeoutError, ConnectionLostError, FrameTooLargeError, SwarmError, error_from_wire
from swarm.identity import PeerId
from swarm.net.base import ServedStream, guard_stream_chunk, sessions_revoked
from swarm.net.sessions import Session
from swarm.net.transport import ByteStream

if TYPE_CHECKING:
    from swarm.net.memory import MemoryTransport
    from swarm.net.memory_network import MemoryNetwork

STREAM_WINDOW_BYTES = 4 * MIB
_CONTROL_BYTES = 0


class Pipe:
    """One direction of a stream. A lost message stalls it for good, as a black-holed connection would.

    Args:
        network: The network it runs through.
        source: The sending peer.
        target: The receiving peer.
        path: The method, for the digest.
        max_chunk_bytes: The receiver's limit.
    """

    def __init__(self, network: MemoryNetwork, source: PeerId, target: PeerId, path: str, max_chunk_bytes: int) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._path = path
        self._max_chunk_bytes = max_chunk_bytes
        self._travelling: deque[Callable[[], None]] = deque()
        self._arrived: deque[bytes] = deque()
        self._in_flight_bytes = 0
        self._last_arrival_s = 0.0
        self._stalled = False
        self._ended = False
        self._final: SwarmError | None = None
        self._broken: SwarmError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] = deque()

    async def put(self, chunk: bytes) -> None:
        """Send a chunk; waits while the window is full."""
        size = len(chunk)
        while self._broken is None and self._in_flight_bytes and self._in_flight_bytes + size > STREAM_WINDOW_BYTES:
            writer = asyncio.get_running_loop().create_future()
            self._writers.append(writer)
            await writer
        if self._broken is not None:
            raise self._broken
        self._in_flight_bytes += size
        if self._network.corrupt is not None:
            chunk = self._network.alter(self._source, self._target, self._path, chunk)
        self.post(lambda: self._arrived.append(chunk), size)

    def end(self, error: SwarmError | None = None) -> None:
        """Say, after everything sent so far, that nothing more comes, and why if it is an error."""

        def arrive() -> None:
            self._ended, self._final = True, error

        self.post(arrive, _CONTROL_BYTES)

    def post(self, arrive: Callable[[], None], size: int) -> None:
        """Send a message whose arrival runs `arrive`, in order with all others of this pipe."""
        delay_s = self._network.transmit(self._source, self._target, self._path, size)
        if delay_s is None or self._stalled:
            self._stalled = True
            return
        loop = asyncio.get_running_loop()
        self._last_arrival_s = max(self._last_arrival_s, loop.time() + delay_s)
        self._travelling.append(arrive)
        loop.call_at(self._last_arrival_s, self._deliver)

    def _deliver(self) -> None:
        if self._network.hold(self._source, self._target, self._deliver):
            return
        self._travelling.popleft()()
        self._wake()

    async def get(self) -> bytes | None:
        """The next chunk that has arrived; none at the end. Raises the error that ended the stream."""
        while True:
            if self._broken is not None:
                raise self._broken
            if self._arrived:
                chunk = self._arrived.popleft()
                self._in_flight_bytes -= len(chunk)
                self._wake_writers()
                if len(chunk) > self._max_chunk_bytes:
                    raise FrameTooLargeError(
                        f"A chunk of {len(chunk)} bytes exceeds the limit of {self._max_chunk_bytes}."
                    )
                return chunk
            if self._ended:
                if self._final is not None:
                    raise self._final
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def break_off(self, error: SwarmError) -> None:
        """End the pipe for both sides at once."""
        if self._broken is None:
            self._broken = error
            self._wake()
            self._wake_writers()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writers(self) -> None:
        while self._writers:
            writer = self._writers.popleft()
            if not writer.done():
                writer.set_result(None)


class _Side(ByteStream):
    def __init__(self, transport: MemoryTransport, out: Pipe, into: Pipe) -> None:
        self._transport = transport
        self._out = out
        self._into = into
        self._finished = False

    async def send(self, chunk: bytes) -> None:
        transport = self._transport
        chunk = guard_stream_chunk(chunk, transport.config.transport.max_stream_chunk_bytes)
        await transport.pacer.wait(len(chunk))
        await self._out.put(chunk)
        transport.stats.sent_bytes += len(chunk)

    async def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._out.end()

    async def receive(self) -> bytes | None:
        chunk = await self._into.get()
        if chunk is not None:
            self._transport.stats.received_bytes += len(chunk)
        return chunk


class ClientStream(_Side):
    """The caller's side; also runs the handler on the serving side."""

    def __init__(self, caller: MemoryTransport, server: MemoryTransport, path: str, token: bytes) -> None:
        network = caller.network
        limit = caller.config.transport.max_stream_chunk_bytes
        server_limit = server.config.transport.max_stream_chunk_bytes
        up = Pipe(network, caller.peer_id, server.peer_id, path, server_limit)
        down = Pipe(network, server.peer_id, caller.peer_id, path, limit)
        super().__init__(caller, up, down)
        self._server = server
        self._path = path
        self._token = token
        self._handler: asyncio.Task[None] | None = None
        self._gone = False
        self._end_reason: SwarmError | None = None

    def open(self) -> None:
        """Ask the serving side to run its handler."""
        self._out.post(self._start_handler, _CONTROL_BYTES)

    def _start_handler(self) -> None:
        server = self._server
        if self._gone:
            return
        if not server.listening:
            self.fail(ConnectionLostError(f"The connection to peer {server.peer_id.short} broke."))
            return
        try:
            session, served = server._enter_stream(self._path, self._token)
        except SwarmError as error:
            self._into.end(error_from_wire(error.to_wire(), str(server.peer_id)))
            return
        self._handler = asyncio.get_running_loop().create_task(
            self._handle(session, served), name=f"handle {self._path}"
        )
        server.started(self, self._server_stops)
        session.on_end[self] = self._revoke

    async def _handle(self, session: Session, served: ServedStream) -> None:
        error: SwarmError | None = None
        stream = _Side(self._server, self._into, self._out)
        try:
            await served.handler(session.context, stream)
        except asyncio.CancelledError:
            if self._end_reason is None:
                raise
            error = self._end_reason
        except Exception as failure:  # noqa: BLE001 - the caller gets a typed error, the rest is an event
            error = self._server._handler_error(self._path, session.context, failure)
        finally:
            self._server.finished(self)
            session.on_end.pop(self, None)
        self._into.end(error_from_wire(error.to_wire(), str(self._server.peer_id)) if error else None)

    def _revoke(self) -> None:
        self._end_reason = sessions_revoked()
        self._cancel_handler()

    def _server_stops(self) -> None:
        self.fail(ConnectionLostError(f"The connection to peer {self._server.peer_id.short} broke."))
        self._cancel_handler()

    def _cancel_handler(self) -> None:
        if self._handler is not None:
            self._handler.cancel()

    def fail(self, error: SwarmError) -> None:
        """Break both directions."""
        self._out.break_off(error)
        self._into.break_off(error)

    def expire(self, timeout_s: float) -> None:
        """The deadline has passed, on both sides."""
        peer = self._server.peer_id.short
        self.fail(CallTimeoutError(f"The stream {self._path} to peer {peer} was not done within {timeout_s:.3g} s."))
        self._gone = True
        self._cancel_handler()

    def cancel(self) -> None:
        """The caller has left: what is unfinished on the serving side is cancelled when it hears of it."""
        self._gone = True
        if self._handler is None or not self._handler.done():
            self._out.post(self._cancel_handler, _CONTROL_BYTES)
