"""How much of a crawl may be under way at a time: many keys at once must not make everybody slow. No I/O, no clock."""

from __future__ import annotations

from swarm.dht.crawl import Ask

MAX_REQUESTS = 64
"""Requests under way at a time."""
CALM_REQUESTS = 16
"""While more are under way, a peer that has not answered yet is asked nothing further until a request to it is full."""
FIRST_POSITIONS = 512
"""Positions under way in the beginning."""
LEAST_POSITIONS = 256
MOST_POSITIONS = 4096
QUICK = 0.5
"""An answer within this part of the patience says that there is room for as many positions more."""
SLOW_COSTS = 2
"""A peer that is slow says that there were so many times the positions of its request too many."""


class Pace:
    """The requests of one crawl that are under way. Room grows by what is answered quickly and falls by what is not.

    Args:
        patience_s: After this time a peer is slow.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._sent_s: dict[Ask, float] = {}
        self._bound = FIRST_POSITIONS
        self._positions = 0

    @property
    def requests(self) -> int:
        """How many more may be sent now."""
        return MAX_REQUESTS - len(self._sent_s)

    @property
    def positions(self) -> int:
        """Of how many positions."""
        return self._bound - self._positions

    @property
    def busy(self) -> dict[bytes, None]:
        """Ids of peers that are to be asked only what fills a request."""
        return {ask.node.id: None for ask in self._sent_s} if len(self._sent_s) > CALM_REQUESTS else {}

    @property
    def oldest(self) -> tuple[Ask, float] | None:
        """The request that has been under way for longest, and when its peer will count as slow."""
        for ask, sent_s in self._sent_s.items():
            return ask, sent_s + self._patience_s
        return None

    def sent(self, ask: Ask, now_s: float) -> None:
        self._sent_s[ask] = now_s
        self._positions += len(ask.lookups)

    def ended(self, ask: Ask, now_s: float) -> None:
        """It was answered, or failed; perhaps after its peer was slow."""
        sent_s = self._sent_s.pop(ask, None)
        if sent_s is None:
            return
        self._positions -= len(ask.lookups)
        if now_s - sent_s < QUICK * self._patience_s:
            self._bound = min(MOST_POSITIONS, self._bound + len(ask.lookups))

    def slow(self, ask: Ask) -> None:
        """The peer has not answered for long."""
        del self._sent_s[ask]
        self._positions -= len(ask.lookups)
        self._bound = max(LEAST_POSITIONS, self._bound - SLOW_COSTS * len(ask.lookups))
