"""Matchmaking's calls to other peers: what a matchmaker's instructions become on the network, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from swarm.averaging.board import MatchmakingImpaired
from swarm.averaging.decisions import AskFailed, JoinAnswered, SealAnswered
from swarm.averaging.declarations import MAX_ADDRESSES, checked_addresses
from swarm.averaging.mail import Mailboxes
from swarm.averaging.messages import MAX_REASON_CHARS, join_request, read_join_response, seal_request
from swarm.averaging.rounds import Member, Seal
from swarm.averaging.seals import MAX_GROUP
from swarm.endpoint import Endpoint
from swarm.errors import SwarmError
from swarm.identity import PeerId
from swarm.net.transport import Contact, UnaryMethod
from swarm.pb import averaging_pb2 as pb
from swarm.roles import Role

_ROLES = frozenset({Role.TRAINER, Role.HOST})
JOIN = UnaryMethod("/swarm.pb.Averaging/Join", pb.JoinGroupRequest, pb.JoinGroupResponse, _ROLES)
SEAL = UnaryMethod("/swarm.pb.Averaging/Seal", pb.SealGroupRequest, pb.SealGroupResponse, _ROLES)
COMMIT = UnaryMethod("/swarm.pb.Averaging/Commit", pb.CommitGroupRequest, pb.AveragingAck, _ROLES)
POLL = UnaryMethod("/swarm.pb.Averaging/Poll", pb.PollGroupRequest, pb.PollGroupResponse, _ROLES)
RELEASE = UnaryMethod("/swarm.pb.Averaging/Release", pb.ReleaseGroupRequest, pb.AveragingAck, _ROLES)

KEPT_CONTACTS = 16 * MAX_GROUP


class Calls:
    """Calls under one averaging key, and how to reach those it may call; those it may not have a mailbox.

    Args:
        patience_s: Of every call, for its answer.
        on_turn: Told in which turn of pairing others are.
    """

    def __init__(
        self, endpoint: Endpoint, key: str, patience_s: float, on_turn: Callable[[int], None] = lambda _: None
    ) -> None:
        self.key = key
        self._endpoint = endpoint
        self._patience_s = patience_s
        self._contacts: dict[PeerId, Contact] = {}
        self._on_turn = on_turn
        self.mail = Mailboxes(endpoint.runtime.clock.time, 2 * patience_s)

    def remember(self, contact: Contact) -> None:
        """Know how to reach a peer; the latest word counts."""
        self._contacts.pop(contact.peer_id, None)
        self._contacts[contact.peer_id] = contact
        while len(self._contacts) > KEPT_CONTACTS:
            del self._contacts[next(iter(self._contacts))]

    def remember_redirect(self, peer: PeerId, addresses: Any) -> None:
        """Another's word on how to reach a peer: counts only where nothing better is known."""
        if peer not in self._contacts:
            self.remember(Contact(peer, checked_addresses(addresses)))

    def contact(self, peer: PeerId | None) -> Contact | None:
        return self._contacts.get(peer) if peer is not None else None

    async def join(self, peer: PeerId, me: Member, looks_for_s: float, turn: int) -> JoinAnswered | AskFailed:
        """Ask to be admitted, as what we declared to be."""
        contact = self._contacts.get(peer)
        if contact is None:
            return AskFailed(peer, "no address is known")
        request = join_request(self.key, me, looks_for_s, turn)
        try:
            reply = await self._endpoint.transport.call(contact, JOIN, request, timeout_s=self._patience_s)
            answer = read_join_response(peer, reply)
            self._on_turn(reply.turn)
            if answer.leader is not None:
                self.remember_redirect(answer.leader, reply.leader_addresses)
        except SwarmError as error:
            return AskFailed(peer, error.message)
        return answer

    async def offer(self, contact: Contact, seal: Seal) -> SealAnswered:
        """Ask a member to accept the seal."""
        request = seal_request(self.key, seal)
        if contact.peer_id in self.mail:
            accepted, reason = await self.mail.offer(contact.peer_id, request, self._patience_s)
            return SealAnswered(contact.peer_id, seal.nonce, accepted, reason[:MAX_REASON_CHARS])
        try:
            reply = await self._endpoint.transport.call(contact, SEAL, request, timeout_s=self._patience_s)
        except SwarmError as error:
            return SealAnswered(contact.peer_id, seal.nonce, False, error.message)
        return SealAnswered(contact.peer_id, seal.nonce, reply.accepted, reply.reason[:MAX_REASON_CHARS])

    async def commit(self, seal: Seal) -> None:
        """Tell the other members that the group exists."""
        request = pb.CommitGroupRequest(key=self.key, nonce=seal.nonce)
        async with asyncio.TaskGroup() as group:
            for member in seal.members:
                if member.peer_id in self.mail:
                    self.mail.put(member.peer_id, pb.GroupMessage(commit=request))
                elif member.peer_id != self._endpoint.peer_id:
                    group.create_task(self._tell(Contact(member.peer_id, member.addresses), COMMIT, request))

    async def release(self, peer: PeerId, redirect: PeerId | None) -> None:
        """Tell a peer that our agreement is off, and whom to ask instead."""
        contact, other = self._contacts.get(peer), self.contact(redirect)
        request = pb.ReleaseGroupRequest(key=self.key)
        if other is not None:
            request.redirect = other.peer_id.digest
            request.redirect_addresses.extend(other.addresses[:MAX_ADDRESSES])
        if peer in self.mail:
            self.mail.put(peer, pb.GroupMessage(release=request))
        elif contact is not None:
            await self._tell(contact, RELEASE, request)

    async def poll(self, leader: PeerId, request: pb.PollGroupRequest) -> pb.PollGroupResponse:
        """Ask a leader what it has for a peer that it cannot call. Raises what `Transport.call` raises."""
        contact = self._contacts.get(leader) or Contact(leader, ())
        return await self._endpoint.transport.call(contact, POLL, request, timeout_s=self._patience_s)

    async def _tell(self, contact: Contact, method: UnaryMethod[Any, Any], request: Any) -> None:
        try:
            await self._endpoint.transport.call(contact, method, request, timeout_s=self._patience_s)
        except SwarmError as error:
            # The other side has its own deadlines; nothing depends on this message arriving.
            reason = f"{contact.peer_id.short} was not told: {error.message}"
            self._endpoint.runtime.emit(MatchmakingImpaired(self.key, reason))
