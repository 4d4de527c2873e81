"""One search for a group as a value: who follows, who failed and why, whose seal is out, and what it ends in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from swarm.averaging.decisions import JoinAsked, Terms, Timing
from swarm.averaging.rounds import Alone, Mismatch, Outcome, Seal, TooFew
from swarm.identity import PeerId

WRONG_WAY = "disagrees about who leads"
NO_REDUCER = "all who are known only send, so that nobody would reduce"


class Phase(Enum):
    IDLE = "idle"
    LOOKING = "looking"
    """Asking lower numbers, accepting higher ones."""
    FOLLOWING = "following"
    """A leader accepted us; its seal is to come."""
    PLEDGED = "pledged"
    """We accepted a seal; the leader's commit is to come."""
    SEALING = "sealing"
    """Our seal is out; answers are to come."""


@dataclass(frozen=True, slots=True)
class Follower:
    """A peer that we accepted, as it asked, and when."""

    asked: JoinAsked
    at: float


@dataclass(slots=True)
class Search:
    """What belongs to one attempt to find a group."""

    terms: Terms
    begun_at: float
    closes_at: float
    gives_up_at: float
    next_poll_at: float
    hinted: bool = False
    """Whether hints arrived during this search or just before: only then do we know whom to expect."""
    heard: dict[PeerId, None] = field(default_factory=dict)
    """Peers that said themselves that they look, whether or not the DHT names them."""
    queue: list[PeerId] = field(default_factory=list)
    nudged: dict[PeerId, None] = field(default_factory=dict)
    asking: PeerId | None = None
    asked_at: float = 0.0
    followers: dict[PeerId, Follower] = field(default_factory=dict)
    failed: dict[PeerId, str] = field(default_factory=dict)
    mismatch: Mismatch | None = None
    leader: PeerId | None = None
    until: float = math.inf
    """When we stop waiting for the leader (FOLLOWING, PLEDGED) or for answers to our seal (SEALING)."""
    check_at: float = math.inf
    """When we ask the leader again whether it is there (FOLLOWING)."""
    doubts: int = 0
    """Such questions in a row that failed."""
    seal: Seal | None = None
    unanswered: dict[PeerId, None] = field(default_factory=dict)
    lost: str = ""

    @property
    def size(self) -> int:
        """Members that a group would have now."""
        return len(self.followers) + 1

    @property
    def full(self) -> bool:
        return self.size >= self.terms.max_group

    @property
    def sealable(self) -> bool:
        """Whether those who are here can be a group that we lead."""
        return self.size >= self.terms.min_group and not self.terms.sends_only

    def settled(self, now: float, timing: Timing) -> bool:
        """Whether everybody who looks had time to tell us."""
        return now >= self.begun_at + timing.settle_s

    def wake_at(self, phase: Phase, timing: Timing) -> float:
        """When time alone changes something."""
        if phase is Phase.FOLLOWING:
            return min(self.until, self.check_at if self.asking is None else self.asked_at + timing.answer_s)
        if phase is not Phase.LOOKING:
            return self.until
        if self.asking is None:
            return min(self.closes_at, self.next_poll_at)
        patience_s = timing.patience_when_full_s if self.full and self.sealable else timing.answer_s
        return min(self.closes_at, self.asked_at + patience_s)

    def follow(self, leader: PeerId) -> list[PeerId]:
        """Take a leader; those who followed us are returned, and to be released."""
        released = list(self.followers)
        self.followers.clear()
        self.leader, self.asking, self.doubts = leader, None, 0
        return released

    def unfollow(self, now: float, reason: str, patience_s: float) -> None:
        """Look again. Time spent on a leader that went must not leave us without a chance, within the budget."""
        self.lost, self.leader, self.seal, self.asking = reason, None, None, None
        self.until = self.check_at = math.inf
        self.closes_at = min(max(self.closes_at, now + patience_s), self.gives_up_at)
        self.queue.clear()
        self.next_poll_at = now

    def prefer(self, peer: PeerId) -> None:
        """Ask this peer next, unless it failed."""
        if peer not in self.failed and peer not in self.queue[:1]:
            self.queue = [peer, *(p for p in self.queue if p != peer)]

    def other_schema(self, peer: PeerId, theirs: bytes) -> None:
        self.mismatch = Mismatch(str(peer), self.terms.schema_hash.hex(), theirs.hex())
        self.failed[peer] = "other schema"
        self.followers.pop(peer, None)

    def outcome(self, knows_others: bool, knows_leaders: bool) -> Outcome:
        """What the search ends in without a group.

        Args:
            knows_leaders: Some of the others would reduce, and could lead us.
        """
        if self.mismatch is not None:
            return self.mismatch
        if not knows_others and not self.followers and not self.lost:
            return Alone()
        reason = self.lost or "; ".join(f"{p.short}: {r}" for p, r in list(self.failed.items())[:4])
        if self.terms.sends_only and not knows_leaders and not self.lost:
            reason = NO_REDUCER
        return TooFew(self.size, self.terms.min_group, reason or "others were not looking")
