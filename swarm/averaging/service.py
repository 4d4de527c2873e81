"""Averaging on the network: carries out what the matchmaker of each key decides, and serves other peers' requests."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from swarm.averaging.allreduce import equal_parts
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
    JoinAsked,
    MatchEvent,
    Nudge,
    OfferSeal,
    Released,
    SealAnswered,
    SealOffered,
    SendCommit,
    SendRelease,
    Terms,
    Tick,
    Timing,
    Verdict,
)
from swarm.averaging.exchange import EXCHANGE, Exchange
from swarm.averaging.gossip import Gossip, Strategy
from swarm.averaging.matchmaking import MAX_GROUP, Matchmaker
from swarm.averaging.rounds import Member, Seal
from swarm.endpoint import Endpoint
from swarm.errors import ClosedError, MalformedFrameError, NoGroupError, SwarmError, UsageError
from swarm.events import Event
from swarm.identity import PeerId
from swarm.net.transport import ByteStream, CallContext, Contact, UnaryMethod
from swarm.pb import averaging_pb2 as pb
from swarm.roles import Role

_ROLES = frozenset({Role.TRAINER, Role.HOST})
JOIN = UnaryMethod("/swarm.pb.Averaging/Join", pb.JoinGroupRequest, pb.JoinGroupResponse, _ROLES)
SEAL = UnaryMethod("/swarm.pb.Averaging/Seal", pb.SealGroupRequest, pb.SealGroupResponse, _ROLES)
COMMIT = UnaryMethod("/swarm.pb.Averaging/Commit", pb.CommitGroupRequest, pb.AveragingAck, _ROLES)
RELEASE = UnaryMethod("/swarm.pb.Averaging/Release", pb.ReleaseGroupRequest, pb.AveragingAck, _ROLES)

MAX_ADDRESSES = 8
MAX_ADDRESS_CHARS = 260
HINT_EVERY_S = 0.5
"""While looking, the DHT is read at most this often."""


@dataclass(frozen=True, slots=True)
class MatchmakingImpaired(Event):
    """A record could not be read or written, or a message not be delivered; matchmaking goes on without it."""

    key: str
    reason: str


def _checked_id(raw: bytes) -> PeerId:
    return PeerId(bytes(raw))


def _checked_addresses(raw: Any) -> tuple[str, ...]:
    addresses = tuple(str(a) for a in raw)
    if len(addresses) > MAX_ADDRESSES or any(len(a) > MAX_ADDRESS_CHARS for a in addresses):
        raise MalformedFrameError("Too many or too long addresses.")
    return addresses


class Seat:
    """This peer's place under one averaging key: its matchmaker and the exchange it is in."""

    def __init__(self, endpoint: Endpoint, key: str, strategy: Strategy) -> None:
        window_s = endpoint.config.averaging.matchmaking_s
        self.key = key
        self._endpoint = endpoint
        self._timing = Timing(
            window_s=window_s,
            poll_s=min(0.25, window_s / 20),
            settle_s=min(0.5, window_s / 5),
            answer_s=min(5.0, window_s / 2),
        )
        self._contacts: dict[PeerId, Contact] = {}
        self._wake = asyncio.Event()
        self._concluded: asyncio.Future[Concluded] | None = None
        self._exchanges: dict[bytes, asyncio.Future[Exchange]] = {}
        self.matchmaker = Matchmaker(
            key,
            Member(endpoint.peer_id, (), 0.0),
            self._timing,
            endpoint.runtime.rng,
            split=equal_parts,
            new_nonce=lambda: secrets.token_bytes(16),
            random_order=isinstance(strategy, Gossip),
        )

    @property
    def now(self) -> float:
        return self._endpoint.runtime.clock.time()

    async def match(self, terms: Terms, timeout_s: float | None) -> Concluded:
        """Look for a group. Never raises for what others do."""
        if self._concluded is not None:
            raise UsageError("A round of this averager is running.", fix="Wait for it before starting another.")
        self.matchmaker.me = Member(self._endpoint.peer_id, self._endpoint.contact.addresses, terms.weight)
        concluded: asyncio.Future[Concluded] = asyncio.get_running_loop().create_future()
        self._concluded = concluded
        try:
            self.feed(Begin(terms, math.inf if timeout_s is None else timeout_s))
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._tick()), group.create_task(self._refresh_hints())]
                try:
                    return await concluded
                finally:
                    for helper in helpers:
                        helper.cancel()
        finally:
            self.feed(GiveUp("cancelled"))
            self._concluded = None

    def feed(self, event: MatchEvent) -> Instruction | None:
        """Give an event to the matchmaker, carry out its instructions, return its answer if there is one."""
        answer: Instruction | None = None
        for instruction in self.matchmaker.handle(event, self.now):
            match instruction:
                case AnswerJoin() | AnswerSeal():
                    answer = instruction
                case Concluded(_, seal):
                    if seal is not None:
                        self._expect(seal.nonce)
                    if self._concluded is not None and not self._concluded.done():
                        self._concluded.set_result(instruction)
                case _:
                    self._start(self._carry_out(instruction))
        self._wake.set()
        return answer

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._endpoint.runtime.spawn(coroutine, f"averaging {self.key}")

    async def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case AskJoin(peer):
                await self._ask(peer, report=True)
            case Nudge(peer):
                await self._ask(peer, report=False)
            case OfferSeal(seal):
                me = self._endpoint.peer_id
                async with asyncio.TaskGroup() as group:
                    for member in seal.members:
                        if member.peer_id != me:
                            group.create_task(self._offer(member, seal))
            case SendCommit(seal):
                me = self._endpoint.peer_id
                request = pb.CommitGroupRequest(key=self.key, nonce=seal.nonce)
                async with asyncio.TaskGroup() as group:
                    for member in seal.members:
                        if member.peer_id != me:
                            group.create_task(self._tell(Contact(member.peer_id, member.addresses), COMMIT, request))
            case SendRelease(peer, redirect):
                contact, other = self._contacts.get(peer), self._contacts.get(redirect) if redirect else None
                if contact is not None:
                    release = pb.ReleaseGroupRequest(key=self.key)
                    if other is not None:
                        release.redirect = other.peer_id.digest
                        release.redirect_addresses.extend(other.addresses[:MAX_ADDRESSES])
                    await self._tell(contact, RELEASE, release)

    async def _tell(self, contact: Contact, method: UnaryMethod[Any, Any], request: Any) -> None:
        try:
            await self._endpoint.transport.call(contact, method, request, timeout_s=self._timing.answer_s)
        except SwarmError as error:
            # The other side has its own deadlines; nothing depends on this message arriving.
            self._endpoint.runtime.emit(
                MatchmakingImpaired(self.key, f"{contact.peer_id.short} was not told: {error.message}")
            )

    async def _ask(self, peer: PeerId, report: bool) -> None:
        contact = self._contacts.get(peer)
        search = self.matchmaker.terms
        if contact is None or search is None:
            self.feed(AskFailed(peer, "no address is known"))
            return
        me = self._endpoint.contact
        request = pb.JoinGroupRequest(
            key=self.key,
            schema_hash=search.schema_hash,
            weight=search.weight,
            addresses=me.addresses[:MAX_ADDRESSES],
            patience_s=max(0.0, self.matchmaker.closes_at - self.now),
        )
        try:
            reply = await self._endpoint.transport.call(contact, JOIN, request, timeout_s=self._timing.answer_s)
            leader = _checked_id(reply.leader) if reply.leader else None
            if leader is not None and leader not in self._contacts:
                self._remember(Contact(leader, _checked_addresses(reply.leader_addresses)))
            verdict = Verdict(reply.verdict)
        except SwarmError as error:
            self.feed(AskFailed(peer, error.message))
        except ValueError:
            self.feed(AskFailed(peer, "its answer is malformed"))
        else:
            if report:
                self.feed(JoinAnswered(peer, verdict, reply.seal_within_s, leader, bytes(reply.schema_hash)))

    async def _offer(self, member: Member, seal: Seal) -> None:
        request = pb.SealGroupRequest(key=self.key, nonce=seal.nonce, schema_hash=seal.schema_hash)
        for m in seal.members:
            request.members.add(peer_id=m.peer_id.digest, addresses=m.addresses, weight=m.weight, part=m.part)
        contact = Contact(member.peer_id, member.addresses)
        try:
            reply = await self._endpoint.transport.call(contact, SEAL, request, timeout_s=self._timing.answer_s)
            answer = SealAnswered(member.peer_id, seal.nonce, reply.accepted, reply.reason[:200])
        except SwarmError as error:
            answer = SealAnswered(member.peer_id, seal.nonce, False, error.message)
        self.feed(answer)

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

    async def _refresh_hints(self) -> None:
        while True:
            await self.read_hints()
            await asyncio.sleep(max(HINT_EVERY_S, self._timing.poll_s))

    async def read_hints(self) -> None:
        """Learn from the DHT who averages under this key."""
        try:
            entries = await self._endpoint.dht.get(f"rounds/{self.key}", fresh=True)
        except SwarmError as error:
            self._endpoint.runtime.emit(MatchmakingImpaired(self.key, error.message))
            return
        peers: list[PeerId] = []
        for entry in entries[: 16 * MAX_GROUP]:
            addresses = entry.body.get("addresses") if isinstance(entry.body, dict) else None
            if entry.author == self._endpoint.peer_id or not isinstance(addresses, list | tuple):
                continue
            try:
                self._remember(Contact(entry.author, _checked_addresses(addresses)))
            except MalformedFrameError:
                continue
            peers.append(entry.author)
        self.feed(Hinted(tuple(peers)))

    def _remember(self, contact: Contact) -> None:
        self._contacts.pop(contact.peer_id, None)
        self._contacts[contact.peer_id] = contact
        while len(self._contacts) > 16 * MAX_GROUP:
            del self._contacts[next(iter(self._contacts))]

    # Serving ---------------------------------------------------------------------------------------------------------

    def joined(self, caller: PeerId, request: pb.JoinGroupRequest) -> pb.JoinGroupResponse:
        if not 0 <= request.weight < math.inf or len(request.schema_hash) != 32:
            raise MalformedFrameError("The weight or the schema hash of the request cannot be.")
        addresses = _checked_addresses(request.addresses)
        self._remember(Contact(caller, addresses))
        member = Member(caller, addresses, request.weight)
        answer = self.feed(JoinAsked(member, bytes(request.schema_hash), max(0.0, request.patience_s)))
        assert isinstance(answer, AnswerJoin)
        response = pb.JoinGroupResponse(
            verdict=int(answer.verdict),  # type: ignore[arg-type]
            seal_within_s=answer.seal_within_s,
            schema_hash=answer.schema_hash,
        )
        if answer.leader is not None:
            response.leader = answer.leader.digest
            if (contact := self._contacts.get(answer.leader)) is not None:
                response.leader_addresses.extend(contact.addresses[:MAX_ADDRESSES])
        return response

    def sealed(self, caller: PeerId, request: pb.SealGroupRequest) -> pb.SealGroupResponse:
        if len(request.members) > MAX_GROUP:
            raise MalformedFrameError("The group is too large.")
        members = tuple(
            Member(_checked_id(m.peer_id), _checked_addresses(m.addresses), m.weight, m.part) for m in request.members
        )
        seal = Seal(bytes(request.nonce), bytes(request.schema_hash), members)
        answer = self.feed(SealOffered(caller, seal))
        assert isinstance(answer, AnswerSeal)
        if answer.accepted:
            self._expect(seal.nonce)
        return pb.SealGroupResponse(accepted=answer.accepted, reason=answer.reason)

    def released(self, caller: PeerId, request: pb.ReleaseGroupRequest) -> None:
        redirect = _checked_id(request.redirect) if request.redirect else None
        if redirect is not None and redirect not in self._contacts:
            self._remember(Contact(redirect, _checked_addresses(request.redirect_addresses)))
        self.feed(Released(caller, redirect))

    def _expect(self, nonce: bytes) -> asyncio.Future[Exchange]:
        if nonce not in self._exchanges:
            while len(self._exchanges) >= 4:
                self._exchanges.pop(next(iter(self._exchanges))).cancel()
            self._exchanges[nonce] = asyncio.get_running_loop().create_future()
        return self._exchanges[nonce]

    def enter(self, nonce: bytes, exchange: Exchange) -> None:
        """Let streams of the sealed group reach the exchange."""
        self._expect(nonce).set_result(exchange)

    def takes_part(self, nonce: bytes) -> bool:
        """Whether this peer pledged itself to the group, or is in it."""
        return nonce in self._exchanges

    def leave(self, nonce: bytes) -> None:
        future = self._exchanges.pop(nonce, None)
        if future is not None:
            future.cancel()

    async def exchange(self, nonce: bytes) -> Exchange:
        """The exchange of a group that this peer pledged itself to; a member's stream implies that the group exists.

        Raises:
            NoGroupError: This peer is in no such group.
        """
        self.feed(Committed(nonce))
        future = self._exchanges.get(nonce)
        if future is None:
            raise NoGroupError("This peer is in no such group.")
        try:
            async with asyncio.timeout(self._timing.answer_s):
                return await asyncio.shield(future)
        except (TimeoutError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not future.cancelled():
                raise
            raise NoGroupError("This peer left the group before the exchange.") from error


class AveragingService:
    """One per peer: registers the averaging methods and dispatches them by averaging key."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._seats: dict[str, Seat] = {}
        self._closed = False
        transport = endpoint.transport
        transport.serve(JOIN, self._join)
        transport.serve(SEAL, self._seal)
        transport.serve(COMMIT, self._commit)
        transport.serve(RELEASE, self._release)
        transport.serve_stream(EXCHANGE, self._exchange)

    @property
    def closed(self) -> bool:
        return self._closed

    async def open(self, key: str, strategy: Strategy) -> Seat:
        """Take part under a key, and announce it.

        Raises:
            UsageError: This peer averages under this key already.
        """
        if self._closed:
            raise ClosedError("The peer is closed.")
        if key in self._seats:
            raise UsageError(
                f"This peer averages under {key!r} already.", fix="Close that averager, or use another key."
            )
        seat = self._seats[key] = Seat(self.endpoint, key, strategy)
        addresses = list(self.endpoint.contact.addresses[:MAX_ADDRESSES])
        try:
            # Renewed by the DHT until it is deleted, also if nobody could take it now.
            await self.endpoint.dht.put(
                f"rounds/{key}", {"addresses": addresses}, ttl_s=3 * self.endpoint.config.heartbeat_s
            )
        except SwarmError as error:
            self.endpoint.runtime.emit(MatchmakingImpaired(key, error.message))
        return seat

    async def shut(self, key: str) -> None:
        """Stop taking part under a key and withdraw the announcement. Idempotent."""
        if self._seats.pop(key, None) is None:
            return
        try:
            await self.endpoint.dht.delete(f"rounds/{key}")
        except SwarmError as error:
            self.endpoint.runtime.emit(MatchmakingImpaired(key, error.message))

    async def close(self) -> None:
        """Leave every key. Idempotent."""
        self._closed = True
        for key in list(self._seats):
            await self.shut(key)

    def _seat(self, key: str) -> Seat:
        seat = self._seats.get(key)
        if seat is None:
            raise NoGroupError(f"This peer does not average under {key[:60]!r}.")
        return seat

    async def _join(self, context: CallContext, request: pb.JoinGroupRequest) -> pb.JoinGroupResponse:
        return self._seat(request.key).joined(context.peer_id, request)

    async def _seal(self, context: CallContext, request: pb.SealGroupRequest) -> pb.SealGroupResponse:
        return self._seat(request.key).sealed(context.peer_id, request)

    async def _commit(self, context: CallContext, request: pb.CommitGroupRequest) -> pb.AveragingAck:
        self._seat(request.key).feed(Committed(bytes(request.nonce)))
        return pb.AveragingAck()

    async def _release(self, context: CallContext, request: pb.ReleaseGroupRequest) -> pb.AveragingAck:
        self._seat(request.key).released(context.peer_id, request)
        return pb.AveragingAck()

    async def _exchange(self, context: CallContext, stream: ByteStream) -> None:
        first = await stream.receive()
        hello = pb.ExchangeHello()
        try:
            hello.ParseFromString(first or b"")
        except DecodeError as error:
            raise MalformedFrameError("The exchange does not begin with a hello.") from error
        for seat in list(self._seats.values()):
            if seat.takes_part(bytes(hello.nonce)):
                exchange = await seat.exchange(bytes(hello.nonce))
                await exchange.serve(context.peer_id, hello, stream)
                return
        raise NoGroupError("This peer is in no such group.")
