"""Chains of remote experts on real hosts, with records in a real DHT: the same on both transports."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from swarm.experts.registry import build_expert
from swarm.experts.sequential import RemoteSequential
from swarm.experts.spec import ExpertGrid, OptimizerSpec
from tests.hosting import Hosting, host_experts
from tests.support import RUN_ID, GrpcWorld, World

HID, SEQ, LR = 8, 5, 0.05
ADAM = OptimizerSpec("adamw", lr=LR)


def grid(pattern: str, module: str, **config: int) -> ExpertGrid:
    return ExpertGrid(pattern, module, config=config, replicas=1, optimizer=ADAM)


GRIDS = {
    "block": grid("block.[0:4]", "causal_transformer", hid=HID, seq=SEQ),
    "head": grid("head", "transformer", hid=HID),
    "image": grid("image.[0:2]", "conv", channels=8, height=4, width=4),
    "ffn": grid("ffn.[0:2]", "ffn", hid=HID),
    "nop": grid("nop", "nop", hid=HID),
}
CHAINS = {
    "block": ("block", (SEQ, HID)),
    "mixed": (["block.2", "head", "block.0"], (SEQ, HID)),
    "image": ("image", (8, 4, 4)),
    "ffn": (["ffn.0", "nop", "ffn.1"], (HID,)),
}


class Twin:
    """The same experts in this process, each trained as its hosts do."""

    def __init__(self) -> None:
        uids = [uid for grid in GRIDS.values() for uid in grid.uids()]
        self.experts = {uid: build_expert(GRIDS[uid.partition(".")[0]], uid, RUN_ID) for uid in uids}
        self.optimizers = {
            uid: torch.optim.AdamW(e.parameters(), lr=LR) for uid, e in self.experts.items() if uid != "nop"
        }

    def step(self, uids: Sequence[str], x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and input gradients of a chain; trains it."""
        x = x.clone().requires_grad_()
        out = nn.Sequential(*(self.experts[uid] for uid in uids))(x)
        (out - target).square().mean().backward()
        for uid in uids:
            if uid in self.optimizers:
                self.optimizers[uid].step()
                self.optimizers[uid].zero_grad()
        assert x.grad is not None
        return out.detach(), x.grad


def relative_error(got: Tensor | None, expected: Tensor) -> float:
    assert got is not None
    return float((got.detach() - expected).norm() / expected.norm().clamp_min(1e-12))


def test_outputs_gradients_and_training_equal_those_of_local_modules(world: World) -> None:
    async def main() -> None:
        swarm, twin = await host_experts(world, hosts=3, grids=GRIDS), Twin()
        torch.manual_seed(0)
        for (experts, shape), microbatches in itertools.product(CHAINS.values(), (1, 3)):
            chain = RemoteSequential(swarm, experts, microbatches=microbatches)
            for _ in range(2):
                x, target = torch.randn(7, *shape).requires_grad_(), torch.randn(7, *shape)
                out, pending = await chain.forward_async(x)
                (out - target).square().mean().backward()
                await pending.backward()
                expected, gradient = twin.step(chain.uids, x.detach(), target)
                assert relative_error(out, expected) <= 1e-5
                assert relative_error(x.grad, gradient) <= 1e-5
            stats = chain.stats
            assert (stats.failed_calls, stats.lost_updates, stats.missing_gradients) == (0, 0, 0)
            assert stats.calls == 2 * 2 * microbatches * len(chain)

    world.run(main)


def test_a_training_thread_gets_local_gradients_through_autograd(grpc_world: GrpcWorld) -> None:
    """Only where there is a loop thread to wait for."""
    swarm = grpc_world.run(lambda: host_experts(grpc_world, hosts=3, grids={"block": GRIDS["block"]}))
    chain, twin = RemoteSequential(swarm, "block", microbatches=2), Twin()
    torch.manual_seed(0)
    for _ in range(3):
        x, target = torch.randn(6, SEQ, HID).requires_grad_(), torch.randn(6, SEQ, HID)
        out = chain(x)
        (out - target).square().mean().backward()
        expected, gradient = twin.step(chain.uids, x.detach(), target)
        assert relative_error(out, expected) <= 1e-5
        assert relative_error(x.grad, gradient) <= 1e-5


async def both_replicas(swarm: Hosting, uids: Sequence[str]) -> None:
    directory = swarm.experts.directory
    while any(len(directory.replicas(uid)) < 2 for uid in uids):
        await asyncio.sleep(0.1)
        await directory.refresh()


async def kill_host_of(swarm: Hosting, uid: str) -> None:
    peer_id = swarm.experts.directory.replicas(uid)[0].contact.peer_id
    await next(h for h in swarm.hosts if h._endpoint.peer_id == peer_id)._endpoint.transport.close()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_host_that_dies_between_the_passes_is_replaced_by_another_replica(world: World, microbatches: int) -> None:
    grids = {"block": dataclasses.replace(GRIDS["block"], replicas=2)}

    async def main() -> None:
        swarm, twin = await host_experts(world, hosts=2, grids=grids), Twin()
        chain = RemoteSequential(swarm, "block", microbatches=microbatches, backward_timeout_s=10.0)
        await both_replicas(swarm, chain.uids)
        x, target = torch.randn(6, SEQ, HID).requires_grad_(), torch.randn(6, SEQ, HID)
        out, pending = await chain.forward_async(x)
        await kill_host_of(swarm, "block.1")
        (out - target).square().mean().backward()
        await pending.backward()
        _, gradient = twin.step(chain.uids, x.detach(), target)
        # the other replica has no part of the step yet, so it makes one for each micro-batch
        assert relative_error(x.grad, gradient) <= (1e-5 if microbatches == 1 else 1.0)
        assert chain.stats.missing_gradients == 0
        again, _ = await chain.forward_async(x.detach())  # the chain goes on without the host
        assert torch.isfinite(again).all()

    world.run(main)
