"""When a second replica is asked because the first takes long: rarely, and never when hosts are loaded. No I/O.

Hedged requests cut the tail of latencies that one host causes (Dean & Barroso, "The tail at scale", 2013). Without a
budget they are load themselves: at load 0.9 they raised the 99th percentile tenfold in simulation. So a token bucket is
filled by a fraction of the requests made, and hosts that report queues or refuse work are left alone.

The first half of the bucket may be spent once a request has taken longer than 95 % of those before it. The other half
is kept for requests that stall outright, so that the ordinary tail never uses up what a frozen host will need.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.identity import PeerId

FRACTION = 0.02
BURST = 8.0
LATE_FACTOR = 1.2
"""A request is late when it takes this many times the 95th percentile: without a margin, a host whose answers all take
the same time would be hedged at random."""
STALLED_FACTOR = 4.0
"""A request stalls when it takes this many times the 95th percentile."""
MIN_DELAY_S = 0.005
"""Nothing is hedged sooner: a busy process of our own is late by as much."""
BUSY_QUIET_S = 5.0
MAX_BUSY = 1024


@dataclass(frozen=True, slots=True)
class Hedge:
    """Ask another replica now."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide again in `seconds`, if no answer came."""

    seconds: float


class Hedging:
    """The budget, and the hosts that must not be hedged.

    Args:
        fraction: Hedges allowed per request in the long run; 0 turns hedging off.
        burst: How many may be saved up; as many are there at the start.

    Attributes:
        requests: Requests made, without hedges.
        hedges: Hedges made.
        wins: Hedges that answered first.
    """

    def __init__(self, fraction: float = FRACTION, burst: float = BURST) -> None:
        self._fraction = fraction
        self._burst = burst if fraction > 0 else 0.0
        self._tokens = self._burst
        self._busy: OrderedDict[PeerId, float] = OrderedDict()
        self.requests = 0
        self.hedges = 0
        self.wins = 0

    def requested(self) -> None:
        """A request was made."""
        self.requests += 1
        self._tokens = min(self._burst, self._tokens + self._fraction)

    def refused(self, peer_id: PeerId, now_s: float) -> None:
        """A host had no room for a request."""
        self._busy[peer_id] = now_s + BUSY_QUIET_S
        self._busy.move_to_end(peer_id)
        if len(self._busy) > MAX_BUSY:
            self._busy.popitem(last=False)

    def refusing(self, peers: Sequence[PeerId], now_s: float) -> bool:
        """Whether any of these hosts refused work lately."""
        return any(self._busy.get(peer, now_s) > now_s for peer in peers)

    def first_look_s(self, p95_s: float) -> float:
        """How long to wait for an answer before `decide` is asked."""
        return max(LATE_FACTOR * p95_s, MIN_DELAY_S)

    def decide(self, waited_s: float, p95_s: float) -> Hedge | Wait | None:
        """What to do about a request that has waited so long; None: nothing, however long it takes.

        Args:
            p95_s: 95th percentile of such requests to this host so far.
        """
        if self._tokens < 1.0:
            return None
        late = self._tokens >= 1.0 + self._burst / 2
        due_s = self.first_look_s(p95_s) if late else max(STALLED_FACTOR * p95_s, MIN_DELAY_S)
        return Hedge() if waited_s >= due_s - 1e-6 else Wait(due_s - waited_s)

    def spend(self) -> bool:
        """Take the right to one hedge, if there is one left."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        self.hedges += 1
        return True

    def won(self) -> None:
        """A hedge answered first."""
        self.wins += 1
