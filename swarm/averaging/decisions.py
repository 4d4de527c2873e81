"""The vocabulary of matchmaking: events that a `Matchmaker` takes and instructions that it returns, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

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


@dataclass(frozen=True, slots=True)
class Timing:
    """Patience of matchmaking, in seconds.

    Attributes:
        window_s: How long a peer looks; it gives up for certain after twice that.
        poll_s: Between two attempts to join somebody.
        settle_s: How long a peer that knows of nobody waits for a hint.
        answer_s: Patience for one answer.
    """

    window_s: float = 10.0
    poll_s: float = 0.2
    settle_s: float = 0.5
    answer_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a peer brings to a round."""

    schema_hash: bytes
    weight: float
    numel: int
    min_group: int = 2
    max_group: int = 16


# Events: what happened.
@dataclass(frozen=True, slots=True)
class Begin:
    terms: Terms
    window_s: float = math.inf
    """Look for this time at most, if it is shorter than the configured window."""


@dataclass(frozen=True, slots=True)
class Hinted:
    """All peers that the DHT names for this key at present."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class JoinAsked:
    member: Member
    schema_hash: bytes
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JoinAnswered:
    peer: PeerId
    verdict: Verdict
    seal_within_s: float = 0.0
    leader: PeerId | None = None
    schema_hash: bytes = b""


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
    """Send `peer` the same request: it may not follow us yet, but learns that we look. Report only `AskFailed`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class AnswerJoin:
    verdict: Verdict
    seal_within_s: float = 0.0
    leader: PeerId | None = None
    schema_hash: bytes = b""


@dataclass(frozen=True, slots=True)
class OfferSeal:
    """Send the seal to all its members but us; report `SealAnswered` for each."""

    seal: Seal


@dataclass(frozen=True, slots=True)
class AnswerSeal:
    accepted: bool
    reason: str = ""


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
