"""Whom a peer knows under an averaging key and in which order it asks them: hints, absences, probation. No I/O."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from swarm.averaging.search import Search
from swarm.identity import PeerId

MAX_NUDGES = 32
"""Peers with higher numbers that one search tells about itself."""
MAX_HEARD = 256
MAX_PULLS = 1024


def priority(key: str, peer: PeerId) -> bytes:
    """A peer's number under a key, uniform and fixed; lower leads."""
    return hashlib.sha256(key.encode() + b"\0" + peer.digest).digest()


class View:
    """What outlives a search. The DHT's hints may be stale or wrong, so what peers say themselves adds to them.

    Args:
        barred: What a peer is on probation for; empty if it is not.
        random_order: Ask lower numbers in random order (pairs mix better) instead of the lowest first.
        partner: With whom this peer pairs among these others; until a search has settled it meets nobody else. None:
            there are no pairs.
    """

    def __init__(
        self,
        key: str,
        me: PeerId,
        rng: random.Random,
        barred: Callable[[PeerId], str],
        random_order: bool = False,
        partner: Callable[[Sequence[PeerId]], PeerId | None] | None = None,
    ) -> None:
        self.barred = barred
        self.hinted: dict[PeerId, None] = {}
        self.cell = ""
        self._key = key
        self._me = me
        self._rng = rng
        self._random_order = random_order
        self._partner = partner
        self._number = priority(key, me)
        self._pull = False
        self._pulls: dict[PeerId, None] = {}
        """Who only sends: it is not called and leads nobody."""
        self._absent: dict[PeerId, None] = {}
        self._waiting: dict[PeerId, tuple[float, float]] = {}

    def order(self, peer: PeerId) -> bytes:
        """By this peers are sorted; the first leads."""
        return priority(self._key, peer)

    def may_lead_us(self, peer: PeerId) -> bool:
        """Whoever only sends comes after all others."""
        return peer not in self._pulls and (self._pull or priority(self._key, peer) < self._number)

    def learn(self, peer: PeerId, pulls: bool) -> None:
        """Whether a peer only sends."""
        self._pulls.pop(peer, None)
        if pulls:
            self._pulls[peer] = None
            if len(self._pulls) > MAX_PULLS:
                del self._pulls[next(iter(self._pulls))]

    def begin(self, search: Search, now: float) -> None:
        """Give a new search what is known from before: nothing, if it is in another cell."""
        self._pull = search.terms.sends_only
        if search.terms.cell != self.cell:
            self.cell = search.terms.cell
            self.hinted, self._absent, search.hinted = {}, {}, False
        search.heard.update(dict.fromkeys(peer for peer, (_, until) in self._waiting.items() if until > now))
        self._waiting.clear()

    def hint(self, peers: Sequence[PeerId], pulls: Sequence[PeerId]) -> bool:
        """Take the DHT's word, which replaces its earlier one; whether it names somebody new."""
        pulling = dict.fromkeys(pulls)
        for peer in peers:
            self.learn(peer, peer in pulling)
        known, self.hinted = self.hinted, {peer: None for peer in peers if peer != self._me}
        return any(peer not in known for peer in self.hinted)

    def heard(self, peer: PeerId, search: Search | None, now: float, enters_in_s: float, for_s: float) -> None:
        """A peer asked or nudged us: it looks for `for_s` at least, for a round that it enters in `enters_in_s`."""
        self._absent.pop(peer, None)
        if search is not None:
            if len(search.heard) < MAX_HEARD:
                search.heard[peer] = None
        elif peer in self._waiting or len(self._waiting) < MAX_HEARD:
            enters_at, until = self._waiting.get(peer, (now, now))
            asked_before = until > now  # and said then when it enters
            self._waiting[peer] = (enters_at if asked_before else now + enters_in_s, now + for_s)

    def others_waiting(self, now: float) -> bool:
        """Whether others look while we do not. Who looks ahead of its round does not wait for us yet."""
        self._waiting = {peer: times for peer, times in self._waiting.items() if times[1] > now}
        return any(enters_at <= now for enters_at, _ in self._waiting.values())

    def missed(self, search: Search) -> None:
        """The window closed: who did not come by then does not hold up the next one."""
        self._absent = {peer: None for peer in self.hinted if peer not in search.followers}

    def expected(self, search: Search) -> list[PeerId]:
        """Everybody who may look now, without those on probation."""
        return [peer for peer in {**self.hinted, **search.heard} if not self.barred(peer)]

    def leaders(self, search: Search) -> bool:
        """Whether anybody may look now and has not failed, with whom we could be in a group."""
        expected = (peer for peer in self.expected(search) if peer not in search.failed)
        return any(not self._pull or peer not in self._pulls for peer in expected)

    def complete(self, search: Search, settled: bool) -> bool:
        """Whether everybody whom we expect follows us, failed, or, once `settled`, stayed away the last time too."""
        known = (search.followers, search.failed, self._absent if settled else {})
        return search.hinted and all(any(peer in group for group in known) for peer in self.expected(search))

    def may_meet(self, search: Search, peer: PeerId, settled: bool) -> bool:
        """Whether this is our partner, or there is none, or it is time to take whoever is free."""
        if self._partner is None or settled:
            return True
        partner = self._partner(self.expected(search)) if search.hinted else None
        return peer == partner or (search.hinted and (partner is None or partner in search.failed))

    def sweep(self, search: Search, settled: bool) -> list[PeerId]:
        """Whom to ask, in order."""
        lower = sorted((p for p in self.expected(search) if self.may_lead_us(p)), key=self.order)
        queue = [peer for peer in lower if peer not in search.failed and self.may_meet(search, peer, settled)]
        if self._random_order:
            self._rng.shuffle(queue)
        return queue

    def nudges(self, search: Search) -> list[PeerId]:
        """Whom to tell that we look: those who could follow us and were not told yet."""
        new = [p for p in self.expected(search) if not self.may_lead_us(p) and p not in self._pulls]
        new = [p for p in new if p not in search.nudged]
        new = [p for p in new if p not in search.followers][: MAX_NUDGES - len(search.nudged)]
        search.nudged.update(dict.fromkeys(new))
        return new

    def prefer(self, search: Search, peer: PeerId) -> None:
        """Ask this peer next, if it may be asked at all."""
        if peer != self._me and self.may_lead_us(peer) and not self.barred(peer):
            search.prefer(peer)
