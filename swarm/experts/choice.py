"""Which replica of an expert is asked: by the time that hosts are expected to take, learned from their answers. No I/O.

Two random replicas are compared, and the faster is taken (the power of two choices, Mitzenmacher 2001): the expected
time is a moving average of what is not computing (network, overhead), plus the queue that the host reports, plus the
tokens over its throughput. Where two are about as fast, the host that is asked for something else in the same pass
wins, so that requests for several experts travel together, and then the one that comes first in rendezvous order.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.identity import PeerId

MAX_HOSTS = 4096
CLOSE_FACTOR = 1.25
CLOSE_S = 0.001
"""Expected times within this factor and difference count as equal."""
CONGESTED_S = 0.01
"""A host is congested if others' work keeps requests waiting for longer than this, and for longer than they compute."""
FRESH_S = 10.0
"""A reported queue older than this says nothing."""
_EWMA = 0.2
_TYPICAL_EWMA = 0.05
_PROBE_EWMA = 0.5
_MAX_QUEUE_S = 60.0


@dataclass(slots=True)
class _Host:
    """What is known of one host; `pace_s` is seconds per token by grid, the usual times are moving averages."""

    latency_s: float | None = None
    measured_s: float = 0.0
    queue_s: float = 0.0
    queue_at_s: float = float("-inf")
    usual_queue_s: float = 0.0
    usual_compute_s: float = 0.0
    throughput: float = 0.0
    waiting: int = 0
    pace_s: dict[str, float] | None = None


def _follow(before: float | None, value: float, weight: float) -> float:
    return value if before is None else before + weight * (value - before)


def others_queue_s(queue_s: float, compute_s: float) -> float:
    """The part of a reported wait that work of other callers caused: parts of one request wait for each other."""
    return max(0.0, queue_s - compute_s)


class HostLoads:
    """What each host is expected to take, in bounded memory (the hosts not heard of for longest are forgotten).

    A host that nobody asked yet is taken to be like the typical one.
    """

    def __init__(self) -> None:
        self._hosts: OrderedDict[PeerId, _Host] = OrderedDict()
        self._typical_s: float | None = None
        self._typical_pace_s: dict[str, float] = {}

    def asked(self, peer_id: PeerId, tokens: int) -> None:
        """A request with so many tokens is on its way; `done` tells when it no longer is."""
        self._host(peer_id).waiting += tokens

    def done(self, peer_id: PeerId, tokens: int) -> None:
        """A request was answered, failed or was cancelled."""
        host = self._hosts.get(peer_id)
        if host is not None:
            host.waiting = max(0, host.waiting - tokens)

    def answered(
        self, peer_id: PeerId, grid: str, tokens: int, elapsed_s: float, queue_s: float, compute_s: float, now_s: float
    ) -> None:
        """Learn from an answer.

        Args:
            tokens: How many the request held.
            elapsed_s: How long it took, as we saw it: what the host says of itself only divides this up.
            queue_s, compute_s: What the host reported.
        """
        host = self._host(peer_id)
        compute_s = min(compute_s, elapsed_s)
        waited_s = min(others_queue_s(queue_s, compute_s), elapsed_s - compute_s)
        latency_s = elapsed_s - compute_s - waited_s
        host.latency_s = _follow(host.latency_s, latency_s, _EWMA)
        self._typical_s = _follow(self._typical_s, latency_s, _TYPICAL_EWMA)
        host.measured_s = now_s
        host.queue_s, host.queue_at_s = min(others_queue_s(queue_s, compute_s), _MAX_QUEUE_S), now_s
        host.usual_queue_s = _follow(host.usual_queue_s, host.queue_s, _EWMA)
        host.usual_compute_s = _follow(host.usual_compute_s, compute_s, _EWMA)
        pace_s = compute_s / max(1, tokens)
        if host.pace_s is None:
            host.pace_s = {}
        host.pace_s[grid] = _follow(host.pace_s.get(grid), pace_s, _EWMA)
        self._typical_pace_s[grid] = _follow(self._typical_pace_s.get(grid), pace_s, _TYPICAL_EWMA)

    def waited(self, peer_id: PeerId, waited_s: float, now_s: float) -> None:
        """A host had not answered after `waited_s`: it takes at least that."""
        host = self._host(peer_id)
        host.latency_s = max(host.latency_s or 0.0, waited_s)
        host.measured_s = now_s

    def probed(self, peer_id: PeerId, elapsed_s: float, now_s: float) -> None:
        """A small call of the directory's took so long: a host that was slow may be fast again, or the reverse."""
        host = self._host(peer_id)
        host.latency_s = _follow(host.latency_s, elapsed_s, _PROBE_EWMA)
        host.measured_s = now_s

    def announced(self, peer_id: PeerId, queue_s: float, throughput: float, now_s: float) -> None:
        """A host's record says how long its queue is and how many tokens it computes per second (0: unknown)."""
        host = self._hosts.get(peer_id)
        if host is None:
            if queue_s <= 0 and throughput <= 0:
                return
            host = self._host(peer_id)
        host.throughput = throughput
        if now_s - host.queue_at_s > FRESH_S:  # its own answers are newer
            host.queue_s, host.queue_at_s = min(queue_s, _MAX_QUEUE_S), now_s
            host.usual_queue_s = host.queue_s

    def congested(self, peer_id: PeerId, now_s: float) -> bool:
        """Whether requests usually wait at this host because of other callers' work, rather than compute."""
        host = self._hosts.get(peer_id)
        return (
            host is not None
            and now_s - host.queue_at_s <= FRESH_S
            and host.usual_queue_s > max(CONGESTED_S, host.usual_compute_s)
        )

    def queue_s(self, peer_id: PeerId, now_s: float) -> float:
        """How long the work of other callers was last reported to keep a request waiting."""
        host = self._hosts.get(peer_id)
        return host.queue_s if host is not None and now_s - host.queue_at_s <= FRESH_S else 0.0

    def expected_s(self, peer_id: PeerId, grid: str, tokens: int, now_s: float) -> float:
        """How long a request of so many tokens is expected to take."""
        host = self._hosts.get(peer_id)
        typical_s = self._typical_s or 0.0
        if host is None:
            return typical_s + tokens * self._typical_pace_s.get(grid, 0.0)
        pace_s = None if host.pace_s is None else host.pace_s.get(grid)
        if pace_s is None:
            pace_s = 1.0 / host.throughput if host.throughput > 0 else self._typical_pace_s.get(grid, 0.0)
        latency_s = typical_s if host.latency_s is None else host.latency_s
        # our own requests that it has not answered are ahead of another one, if it has not counted them in its queue
        ahead_s = max(self.queue_s(peer_id, now_s), host.waiting * pace_s)
        return latency_s + ahead_s + tokens * pace_s

    def slow(self, peers: Sequence[PeerId], now_s: float, older_than_s: float) -> list[PeerId]:
        """Those that were found much slower than the typical host, not measured lately: nobody asks them any more."""
        typical_s = self._typical_s or 0.0
        found: list[PeerId] = []
        for peer in peers:
            host = self._hosts.get(peer)
            if (
                host is not None
                and host.latency_s is not None
                and now_s - host.measured_s >= older_than_s
                and not _close(host.latency_s, typical_s)
            ):
                found.append(peer)
        return found

    def _host(self, peer_id: PeerId) -> _Host:
        host = self._hosts.get(peer_id)
        if host is None:
            host = self._hosts[peer_id] = _Host()
            if len(self._hosts) > MAX_HOSTS:
                self._hosts.popitem(last=False)
        else:
            self._hosts.move_to_end(peer_id)
        return host


def _close(slower_s: float, faster_s: float) -> bool:
    return slower_s <= faster_s * CLOSE_FACTOR + CLOSE_S


class Chooser:
    """Assigns the experts of one pass to hosts, one after the other.

    Args:
        loads: What hosts are expected to take.
        rng: Draws the two replicas that are compared.
        now_s: The time.
    """

    def __init__(self, loads: HostLoads, rng: random.Random, now_s: float) -> None:
        self._loads = loads
        self._rng = rng
        self._now_s = now_s
        self._assigned: dict[PeerId, int] = {}

    def choose(self, peers: Sequence[PeerId], grid: str, tokens: int) -> PeerId:
        """The host for an expert with so many tokens; at least one peer, in order of preference."""
        chosen = peers[0] if len(peers) == 1 else self._faster(peers, grid, tokens)
        self._assigned[chosen] = self._assigned.get(chosen, 0) + tokens
        return chosen

    def _faster(self, peers: Sequence[PeerId], grid: str, tokens: int) -> PeerId:
        if len(peers) == 2:
            first, second = peers
        else:
            i, j = sorted(self._rng.sample(range(len(peers)), 2))
            first, second = peers[i], peers[j]
        # what this pass has given a host already comes before
        expected_s, given = self._loads.expected_s, self._assigned
        one_s = expected_s(first, grid, tokens + given.get(first, 0), self._now_s)
        two_s = expected_s(second, grid, tokens + given.get(second, 0), self._now_s)
        if not _close(max(one_s, two_s), min(one_s, two_s)):
            return first if one_s < two_s else second
        return second if second in self._assigned and first not in self._assigned else first
