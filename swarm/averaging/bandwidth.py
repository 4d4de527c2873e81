"""Which member reduces how much: in proportion to the bandwidth that *other* members measured, without I/O.

A peer that boasts about its own link cannot take the vector: nobody's word about itself counts, the median of several
others' does, and no share exceeds 2 / n.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from swarm.identity import PeerId
from swarm.tensors.partition import bandwidth_shares, split

Direction = Literal["up", "down"]
"""Of the observed peer: `up` if it sent to us, `down` if we sent to it."""

KEPT_PEERS = 256
REPORTED_PEERS = 32
"""Peers whose rates travel in one request to join, and with the seal to all members."""
SMOOTHING = 0.3
"""Weight of the newest sample in the moving average."""
LEAST_BYTES = 64 * 1024
"""Smaller transfers measure the latency, not the bandwidth."""
NEARLY_EQUAL = 1.5
"""Bandwidths within this ratio get equal parts: measurements of one link differ by as much."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What one peer measured of another, in bytes per second; 0 = not measured."""

    peer: PeerId
    up: float = 0.0
    down: float = 0.0


class Bandwidths:
    """Moving averages of the rates at which this peer exchanged bytes with others. Bounded; the latest stay."""

    def __init__(self) -> None:
        self._rates: dict[PeerId, Rate] = {}

    def observe(self, peer: PeerId, nbytes: int, seconds: float, direction: Direction) -> None:
        """Count a transfer of `nbytes` that took `seconds` of sending or receiving (not of waiting for others)."""
        if nbytes < LEAST_BYTES or seconds <= 0:
            return
        sample = nbytes / seconds
        known = self._rates.pop(peer, None) or Rate(peer)
        before = known.up if direction == "up" else known.down
        after = sample if before == 0.0 else before + SMOOTHING * (sample - before)
        self._rates[peer] = Rate(peer, after, known.down) if direction == "up" else Rate(peer, known.up, after)
        while len(self._rates) > KEPT_PEERS:
            del self._rates[next(iter(self._rates))]

    def measured(self, limit: int = REPORTED_PEERS) -> tuple[Rate, ...]:
        """The rates last updated, newest first."""
        return tuple(list(reversed(self._rates.values()))[:limit])


def consensus(members: Sequence[PeerId], reports: Mapping[PeerId, Iterable[Rate]]) -> list[float]:
    """Each member's bandwidth, min(up, down), as the median of what the other members measured; 0 = unknown."""
    named = dict.fromkeys(members)
    up: dict[PeerId, list[float]] = {peer: [] for peer in named}
    down: dict[PeerId, list[float]] = {peer: [] for peer in named}
    for reporter, rates in reports.items():
        if reporter not in named:
            continue
        latest = {rate.peer: rate for rate in rates if rate.peer in named and rate.peer != reporter}
        for peer, rate in latest.items():
            if 0 < rate.up < math.inf:
                up[peer].append(rate.up)
            if 0 < rate.down < math.inf:
                down[peer].append(rate.down)
    return [
        min((statistics.median(found) for found in (up[peer], down[peer]) if found), default=0.0) for peer in members
    ]


def parts(numel: int, bandwidths: Sequence[float], reduces: Sequence[bool]) -> list[int] | None:
    """Elements that each member reduces.

    Args:
        numel: Length of the flat vector.
        bandwidths: Of each member, 0 = unknown; then it counts as the median of the known ones.
        reduces: Whether a member may be a reducer at all; one that cannot be reached gets no part.

    Returns:
        As many sizes as members, which sum to `numel`; equal ones where nothing was measured or all are nearly equal.
        None if nobody may reduce.
    """
    if not any(reduces):
        return None
    known = [b for b, may in zip(bandwidths, reduces, strict=True) if may and b > 0]
    shares = [1.0 if may else 0.0 for may in reduces]
    if known and max(known) > NEARLY_EQUAL * min(known):
        usual = statistics.median(known)
        shares = bandwidth_shares([(b or usual) if may else 0.0 for b, may in zip(bandwidths, reduces, strict=True)])
    return [len(part) for part in split(numel, shares)]
