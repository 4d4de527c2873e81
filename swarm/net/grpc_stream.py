"""The two sides of a tensor stream over gRPC.

The caller's side starts sending at once and keeps what it has sent until the other side has accepted the stream. If the
session turns out to be forgotten, or the connection to lead nowhere, it says hello again, once, and sends it again:
nothing was executed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from grpc import aio

from swarm.config import MIB
from swarm.errors import (
    CallTimeoutError,
    ConnectionLostError,
    PeerUnreachableError,
    SwarmError,
    UnknownSessionError,
)
from swarm.net.base import HeldSession, guard_stream_chunk
from swarm.net.grpc_channels import SILENT_S
from swarm.net.grpc_status import Ending, typed_error
from swarm.net.transport import ByteStream, Contact

if TYPE_CHECKING:
    from swarm.net.grpc import GrpcTransport
    from swarm.net.grpc_channels import Link, Road

ENDED = (aio.AioRpcError, aio.InternalError, asyncio.InvalidStateError, asyncio.CancelledError)
"""What the methods of a call raise when it has ended."""
ACCEPTED_METADATA = (("swarm-accepted", "1"),)
MAX_UNCONFIRMED_BYTES = 8 * MIB


class ServerStream(ByteStream):
    """The handler's side."""

    def __init__(self, transport: GrpcTransport, context: aio.ServicerContext[Any, Any]) -> None:
        self._transport = transport
        self._context = context
        self._max_bytes = transport.config.transport.max_stream_chunk_bytes

    async def send(self, chunk: bytes) -> None:
        chunk = guard_stream_chunk(chunk, self._max_bytes)
        await self._transport.pacer.wait(len(chunk))
        try:
            await self._context.write(chunk)
        except aio.InternalError as error:
            raise ConnectionLostError("The caller went away.") from error
        self._transport.stats.sent_bytes += len(chunk)

    async def finish(self) -> None:
        """Nothing to do: gRPC has no half-close on this side, the stream finishes when the handler returns."""

    async def receive(self) -> bytes | None:
        chunk = await self._context.read()
        if chunk is aio.EOF:
            return None
        assert isinstance(chunk, bytes)
        self._transport.stats.received_bytes += len(chunk)
        return chunk


class ClientStream(ByteStream):
    """The caller's side. Use it through `GrpcTransport.stream`."""

    def __init__(self, transport: GrpcTransport, to: Contact, path: str, timeout_s: float) -> None:
        self._transport = transport
        self._to = to
        self._path = path
        self._timeout_s = timeout_s
        self._end_s = transport.runtime.clock.time() + timeout_s
        self._max_bytes = transport.config.transport.max_stream_chunk_bytes
        self._lock = asyncio.Lock()  # sends, and recovery, which repeats them
        self._unconfirmed: list[bytes] | None = []
        self._unconfirmed_bytes = 0
        self._recovered = False
        self._finished = False
        self._held: HeldSession | None = None
        self._link: Link | None = None
        self._road: Road | None = None
        self._heard = False
        self._begun_s = 0.0
        self._call: Any = None
        self._ending: Ending | None = None

    async def open(self) -> None:
        """Start the call; does not wait for the other side unless a hello is needed."""
        transport = self._transport
        left_s = self._end_s - transport.runtime.clock.time()
        self._held = transport._held.get(self._to.peer_id) or await transport._session_for(self._to, max(0.0, left_s))
        left_s = self._end_s - transport.runtime.clock.time()
        if left_s <= 0:
            raise PeerUnreachableError(f"No time was left for {self._path} after connecting.")
        self._link = transport._link(self._held)
        self._road, self._heard, self._begun_s = self._link.bulk(), False, transport.runtime.clock.time()
        self._link.begin(self._road)
        self._link.streams[self] = None
        self._call = self._road.channel.stream_stream(self._path)(timeout=left_s, metadata=self._held.metadata)
        self._ending = Ending(self._call)
        transport.stats.calls_made += 1

    async def send(self, chunk: bytes) -> None:
        chunk = guard_stream_chunk(chunk, self._max_bytes)
        await self._transport.pacer.wait(len(chunk))
        async with self._lock:
            if self._unconfirmed is not None:
                self._unconfirmed.append(chunk)
                self._unconfirmed_bytes += len(chunk)
            try:
                await self._call.write(chunk)
            except ENDED as error:
                await self._recover(await self._meaning(error))
            if self._unconfirmed is not None and self._unconfirmed_bytes > MAX_UNCONFIRMED_BYTES:
                await self._confirm()
        self._transport.stats.sent_bytes += len(chunk)

    async def finish(self) -> None:
        async with self._lock:
            if not self._finished:
                self._finished = True
                try:
                    await self._call.done_writing()
                except ENDED as error:
                    await self._recover(await self._meaning(error))

    async def receive(self) -> bytes | None:
        while True:
            call, ending = self._call, self._ending
            try:
                chunk = await call.read()
            except ENDED as error:
                failure = await self._meaning(error, call, ending)
                if failure is None:
                    return None
                async with self._lock:
                    if self._call is call:  # else the sending side has recovered already
                        await self._recover(failure)
                continue
            self._heard = True
            if chunk is aio.EOF:
                return None
            self._unconfirmed = None
            self._transport.stats.received_bytes += len(chunk)
            data: bytes = chunk
            return data

    def cancel(self) -> None:
        """End the call if it has not ended."""
        if self._call is not None and not self._call.done():
            self._call.cancel()
        if self._link is not None and self._road is not None:
            lasted_s = self._transport.runtime.clock.time() - self._begun_s
            self._link.end(self._road, True if self._heard else False if lasted_s >= SILENT_S else None)
            self._link.streams.pop(self, None)
            self._link = None

    async def _confirm(self) -> None:
        """Wait until the other side has accepted the stream; what was sent need not be kept after that."""
        call = self._call
        metadata = await call.initial_metadata()
        self._heard = True
        if any(key == ACCEPTED_METADATA[0][0] for key, _ in metadata):
            self._unconfirmed = None
        else:  # refused: the status follows
            await self._recover(await self._meaning(asyncio.InvalidStateError()))

    async def _meaning(self, error: BaseException, call: Any = None, ending: Ending | None = None) -> SwarmError | None:
        """The typed error of an ended call; none when it ended well. A cancellation of our own task is raised on."""
        call = call or self._call
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if (task is not None and task.cancelling()) or not call.cancelled():
                raise error
            return ConnectionLostError(f"The connection to peer {self._to.peer_id.short} was closed.")
        ending = ending or self._ending
        assert ending is not None
        status = await ending.wait()
        failure = None if status is None else typed_error(status, self._to.peer_id, self._path, self._timeout_s)
        self._heard = self._heard or failure is None or failure.remote is not None
        return failure

    async def _recover(self, error: SwarmError | None) -> None:
        """Open the stream again if it was never accepted and that can help; else raise the error. Holds the lock."""
        if error is None:
            return  # the handler has returned: it does not want the rest
        not_executed = isinstance(error, UnknownSessionError) or (
            isinstance(error, PeerUnreachableError) and error.remote is None
        )
        if self._recovered or self._unconfirmed is None or not not_executed or self._held is None:
            if isinstance(error, CallTimeoutError) and error.remote is None:
                raise CallTimeoutError(
                    f"The stream {self._path} to peer {self._to.peer_id.short} "
                    f"was not done within {self._timeout_s:.3g} s."
                ) from error
            raise error
        self._recovered = True
        self._transport._forget(self._held)
        self.cancel()
        if isinstance(error, PeerUnreachableError):
            self._transport._drop_connection(self._to.peer_id)
        await self.open()
        try:
            for chunk in self._unconfirmed:
                await self._call.write(chunk)
            if self._finished:
                await self._call.done_writing()
        except ENDED as again:
            failure = await self._meaning(again)
            if failure is not None:
                raise failure from again
