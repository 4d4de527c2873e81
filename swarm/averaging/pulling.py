"""A follower that nobody can call asks its leader, again and again, what it would be told, until the search ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from swarm.averaging.board import MatchmakingImpaired
from swarm.averaging.calls import Calls
from swarm.averaging.decisions import AnswerSeal, Committed, MatchEvent, Released, Timing
from swarm.averaging.messages import MAX_REASON_CHARS
from swarm.endpoint import Endpoint
from swarm.errors import MalformedFrameError, SwarmError
from swarm.identity import PeerId
from swarm.pb import averaging_pb2 as pb


class Puller:
    """Asks whom this peer follows.

    Args:
        leader: Whom this peer follows at present.
        feed: Takes what the leader tells.
        sealed: Takes the seals that it offers, and answers them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        calls: Calls,
        timing: Timing,
        leader: Callable[[], PeerId | None],
        feed: Callable[[MatchEvent], object],
        sealed: Callable[[PeerId, pb.SealGroupRequest], Awaitable[AnswerSeal]],
    ) -> None:
        self._endpoint = endpoint
        self._calls = calls
        self._timing = timing
        self._leader = leader
        self._feed = feed
        self._sealed = sealed
        self._asked: PeerId | None = None

    async def follow(self) -> None:
        """Ask the present leader until this peer follows it no more. Does nothing if that is being done already.

        A question that fails is repeated; whether the leader is there at all is for the matchmaker to find out.
        """
        leader = self._leader()
        if leader is None or leader == self._asked:
            return
        self._asked = leader
        request = pb.PollGroupRequest(key=self._calls.key, patience_s=self._timing.answer_s / 2)
        try:
            while self._leader() == leader == self._asked:
                try:
                    reply = await self._calls.poll(leader, request)
                    for message in reply.messages:
                        if message.number > request.seen:
                            request.seen = message.number
                            await self._take(leader, message, request)
                except SwarmError as error:
                    reason = f"{leader.short} was not asked for news: {error.message}"
                    self._endpoint.runtime.emit(MatchmakingImpaired(self._calls.key, reason))
                    await asyncio.sleep(self._timing.poll_s)
        finally:
            if self._asked == leader:
                self._asked = None

    async def _take(self, leader: PeerId, message: pb.GroupMessage, request: pb.PollGroupRequest) -> None:
        match message.WhichOneof("content"):
            case "seal":
                answer = await self._sealed(leader, message.seal)
                request.nonce, request.accepted = message.seal.nonce, answer.accepted
                request.reason = answer.reason[:MAX_REASON_CHARS]
            case "commit":
                self._feed(Committed(message.commit.nonce))
            case "release":
                redirect = PeerId(message.release.redirect) if message.release.redirect else None
                if redirect is not None:
                    self._calls.remember_redirect(redirect, message.release.redirect_addresses)
                self._feed(Released(leader, redirect))
            case _:
                raise MalformedFrameError("A message without content.")
