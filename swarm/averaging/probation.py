"""Peers that spoiled rounds are left out of new ones for a while: which, what for and for how long, without I/O.

One offence may be an accident, so the first term is short; each further one doubles it, up to a cap, and good conduct
halves what is held against a peer with time. Every peer judges only by what it saw itself: nobody can have another one
excluded by saying so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from swarm.events import Event
from swarm.identity import PeerId

KEPT_PEERS = 1024


class Offence(Enum):
    """What a peer did to a round; the value is told to people."""

    NON_FINITE = "sent values that are not finite"
    MALFORMED = "sent what the protocol does not allow"
    DIVERGED = "ended a round with other results than its group"
    LIED = "gave a false average or verdict"
    DISPUTED = "may have given a false average, verdict, values or seal"
    FORGED = "sealed a group with what its members did not say"
    OUTDATED = "sealed a group with what a member said for another round"
    STALLED = "stalled in several rounds"


_GRAVITY = {Offence.STALLED: 0.4, Offence.DISPUTED: 0.3, Offence.OUTDATED: 0.4}
"""How much of an offence one report is. A stall is usually the network's fault, so only the third in a row counts.
Where one of several lied and nobody knows who, it is the one that is suspected again and again. A leader may seal what
a member said shortly before, if messages overtake each other."""


@dataclass(frozen=True, slots=True)
class PeerOnProbation(Event):
    """A peer spoiled rounds and is left out of new ones for a while."""

    peer: str
    reason: str
    for_s: float
    offences: int


@dataclass(frozen=True, slots=True)
class ProbationPolicy:
    """How strict to be.

    Attributes:
        first_s: Term for the first offence; the next ones are twice as long each.
        longest_s: No term is longer.
        half_life_s: In this time without an offence half of what is held against a peer is forgotten.
    """

    first_s: float = 30.0
    longest_s: float = 3600.0
    half_life_s: float = 1800.0


@dataclass(slots=True)
class _Case:
    held: float
    """Offences held against the peer, decayed up to `at`."""
    at: float
    until: float
    reason: str


class Probation:
    """Who is left out at present. `now` is the peer's own clock and never falls."""

    def __init__(self, policy: ProbationPolicy | None = None) -> None:
        self._policy = policy or ProbationPolicy()
        self._cases: dict[PeerId, _Case] = {}

    def report(self, peer: PeerId, offence: Offence, now: float, detail: str = "") -> PeerOnProbation | None:
        """Count an offence that this peer saw itself; the event to emit if a term begins or grows."""
        case = self._cases.pop(peer, None) or _Case(0.0, now, now, "")
        case.held = self._decayed(case, now) + _GRAVITY.get(offence, 1.0)
        case.at, case.reason = now, f"{offence.value}: {detail}" if detail else offence.value
        self._cases[peer] = case
        while len(self._cases) > KEPT_PEERS:
            del self._cases[next(iter(self._cases))]
        if case.held < 1.0:
            return None
        # The exponent is bounded before it is used: a float's range ends, and the cap is reached long before.
        term = min(self._policy.first_s * 2.0 ** min(case.held - 1.0, 64.0), self._policy.longest_s)
        case.until = max(case.until, now + term)
        return PeerOnProbation(str(peer), case.reason, case.until - now, round(case.held))

    def reason(self, peer: PeerId, now: float) -> str:
        """What a peer is left out for; empty if it is not."""
        case = self._cases.get(peer)
        return case.reason if case is not None and now < case.until else ""

    def remaining_s(self, peer: PeerId, now: float) -> float:
        """How long a peer is still left out; 0 if it is not."""
        case = self._cases.get(peer)
        return max(0.0, case.until - now) if case is not None else 0.0

    def current(self, now: float) -> dict[PeerId, str]:
        """Everybody who is left out, with the reason."""
        return {peer: case.reason for peer, case in self._cases.items() if now < case.until}

    def _decayed(self, case: _Case, now: float) -> float:
        return float(case.held * 0.5 ** ((now - case.at) / self._policy.half_life_s))
