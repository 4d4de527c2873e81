"""Tells a second process that runs under our identity from our own past. No I/O, no clock.

Every process signs its records with an incarnation of its own. A record by our key with another incarnation is usually
a leftover of our former self, whose disk or memory is gone: we write above it and that is all. It is a second process
if it was signed after we wrote ours. Versions alone do not show that (clocks differ, and our former self may have been
ahead), but lifetimes do, without comparing clocks: what is left of a lifetime only ever falls, so that a record is at
most as old as the part of its lifetime that is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.dht.records import Copy

COOLDOWN_S = 300.0
"""A second process is told of at most this often; so long we do not write above what it has written."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The first statement that this process made about an entry."""

    record_version: int
    at_s: float


class Incarnations:
    """What this process concludes from records by its own key.

    Args:
        own: Our incarnation.
        transit_s: A record may have been under way for this long without its lifetime falling.
    """

    def __init__(self, own: bytes, transit_s: float) -> None:
        self._own = own
        self._transit_s = transit_s
        self._quiet_until_s = 0.0

    def is_foreign(self, copy: Copy) -> bool:
        """Whether another process than this one has signed a record of ours."""
        return copy.record.incarnation != self._own

    def is_rival(self, copy: Copy, first: Claimed | None, now_s: float) -> bool:
        """Whether a record of ours proves that another process is publishing now.

        Args:
            copy: By our key; the remaining lifetime is what its holder told.
            first: Our own first statement about the entry; none if we made none, which proves nothing.
            now_s: The present.
        """
        if first is None or not self.is_foreign(copy) or copy.record.record_version <= first.record_version:
            return False
        oldest_s = copy.record.ttl_ms / 1000 - copy.remaining_s(now_s) + self._transit_s
        return oldest_s < now_s - first.at_s

    def may_tell(self, now_s: float) -> bool:
        """Whether it is time to tell of a rival (again)."""
        if now_s < self._quiet_until_s:
            return False
        self._quiet_until_s = now_s + COOLDOWN_S
        return True
