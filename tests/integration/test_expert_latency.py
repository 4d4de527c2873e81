"""Real hosts, one of which freezes or is suddenly far away: steps go on, and nothing is masked."""

from __future__ import annotations

import time

import torch

import swarm
from swarm.experts.hedging import BURST, FRACTION
from swarm.simulation.pytest_plugin import LocalSwarmFactory

DIM = 8
GRID = swarm.ExpertGrid(
    "ffn.[0:4]", "ffn", config={"hid": DIM}, replicas=2, optimizer=swarm.OptimizerSpec("sgd", lr=1e-3)
)


class Trainer:
    """Steps of a mixture of all experts, and which host was asked how often."""

    def __init__(self, peer: swarm.Peer) -> None:
        self.peer = peer
        self.moe = swarm.MixtureOfExperts(peer, "ffn", dim=DIM, k=4)

    def step(self) -> float:
        x = torch.randn(8, DIM)
        begun = time.monotonic()
        y = self.moe(x)
        (y.square().mean() + self.moe.aux_loss()).backward()
        return time.monotonic() - begun


def host_in_use(local: swarm.LocalSwarm, trainer: Trainer) -> str:
    """A host that the trainer would ask next."""
    chosen = trainer.peer.experts.directory.next_host("ffn.0", [])
    assert chosen is not None
    return next(name for name in local.names("host") if local.peer_id(name) == str(chosen.peer_id))


def test_a_frozen_and_a_far_host_fail_no_step_and_mask_nothing(local_swarm: LocalSwarmFactory) -> None:
    with local_swarm(experts=[GRID], hosts=3, links=True) as local, local.peer(role="trainer") as peer:
        peer.wait_for_experts("ffn", timeout_s=60.0)
        local.wait_until(lambda view: view.min_replicas("ffn") == 2, timeout_s=60.0)
        trainer = Trainer(peer)
        for _ in range(15):
            trainer.step()
        calm = trainer.moe.stats
        assert calm.masked_tokens == 0

        far = host_in_use(local, trainer)
        local.shape(far, latency_ms=250.0)
        times = [trainer.step() for _ in range(15)]
        assert sum(t > 0.4 for t in times) <= 4, "the first steps may notice; then the near replicas are asked"

        local.shape(far, latency_ms=0.0)
        frozen = host_in_use(local, trainer)
        local.freeze(frozen)
        times = [trainer.step() for _ in range(20)]
        assert sum(t > 0.9 for t in times) <= 6, "at most the first steps wait for a deadline"
        after = trainer.moe.stats
        for _ in range(8):
            trainer.step()
        stats = trainer.moe.stats
        assert stats.since(after).masked_tokens == 0
        assert stats.hedges <= FRACTION * stats.requests + BURST
        assert stats.missing_gradients == 0
        assert stats.lost_updates <= 8
