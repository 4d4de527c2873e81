"""What the two sides of an exchange share: the group, this member's values, its patience, and where problems go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from swarm.averaging.agreement import PartTally, Result
from swarm.averaging.allreduce import rounding_seed
from swarm.averaging.bandwidth import Bandwidths
from swarm.averaging.lag import LoopLag
from swarm.averaging.probation import Offence
from swarm.averaging.robust import Reducer
from swarm.averaging.rounds import Member, RoundReport, Seal
from swarm.averaging.vector import Chunk, FlatVector
from swarm.averaging.verification import VerifiedPart, checker_of
from swarm.config import AveragingConfig
from swarm.errors import NoGroupError
from swarm.identity import PeerId
from swarm.net.transport import StreamMethod, Transport
from swarm.pb.averaging_pb2 import ExchangeHello
from swarm.runtime import Runtime
from swarm.tensors.codecs import Codec
from swarm.tensors.codecs.scratch import scratch
from swarm.tensors.feedback import ErrorFeedback, wide
from swarm.tensors.memory import blank_bytes

P = ParamSpec("P")
T = TypeVar("T")

EXCHANGE = StreamMethod("/swarm.pb.Averaging/Exchange")
INLINE_BYTES = 32 * 1024 * 1024
"""Copies and sums that touch up to this much memory, which takes under a millisecond, run on the loop: handing every
chunk to the codec pool made rounds of four peers on two cores a tenth to a fifth slower."""
LEAST_PATIENCE = 0.5
"""Of `chunk_timeout_s`: a peer that was always fast may still pause for so long before it is left behind."""

OnOffender = Callable[[PeerId, Offence, str], None]


class Signal:
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


@dataclass(slots=True)
class Part:
    """One member's part as this member sees it.

    Attributes:
        number: The member's place in the seal.
        tally: What this member holds of it.
        settled: Whether each of its chunks was averaged, or given up.
        verified: What was heard of it, if a second member checks it.
        heard: Fires when something was.
    """

    number: int
    member: Member
    chunks: list[Chunk]
    tally: PartTally
    settled: bool = False
    verified: VerifiedPart | None = None
    heard: Signal = field(default_factory=Signal)


@dataclass(slots=True)
class Shared:
    """One exchange of this member.

    Attributes:
        weight: Of this member's values.
        feedback: What lossy codecs left out of earlier rounds; none without error feedback.
        stochastic: Whether values are rounded stochastically.
        over: The exchange has ended: streams that still run must not touch anything.
    """

    seal: Seal
    vector: FlatVector
    weight: float
    report: RoundReport
    transport: Transport
    runtime: Runtime
    config: AveragingConfig
    feedback: ErrorFeedback | None = None
    stochastic: bool = False
    reducer: Reducer = "mean"
    verify: bool = False
    bandwidth: Bandwidths | None = None
    on_offender: OnOffender | None = None
    lag: LoopLag = field(default_factory=LoopLag)
    """Pauses of our own loop, which nobody else is to blame for."""
    parts: list[Part] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    """Every part is settled."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    results: dict[PeerId, Result] = field(default_factory=dict)
    """What other members said they hold."""

    def __post_init__(self) -> None:
        start = 0
        for number, member in enumerate(self.seal.members):
            chunks = self.vector.chunks(start, start + member.part, self.config.chunk_bytes)
            self.parts.append(Part(number, member, chunks, PartTally(len(chunks)), settled=not chunks))
            start += member.part
        if self.verify:
            self._verify_parts()
        self._check_complete()

    def _verify_parts(self) -> None:
        members = self.seal.members
        for part in self.parts:
            checker = checker_of(members, part.number)
            if part.chunks and checker is not None:
                part.verified = VerifiedPart(part.number, checker, self.place)
            elif part.chunks:
                self.report.note(f"the part of {part.member.peer_id.short} is not verified: nobody else reduces")

    @property
    def me(self) -> PeerId:
        return self.transport.peer_id

    @property
    def place(self) -> int:
        """This member's in the seal."""
        return next(place for place, member in enumerate(self.seal.members) if member.peer_id == self.me)

    @property
    def now(self) -> float:
        return self.runtime.clock.time()

    def codec(self, chunk: Chunk) -> Codec:
        return self.vector.segments[chunk.segment].codec

    def encoded_nbytes(self, chunk: Chunk) -> int:
        segment = self.vector.segments[chunk.segment]
        return segment.codec.encoded_nbytes(chunk.numel, segment.dtype)

    def encode(self, part: Part, index: int) -> bytes:
        """This member's values of a chunk as they travel, with what feedback held back."""
        chunk, feedback = part.chunks[index], self.feedback
        codec, values = self.codec(chunk), self.vector.read(chunk)
        seed = rounding_seed(self.seal.nonce, self.place, part.number, index) if self.stochastic else None
        if codec.is_copy:
            return bytes(codec.encode(values))
        if feedback is None or not feedback.covers(chunk.segment):
            return codec.encode_bytes(values, rng=seed)
        payload, memory = blank_bytes(self.encoded_nbytes(chunk))
        for tile, span, place in codec.spans(chunk.numel, values.dtype):
            piece = values[span]
            into = scratch("compensated", piece.numel(), wide(piece.dtype))
            piece = feedback.compensated(chunk.segment, chunk.start + span.start, piece, self.weight, into)
            codec.encode_into(piece, memory[place], rng=seed, tile=tile)
        return payload

    def hello(self, chunks: int, check: bool = False) -> ExchangeHello:
        """What a stream to another member begins with."""
        seal = self.seal
        return ExchangeHello(nonce=seal.nonce, chunks=chunks, weight=self.weight, check=check, seal=seal.digest)

    def check_hello(self, peer: PeerId, hello: ExchangeHello) -> None:
        """Raise `NoGroupError` if the leader sealed another group for this member than for us.

        Either of the two may lie about that, so that neither is more than suspected.
        """
        if hello.seal != self.seal.digest:
            leader = self.seal.members[0].peer_id
            self.report.note(f"{peer.short} holds another seal of this group than we: left out")
            for suspect in dict.fromkeys((leader, peer)):
                if suspect != self.me:
                    self.offend(suspect, Offence.DISPUTED, "members hold different seals of one group")
            raise NoGroupError("Your seal of this group says something else than ours.")

    async def end_with_the_round(self) -> None:
        """Raise `NoGroupError` when the exchange is over."""
        await self.over.wait()
        raise NoGroupError("The round is over here.")

    def settle(self, part: Part) -> None:
        """Nothing more will change in this part."""
        part.settled = True
        self._check_complete()

    def _check_complete(self) -> None:
        if all(part.settled for part in self.parts):
            self.complete.set()

    def result(self) -> Result:
        """What this member holds."""
        return Result.of([part.tally for part in self.parts])

    def learn(self, peer: PeerId, data: bytes) -> None:
        """A member's summary of what it holds. Raises `MalformedFrameError`."""
        self.results[peer] = Result.from_bytes(data, len(self.parts))

    def offend(self, peer: PeerId, offence: Offence, detail: str = "") -> None:
        if self.on_offender is not None:
            self.on_offender(peer, offence, detail)

    # Patience --------------------------------------------------------------------------------------------------------

    @property
    def arrival_s(self) -> float:
        """How long members may take until their first chunk: a group sealed ahead waits for those who still compute."""
        return self.seal.enter_within_s + self.config.chunk_timeout_s

    def patience_s(self, peer: PeerId, direction: str, nbytes: int) -> float:
        """How long to wait for the next chunk of a peer: what was learnt of it, within `chunk_timeout_s`."""
        cap = self.config.chunk_timeout_s
        learned = self.transport.deadlines.budget_s(peer, EXCHANGE.path + direction, nbytes, cap_s=cap)
        return max(learned, LEAST_PATIENCE * cap)

    def waited(self, peer: PeerId, direction: str, nbytes: int, seconds: float | None) -> None:
        """Learn how long a chunk took; none: it did not come in time."""
        deadlines = self.transport.deadlines
        if seconds is None:
            deadlines.record_timeout(peer, EXCHANGE.path + direction, nbytes)
        else:
            deadlines.record(peer, EXCHANGE.path + direction, nbytes, seconds)

    # Work ------------------------------------------------------------------------------------------------------------

    async def compute(self, cost_bytes: float, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run on the loop if cheap, else on the codec pool. Ends only when `fn` has: it may write into the vector."""
        if cost_bytes <= INLINE_BYTES:
            return fn(*args, **kwargs)
        work: asyncio.Task[Any] = asyncio.ensure_future(self.runtime.offload(fn, *args, **kwargs))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
