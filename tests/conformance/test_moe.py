"""Layers of remote experts on real hosts, with records in a real DHT: the same on both transports."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from swarm.experts.moe import MixtureOfExperts
from swarm.experts.registry import build_expert
from swarm.experts.remote import RemoteExpert
from swarm.experts.spec import ExpertGrid, OptimizerSpec
from tests.hosting import host_experts
from tests.support import RUN_ID, GrpcWorld, World

HID = 16
LR = 0.05
GRIDS = {
    "ffn": ExpertGrid("ffn.[0:2].[0:3]", "ffn", config={"hid": HID}, replicas=1, optimizer=OptimizerSpec("sgd", lr=LR)),
    "nop": ExpertGrid("nop", "nop", config={"hid": HID}, replicas=1),
}
UIDS = GRIDS["ffn"].uids()


def local_experts() -> dict[str, nn.Module]:
    return {uid: build_expert(GRIDS["ffn"], uid, RUN_ID) for uid in UIDS}


def mixture(moe: MixtureOfExperts, experts: Mapping[str, nn.Module], x: Tensor) -> Tensor:
    """What the layer should give, computed densely in this process."""
    first, second = moe.gate.projection(x).split((2, 3), dim=-1)
    scores = (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(1)
    top = scores.topk(moe.k, dim=-1)
    weights = torch.zeros_like(scores).scatter(1, top.indices, top.values.softmax(-1))
    return torch.einsum("te,teo->to", weights, torch.stack([experts[uid](x) for uid in UIDS], dim=1))


def relative_error(got: Tensor | None, expected: Tensor | None) -> float:
    assert got is not None
    assert expected is not None
    return float((got.detach() - expected.detach()).norm() / expected.detach().norm().clamp_min(1e-12))


class Twin:
    """The same layer with the same experts in this process, trained by SGD as the hosts do."""

    def __init__(self, moe: MixtureOfExperts) -> None:
        self.moe = copy.deepcopy(moe)
        self.experts = local_experts()
        self.optimizers = [torch.optim.SGD(e.parameters(), lr=LR) for e in self.experts.values()]

    def step(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and input gradients."""
        x = x.clone().requires_grad_()
        self.moe.zero_grad()
        out = mixture(self.moe, self.experts, x)
        (out - target).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert x.grad is not None
        return out.detach(), x.grad


def check(moe: MixtureOfExperts, out: Tensor, grad: Tensor | None, twin: Twin, x: Tensor, target: Tensor) -> None:
    expected, expected_grad = twin.step(x, target)
    assert relative_error(out, expected) <= 1e-5
    assert relative_error(grad, expected_grad) <= 1e-5
    for a, b in zip(moe.gate.parameters(), twin.moe.gate.parameters(), strict=True):
        assert relative_error(a.grad, b.grad) <= 1e-5


@pytest.mark.parametrize("tokens", [24, 3000], ids=["messages", "streams"])
def test_outputs_gradients_and_trained_experts_equal_local_ones(world: World, tokens: int) -> None:
    async def main() -> None:
        swarm = await host_experts(world, grids=GRIDS, hosts=2)
        assert all(host.held for host in swarm.hosts), "the hosts share the experts"
        torch.manual_seed(0)
        moe = MixtureOfExperts(swarm, "ffn", HID, k=3)
        twin = Twin(moe)
        for _ in range(3):
            x, target = torch.randn(tokens, HID).requires_grad_(), torch.randn(tokens, HID)
            moe.zero_grad()
            out, pending = await moe.forward_async(x)
            (out - target).square().mean().backward()
            await pending.backward()
            check(moe, out, x.grad, twin, x.detach(), target)
        # what the hosts have learned, seen through their answers
        for uid in UIDS:
            probe = torch.randn(5, HID)
            call = swarm.experts.new_call(uid, 5, [probe])
            await swarm.experts.forward([call], moe._new_call([], []).options)
            assert call.outputs is not None
            assert relative_error(call.outputs[0], twin.experts[uid](probe)) <= 1e-5
        stats = moe.stats
        assert (stats.failed_calls, stats.masked_fraction, stats.lost_updates, stats.missing_gradients) == (0, 0, 0, 0)

    world.run(main)


def test_a_training_thread_gets_local_gradients_through_autograd(grpc_world: GrpcWorld) -> None:
    """Only where there is a loop thread to wait for."""
    swarm = grpc_world.run(lambda: host_experts(grpc_world, grids=GRIDS, hosts=2))
    torch.manual_seed(0)
    moe = MixtureOfExperts(swarm, "ffn", HID, k=2)
    twin = Twin(moe)
    for _ in range(3):
        x, target = torch.randn(4, 10, HID).requires_grad_(), torch.randn(4, 10, HID)
        moe.zero_grad()
        out = moe(x)
        (out - target).square().mean().backward()
        assert x.grad is not None
        check(moe, out.view(-1, HID), x.grad.view(-1, HID), twin, x.detach().view(-1, HID), target.view(-1, HID))
    assert moe.stats.lost_updates == 0


def test_a_single_expert_and_one_without_parameters(grpc_world: GrpcWorld) -> None:
    """Only where there is a loop thread to wait for."""
    swarm = grpc_world.run(lambda: host_experts(grpc_world, grids=GRIDS, hosts=1))
    remote = RemoteExpert(swarm, "nop")
    x = torch.randn(4, HID).requires_grad_()
    remote(x).sum().backward()
    assert torch.equal(remote(x), x)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, HID))
    assert (remote.stats.lost_updates, remote.stats.missing_gradients) == (0, 0)


def test_a_layer_survives_the_loss_of_a_host(world: World) -> None:
    async def main() -> None:
        swarm = await host_experts(world, grids=GRIDS, hosts=2)
        moe = MixtureOfExperts(swarm, "ffn", HID, k=6, forward_timeout_s=2.0, backward_timeout_s=2.0)
        x = torch.randn(20, HID)
        out, _ = await moe.forward_async(x)
        assert torch.isfinite(out).all()
        lost = max(swarm.hosts, key=lambda h: len([u for u in h.held if u in UIDS]))
        gone = [uid for uid in UIDS if uid in lost.held]
        await lost._endpoint.transport.close()
        out, pending = await moe.forward_async(x)
        out.sum().backward()
        await pending.backward()
        assert torch.isfinite(out).all()
        assert 0 < moe.stats.masked_fraction < 0.5
        assert set(swarm.experts.directory.live_uids("ffn")).isdisjoint(gone)
        before = moe.stats
        for _ in range(3):
            await moe.forward_async(x)  # the dead host is avoided, and nothing more is masked
        assert moe.stats.masked_tokens == before.masked_tokens

    world.run(main)
