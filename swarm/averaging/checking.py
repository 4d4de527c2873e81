"""Verified parts on the network: a checker takes the values of another reducer's part and answers with verdicts.

Each member has one more stream for every part, to its checker. Averages wait for their verdicts, so that an exchange
holds up to the vector as it travels in memory; values go up twice, averages come down once.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import torch
from torch import Tensor

from swarm.averaging.agreement import checksum
from swarm.averaging.allreduce import NO_VALUES, WINDOW_CHUNKS, ChunkReducer, rounding_seed
from swarm.averaging.probation import Offence
from swarm.averaging.reducing import agreed_chunks, network_errors
from swarm.averaging.shared import EXCHANGE, Part, Shared, Signal
from swarm.averaging.verification import (
    VERDICT_BYTES,
    Finding,
    Statement,
    Verdict,
    VerifiedPart,
    digest,
    judge_inputs,
    same_average,
)
from swarm.errors import ConnectionLostError, MalformedFrameError, NoGroupError, SwarmError
from swarm.identity import PeerId
from swarm.net.transport import ByteStream, Contact
from swarm.pb.averaging_pb2 import ExchangeHello
from swarm.tensors.memory import peek
from swarm.tensors.schema import is_finite

_PATIENCE = 4.0
"""Of `chunk_timeout_s`, for a verdict: the reducer, the checker and a sender to each of them may all be late."""


async def settle_verified(shared: Shared, part: Part) -> None:
    """Write a part's averages as they are confirmed; note and report what was not."""
    verified = part.verified
    assert verified is not None
    problems: Counter[str] = Counter()
    offences: dict[tuple[int, Offence], None] = {}
    try:
        while verified.decided < len(part.chunks):
            while not verified.due:
                await part.heard.wait()
            index = verified.decided
            decision = await shared.compute(math.inf, verified.decide, NO_VALUES)
            offences.update(dict.fromkeys(decision.offences))
            if decision.problem:
                problems[decision.problem] += 1
            if decision.payload is not None:
                if await shared.compute(_cost(shared, part, index), _write, shared, part, index, decision.payload):
                    continue
                problems["their averages are not finite"] += 1
                offences[verified.place, Offence.NON_FINITE] = None
            elif decision.known:
                part.tally.stays_local(index)
    finally:
        shared.settle(part)
    reducer, checker = part.member.peer_id, shared.parts[verified.checker].member.peer_id
    for problem, count in problems.items():
        shared.report.note(
            f"{count} of {len(part.chunks)} chunks of {reducer.short}, checked by {checker.short}, keep local values: "
            f"{problem}"
        )
    for place, offence in offences:
        if place != verified.me:
            shared.offend(shared.parts[place].member.peer_id, offence, "in a part that two members reduced")


def _cost(shared: Shared, part: Part, index: int) -> float:
    chunk = part.chunks[index]
    return 6.0 * chunk.numel if shared.codec(chunk).unit_elements == 1 else math.inf


def _decoded(shared: Shared, part: Part, index: int, payload: bytes) -> Tensor:
    chunk = part.chunks[index]
    values = torch.empty(chunk.numel, dtype=shared.vector.segments[chunk.segment].dtype)
    shared.codec(chunk).decode_into(peek(payload), values)
    return values


def _write(shared: Shared, part: Part, index: int, payload: bytes) -> bool:
    try:
        values = _decoded(shared, part, index, payload)
    except MalformedFrameError:
        return False
    if not is_finite(values):
        return False
    shared.vector.write(part.chunks[index], values)
    part.tally.averaged(index, checksum(payload))
    return True


class CheckServer:
    """This member as the checker of another one's part. `check` once; hand it the others' streams by `serve`."""

    def __init__(self, shared: Shared, part: Part, verified: VerifiedPart) -> None:
        self._shared = shared
        self._part = part
        self._verified = verified
        self._places = {member.peer_id: place for place, member in enumerate(shared.seal.members)}
        self._reducer = ChunkReducer(shared.vector, None, shared.reducer)
        self._cursor = 0
        self._verdicts: list[bytes] = []
        self._ended = False
        self._weights: dict[int, float] = {}
        self._held: dict[int, dict[int, bytes]] = {}
        self._received: dict[int, int] = {}
        """How many chunks a member has sent; all of them when no more will come."""
        self._unserved: dict[PeerId, None] = {p: None for p in self._places if p != shared.me}
        self._seen: dict[PeerId, None] = {}
        self._changed = Signal()
        self._judged = Signal()
        self._left = Signal()

    async def check(self) -> None:
        """Judge all averages, then wait until the others have fetched the verdicts, within bounds."""
        shared, verified = self._shared, self._verified
        try:
            for index in range(len(self._part.chunks)):
                while index not in verified.averages and not verified.averages_over:
                    await self._part.heard.wait()
                if index not in verified.averages:
                    break
                verdict = await self._judge(index, *verified.averages[index])
                self._cursor = index + 1
                for held in self._held.values():
                    held.pop(index, None)
                self._verdicts.append(verdict.to_bytes())
                self._judged.fire()
                verified.verdicts[index] = verdict
                self._part.heard.fire()
        finally:
            self._ended = verified.verdicts_over = True
            self._judged.fire()
            self._part.heard.fire()
        await shared.complete.wait()
        try:
            async with shared.lag.timeout(shared.config.chunk_timeout_s):
                while self._unserved:
                    await self._left.wait()
        except TimeoutError:
            for peer in self._unserved:
                shared.report.note(f"{peer.short} did not fetch our verdicts in time")

    async def _judge(self, index: int, statement: Statement, payload: bytes) -> Verdict:
        shared = self._shared
        others = [i.place for i in statement.inputs if i.place != self._verified.me]
        try:
            async with shared.lag.timeout(shared.arrival_s if index == 0 else shared.config.chunk_timeout_s):
                while any(self._received.get(place, 0) <= index for place in others):
                    await self._changed.wait()
        except TimeoutError:
            pass  # the verdict says who is missing
        return await shared.compute(math.inf, self._verdict, index, statement, payload)

    def _verdict(self, index: int, statement: Statement, payload: bytes) -> Verdict:
        shared, part, about = self._shared, self._part, digest(payload)
        held = {place: chunks[index] for place, chunks in self._held.items() if index in chunks}
        seen = {place: (self._weights[place], values) for place, values in held.items() if values != NO_VALUES}
        if shared.weight > 0:
            seen[self._verified.me] = (shared.weight, shared.encode(part, index))
        found = judge_inputs(statement, seen, about)
        if found is not None:
            return found
        if payload == NO_VALUES:
            return Verdict(Finding.CONFIRMED, about)
        members = shared.seal.members
        rows = [(members[i.place].peer_id, *seen[i.place]) for i in statement.inputs]
        seed = rounding_seed(shared.seal.nonce, part.number, part.number, index) if shared.stochastic else None
        again = self._reducer.reduce(part.chunks[index], 0.0, rows, seed, write=False)
        confirmed = again.encoded == payload or self._same(index, payload, again.encoded)
        return Verdict(Finding.CONFIRMED if confirmed else Finding.REFUTED, about)

    def _same(self, index: int, payload: bytes, again: bytes | None) -> bool:
        if again is None:
            return False
        codec = self._shared.codec(self._part.chunks[index])
        try:
            theirs = _decoded(self._shared, self._part, index, payload)
        except MalformedFrameError:
            return False
        return is_finite(theirs) and same_average(theirs, _decoded(self._shared, self._part, index, again), codec)

    def gone(self, peer: PeerId) -> None:
        """A member is not there any more: it sends and fetches nothing."""
        self._received[self._places[peer]] = len(self._part.chunks)
        self._unserved.pop(peer, None)
        self._changed.fire()
        self._left.fire()

    async def serve(self, peer: PeerId, hello: ExchangeHello, stream: ByteStream) -> None:
        """Take a member's values and give it the verdicts.

        Raises:
            NoGroupError: The peer is no member. MalformedFrameError: It sends something else than agreed.
        """
        if peer in self._seen or peer not in self._places or peer == self._shared.me:
            raise NoGroupError("You are no member of this group, or have your averages checked already.")
        self._seen[peer] = None
        try:
            expected = agreed_chunks(hello, self._part)
            self._weights[self._places[peer]] = hello.weight
            async with asyncio.TaskGroup() as outer:
                watcher = outer.create_task(self._shared.end_with_the_round())
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._read_values(self._places[peer], expected, stream))
                    group.create_task(self._write_verdicts(stream))
                watcher.cancel()
        except BaseExceptionGroup as errors:
            found = network_errors(errors)
            if not found:
                raise
            if isinstance(found[0], MalformedFrameError):
                self._shared.offend(peer, Offence.MALFORMED, found[0].message)
            raise found[0] from errors
        finally:
            self.gone(peer)

    async def _read_values(self, place: int, count: int, stream: ByteStream) -> None:
        held = self._held.setdefault(place, {})
        for index in range(count):
            while index >= self._cursor + WINDOW_CHUNKS and not self._ended:
                await self._judged.wait()
            payload = await stream.receive()
            if payload is None:
                break
            needed = self._shared.encoded_nbytes(self._part.chunks[index])
            if len(payload) != needed and payload != NO_VALUES:
                raise MalformedFrameError(f"A chunk has {len(payload)} bytes where {needed} are needed.")
            self._shared.report.bytes_received += len(payload)
            if index >= self._cursor and not self._ended:
                held[index] = payload
            self._received[place] = index + 1
            self._changed.fire()
        self._received[place] = len(self._part.chunks)
        self._changed.fire()

    async def _write_verdicts(self, stream: ByteStream) -> None:
        for index in range(len(self._part.chunks)):
            while index >= len(self._verdicts) and not self._ended:
                await self._judged.wait()
            if index >= len(self._verdicts):
                return
            await stream.send(self._verdicts[index])
            self._shared.report.bytes_sent += VERDICT_BYTES


class CheckClient:
    """This member's stream to the checker of a part. `talk` once."""

    def __init__(self, shared: Shared, part: Part, verified: VerifiedPart) -> None:
        self._shared = shared
        self._part = part
        self._verified = verified

    async def talk(self) -> None:
        """Have the part's averages checked. Without verdicts local values stand: `settle_verified` notes it."""
        shared, part = self._shared, self._part
        checker = shared.parts[self._verified.checker].member
        budget_s = shared.config.round_timeout_s + shared.seal.enter_within_s
        try:
            contact = Contact(checker.peer_id, checker.addresses)
            async with shared.transport.stream(contact, EXCHANGE, timeout_s=budget_s) as stream:
                count = len(part.chunks) if shared.weight > 0 else 0
                hello = shared.hello(count, check=True)
                await stream.send(hello.SerializeToString())
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send_values(count, stream))
                    group.create_task(self._receive_verdicts(stream))
        except* SwarmError as errors:
            found = network_errors(errors)
            if any(isinstance(error, MalformedFrameError) and error.remote is None for error in found):
                shared.offend(checker.peer_id, Offence.MALFORMED, found[0].message)
            shared.report.note(f"{checker.peer_id.short} cannot check {part.member.peer_id.short}: {found[0].message}")
        except* TimeoutError:
            shared.report.note(f"{checker.peer_id.short} did not check {part.member.peer_id.short} in time")
        finally:
            self._verified.verdicts_over = True
            part.heard.fire()

    async def _send_values(self, count: int, stream: ByteStream) -> None:
        shared = self._shared
        for index in range(count):
            if index < self._verified.decided:
                payload = NO_VALUES  # the average may be in place already
            else:
                payload = await shared.compute(_cost(shared, self._part, index), shared.encode, self._part, index)
            await stream.send(payload)
            shared.report.bytes_sent += len(payload)
        await stream.finish()

    async def _receive_verdicts(self, stream: ByteStream) -> None:
        shared, verified = self._shared, self._verified
        for index in range(len(self._part.chunks)):
            first_s = shared.arrival_s if index == 0 else 0.0
            async with shared.lag.timeout(first_s + _PATIENCE * shared.config.chunk_timeout_s):
                data = await stream.receive()
            if data is None:
                raise ConnectionLostError("The checker ended the stream early.")
            verdict = Verdict.from_bytes(data)
            shared.report.bytes_received += len(data)
            if index >= verified.decided:
                verified.verdicts[index] = verdict
            self._part.heard.fire()
