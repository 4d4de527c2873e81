"""What a user may ask of the demo, checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import UsageError

GRID = "ffn"
MAX_PROCESSES = 64


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `swarm demo`. Raises `UsageError` for values that cannot work.

    Attributes:
        steps: Training steps of each trainer; a restarted trainer goes on where the others are.
        experts: Experts in total, laid out as the squarest possible grid.
        data: Text to learn; none takes the documentation topics that ship with Python.
        seed: Fixes data order and initial weights.
        device: `cpu`, `cuda`, ... or `auto`.
        faults: Freeze a host, kill a host and a trainer, restart the trainer.
    """

    steps: int = 600
    hosts: int = 4
    trainers: int = 3
    experts: int = 16
    data: Path | None = None
    seed: int = 0
    device: str = "cpu"
    faults: bool = True

    def __post_init__(self) -> None:
        if self.steps < 20:
            raise UsageError(f"{self.steps} steps are too few to see anything.", fix="Ask for at least --steps 20.")
        if self.hosts < 1 or self.trainers < 1:
            raise UsageError("The demo needs at least one host and one trainer.", fix="Raise --hosts or --trainers.")
        if self.hosts + self.trainers > MAX_PROCESSES:
            raise UsageError(f"The demo starts at most {MAX_PROCESSES} processes.", fix="Lower --hosts or --trainers.")
        if self.faults and self.hosts < 2:
            raise UsageError(
                "With one host, nobody could take over when it is killed.", fix="Use --hosts 2 or more, or --no-faults."
            )
        if self.faults and self.trainers < 2:
            raise UsageError(
                "With one trainer, nobody could go on when it is killed.",
                fix="Use --trainers 2 or more, or --no-faults.",
            )
        grid_dims(self.experts)

    @property
    def pattern(self) -> str:
        """The experts' grid, e.g. `ffn.[0:4].[0:4]`."""
        rows, columns = grid_dims(self.experts)
        return f"{GRID}.[0:{rows}].[0:{columns}]"


def grid_dims(experts: int) -> tuple[int, int]:
    """The squarest grid of this many experts. Raises `UsageError` where there is none with two rows or more."""
    if 4 <= experts <= 256:
        for rows in range(math.isqrt(experts), 1, -1):
            if experts % rows == 0:
                return rows, experts // rows
    raise UsageError(
        f"{experts} experts cannot be laid out as a grid.",
        fix="Use a product of two numbers, such as 4, 9, 12, 16 or 64, up to 256.",
    )
