"""Events that the DHT emits."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.events import Event


@dataclass(frozen=True, slots=True)
class RecordRefused(Event):
    """A record that a peer sent, or that a peer would not take from us, was refused."""

    reason: str
    sender: str
    """Id of the peer on the other side; empty where a whole read knew nothing newer than what we had seen."""


@dataclass(frozen=True, slots=True)
class RecordEvicted(Event):
    """A record that this peer held for another gave way to a newer one, because a bound of the storage was reached."""

    key: str
    author: str
    reason: str


@dataclass(frozen=True, slots=True)
class DuplicateIdentity(Event):
    """Another process publishes under our identity, now: each replaces what the other says."""

    key: str
    """Of a record that it has written after we wrote ours."""
    reason: str
    fix: str


@dataclass(frozen=True, slots=True)
class ContactDropped(Event):
    """A peer left the routing table because it could not be reached or does not behave."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerThrottled(Event):
    """A peer asked for more DHT work than one may; its calls are refused until it slows down."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class UnderReplicated(Event):
    """A record is held by fewer peers than wanted."""

    key: str
    accepted: int
    reason: str


@dataclass(frozen=True, slots=True)
class RenewalFailed(Event):
    """Nobody took the renewal of a record of ours. It is tried again soon; without success the record ends."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejoined(Event):
    """The routing table had run empty and was filled again from remembered peers."""

    peers: int
    reason: str


@dataclass(frozen=True, slots=True)
class IslandMet(Event):
    """A peer's record showed that it lives in a part of the run that we did not know of; we have joined that too."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """Time has passed in which this peer did not run; its records are renewed and its neighbours looked up again."""

    away_s: float
    reason: str
