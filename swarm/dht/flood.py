"""How much DHT work one peer may cause here: signatures to check and entries to find count, not calls alone."""

from __future__ import annotations

from collections import OrderedDict

from swarm.clock import Clock
from swarm.errors import RateLimitedError
from swarm.identity import PeerId
from swarm.net.sessions import RateLimit

MAX_PEERS = 4096
"""Peers whose rate is remembered; the least recently active is forgotten."""
BURST_S = 20.0
"""So many seconds' worth of work may come at once: an author's bulk of records, or a hand-over."""
TELL_S = 10.0
"""A peer that floods is told of at most once in this time."""


class FloodGuard:
    """A token bucket of work for each peer id, over all its sessions.

    Args:
        per_s: Units of work a second.
        clock: The peer's clock.
    """

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._per_s = per_s
        self._clock = clock
        self._rates: OrderedDict[PeerId, RateLimit] = OrderedDict()
        self._told_s: OrderedDict[PeerId, float] = OrderedDict()
        self.refused = 0
        """Calls refused so far."""

    def take(self, peer_id: PeerId, cost: float) -> None:
        """Account for the work that a call asks for. Raises `RateLimitedError`, counted."""
        rate = self._rates.get(peer_id)
        if rate is None:
            rate = self._rates[peer_id] = RateLimit(self._per_s, self._clock, BURST_S * self._per_s)
            if len(self._rates) > MAX_PEERS:
                self._rates.popitem(last=False)
        else:
            self._rates.move_to_end(peer_id)
        try:
            rate.take(cost)
        except RateLimitedError as error:
            self.refused += 1
            raise RateLimitedError(
                f"More DHT work than {self._per_s:g} units a second.",
                fix="Retry after a pause, or raise dht.max_work_per_s there.",
            ) from error

    def may_tell(self, peer_id: PeerId) -> bool:
        """Whether it is time to tell of a peer that was refused; if so, it has been told now."""
        now_s, told_s = self._clock.time(), self._told_s.get(peer_id)
        if told_s is not None and now_s - told_s < TELL_S:
            return False
        self._told_s[peer_id] = now_s
        self._told_s.move_to_end(peer_id)
        if len(self._told_s) > MAX_PEERS:
            self._told_s.popitem(last=False)
        return True
