"""This peer's place under one averaging key: feeds its matchmaker, and leads incoming streams to the sealed group."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from swarm.averaging.ahead import Ahead
from swarm.averaging.allreduce import AllReduce
from swarm.averaging.bandwidth import Bandwidths
from swarm.averaging.board import Board
from swarm.averaging.calls import Calls
from swarm.averaging.decisions import (
    AnswerJoin,
    AnswerSeal,
    AskFailed,
    AskJoin,
    Begin,
    Committed,
    Concluded,
    GiveUp,
    Hinted,
    Instruction,
    JoinAnswered,
    MatchEvent,
    Nudge,
    OfferSeal,
    Released,
    SealOffered,
    SealSpoilt,
    SendCommit,
    SendRelease,
    Terms,
    Tick,
    Timing,
    Verdict,
)
from swarm.averaging.declarations import Declarations, declare
from swarm.averaging.entries import Entries
from swarm.averaging.exchange import Exchange
from swarm.averaging.gossip import Gossip, Pairing
from swarm.averaging.grid import Grid
from swarm.averaging.matchmaking import NOT_OURS, Matchmaker
from swarm.averaging.messages import join_asked, join_response, seal_of
from swarm.averaging.probation import Offence, Probation
from swarm.averaging.pulling import Puller
from swarm.averaging.rounds import Member, Seal
from swarm.averaging.seals import MAX_ENTER_S
from swarm.averaging.shared import OnOffender
from swarm.endpoint import Endpoint
from swarm.errors import BadSignatureError, MalformedFrameError, NoGroupError, UsageError
from swarm.identity import PeerId
from swarm.net.transport import Contact
from swarm.pb import averaging_pb2 as pb

HINT_EVERY_S = 0.5
"""While looking, the DHT is read at most this often."""


class Seat:
    """This peer's place under one averaging key: its matchmaker and the exchanges it is in."""

    def __init__(
        self,
        endpoint: Endpoint,
        key: str,
        strategy: AllReduce | Gossip,
        bandwidth: Bandwidths,
        probation: Probation,
        on_offender: OnOffender,
    ) -> None:
        self.key = key
        self.search_s = 0.0
        """How long the last search for a group took, prepared or not."""
        self.board = Board(endpoint, key)
        self._endpoint = endpoint
        self._bandwidth = bandwidth
        self._offend = on_offender
        self._declarations = Declarations(endpoint.runtime, key)
        self._timing = Timing.within(endpoint.config.averaging.matchmaking_s)
        in_pairs = isinstance(strategy, Gossip)
        self._pairing = Pairing(key, endpoint.peer_id)
        self._calls = Calls(endpoint, key, self._timing.answer_s, self._pairing.saw)
        self._grid = None if in_pairs else Grid(strategy.max_group, endpoint.runtime.rng)
        self._looked_at = -math.inf
        self._counted_at = -math.inf
        self._looked_in: str | None = None
        self._wake = asyncio.Event()
        self._concluded: asyncio.Future[Concluded] | None = None
        self._ahead: Ahead | None = None
        self._entries = Entries()
        self.matchmaker = Matchmaker(
            key,
            Member(endpoint.peer_id, (), 0.0),
            self._timing,
            endpoint.runtime.rng,
            new_nonce=lambda: secrets.token_bytes(16),
            random_order=in_pairs,
            partner=self._pairing.partner if in_pairs else None,
            barred=lambda peer: probation.reason(peer, self.now),
        )
        self._puller = Puller(
            endpoint, self._calls, self._timing, lambda: self.matchmaker.leader, self.feed, self.take_seal
        )

    @property
    def now(self) -> float:
        return self._endpoint.runtime.clock.time()

    @property
    def others_waiting(self) -> bool:
        """Whether another peer looks for a group while we do not, or waits in one that we prepared."""
        return self.matchmaker.others_waiting(self.now) or (self._ahead is not None and self._ahead.awaited)

    # Searches --------------------------------------------------------------------------------------------------------

    async def match(self, terms: Terms, timeout_s: float | None) -> Concluded:
        """The group prepared ahead, if there is one, else look for one. Never raises for what others do.

        `enter_within_s` of the seal is what is left of it now.
        """
        begun = self.now
        if self._ahead is not None:
            ahead = self._ahead
            prepared = await ahead.claim(timeout_s)
            if self._ahead is ahead:
                self._ahead = None
            if prepared is not None:
                return prepared
        left_s = math.inf if timeout_s is None else max(0.0, timeout_s - (self.now - begun))
        return await self._search(terms, left_s)

    def prepare(self, terms: Terms, at_s: float) -> bool:
        """Begin to look for the group of the next round, which is expected in `at_s`; `match` takes it from there.

        The group waits for this peer until then and for `chunk_timeout_s` more. False if a search runs, or a group is
        prepared already.
        """
        if self._concluded is not None or (self._ahead is not None and not self._ahead.useless):
            return False
        terms = replace(terms, enters_in_s=min(max(0.0, at_s), MAX_ENTER_S))
        search = partial(self._search, terms, math.inf)
        self._ahead = Ahead(self._endpoint, self.key, search, lambda reason: self.feed(GiveUp(reason)), self.leave)
        return True

    def abandon(self) -> None:
        """Give up what was prepared; members of a group that was sealed do without us."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.abandon()

    async def _search(self, terms: Terms, timeout_s: float) -> Concluded:
        if self._concluded is not None:
            raise UsageError("A round of this averager is running.", fix="Wait for it before starting another.")
        concluded: asyncio.Future[Concluded] = asyncio.get_running_loop().create_future()
        self._concluded, begun = concluded, self.now
        try:
            cell = await self._choose_cell()
            addresses = self.board.addresses
            terms = replace(
                terms,
                cell=cell,
                sends_only=not addresses,
                measured=self._bandwidth.measured(),
                turn=self._pairing.turn,
            )
            self.matchmaker.me = declare(self._endpoint.identity, self.key, addresses, terms)
            self.feed(Begin(terms, timeout_s, warm=self._is_warm(cell)))
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._tick()), group.create_task(self._refresh_hints(cell))]
                try:
                    result = await concluded
                finally:
                    for helper in helpers:
                        helper.cancel()
        finally:
            self.feed(GiveUp("cancelled"))
            self._concluded = None
        self.search_s = self.now - begun
        self._after(result)
        return result

    def _after(self, result: Concluded) -> None:
        """Choose whom or where to meet next time, and learn who is there before that is urgent."""
        self._pairing.advance()
        if self._grid is not None and self.matchmaker.cell:
            if result.seal is None:
                self._grid.scatter()
            else:
                ranks = [member.peer_id for member in result.seal.members]
                self._grid.advance(ranks.index(self._endpoint.peer_id), result.seal.nonce)
            self._start(self._move())
        elif self.now - self._looked_at > self._endpoint.config.heartbeat_s / 3:
            self._start(self.read_hints(""))

    async def _move(self) -> None:
        if self._grid is not None and self._concluded is None:
            await self.board.enter(self._grid.cell(self.board.population))

    # Instructions ----------------------------------------------------------------------------------------------------

    def feed(self, event: MatchEvent) -> Instruction | None:
        """Give an event to the matchmaker, carry out its instructions, return its answer if there is one."""
        answer: Instruction | None = None
        for instruction in self.matchmaker.handle(event, self.now):
            match instruction:
                case AnswerJoin() | AnswerSeal():
                    answer = instruction
                case Concluded(_, seal):
                    if seal is not None:
                        self._entries.expect(seal.nonce)
                    if self._concluded is not None and not self._concluded.done():
                        self._concluded.set_result(instruction)
                case _:
                    self._start(self._carry_out(instruction))
        self._wake.set()
        return answer

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._endpoint.runtime.spawn(coroutine, f"averaging {self.key}")

    async def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case AskJoin(peer) | Nudge(peer):
                answer: JoinAnswered | AskFailed = AskFailed(peer, "we look no more")
                if (terms := self.matchmaker.terms) is not None:
                    left_s = max(0.0, self.matchmaker.closes_at - self.now)
                    answer = await self._calls.join(peer, self.matchmaker.me, left_s, terms.turn)
                about_us = (Verdict.MISMATCH, Verdict.PROBATION)
                if isinstance(instruction, AskJoin) or isinstance(answer, AskFailed) or answer.verdict in about_us:
                    self.feed(answer)
                if self.matchmaker.terms is not None and self.matchmaker.terms.sends_only:
                    await self._puller.follow()
            case OfferSeal(seal):
                async with asyncio.TaskGroup() as group:
                    for member in seal.members:
                        if member.peer_id != self._endpoint.peer_id:
                            group.create_task(self._offer(Contact(member.peer_id, member.addresses), seal))
            case SendCommit(seal):
                await self._calls.commit(seal)
            case SendRelease(peer, redirect):
                await self._calls.release(peer, redirect)

    async def _offer(self, contact: Contact, seal: Seal) -> None:
        self.feed(await self._calls.offer(contact, seal))

    # Time and hints --------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            self._wake.clear()
            delay = max(0.0, self.matchmaker.wake_at - self.now)
            try:
                async with asyncio.timeout(None if delay == math.inf else delay):
                    await self._wake.wait()
            except TimeoutError:
                self.feed(Tick())

    async def _choose_cell(self) -> str:
        if self._grid is None:
            return ""
        if self.now - self._counted_at > self._endpoint.config.heartbeat_s:
            await self.read_hints("")
        cell = self._grid.cell(self.board.population)
        await self.board.enter(cell)
        return cell

    def _is_warm(self, cell: str) -> bool:
        return self._looked_in == cell and self.now - self._looked_at < self._endpoint.config.heartbeat_s

    async def _refresh_hints(self, cell: str) -> None:
        pause_s = max(HINT_EVERY_S, self._timing.poll_s)
        if self._is_warm(cell):
            await asyncio.sleep(pause_s)
        while True:
            await self.read_hints(cell)
            await asyncio.sleep(pause_s)

    async def read_hints(self, cell: str) -> None:
        """Learn from the DHT who averages under this key, in this cell."""
        contacts = await self.board.look(cell)
        if contacts is None:
            return
        for contact in contacts:
            self._calls.remember(contact)
        self._looked_in, self._looked_at = cell, self.now
        if not cell:
            self._counted_at = self.now
        if cell == self.matchmaker.cell:
            pulls = tuple(contact.peer_id for contact in contacts if not contact.addresses)
            self.feed(Hinted(tuple(contact.peer_id for contact in contacts), pulls))

    # Serving ---------------------------------------------------------------------------------------------------------

    async def joined(self, caller: PeerId, request: pb.JoinGroupRequest) -> pb.JoinGroupResponse:
        """Answer a peer that asks to join. Raises `MalformedFrameError` or `BadSignatureError` for what it declares."""
        asked = join_asked(await self._declarations.of(caller, request.declared), request.patience_s)
        self._calls.remember(Contact(caller, asked.member.addresses))
        self._pairing.saw(request.turn)
        self._calls.mail.open(caller, asked.member.sends_only, anew=not self.matchmaker.follows_us(caller))
        answer = self.feed(asked)
        assert isinstance(answer, AnswerJoin)
        turn = self._pairing.turn if self._concluded is not None else 0  # between two rounds we are in none
        return join_response(answer, self._calls.contact(answer.leader), turn)

    async def sealed(self, caller: PeerId, request: pb.SealGroupRequest) -> pb.SealGroupResponse:
        answer = await self.take_seal(caller, request)
        return pb.SealGroupResponse(accepted=answer.accepted, reason=answer.reason)

    async def take_seal(self, leader: PeerId, request: pb.SealGroupRequest) -> AnswerSeal:
        """Accept a seal or refuse it, by what its members signed. A leader that says what they did not is reported."""
        if not self.matchmaker.expects_seal(leader):
            return AnswerSeal(False, NOT_OURS)
        try:
            seal = seal_of(request, await self._declarations.of_members(request.members))
        except (MalformedFrameError, BadSignatureError) as error:
            forged = isinstance(error, BadSignatureError)
            self._offend(leader, Offence.FORGED if forged else Offence.MALFORMED, error.message)
            self.feed(SealSpoilt(leader, error.message))
            return AnswerSeal(False, error.message)
        answer = self.feed(SealOffered(leader, seal))
        assert isinstance(answer, AnswerSeal)
        if answer.accepted:
            self._entries.expect(seal.nonce)
        elif answer.offence is not None:
            self._offend(leader, answer.offence, answer.reason)
        return answer

    def released(self, caller: PeerId, request: pb.ReleaseGroupRequest) -> None:
        redirect = PeerId(bytes(request.redirect)) if request.redirect else None
        if redirect is not None:
            self._calls.remember_redirect(redirect, request.redirect_addresses)
        self.feed(Released(caller, redirect))

    async def poll(self, caller: PeerId, request: pb.PollGroupRequest) -> pb.PollGroupResponse:
        """What there is to tell a peer that nobody can call. Raises `NoGroupError` if it did not ask to join."""
        if caller not in self._calls.mail:
            raise NoGroupError("You did not ask to be admitted.")
        longest_s = self._timing.answer_s / 2
        patience_s = min(max(request.patience_s, 0.0), longest_s) if math.isfinite(request.patience_s) else longest_s
        return pb.PollGroupResponse(messages=await self._calls.mail.collect(caller, request, patience_s))

    # Exchanges -------------------------------------------------------------------------------------------------------

    def enter(self, nonce: bytes, exchange: Exchange) -> None:
        """Let streams of the sealed group reach the exchange."""
        self._entries.enter(nonce, exchange)

    def takes_part(self, nonce: bytes) -> bool:
        """Whether this peer pledged itself to the group, or is in it."""
        return nonce in self._entries

    def leave(self, nonce: bytes) -> None:
        self._entries.leave(nonce)

    async def exchange(self, nonce: bytes) -> Exchange:
        """The exchange of a group that this peer pledged itself to; a member's stream implies that the group exists.

        Waits until this peer enters it; a group that was prepared ends by itself if it never does.

        Raises:
            NoGroupError: This peer is in no such group.
        """
        self.feed(Committed(nonce))
        patience_s = self._timing.answer_s
        if self._ahead is not None and not self._entries.entered(nonce):
            patience_s = MAX_ENTER_S
            self._ahead.awaited = True
        return await self._entries.get(nonce, patience_s)
