"""Which peers to avoid after failures, and when to try them again: a circuit breaker without I/O."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.identity import PeerId

MAX_AVOIDED = 4096
"""Peers that the circuit breaker remembers."""
RELAPSE_PAUSES = 4.0
"""A peer that fails again within so many of its last pauses after it recovered is where it was before."""


@dataclass(slots=True)
class _Pause:
    """One avoided peer."""

    failures: int
    until_s: float
    probing: bool = False


class CircuitBreaker:
    """Which peers to avoid. I/O-free: times come in as arguments.

    Args:
        pause_s: The pause after a first failure; it doubles with each further one.
        max_pause_s: The longest pause.
    """

    def __init__(self, pause_s: float, max_pause_s: float) -> None:
        self._pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._avoided: dict[PeerId, _Pause] = {}
        self._recovered: dict[PeerId, tuple[int, float]] = {}

    def failed(self, peer_id: PeerId, now_s: float) -> float | None:
        """Note a failure. Returns the pause if it starts now, None if the peer was being avoided already."""
        known = self._avoided.pop(peer_id, None)
        if known is not None and not known.probing and now_s < known.until_s:
            self._avoided[peer_id] = known  # the failure of a call that was under way when the pause began
            return None
        failures = 1 + (known.failures if known is not None else self._relapse(peer_id, now_s))
        pause_s = self._pause_of(failures)
        self._avoided[peer_id] = _Pause(failures, now_s + pause_s)
        while len(self._avoided) > MAX_AVOIDED:
            del self._avoided[next(iter(self._avoided))]
        return pause_s

    def succeeded(self, peer_id: PeerId, now_s: float) -> bool:
        """Note an answer. True if the peer was being avoided until now.

        A peer that answers trial calls but is too slow for real ones must not be tried at the shortest pause for ever:
        if it fails again soon, its failures count on.
        """
        known = self._avoided.pop(peer_id, None)
        if known is None:
            return False
        self._recovered.pop(peer_id, None)
        self._recovered[peer_id] = (known.failures, now_s + RELAPSE_PAUSES * self._pause_of(known.failures))
        if len(self._recovered) > MAX_AVOIDED:
            del self._recovered[next(iter(self._recovered))]
        return True

    def _relapse(self, peer_id: PeerId, now_s: float) -> int:
        """How many failures a peer that recovered is still known for."""
        failures, until_s = self._recovered.pop(peer_id, (0, 0.0))
        return failures if now_s < until_s else 0

    def _pause_of(self, failures: int) -> float:
        return min(self._max_pause_s, self._pause_s * 2.0 ** min(failures - 1, 32))

    def avoids(self, peer_id: PeerId) -> bool:
        """Whether calls should go elsewhere: from a failure until the next answer."""
        return peer_id in self._avoided

    def take_due(self, now_s: float) -> list[PeerId]:
        """Peers whose pause is over, for one trial call each; its outcome must be reported."""
        due = [peer for peer, pause in self._avoided.items() if not pause.probing and now_s >= pause.until_s]
        for peer in due:
            self._avoided[peer].probing = True
        return due

    def forget(self, peer_id: PeerId) -> None:
        """Stop remembering a peer that holds nothing any more."""
        self._avoided.pop(peer_id, None)
        self._recovered.pop(peer_id, None)
