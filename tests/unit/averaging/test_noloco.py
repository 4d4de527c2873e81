"""NoLoCo's outer step: symmetric, contracting, and DiLoCo's where all agree."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from swarm.averaging.noloco import NoLoCo, SlowWeights
from swarm.errors import UsageError


def pair(one: SlowWeights, other: SlowWeights, thetas: tuple[Tensor, Tensor]) -> None:
    """What a pair round does: both hold the mean of what they exchange."""
    a, b = one.begin(thetas[0]), other.begin(thetas[1])
    mean = (a + b) / 2
    a.copy_(mean)
    b.copy_(mean)
    one.finish()
    other.finish()


def test_one_step_is_the_formula() -> None:
    phi = torch.tensor([[1.0, 2.0], [3.0, -2.0]])
    replicas = [SlowWeights(row, NoLoCo(momentum=0.5, rate=0.7, pull=0.3)) for row in phi]
    replicas[0].momentum.copy_(torch.tensor([0.2, 0.4]))
    theta = phi + torch.tensor([[0.1, 0.3], [0.5, -0.1]])
    pair(replicas[0], replicas[1], (theta[0], theta[1]))
    moved, mean = torch.tensor([0.3, 0.1]), torch.tensor([2.0, 0.0])
    first = 0.5 * torch.tensor([0.2, 0.4]) + 0.7 * moved + 0.3 * (mean - phi[0])
    second = 0.7 * moved + 0.3 * (mean - phi[1])
    for replica, before, momentum in zip(replicas, phi, (first, second), strict=True):
        torch.testing.assert_close(replica.momentum, momentum)
        torch.testing.assert_close(replica.phi, before + momentum)


def test_the_order_of_partners_does_not_matter() -> None:
    torch.manual_seed(0)
    starts, thetas = torch.randn(2, 5), torch.randn(2, 5)
    one, other = SlowWeights(starts[0]), SlowWeights(starts[1])
    pair(one, other, (thetas[0], thetas[1]))
    again, mirrored = SlowWeights(starts[1]), SlowWeights(starts[0])
    pair(again, mirrored, (thetas[1], thetas[0]))
    assert torch.equal(one.phi, mirrored.phi)
    assert torch.equal(other.phi, again.phi)


def test_where_all_agree_it_is_an_outer_step_with_momentum() -> None:
    torch.manual_seed(0)
    start = torch.randn(6)
    reference = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.5)
    replicas = [SlowWeights(start), SlowWeights(start)]
    for _ in range(5):
        moved = torch.randn(2, 6)
        reference.grad = -moved.mean(0)
        optimizer.step()
        pair(replicas[0], replicas[1], (replicas[0].phi + moved[0], replicas[1].phi + moved[1]))
        torch.testing.assert_close(replicas[0].phi, reference.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(replicas[1].phi, replicas[0].phi, rtol=1e-5, atol=1e-6)


def test_without_a_partner_the_step_is_a_local_one() -> None:
    replica = SlowWeights(torch.zeros(3))
    replica.begin(torch.tensor([1.0, 2.0, 3.0]))
    weights = replica.finish()
    torch.testing.assert_close(weights, 0.7 * torch.tensor([1.0, 2.0, 3.0]))
    assert weights is replica.phi


def test_random_pairs_contract_replicas_that_never_all_meet() -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    replicas = [SlowWeights(torch.randn(8, generator=generator)) for _ in range(16)]
    mean = torch.stack([r.phi for r in replicas]).mean(0)
    spread = [float(torch.stack([r.phi for r in replicas]).var(0).mean())]
    for _ in range(60):
        order = rng.sample(replicas, len(replicas))
        for one, other in zip(order[::2], order[1::2], strict=True):
            pair(one, other, (one.phi.clone(), other.phi.clone()))
        spread.append(float(torch.stack([r.phi for r in replicas]).var(0).mean()))
    rate = (spread[-1] / spread[0]) ** (1 / 60)
    print(f"variance times {rate:.3f} per outer step")
    assert rate < 0.9
    drift = torch.stack([r.phi for r in replicas]).mean(0) - mean
    assert float(drift.abs().max()) < 1e-5, "the mean stays where it is, momentum or not"


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"momentum": -0.1}, {"rate": 0.0}, {"pull": 0.0}, {"pull": 3.0}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        NoLoCo(**wrong)
