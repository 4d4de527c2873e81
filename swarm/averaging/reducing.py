"""A member as the reducer of its part: takes the others' values over their streams and answers with the averages.

Every chunk is reduced, sent on and written as soon as it can be. Who holds it up for longer than usual is left behind:
its chunks count again from the one with which it has caught up.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace

from swarm.averaging.agreement import checksum
from swarm.averaging.allreduce import NO_VALUES, NOT_COUNTED, ChunkReducer, PartReduction, Reduced, rounding_seed
from swarm.averaging.probation import Offence
from swarm.averaging.shared import Part, Shared, Signal
from swarm.averaging.verification import Input, Statement, digest
from swarm.errors import MalformedFrameError, NoGroupError, SwarmError
from swarm.identity import PeerId
from swarm.net.transport import ByteStream
from swarm.pb.averaging_pb2 import ExchangeHello

UP = "/up"


class PartServer:
    """Reduces this member's part. `reduce` it once; hand it the others' streams by `serve`."""

    def __init__(self, shared: Shared, part: Part) -> None:
        self._shared = shared
        self._part = part
        others = [m.peer_id for m in shared.seal.members if m.peer_id != shared.me]
        self._reduction = PartReduction(len(part.chunks), others)
        self._reducer = ChunkReducer(shared.vector, shared.feedback, shared.reducer)
        self._averages: list[bytes] = []
        self._statements: list[Statement] = []
        self._contributors: list[dict[PeerId | None, None]] = []
        self._changed = Signal()
        """Something arrived, or somebody is lost."""
        self._taken = Signal()
        self._averaged = Signal()
        self._served = Signal()
        """An average went to somebody, or somebody needs no more."""
        self._unserved: dict[PeerId, None] = dict.fromkeys(others) if part.chunks else {}
        self._seen: dict[PeerId, None] = {}
        self._late: Counter[PeerId] = Counter()
        self._strikes: Counter[PeerId] = Counter()
        self._missed_since = math.inf
        self._alive: dict[PeerId, None] = {}

    @property
    def contributors(self) -> int:
        """Members whose values are in this part, without the reducer itself."""
        return len(self._alive)

    # Reducing --------------------------------------------------------------------------------------------------------

    async def reduce(self) -> None:
        """Reduce all chunks, then wait until the others have fetched them, within bounds."""
        shared, reduction, part = self._shared, self._reduction, self._part
        while not reduction.done:
            await self._wait_for_senders()
            index = reduction.cursor
            arrived = reduction.take()
            self._taken.fire()
            chunk = part.chunks[index]
            segment = shared.vector.segments[chunk.segment]
            cost = chunk.numel * segment.dtype.itemsize * (3 + len(arrived))
            seed = rounding_seed(shared.seal.nonce, part.number, part.number, index) if shared.stochastic else None
            if part.verified is not None:
                reduced, stated = await shared.compute(math.inf, self._reduce_stated, index, arrived, seed)
                self._statements.append(stated)
            else:
                reduced = await shared.compute(
                    cost if segment.codec.unit_elements == 1 and shared.reducer == "mean" else math.inf,
                    self._reducer.reduce,
                    chunk,
                    shared.weight,
                    arrived,
                    seed,
                )
            self._note(index, reduced)
            self._averaged.fire()
        if part.verified is not None:
            part.verified.averages_over = True
            part.heard.fire()
        else:
            shared.settle(part)
        for peer, count in self._late.items():
            shared.report.note(f"{count} of {len(part.chunks)} chunks of our part were averaged without {peer.short}")
        await shared.complete.wait()
        try:
            while self._unserved:
                async with shared.lag.timeout(shared.config.chunk_timeout_s):
                    await self._served.wait()  # a slow link is no reason to end as long as averages leave
        except TimeoutError:
            for peer in self._unserved:
                shared.report.note(f"{peer.short} did not fetch the averages of our part in time")

    def _reduce_stated(
        self, index: int, arrived: list[tuple[PeerId, float, bytes]], seed: int | None
    ) -> tuple[Reduced, Statement]:
        """Reduce from encoded values alone, in the order of the seal, so that the checker can repeat it."""
        shared = self._shared
        rows = {peer: (weight, payload) for peer, weight, payload in arrived}
        if shared.weight > 0:
            rows[shared.me] = (shared.weight, shared.encode(self._part, index))
        places = [(p, m.peer_id) for p, m in enumerate(shared.seal.members) if m.peer_id in rows]
        ordered = [(peer, *rows[peer]) for _, peer in places]
        reduced = self._reducer.reduce(self._part.chunks[index], 0.0, ordered, seed, write=False)
        inputs = [Input(p, rows[m][0], digest(rows[m][1])) for p, m in places if m in reduced.contributors]
        contributors = tuple(None if peer == shared.me else peer for peer in reduced.contributors)
        offenders = tuple(None if peer == shared.me else peer for peer in reduced.offenders)
        return replace(reduced, contributors=contributors, offenders=offenders), Statement(tuple(inputs))

    async def _wait_for_senders(self) -> None:
        reduction, shared = self._reduction, self._shared
        nbytes = shared.encoded_nbytes(self._part.chunks[reduction.cursor])
        self._missed_since = since = shared.now
        paused_s = shared.lag.total_s
        while missing := reduction.missing():
            waited_s = shared.now - since - (shared.lag.total_s - paused_s)
            patience = {peer: self._patience_s(peer, nbytes) for peer in missing}
            try:
                async with shared.lag.timeout(max(0.0, min(patience.values()) - waited_s)):
                    await self._changed.wait()
            except TimeoutError:
                waited_s = shared.now - since - (shared.lag.total_s - paused_s)
                for peer in reduction.missing():
                    if peer in patience and waited_s >= patience[peer] - 1e-6:
                        self._leave_behind(peer, nbytes, waited_s)
        for peer in reduction.behind():
            self._late[peer] += 1

    def _patience_s(self, peer: PeerId, nbytes: int) -> float:
        """Halves whenever the peer is left behind, so that one which limps costs the round twice that at most."""
        if peer not in self._seen:
            return self._shared.arrival_s
        return self._shared.patience_s(peer, UP, nbytes) * 0.5 ** self._strikes[peer]

    def _leave_behind(self, peer: PeerId, nbytes: int, waited_s: float) -> None:
        shared = self._shared
        self._reduction.leave_behind(peer)
        self._strikes[peer] += 1
        if self._strikes[peer] == 1:
            shared.report.note(f"values of {peer.short} are missing from our part: sent nothing for {waited_s:.2g} s")
            shared.offend(peer, Offence.STALLED)
            if peer in self._seen:
                shared.waited(peer, UP, nbytes, None)

    def _note(self, index: int, reduced: Reduced) -> None:
        shared = self._shared
        for peer in reduced.contributors:
            if peer is not None:
                self._alive[peer] = None
        for peer in reduced.offenders:
            name = "this peer" if peer is None else peer.short
            shared.report.note(f"values of {name} are not finite: left out")
            if peer is not None:
                shared.offend(peer, Offence.NON_FINITE)
        for peer in reduced.malformed:
            shared.report.note(f"values of {peer.short} cannot be decoded: left out")
            shared.offend(peer, Offence.MALFORMED)
        if reduced.encoded is None and shared.weight > 0:
            shared.report.note("part of the vector had no finite values: kept local")
        if self._part.verified is not None:
            average = NO_VALUES if reduced.encoded is None else reduced.encoded
            self._part.verified.averages[index] = (self._statements[index], average)
            self._part.heard.fire()
        elif reduced.encoded is None:
            self._part.tally.stays_local(index)
        else:
            self._part.tally.averaged(index, checksum(reduced.encoded))
        self._contributors.append(dict.fromkeys(reduced.contributors))
        self._averages.append(NO_VALUES if reduced.encoded is None else reduced.encoded)

    def lose(self, peer: PeerId, reason: str) -> None:
        """Expect nothing more from a member; what it sent counts."""
        if self._reduction.lose(peer):
            self._shared.report.note(f"values of {peer.short} are missing from our part: {reason}")
        self._changed.fire()

    def gone(self, peer: PeerId, reason: str) -> None:
        """A member is not there any more: it sends and fetches nothing."""
        self.lose(peer, reason)
        self._unserved.pop(peer, None)
        self._served.fire()

    # Streams ---------------------------------------------------------------------------------------------------------

    async def serve(self, peer: PeerId, hello: ExchangeHello, stream: ByteStream) -> None:
        """Take a member's values and give it the averages.

        Raises:
            NoGroupError: The peer is no member. MalformedFrameError: It sends something else than agreed.
        """
        if peer in self._seen or all(m.peer_id != peer for m in self._shared.seal.members) or peer == self._shared.me:
            raise NoGroupError("You are no member of this group, or exchange with it already.")
        self._seen[peer] = None
        reason = "its stream ended early"
        try:
            expected = agreed_chunks(hello, self._part)
            self._reduction.admit(peer, hello.weight)
            self._changed.fire()
            async with asyncio.TaskGroup() as outer:
                watcher = outer.create_task(self._shared.end_with_the_round())
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._read_values(peer, expected, stream))
                    group.create_task(self._write_averages(peer, stream))
                watcher.cancel()
        except MalformedFrameError as error:
            reason = error.message
            self._shared.offend(peer, Offence.MALFORMED, error.message)
            raise
        except BaseExceptionGroup as errors:
            found = network_errors(errors)
            if not found:
                raise
            reason = found[0].message
            if isinstance(found[0], MalformedFrameError):
                self._shared.offend(peer, Offence.MALFORMED, reason)
            raise found[0] from errors
        finally:
            self.gone(peer, reason)

    async def _read_values(self, peer: PeerId, count: int, stream: ByteStream) -> None:
        shared, reduction = self._shared, self._reduction
        first_s = last_s = held_s = 0.0
        nbytes = 0
        for index in range(count):
            if not reduction.wants(peer):
                before = shared.now
                while not reduction.wants(peer):
                    await self._taken.wait()
                held_s += shared.now - before
            payload = await stream.receive()
            if payload is None:
                self.lose(peer, "its stream ended early")
                return
            needed = shared.encoded_nbytes(self._part.chunks[index])
            if len(payload) != needed and payload != NO_VALUES:
                raise MalformedFrameError(f"A chunk has {len(payload)} bytes where {needed} are needed.")
            now = shared.now
            if index == 0:
                first_s = now
            else:
                nbytes += len(payload)
                if index >= reduction.cursor:
                    shared.waited(peer, UP, needed, max(0.0, now - max(last_s, self._missed_since)))
            last_s = now
            shared.report.bytes_received += len(payload)
            reduction.arrived(peer, payload)
            self._changed.fire()
        if shared.bandwidth is not None:
            shared.bandwidth.observe(peer, nbytes, last_s - first_s - held_s, "up")
        summary = await stream.receive()
        if summary is not None:
            shared.learn(peer, summary)

    async def _write_averages(self, peer: PeerId, stream: ByteStream) -> None:
        shared = self._shared
        for index in range(len(self._part.chunks)):
            while index >= len(self._averages):
                await self._averaged.wait()
            average = self._averages[index]
            if self._statements:
                await stream.send(self._statements[index].to_bytes())
            elif average != NO_VALUES and self._reduction.weight(peer) and peer not in self._contributors[index]:
                await stream.send(NOT_COUNTED)
            await stream.send(average)
            shared.report.bytes_sent += len(average)
            self._served.fire()
        await shared.complete.wait()
        await stream.send(shared.result().to_bytes())


def agreed_chunks(hello: ExchangeHello, part: Part) -> int:
    """How many chunks of a part a member will send. Raises `MalformedFrameError`."""
    if not 0 <= hello.weight < math.inf:
        raise MalformedFrameError(f"A weight of {hello.weight:g} cannot be.")
    expected = len(part.chunks) if hello.weight > 0 else 0
    if hello.chunks != expected:
        raise MalformedFrameError(f"{hello.chunks} chunks are announced where {expected} are agreed.")
    return expected


def network_errors(errors: BaseExceptionGroup[BaseException]) -> list[SwarmError]:
    """All errors of ours in a group of them."""
    found: list[SwarmError] = []
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found.extend(network_errors(error))
        elif isinstance(error, SwarmError):
            found.append(error)
    return found
