"""What an averaging round was: its outcome as a value, who took part, what it cost and what went wrong in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from swarm.averaging.bandwidth import Rate
from swarm.events import Event
from swarm.identity import PeerId


@dataclass(frozen=True, slots=True)
class Group:
    """A group was sealed and exchanged its parts. `Round.degraded` says what was missing, if anything."""

    nonce: str = ""
    """Identifies the group (hexadecimal)."""
    contributors: int = 0
    """Members whose values reached this peer's part, itself included."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Nobody else averages under this key at present. Not an error: local values stand."""


@dataclass(frozen=True, slots=True)
class TooFew:
    """Others are known, but no group of `needed` members came together in time. Local values stand."""

    found: int = 1
    needed: int = 2
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Another peer averages other shapes, dtypes or codecs under the same key. Local values stand."""

    peer: str = ""
    ours: str = ""
    """Schema hash of this peer (hexadecimal)."""
    theirs: str = ""


@dataclass(frozen=True, slots=True)
class Pushed:
    """A step of push-sum: shares set out, were taken in, or came back, of which `Round.degraded` tells."""

    sent: int = 0
    """Shares that set out with this step; how they fare shows later."""
    received: int = 0
    """Shares of others that are in the values now."""
    weight: float = 1.0
    """What this peer's values weigh after the step; 1 on average over all peers."""
    under_way: int = 0
    """Shares of earlier steps whose fate is not known yet."""


Outcome = Group | Alone | TooFew | Mismatch | Pushed


@dataclass(frozen=True, slots=True)
class Round:
    """One averaging step as this peer saw it.

    Attributes:
        outcome: What came of it. Only after `Group` and `Pushed` did values change.
        members: Ids of the group's members in the order of their parts; empty without a group.
        bytes_sent, bytes_received: Payload exchanged with other members.
        seconds: From the start of matchmaking to the last chunk.
        exchange_s: The exchange alone, after the group was sealed.
        degraded: One sentence for each thing that was missing. Chunks concerned hold the survivors' mean or local
            values.
        agreed: Ids of the members whose values count, as far as members told what they hold in the end: usually all.
            Who is not among them knows from where to take the group's values.
        others: Ids of the members that said that they hold other values.
        diverged: This member is not among `agreed`: it kept local values somewhere, or was given other averages.
    """

    outcome: Outcome
    members: tuple[str, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    degraded: tuple[str, ...] = ()
    exchange_s: float = 0.0
    agreed: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    diverged: bool = False

    @property
    def majority(self) -> bool:
        """Whether more than half of the whole group hold the same values, by their word."""
        return 2 * len(self.agreed) > len(self.members)

    @property
    def averaged(self) -> bool:
        """Whether values were averaged: in a group, or with shares of others."""
        return isinstance(self.outcome, Group | Pushed)


@dataclass(frozen=True, slots=True)
class RoundFinished(Event):
    """A round ended, with or without a group."""

    key: str
    outcome: str
    members: int
    seconds: float
    bytes_sent: int
    bytes_received: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RoundDegraded(Event):
    """Something was missing in a round that went on without it."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class ResultsDiverged(Event):
    """Members hold different values after a round."""

    key: str
    agreed: tuple[str, ...]
    """Whose values count."""
    others: tuple[str, ...]
    """Who holds others."""


@dataclass(frozen=True, slots=True)
class ShareReclaimed(Event):
    """The receiver of a share was silent for too long; the share came back. If it had taken it and is still alive, the
    share counts twice."""

    key: str
    peer: str
    weight: float


@dataclass(frozen=True, slots=True)
class MassHandedOver(Event):
    """A peer that leaves gave everything it held to another one."""

    key: str
    peer: str
    weight: float


@dataclass(frozen=True, slots=True)
class MassLost(Event):
    """A peer left without anybody to take over what it held, as if it had died: the others' mean moves by that."""

    key: str
    weight: float
    reason: str


@dataclass(slots=True)
class RoundReport:
    """Collects what happens while a round runs; turned into a `Round` at its end."""

    bytes_sent: int = 0
    bytes_received: int = 0
    problems: list[str] = field(default_factory=list)
    contributors: int = 0
    agreed: tuple[PeerId, ...] = ()
    others: tuple[PeerId, ...] = ()

    def note(self, problem: str) -> None:
        """Record a degradation once."""
        if problem not in self.problems:
            self.problems.append(problem)


def describe(outcome: Outcome) -> str:
    """A sentence for people about an outcome that left local values in place; empty for a group."""
    match outcome:
        case Alone():
            return "nobody else averages under this key"
        case TooFew(found, needed, reason):
            return f"{found} of {needed} members found" + (f": {reason}" if reason else "")
        case Mismatch(peer, ours, theirs):
            return f"peer {peer[:8]} averages other tensors: schema {theirs[:16]} there, {ours[:16]} here"
        case _:
            return ""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a group: what it declared of itself, and the part that follows from what all declared.

    Attributes:
        weight: Its weight in the mean, usually a number of samples or steps; 0 contributes nothing. Provisional: what
            counts is the weight that it brings to the exchange, which it may not know yet when the group is sealed.
        part: How many elements of the flat vector it reduces.
        sends_only: It reduces nothing and nobody calls it.
        enters_in_s: It looks ahead of time, and expects to have its values so long after it declared this.
        measured: What it measured of others' bandwidth.
        signed: All this as the member signed it, which others can pass on; see `swarm.averaging.declarations`.
    """

    peer_id: PeerId
    addresses: tuple[str, ...]
    weight: float
    part: int = 0
    sends_only: bool = False
    enters_in_s: float = 0.0
    measured: tuple[Rate, ...] = ()
    signed: bytes = b""


@dataclass(frozen=True, slots=True)
class Seal:
    """A complete group: it exists once every member accepted this.

    Attributes:
        nonce: 16 random bytes that identify the group.
        schema_hash: What the members average; equal for all.
        members: In the order of their parts; the leader is first.
        cell: The cell of the grid in which they met; empty without a grid.
        enter_within_s: A group sealed ahead of time: so long after the seal the last member expects to have its values.
    """

    nonce: bytes
    schema_hash: bytes
    members: tuple[Member, ...]
    cell: str = ""
    enter_within_s: float = 0.0

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal where members hold the same group with the same parts."""
        found = hashlib.blake2b(self.nonce + self.schema_hash + self.cell.encode(), digest_size=16)
        for member in self.members:
            found.update(member.peer_id.digest + member.part.to_bytes(8, "big"))
            found.update(hashlib.blake2b(member.signed, digest_size=16).digest())
        return found.digest()
