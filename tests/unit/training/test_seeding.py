"""Initial weights depend on the run alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from swarm.training import seeded


@dataclass
class Somebody:
    run_id: bytes


def weights(run: bytes, name: str = "trunk") -> torch.Tensor:
    with seeded(Somebody(run), name):
        return nn.Linear(3, 3).weight.detach()


def test_a_run_gives_the_same_weights_anywhere_and_another_run_others() -> None:
    torch.manual_seed(1)
    first = weights(b"a" * 32)
    torch.manual_seed(2)
    assert torch.equal(weights(b"a" * 32), first)
    assert not torch.equal(weights(b"b" * 32), first)
    assert not torch.equal(weights(b"a" * 32, "other"), first)


def test_torchs_own_random_state_is_kept() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    weights(b"a" * 32)
    assert torch.equal(torch.rand(3), expected)
