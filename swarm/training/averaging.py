"""How a trainer averages its parameters: how often, with whom, and whether training waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.gossip import Strategy
from swarm.errors import UsageError


@dataclass(frozen=True, slots=True)
class ParameterAveraging:
    """Every local step is real; every `every` steps the trainable parameters are averaged with other trainers.

    Attributes:
        every: Local optimizer steps between two rounds. From half of that on, a trainer joins a round that others wait
            for.
        strategy: `AllReduce(...)` or `Gossip(...)`.
        overlap: Training goes on while a round runs on a copy; what the round changed is added at a later step
            boundary, so that progress made meanwhile stays. False: training waits, and all members hold the same bits
            after it.
    """

    every: int = 50
    strategy: Strategy = field(default_factory=AllReduce)
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"Averaging every {self.every} steps cannot be.", fix="Use a positive number.")
