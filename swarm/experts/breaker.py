"""Which peers to avoid after failures, and when to try them again: a circuit breaker without I/O."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.identity import PeerId

MAX_AVOIDED = 4096
"""Peers that the circuit breaker remembers."""


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

    def failed(self, peer_id: PeerId, now_s: float) -> float | None:
        """Note a failure. Returns the pause if it starts now, None if the peer was being avoided already."""
        known = self._avoided.pop(peer_id, None)
        if known is not None and not known.probing and now_s < known.until_s:
            self._avoided[peer_id] = known  # the failure of a call that was under way when the pause began
            return None
        failures = known.failures + 1 if known is not None else 1
        pause_s = min(self._max_pause_s, self._pause_s * 2.0 ** min(failures - 1, 32))
        self._avoided[peer_id] = _Pause(failures, now_s + pause_s)
        while len(self._avoided) > MAX_AVOIDED:
            del self._avoided[next(iter(self._avoided))]
        return pause_s

    def succeeded(self, peer_id: PeerId) -> bool:
        """Note an answer. True if the peer was being avoided until now."""
        return self._avoided.pop(peer_id, None) is not None

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
