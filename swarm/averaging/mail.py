"""Messages for followers that nobody can call: their leader keeps them until they ask, which they do all the time.

A follower's question is answered when there is something for it, or after a while. Messages are numbered and given
again until a question says that they arrived; its answer to a seal comes with its next question.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.averaging.shared import Signal
from swarm.identity import PeerId
from swarm.pb import averaging_pb2 as pb

MAX_BOXES = 256
MAX_MAIL = 8
"""Messages kept for one peer; the oldest go first."""


@dataclass(slots=True)
class _Box:
    mail: list[tuple[float, pb.GroupMessage]] = field(default_factory=list)
    """What it was not told yet, and until when that means anything."""
    news: Signal = field(default_factory=Signal)
    seals: dict[bytes, asyncio.Future[tuple[bool, str]]] = field(default_factory=dict)
    """Seals whose answer is awaited, by nonce."""


class Mailboxes:
    """One box for each follower that nobody can call.

    Args:
        now: The clock.
        kept_s: A message that was not fetched by then means nothing any more.
    """

    def __init__(self, now: Callable[[], float], kept_s: float) -> None:
        self._now = now
        self._kept_s = kept_s
        self._boxes: dict[PeerId, _Box] = {}
        self._numbers = itertools.count(1)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._boxes

    def open(self, peer: PeerId, pulls: bool, anew: bool) -> None:
        """A peer asks to be admitted: it has a box if and only if nobody can call it.

        Args:
            anew: It did not follow us. Then nothing that was left before is meant for it any more: a seal of an
                earlier round would look like one of this.
        """
        box = self._boxes.pop(peer, None) or _Box()
        if pulls:
            if anew:
                box.mail.clear()
            self._boxes[peer] = box
            while len(self._boxes) > MAX_BOXES:
                del self._boxes[next(iter(self._boxes))]

    def put(self, peer: PeerId, message: pb.GroupMessage) -> None:
        """Leave a message."""
        box = self._boxes[peer]
        message.number = next(self._numbers)
        box.mail = [*box.mail, (self._now() + self._kept_s, message)][-MAX_MAIL:]
        box.news.fire()

    async def offer(self, peer: PeerId, seal: pb.SealGroupRequest, patience_s: float) -> tuple[bool, str]:
        """Leave a seal and wait for its answer: whether it was accepted, and why not."""
        box = self._boxes[peer]
        answer: asyncio.Future[tuple[bool, str]] = asyncio.get_running_loop().create_future()
        box.seals[seal.nonce] = answer
        self.put(peer, pb.GroupMessage(seal=seal))
        try:
            async with asyncio.timeout(patience_s):
                return await answer
        except TimeoutError:
            return False, "it did not fetch the seal and answer it in time"
        finally:
            box.seals.pop(seal.nonce, None)

    async def collect(self, peer: PeerId, request: pb.PollGroupRequest, patience_s: float) -> list[pb.GroupMessage]:
        """Take a peer's answer to a seal, and what it has seen; what there is for it, as soon as there is something."""
        box = self._boxes[peer]
        answer = box.seals.get(request.nonce)
        if answer is not None and not answer.done():
            answer.set_result((request.accepted, request.reason))
        box.mail = [(until, m) for until, m in box.mail if m.number > request.seen]
        if not box.mail:
            try:
                async with asyncio.timeout(patience_s):
                    await box.news.wait()
            except TimeoutError:
                return []
        box.mail = [(until, m) for until, m in box.mail if until > self._now()]
        return [message for _, message in box.mail]
