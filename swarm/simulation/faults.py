"""Scripted faults: what goes wrong when, decided without I/O, and applied to a local swarm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from swarm.errors import UsageError

Action = Literal["freeze", "thaw", "kill", "restart"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens to one process.

    Attributes:
        at: Progress at which it happens, in whatever grows during the scenario (steps, seconds, a fraction).
        seconds: How long a freeze lasts; none until a `thaw`.
    """

    at: float
    action: Action
    target: str
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and (self.action != "freeze" or self.seconds <= 0):
            raise UsageError(
                f"A {self.action} of {self.seconds} s makes no sense.", fix="Give seconds > 0 to a freeze only."
            )


class Target(Protocol):
    """What faults are applied to; `LocalSwarm` is one."""

    def kill(self, name: str) -> None: ...
    def freeze(self, name: str, seconds: float | None = None) -> None: ...
    def thaw(self, name: str) -> None: ...
    def restart(self, name: str) -> None: ...


class FaultTimeline:
    """Hands out each fault once, in order, when its time has come."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._pending = sorted(faults, key=lambda fault: fault.at)

    @property
    def pending(self) -> Sequence[Fault]:
        """What has not happened yet, next one first."""
        return tuple(self._pending)

    def due(self, progress: float, most: int | None = None) -> list[Fault]:
        """The faults whose `at` has been reached and that were not handed out before, at `most` so many at once."""
        count = sum(1 for fault in self._pending if fault.at <= progress)
        count = count if most is None else min(count, most)
        due, self._pending = self._pending[:count], self._pending[count:]
        return due


def apply(fault: Fault, target: Target) -> None:
    """Do to the swarm what the fault says."""
    match fault.action:
        case "freeze":
            target.freeze(fault.target, fault.seconds)
        case "thaw":
            target.thaw(fault.target)
        case "kill":
            target.kill(fault.target)
        case "restart":
            target.restart(fault.target)
