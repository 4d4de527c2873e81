"""How a trainer averages its parameters: how often, with whom, and whether training waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.gossip import Strategy
from swarm.errors import UsageError

SMOOTHING = 0.3
"""Weight of the newest sample in the moving averages of a `RoundPlanner`."""
LEAST_LEAD_S = 0.5


@dataclass(frozen=True, slots=True)
class ParameterAveraging:
    """Every local step is real; every `every` steps the trainable parameters are averaged with other trainers.

    Attributes:
        every: Local optimizer steps between two rounds. From half of that on, a trainer joins a round that others wait
            for.
        strategy: `AllReduce(...)`, `Gossip(...)` or `PushSum(...)`.
        overlap: Training goes on while a round runs on a copy; what the round changed is added at a later step
            boundary, so that progress made meanwhile stays. False: training waits, and all members hold the same bits
            after it.
        prepare: Look for the group of a round while the last steps before it compute (at most the second half of the
            steps between two rounds), so that the round itself costs the exchange only.
    """

    every: int = 50
    strategy: Strategy = field(default_factory=AllReduce)
    overlap: bool = True
    prepare: bool = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"Averaging every {self.every} steps cannot be.", fix="Use a positive number.")


class RoundPlanner:
    """When to look for the next round's group, from how long steps and searches took. Without I/O.

    Args:
        every: Steps between two rounds.
        longest_s: No search takes longer than this.
    """

    def __init__(self, every: int, longest_s: float) -> None:
        self._every = every
        self._longest_s = longest_s
        self._last_step_at: float | None = None
        self._step_s = 0.0
        self._search_s = 0.0
        self._planned = False

    def stepped(self, now: float) -> None:
        """A step ended now."""
        if self._last_step_at is not None:
            took_s = now - self._last_step_at
            self._step_s = took_s if self._step_s == 0.0 else self._step_s + SMOOTHING * (took_s - self._step_s)
        self._last_step_at = now

    def round_began(self) -> None:
        self._planned = False

    def searched(self, seconds: float) -> None:
        """A search for a group took so long, whether or not it was prepared."""
        self._search_s += SMOOTHING * (seconds - self._search_s) if self._search_s else seconds

    def due(self, since_attempt: int) -> float | None:
        """In how many seconds the next round is expected, if its group should be looked for now; told once a round.

        That is when the search takes about as long as the steps that are left: half again and a little more to be
        sure, since a group that is ready early costs nothing.
        """
        left = self._every - since_attempt
        if self._planned or left < 1 or 2 * since_attempt < self._every or self._step_s == 0.0:
            return None
        left_s = left * self._step_s
        if left_s > min(LEAST_LEAD_S + 1.5 * self._search_s, self._longest_s):
            return None
        self._planned = True
        return left_s
