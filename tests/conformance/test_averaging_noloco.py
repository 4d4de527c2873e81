"""NoLoCo over real pair rounds, on both transports."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from swarm.averaging.averager import Averager
from swarm.averaging.gossip import Gossip
from swarm.averaging.noloco import NoLoCo, SlowWeights
from swarm.averaging.service import AveragingService
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from tests.support import World

CONFIG = PeerConfig.preset("local", averaging={"matchmaking_s": 1.0, "chunk_timeout_s": 0.5, "round_timeout_s": 3.0})
SETTINGS = NoLoCo(momentum=0.3, rate=0.5, pull=0.7)


class Replica:
    """A trainer of |theta - optimum|^2 with outer steps in pairs."""

    def __init__(self, endpoint: Endpoint, optimum: Tensor) -> None:
        self.endpoint = endpoint
        self.averaging = AveragingService(endpoint)
        self.optimum = optimum
        self.theta = optimum.clone()
        self.slow = SlowWeights(self.theta, SETTINGS)
        self.averager = Averager(self, [self.slow.exchanged], "outer", Gossip())
        self.met = 0

    async def outer_step(self, inner_lr: float) -> None:
        for _ in range(4):
            self.theta -= inner_lr * (self.theta - self.optimum)
        self.slow.begin(self.theta)
        self.met += (await self.averager.step_async()).averaged
        self.theta.copy_(self.slow.finish())


def test_replicas_with_different_optima_come_to_the_mean_of_them(world: World) -> None:
    async def main() -> None:
        generator = torch.Generator().manual_seed(0)
        optima = torch.randn(4, 6, generator=generator)
        replicas: list[Replica] = []
        for optimum in optima:
            known = [replicas[0].endpoint.contact] if replicas else []
            replicas.append(Replica(await world.endpoint(bootstrap=known, config=CONFIG), optimum))
            await replicas[-1].averager.open()
            world.at_close(replicas[-1].averager.aclose)
        for step in range(20):
            await asyncio.gather(*(replica.outer_step(0.1 / (1 + step / 4)) for replica in replicas))
        assert sum(replica.met for replica in replicas) > 0.8 * 4 * 20
        mean = optima.mean(0)
        before = float((optima - mean).norm(dim=1).max())
        after = max(float((replica.theta - mean).norm()) for replica in replicas)
        assert after < 0.15 * before

    world.run(main)
