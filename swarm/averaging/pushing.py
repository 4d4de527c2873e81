"""Push-sum on the network: a peer's seat under one key, from which shares set out and where those of others arrive.

What may happen to a share is decided in `swarm.averaging.pushsum`, and how it travels is in `swarm.averaging.delivery`.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

from swarm.averaging.board import Board
from swarm.averaging.delivery import Courier
from swarm.averaging.gossip import PushSum, push_targets
from swarm.averaging.lag import LoopLag
from swarm.averaging.mass import Mass
from swarm.averaging.probation import Offence, Probation
from swarm.averaging.pushsum import INCARNATION_BYTES, MAX_WAITING, Ledger, Receipts, Share, Tag
from swarm.averaging.rounds import Alone, MassHandedOver, MassLost, Outcome, Pushed, Round, ShareReclaimed, TooFew
from swarm.averaging.shared import INLINE_BYTES, OnOffender
from swarm.averaging.vector import FlatVector
from swarm.endpoint import Endpoint
from swarm.errors import MalformedFrameError, NonFiniteError
from swarm.identity import PeerId
from swarm.net.transport import ByteStream, Contact
from swarm.pb import averaging_pb2 as pb

T = TypeVar("T")

MAX_RECEPTIONS = 4
"""Shares that arrive at one time; each takes memory."""
LEAST_WEIGHT_BOUND = 8.0
"""A share may weigh as much as all peers known here together, or this, if few are known."""
LOOK_AGAIN_S = 0.5
HEIRS = 3
KEPT_PROBLEMS = 16


class PushSeat:
    """This peer's place under one key.

    Args:
        layout: A vector of the layout that all have.
        receipts: What is remembered of shares under this key, also of those taken by an earlier seat.
        on_offender: Told who sends shares that cannot be.
    """

    search_s = 0.0
    """Nobody searches for a group here."""

    def __init__(
        self,
        endpoint: Endpoint,
        key: str,
        strategy: PushSum,
        layout: FlatVector,
        schema_hash: bytes,
        receipts: Receipts,
        probation: Probation,
        on_offender: OnOffender,
    ) -> None:
        config = endpoint.config.averaging
        self.key = key
        self.board = Board(endpoint, key)
        self.ledger: Ledger[list[bytes]] = Ledger(secrets.token_bytes(INCARNATION_BYTES))
        self._endpoint = endpoint
        self._config = config
        self._strategy = strategy
        self._schema_hash = schema_hash
        self._receipts = receipts
        self._probation = probation
        self._offend = on_offender
        self._mass = Mass(layout, config.chunk_bytes)
        self._lag = LoopLag()
        self._courier = Courier(endpoint, key, schema_hash, on_offender, self._count_sent, self._lag)
        self._lock = asyncio.Lock()
        """Held by whoever moves mass."""
        self._settled = asyncio.Event()
        self._contacts: dict[PeerId, Contact] = {}
        self._absent: dict[PeerId, float] = {}
        self._looked_at = -math.inf
        self._looking = False
        self._step = 0
        self._stepped_at = -math.inf
        self._waited = 0.0
        """Of what waits, the sum of weight times moment of arrival."""
        self._receiving = 0
        self._leaving = False
        self._sent_bytes = 0
        self._received_bytes = 0
        self._problems: dict[str, None] = {}
        self._senders: dict[PeerId, None] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}

    @property
    def now(self) -> float:
        return self._endpoint.runtime.clock.time()

    @property
    def others_waiting(self) -> bool:
        """Whether so much has arrived that a step is due before others are refused."""
        return 2 * self.ledger.arrivals >= MAX_WAITING

    # Steps -----------------------------------------------------------------------------------------------------------

    async def round(self, vector: FlatVector) -> Round:
        """Take in what arrived, and set out new shares. Waits for no other peer, but for the DHT the first time."""
        begun = self.now
        await self._look_if_due()
        targets, outcome = self._targets()
        shares, received, senders = await _to_the_end(self._exchange(vector, targets))
        pushed = bool(shares) or received is not None
        if pushed:
            outcome = Pushed(len(shares), received or 0, self.ledger.weight, len(self.ledger.open) - len(shares))
        problems, self._problems = self._problems, {}
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        received_bytes, self._received_bytes = self._received_bytes, 0
        met = dict.fromkeys([self._endpoint.peer_id, *(share.to for share in shares), *senders])
        return Round(
            outcome=outcome,
            members=tuple(map(str, met)) if pushed else (),
            bytes_sent=sent_bytes,
            bytes_received=received_bytes,
            seconds=self.now - begun,
            degraded=tuple(problems),
        )

    def _targets(self) -> tuple[list[PeerId], Outcome]:
        """To whom this step sends; if to nobody, why."""
        self._step += 1
        if self._config.sends_only or not self._endpoint.contact.addresses:
            return [], TooFew(1, 2, "others cannot reach this peer, so that nobody could send to it")
        others = self._candidates()
        if not others:
            known = bool(self._contacts)
            return [], TooFew(1, 2, "those who are known did not answer lately") if known else Alone()
        count = self.ledger.can_send(self._strategy.peers)
        if not count:
            return [], TooFew(1, 2, "the last shares are still under way")
        chosen = push_targets(
            self._strategy.partners,
            self._endpoint.peer_id,
            others,
            self._step - 1,
            count,
            self._endpoint.runtime.rng,
        )
        return chosen, Alone()

    async def _exchange(
        self, vector: FlatVector, targets: list[PeerId]
    ) -> tuple[list[Share[list[bytes]]], int | None, dict[PeerId, None]]:
        async with self._lock:
            received, senders = await self._absorb(vector)
            shares: list[Share[list[bytes]]] = []
            if count := self.ledger.can_send(len(targets)):
                content = await self._compute(self._mass.encode, vector, count)
                shares = self.ledger.split(targets[:count], content)
            for share in shares:
                self._start(self._send(share))
            await self._compute(self._mass.stepped, vector)
            self._stepped_at = self.now
            return shares, received, senders

    async def _absorb(self, vector: FlatVector) -> tuple[int | None, dict[PeerId, None]]:
        """Take in what waits: how many shares of others that was, and whose; none if not even our own waited."""
        ledger = self.ledger
        senders, self._senders = self._senders, {}
        waited = ledger.waiting > 0
        if waited:
            held_s = ledger.waiting * self.now - self._waited
            moved = min(ledger.waiting, max(0.0, held_s / max(self.now - self._stepped_at, 1e-9)))
            self._waited = 0.0
            spoilt = await self._compute(self._mass.absorb, vector, ledger.weight, ledger.waiting, moved)
            if spoilt:
                self._note(f"{spoilt} chunks keep local values: with what arrived they are not finite")
        return (ledger.absorb() if waited else None), senders

    def _candidates(self) -> list[PeerId]:
        now = self.now
        self._absent = {peer: until for peer, until in self._absent.items() if until > now}
        present = [p for p, contact in self._contacts.items() if contact.addresses and p not in self._absent]
        return [p for p in present if not self._probation.reason(p, now)]

    def _note(self, problem: str) -> None:
        if len(self._problems) < KEPT_PROBLEMS:
            self._problems[problem] = None

    # Hints -----------------------------------------------------------------------------------------------------------

    async def _look_if_due(self) -> None:
        age_s = self.now - self._looked_at
        if age_s == math.inf:
            await self._look()
        elif age_s > (self._endpoint.config.heartbeat_s / 3 if self._contacts else LOOK_AGAIN_S):
            self._look_soon()

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._start(self._look())

    async def _look(self) -> None:
        self._looking, self._looked_at = True, self.now
        try:
            contacts = await self.board.look("")
        finally:
            self._looking = False
        if contacts is not None:
            self._contacts = {contact.peer_id: contact for contact in contacts}

    # Sending ---------------------------------------------------------------------------------------------------------

    async def _send(self, share: Share[list[bytes]], until: float | None = None) -> bool:
        """Bring a share to its receiver and settle its fate, by `until` at the latest. Whether it was delivered."""
        if until is None:
            until = self.now + self._config.share_reclaim_s
        contact = self._contacts.get(share.to) or Contact(share.to, ())
        taken, reason = await self._courier.bring(share, contact, until)
        if taken:
            self.ledger.delivered(share)
            self._settled.set()
            return True
        if taken is None:
            reason = "silent for too long"
            self._endpoint.runtime.emit(ShareReclaimed(self.key, str(share.to), share.weight))
        self._note(f"the share for {share.to.short} came back: {reason}")
        self._absent[share.to] = self.now + self._endpoint.config.heartbeat_s / 2
        await _to_the_end(self._take_back(share))
        return False

    async def _take_back(self, share: Share[list[bytes]]) -> None:
        async with self._lock:
            if self.ledger.came_back(share):
                self._waited += share.weight * self.now
                await self._compute(self._mass.add, share.weight, share.content)
        self._settled.set()

    def _count_sent(self, nbytes: int) -> None:
        self._sent_bytes += nbytes

    # Receiving -------------------------------------------------------------------------------------------------------

    async def serve(self, sender: PeerId, hello: pb.ShareHello, stream: ByteStream) -> None:
        """Take a share, or refuse it and say why."""
        tag = Tag(bytes(hello.incarnation), hello.number)
        taken, reason = False, self._refusal(sender, hello)
        if not reason:
            self._receiving += 1
            try:
                payloads = await self._receive(stream)
                taken = await _to_the_end(self._take(sender, tag, hello.weight, payloads))
                reason = "" if taken else "you were told that it is not taken"
            except (MalformedFrameError, NonFiniteError) as error:
                kind = Offence.NON_FINITE if isinstance(error, NonFiniteError) else Offence.MALFORMED
                self._offend(sender, kind, "in a share")
                self._note(f"a share of {sender.short} was refused: {error.message}")
                reason = error.message
            except TimeoutError:
                reason = "it came too slowly"
            finally:
                self._receiving -= 1
        if not taken and len(tag.incarnation) == INCARNATION_BYTES:
            taken = bool(self._receipts.fate(sender, tag, self.now))
        await stream.send(pb.ShareAnswer(taken=taken, reason=reason).SerializeToString())

    def _refusal(self, sender: PeerId, hello: pb.ShareHello) -> str:
        """Why a share is not taken; empty if it may be."""
        if charge := self._probation.reason(sender, self.now):
            return f"on probation: {charge}"
        if bytes(hello.schema_hash) != self._schema_hash:
            theirs = bytes(hello.schema_hash).hex()
            return f"other tensors: schema {theirs[:16]} there, {self._schema_hash.hex()[:16]} here"
        if len(hello.incarnation) != INCARNATION_BYTES or hello.chunks != len(self._mass.chunks):
            return "its id, or the number of its chunks, cannot be"
        if not 0 < hello.weight <= max(LEAST_WEIGHT_BOUND, len(self._contacts) + 1.0):
            self._offend(sender, Offence.MALFORMED, f"a share that weighs {hello.weight:g}")
            self._note(f"a share of {sender.short} was refused: it weighs {hello.weight:g}")
            return "its weight cannot be"
        if self._leaving:
            return "this peer leaves"
        if self._receiving >= MAX_RECEPTIONS or self.ledger.full:
            return "too many shares wait here"
        tag = Tag(bytes(hello.incarnation), hello.number)
        if not self._receipts.admits(sender, tag, hello.settled_below, self.now):
            return "it is known already, or too many others are"
        if sender not in self._contacts:
            self._look_soon()
        return ""

    async def _receive(self, stream: ByteStream) -> list[bytes]:
        payloads: list[bytes] = []
        for index in range(len(self._mass.chunks)):
            async with self._lag.timeout(self._config.chunk_timeout_s):
                payload = await stream.receive()
            if payload is None:
                raise MalformedFrameError("The stream ended before the share was whole.")
            self._received_bytes += len(payload)
            await self._compute(self._mass.check, index, payload, cost_bytes=4.0 * len(payload))
            payloads.append(payload)
        return payloads

    async def _take(self, sender: PeerId, tag: Tag, weight: float, payloads: list[bytes]) -> bool:
        async with self._lock:
            if self._leaving or not self._receipts.take(sender, tag, self.now):
                return False
            await self._compute(self._mass.add, weight, payloads)
            self.ledger.arrived(weight)
            self._waited += weight * self.now
            self._senders[sender] = None
            return True

    # Leaving ---------------------------------------------------------------------------------------------------------

    async def hand_over(self, vector: FlatVector) -> bool:
        """Give everything held here to another peer and take no more shares. Bounded; events tell how it ended.

        Shares under way get half of the time (twice `chunk_timeout_s`) to settle. What a lossy codec leaves out of this
        last share is lost.
        """
        self._leaving = True
        ledger, patience_s = self.ledger, self._config.chunk_timeout_s
        end = self.now + 2 * patience_s
        await self._settle(self.now + patience_s)
        reason = "nobody else is there" if not self._candidates() else "nobody took it in time"
        for _ in range(HEIRS):
            async with self._lock:
                await self._absorb(vector)
            others = self._candidates()
            if not others or self.now >= end or not ledger.can_send(1):
                break
            heir = push_targets("random", self._endpoint.peer_id, others, 0, 1, self._endpoint.runtime.rng)
            content = await self._compute(self._mass.encode, vector, 0)
            (share,) = ledger.split(heir, content, keep=False)
            if await self._send(share, until=end):
                self._endpoint.runtime.emit(MassHandedOver(self.key, str(share.to), share.weight))
                break
        self._tell_loss(reason)
        return not self.held

    async def _settle(self, until: float) -> None:
        while self.ledger.open and self.now < until:
            self._settled.clear()
            try:
                async with asyncio.timeout(until - self.now):
                    await self._settled.wait()
            except TimeoutError:
                return

    @property
    def held(self) -> float:
        """All weight that is this peer's concern: its own, what waits, and shares whose fate is not known."""
        return self.ledger.weight + self.ledger.waiting + self.ledger.under_way

    def _tell_loss(self, reason: str) -> None:
        if self.held:
            self._endpoint.runtime.emit(MassLost(self.key, self.held, reason))

    def abandon(self) -> None:
        """End everything that is under way, for this seat is taken no more."""
        if not self._leaving:
            self._leaving = True
            self._tell_loss("it closed without handing over")
        for task in list(self._tasks):
            task.cancel()

    # Work ------------------------------------------------------------------------------------------------------------

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = self._endpoint.runtime.spawn(coroutine, f"averaging {self.key}: share")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _compute(self, fn: Any, *args: Any, cost_bytes: float | None = None) -> Any:
        """Run on the loop if cheap, else on the codec pool."""
        cost = 4.0 * self._mass.nbytes if cost_bytes is None else cost_bytes
        if cost <= INLINE_BYTES:
            return fn(*args)
        return await self._endpoint.runtime.offload(fn, *args)


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await something that moves mass and must not stop half-way; a cancellation waits for it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
