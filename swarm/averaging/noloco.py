"""NoLoCo's outer step [2025]: slow weights that need no round of everybody, only one with a random partner. No I/O.

After H local steps a pair averages what each of them moved, d = theta - phi, and their slow weights phi:

    m <- momentum m + rate mean(d) + pull (mean(phi) - phi)
    phi <- phi + m
    theta <- phi

Both partners compute the same from their own phi and m; the last term pulls replicas together that never meet. Where
all hold the same phi and m, this is DiLoCo's outer step with heavy-ball momentum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.errors import UsageError


@dataclass(frozen=True, slots=True)
class NoLoCo:
    """How far an outer step goes.

    Attributes:
        momentum: mu, how much of the last step is repeated.
        rate: eta, the part of the mean movement that is taken.
        pull: gamma, the part of the distance to the pair's mean that is taken. Replicas come together while
            0 < pull < 2 (1 + momentum).
    """

    momentum: float = 0.5
    rate: float = 0.7
    pull: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UsageError(f"A momentum of {self.momentum} cannot be.", fix="Use 0 <= momentum < 1.")
        if not self.rate > 0:
            raise UsageError(f"A rate of {self.rate} cannot be.", fix="Use a positive number.")
        if not 0 < self.pull < 2 * (1 + self.momentum):
            raise UsageError(
                f"With a pull of {self.pull} replicas do not come together.", fix="Use 0 < pull < 2 (1 + momentum)."
            )


class SlowWeights:
    """One replica's slow weights, as flat fp32 vectors of n elements.

    Memory: four vectors of n elements.

    Args:
        theta: The weights at the start (n elements, flat); not kept.

    Attributes:
        phi: The slow weights (n).
        momentum: The last outer step (n).
        exchanged: What a pair averages (2, n): d and phi. `begin` fills it, a round averages it in place, `finish` uses
            what is in it then; without a partner that is this replica's own, and the step is a local one.
    """

    def __init__(self, theta: Tensor, settings: NoLoCo | None = None) -> None:
        self.settings = settings or NoLoCo()
        self.phi = theta.detach().to("cpu", torch.float32, copy=True).reshape(-1)
        self.momentum = torch.zeros_like(self.phi)
        self.exchanged = torch.zeros(2, self.phi.numel())

    def begin(self, theta: Tensor) -> Tensor:
        """Take what local steps made of the weights (n); returns `exchanged`, ready for the round."""
        torch.sub(theta.detach().to("cpu", torch.float32).reshape(-1), self.phi, out=self.exchanged[0])
        self.exchanged[1].copy_(self.phi)
        return self.exchanged

    def finish(self) -> Tensor:
        """Make the outer step with what `exchanged` holds now; returns the weights to go on with (n), not a copy."""
        settings = self.settings
        mean_moved, mean_phi = self.exchanged
        self.momentum.mul_(settings.momentum).add_(mean_moved, alpha=settings.rate)
        self.momentum.add_(mean_phi.sub_(self.phi), alpha=settings.pull)
        return self.phi.add_(self.momentum)
