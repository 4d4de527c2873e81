"""The butterfly exchange of one sealed group over streams: the thin shell around `PartReduction` and `ChunkReducer`.

One stream per (sender, reducer) carries the sender's values of the reducer's part up and the encoded averages down. Its
two directions are separate tasks on both sides, and every chunk is reduced, sent on and written as soon as it can be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from swarm.averaging.allreduce import (
    NO_VALUES,
    Chunk,
    ChunkReducer,
    FlatVector,
    PartReduction,
    Reduced,
    decode_chunk,
    encode_chunk,
)
from swarm.averaging.rounds import Member, RoundReport, Seal
from swarm.config import AveragingConfig
from swarm.errors import ConnectionLostError, MalformedFrameError, NoGroupError, PeerUnreachableError, SwarmError
from swarm.identity import PeerId
from swarm.net.transport import ByteStream, Contact, StreamMethod, Transport
from swarm.pb.averaging_pb2 import ExchangeHello
from swarm.runtime import Runtime
from swarm.tensors.codecs import Codec

P = ParamSpec("P")
T = TypeVar("T")

EXCHANGE = StreamMethod("/swarm.pb.Averaging/Exchange")
INLINE_BYTES = 8 * 1024 * 1024
"""Work that touches up to this much memory takes under 0.2 ms and runs on the loop, as do plain copies of any chunk."""


class _Signal:
    """Wakes every task that waits for a change, without a lock."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def fire(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Exchange:
    """This member's side of one exchange. `run` it once; hand it incoming streams by `serve`.

    Args:
        vector: Local values; holds averages (or local values, where something was lost) after `run`.
        report: Collects bytes and degradations.
    """

    def __init__(
        self,
        seal: Seal,
        vector: FlatVector,
        codec: Codec,
        report: RoundReport,
        *,
        transport: Transport,
        runtime: Runtime,
        config: AveragingConfig,
        chunk_bytes: int,
    ) -> None:
        self._transport = transport
        self._runtime = runtime
        self._config = config
        self._seal = seal
        self._vector = vector
        self._codec = codec
        self._report = report
        self._members = {member.peer_id: member for member in seal.members}
        me = transport.peer_id
        self._me = self._members[me]
        self._others = [member for member in seal.members if member.peer_id != me]
        self._chunks: dict[PeerId, list[Chunk]] = {}
        start = 0
        for member in seal.members:
            self._chunks[member.peer_id] = vector.chunks(start, start + member.part, codec, chunk_bytes)
            start += member.part
        self._mine = self._chunks[me]
        contributors = [(m.peer_id, m.weight) for m in self._others if m.weight > 0]
        self._reduction = PartReduction(len(self._mine), contributors)
        self._reducer = ChunkReducer(codec)
        self._averages: list[bytes] = []
        self._taken = _Signal()
        self._arrived = _Signal()
        self._averaged = _Signal()
        self._served = _Signal()
        self._unserved: dict[PeerId, None] = {m.peer_id: None for m in self._others} if self._mine else {}
        self._seen: dict[PeerId, None] = {}
        self._alive: dict[PeerId, None] = {}
        """Senders whose values are in this member's part."""

    async def run(self) -> None:
        """Exchange until everything arrived, was given up, or the round's budget ended. Network errors are notes."""
        try:
            async with asyncio.timeout(self._config.round_timeout_s), asyncio.TaskGroup() as group:
                group.create_task(self._reduce())
                for member in self._others:
                    if self._chunks[member.peer_id]:
                        group.create_task(self._talk(member))
        except TimeoutError:
            self._report.note(f"the round's budget of {self._config.round_timeout_s:g} s ended")
        self._report.contributors = len(self._alive) + (1 if self._me.weight > 0 else 0)

    # This member as a reducer ----------------------------------------------------------------------------------------

    async def _reduce(self) -> None:
        reduction, patience_s = self._reduction, self._config.chunk_timeout_s
        while not reduction.done:
            try:
                async with asyncio.timeout(patience_s):
                    while reduction.missing():
                        await self._arrived.wait()
            except TimeoutError:
                for peer in reduction.missing():
                    self._lose_sender(peer, f"sent nothing for {patience_s:g} s")
            index = reduction.cursor
            arrived = reduction.take()
            self._taken.fire()
            view = self._vector.view(self._mine[index])
            cost = view.nbytes * (3 + len(arrived))
            reduced = await self._compute(cost, self._reducer.reduce, view, self._me.weight, arrived)
            self._note(reduced)
            self._averages.append(NO_VALUES if reduced.encoded is None else reduced.encoded)
            self._averaged.fire()
        try:
            async with asyncio.timeout(2 * patience_s):
                while self._unserved:
                    await self._served.wait()
        except TimeoutError:
            for peer in self._unserved:
                self._report.note(f"{peer.short} did not fetch the averages of our part")

    def _note(self, reduced: Reduced) -> None:
        for peer in reduced.contributors:
            if peer is not None:
                self._alive[peer] = None
        for peer in reduced.offenders:
            self._report.note(f"values of {'this peer' if peer is None else peer.short} are not finite: left out")
        if reduced.encoded is None and self._me.weight > 0:
            self._report.note("part of the vector had no finite values: kept local")

    def _lose_sender(self, peer: PeerId, reason: str) -> None:
        if self._reduction.lose(peer, reason):
            self._report.note(f"values of {peer.short} are missing from our part: {reason}")
        self._arrived.fire()

    async def serve(self, peer: PeerId, hello: ExchangeHello, stream: ByteStream) -> None:
        """Take a member's values and give it the averages.

        Raises:
            NoGroupError: The peer is no member. MalformedFrameError: It sends something else than agreed.
        """
        member = self._members.get(peer)
        if member is None or member is self._me or peer in self._seen:
            raise NoGroupError("You are no member of this group, or exchange with it already.")
        self._seen[peer] = None
        expected = len(self._mine) if member.weight > 0 else 0
        reason = "its stream ended early"
        try:
            if hello.chunks != expected:
                raise MalformedFrameError(f"{hello.chunks} chunks are announced where {expected} are agreed.")
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_values(peer, expected, stream))
                group.create_task(self._write_averages(stream))
        except SwarmError as error:
            reason = error.message
            raise
        except BaseExceptionGroup as errors:
            found = _network_errors(errors)
            if not found:
                raise
            reason = found[0].message
            raise found[0] from errors
        finally:
            self._lose_sender(peer, reason)
            self._unserved.pop(peer, None)
            self._served.fire()

    async def _read_values(self, peer: PeerId, count: int, stream: ByteStream) -> None:
        for index in range(count):
            while not self._reduction.wants(peer):
                await self._taken.wait()
            payload = await stream.receive()
            if payload is None:
                self._lose_sender(peer, "its stream ended early")
                return
            chunk = self._mine[index]
            self._reducer.check_size(chunk, self._vector.segments[chunk.segment].dtype, payload)
            self._report.bytes_received += len(payload)
            self._reduction.arrived(peer, payload)
            self._arrived.fire()

    async def _write_averages(self, stream: ByteStream) -> None:
        for index in range(len(self._mine)):
            while index >= len(self._averages):
                await self._averaged.wait()
            await stream.send(self._averages[index])
            self._report.bytes_sent += len(self._averages[index])

    # This member as a sender -----------------------------------------------------------------------------------------

    async def _talk(self, reducer: Member) -> None:
        chunks = self._chunks[reducer.peer_id]
        received = [0]
        contact = Contact(reducer.peer_id, reducer.addresses)
        problem: str | None = None
        try:
            async with self._transport.stream(contact, EXCHANGE, timeout_s=self._config.round_timeout_s) as stream:
                sent = chunks if self._me.weight > 0 else []
                await stream.send(ExchangeHello(nonce=self._seal.nonce, chunks=len(sent)).SerializeToString())
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send_values(sent, stream))
                    group.create_task(self._receive_averages(chunks, stream, received))
        except* SwarmError as errors:
            found = _network_errors(errors)
            problem = found[0].message
            if any(isinstance(error, (PeerUnreachableError, ConnectionLostError)) for error in found):
                self._lose_sender(reducer.peer_id, "the connection to it broke")
                self._unserved.pop(reducer.peer_id, None)
                self._served.fire()
        except* TimeoutError:
            problem = problem or "no averages came in time"
        if received[0] < len(chunks):
            kept = len(chunks) - received[0]
            self._report.note(f"{kept} of {len(chunks)} chunks of {reducer.peer_id.short} keep local values: {problem}")

    async def _send_values(self, chunks: list[Chunk], stream: ByteStream) -> None:
        for chunk in chunks:
            view = self._vector.view(chunk)
            cost = 0 if self._codec.is_copy else view.nbytes
            payload = await self._compute(cost, encode_chunk, self._codec, view)
            await stream.send(payload)
            self._report.bytes_sent += len(payload)
        await stream.finish()

    async def _receive_averages(self, chunks: list[Chunk], stream: ByteStream, received: list[int]) -> None:
        # A reducer may itself wait for a stalled sender before it goes on.
        patience_s = 2 * self._config.chunk_timeout_s + 0.5
        for chunk in chunks:
            async with asyncio.timeout(patience_s):
                payload = await stream.receive()
            if payload is None:
                raise ConnectionLostError("The reducer ended the stream early.")
            view = self._vector.view(chunk)
            self._reducer.check_size(chunk, view.dtype, payload)
            self._report.bytes_received += len(payload)
            if payload != NO_VALUES:
                cost = 0 if self._codec.is_copy else view.nbytes
                await self._compute(cost, decode_chunk, self._codec, payload, view)
            received[0] += 1

    async def _compute(self, cost_bytes: int, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run on the loop if cheap, else on the codec pool. Ends only when `fn` has: it may write into the vector."""
        if cost_bytes <= INLINE_BYTES:
            return fn(*args, **kwargs)
        work: asyncio.Task[Any] = asyncio.ensure_future(self._runtime.offload(fn, *args, **kwargs))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise


def _network_errors(errors: BaseExceptionGroup[Any]) -> list[SwarmError]:
    found: list[SwarmError] = []
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found.extend(_network_errors(error))
        elif isinstance(error, SwarmError):
            found.append(error)
    return found
