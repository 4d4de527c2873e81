"""What a host of experts tells: experts taken, given up, handed over or not."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.events import Event


@dataclass(frozen=True, slots=True)
class ExpertTaken(Event):
    """The host holds an expert from now on: copied from `donor`, from `disk`, or (empty) with its initial weights."""

    uid: str
    weight_version: int
    donor: str


@dataclass(frozen=True, slots=True)
class ExpertNotTaken(Event):
    """The host should hold an expert but could not get it; it tries again."""

    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExpertDropped(Event):
    """The host gave an expert up."""

    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class GradientsLost(Event):
    """Gradients of so many tokens, collected for a step of this replica, ended with it."""

    uid: str
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class GridSkipped(Event):
    """The host cannot hold the experts of a grid."""

    grid: str
    reason: str


@dataclass(frozen=True, slots=True)
class HandOverIncomplete(Event):
    """The host left although nobody had taken some of its experts over; `experts` names a few of `count`."""

    experts: tuple[str, ...]
    count: int
    reason: str
