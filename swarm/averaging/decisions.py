"""The vocabulary of matchmaking: events that a `Matchmaker` takes and instructions that it returns, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from swarm.averaging.bandwidth import Rate
from swarm.averaging.probation import Offence
from swarm.averaging.rounds import Member, Outcome, Seal
from swarm.identity import PeerId


class Verdict(IntEnum):
    """Answers to a request to join. Numbers are those of `JoinGroupResponse.Verdict`."""

    ACCEPTED = 1
    NOT_LOOKING = 2
    REDIRECT = 3
    FULL = 4
    BUSY = 5
    MISMATCH = 6
    WRONG_WAY = 7
    PROBATION = 8


@dataclass(frozen=True, slots=True)
class Timing:
    """Patience of matchmaking, in seconds.

    Attributes:
        window_s: How long a peer looks; it gives up for certain after twice that.
        poll_s: Between two attempts to join somebody.
        settle_s: How long a peer that knows of nobody waits for a hint.
        answer_s: Patience for one answer.
        check_s: A follower asks its leader so often whether it is still there.
    """

    window_s: float = 10.0
    poll_s: float = 0.2
    settle_s: float = 0.5
    answer_s: float = 3.0
    check_s: float = 1.0

    @classmethod
    def within(cls, window_s: float) -> Timing:
        """The patience that suits a window."""
        return cls(
            window_s=window_s,
            poll_s=min(0.25, window_s / 20),
            settle_s=min(0.5, window_s / 5),
            answer_s=min(5.0, window_s / 2),
            check_s=min(1.0, window_s / 8),
        )

    @property
    def patience_when_full_s(self) -> float:
        """For the answer of a better leader, while a whole group waits for us."""
        return min(self.poll_s, self.answer_s)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a peer brings to a round.

    Attributes:
        cell: Only peers with the same cell of the grid meet; empty without a grid.
        sends_only: It reduces nothing and nobody calls it: others cannot reach it, or it is configured so. It leads no
            group; it follows whoever leads, and fetches from there what others are told.
        enters_in_s: It looks ahead of time, and expects to have its values after so long.
        measured: What it measured of others' bandwidth.
    """

    schema_hash: bytes
    weight: float
    numel: int
    min_group: int = 2
    max_group: int = 16
    cell: str = ""
    sends_only: bool = False
    enters_in_s: float = 0.0
    measured: tuple[Rate, ...] = ()
    turn: int = 0
    """Which turn of pairing it knows to be the present one."""


# Events: what happened.
@dataclass(frozen=True, slots=True)
class Begin:
    terms: Terms
    window_s: float = math.inf
    """Look for this time at most, if it is shorter than the configured window."""
    warm: bool = False
    """The hints given before are recent: whom they name is expected, and asked at once."""


@dataclass(frozen=True, slots=True)
class Hinted:
    """All peers that the DHT names for this key at present."""

    peers: tuple[PeerId, ...]
    pulls: tuple[PeerId, ...] = ()
    """Those among them that nobody can call."""


@dataclass(frozen=True, slots=True)
class JoinAsked:
    """A peer asks to be admitted, or tells that it looks. What it says is what its `Terms` are."""

    member: Member
    schema_hash: bytes
    patience_s: float = 0.0
    cell: str = ""


@dataclass(frozen=True, slots=True)
class JoinAnswered:
    peer: PeerId
    verdict: Verdict
    seal_within_s: float = 0.0
    leader: PeerId | None = None
    schema_hash: bytes = b""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AskFailed:
    """The request to join did not reach the peer, or it did not answer."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class SealOffered:
    leader: PeerId
    seal: Seal


@dataclass(frozen=True, slots=True)
class SealSpoilt:
    """A leader offered a seal that cannot be read, or that members did not sign."""

    leader: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class SealAnswered:
    peer: PeerId
    nonce: bytes
    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    """The group exists: its leader says so, or a member began the exchange."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Released:
    peer: PeerId
    redirect: PeerId | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; see `Matchmaker.wake_at`."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The caller's patience ended, or it closes."""

    reason: str


MatchEvent = (
    Begin
    | Hinted
    | JoinAsked
    | JoinAnswered
    | AskFailed
    | SealOffered
    | SealSpoilt
    | SealAnswered
    | Committed
    | Released
    | Tick
    | GiveUp
)


# Instructions: what the shell has to do.
@dataclass(frozen=True, slots=True)
class AskJoin:
    """Ask `peer`; report `JoinAnswered` or `AskFailed`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Nudge:
    """Send `peer` the same request: it may not follow us yet, but learns that we look.

    Report `AskFailed`, and `JoinAnswered` only if the verdict is about us: MISMATCH or PROBATION.
    """

    peer: PeerId


@dataclass(frozen=True, slots=True)
class AnswerJoin:
    verdict: Verdict
    seal_within_s: float = 0.0
    leader: PeerId | None = None
    schema_hash: bytes = b""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OfferSeal:
    """Send the seal to all its members but us; report `SealAnswered` for each."""

    seal: Seal


@dataclass(frozen=True, slots=True)
class AnswerSeal:
    accepted: bool
    reason: str = ""
    offence: Offence | None = None
    """What the leader did, if it is to blame for the refusal."""


@dataclass(frozen=True, slots=True)
class SendCommit:
    seal: Seal


@dataclass(frozen=True, slots=True)
class SendRelease:
    peer: PeerId
    redirect: PeerId | None = None


@dataclass(frozen=True, slots=True)
class Concluded:
    """Matchmaking is over; `seal` is given if and only if the outcome is a group."""

    outcome: Outcome
    seal: Seal | None = None


Instruction = AskJoin | Nudge | AnswerJoin | OfferSeal | AnswerSeal | SendCommit | SendRelease | Concluded
