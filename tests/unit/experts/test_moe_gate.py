"""How the mixture layer shares tokens out: capacity, switch, jitter, balance, utilisation, anomalous answers."""

from __future__ import annotations

import copy
import math
import threading

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from swarm.errors import ConfigError
from swarm.experts.anomalies import AnomalousAnswer, AnswerSizes, size_of
from swarm.experts.capacity import capacity, within_capacity
from swarm.experts.moe import MixtureOfExperts
from tests.support import GrpcWorld, MemoryWorld
from tests.unit.experts.fakes import DIM, GRID, Stage, local_experts, set_stage

UIDS = GRID.uids()


def layer(stage: Stage, **options: object) -> MixtureOfExperts:
    torch.manual_seed(3)
    return MixtureOfExperts(stage, "tanh", DIM, **options)  # type: ignore[arg-type]


def tokens(n: int) -> Tensor:
    return torch.randn(n, DIM, generator=torch.Generator().manual_seed(5))


def test_an_expert_keeps_the_pairs_that_are_wanted_most() -> None:
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 0]])
    scores = torch.tensor([[3.0, 1.0], [5.0, 1.0], [4.0, 1.0], [2.0, 4.0]])
    sent = within_capacity(experts, scores, 2)
    assert sent.tolist() == [[False, True], [True, True], [True, False], [True, False]]
    assert within_capacity(experts, scores, 4).all()
    assert [capacity(f, 10, 2, 4) for f in (1.0, 1.1, 0.01)] == [5, 6, 1]
    assert capacity(1.1, 10, 1, 1) == 11


def test_a_switch_layer_weighs_by_probability_and_drops_what_is_over_capacity(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe, experts = layer(stage, k=1, capacity_factor=1.0).eval(), local_experts()
    x, mine = tokens(20).requires_grad_(), tokens(20).requires_grad_()
    out = moe(x)
    first, second = copy.deepcopy(moe).gate.projection(mine).split((2, 2), dim=-1)
    probabilities = (first.softmax(-1).unsqueeze(-1) * second.softmax(-1).unsqueeze(-2)).flatten(1)
    best, chosen = probabilities.max(-1)
    expected, dropped = [], 0
    for i in range(20):
        rivals = [j for j in range(20) if chosen[j] == chosen[i] and best[j] > best[i]]
        dropped += len(rivals) >= 5
        answer = experts[UIDS[int(chosen[i])]](mine[i : i + 1])[0] * best[i]
        expected.append(answer if len(rivals) < 5 else torch.zeros(DIM))
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert dropped > 0
    assert (moe.stats.dropped_tokens, moe.stats.tokens, moe.stats.masked_tokens) == (dropped, 20, 0)
    out.square().sum().backward()
    torch.stack(expected).square().sum().backward()
    torch.testing.assert_close(x.grad, mine.grad, rtol=1e-5, atol=1e-6)
    assert moe.gate.projection.weight.grad is not None
    assert moe.gate.projection.weight.grad.abs().sum() > 0, "a softmax over one answer would give none"


def test_dropped_tokens_are_no_failures_and_survive_checkpointing(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe = layer(stage, k=2, k_min=2, capacity_factor=0.5, jitter=0.1)
    for reentrant in (False, True):
        x = tokens(20).requires_grad_()
        checkpoint(moe, x, use_reentrant=reentrant).square().sum().backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
    assert moe.stats.dropped_tokens > 0
    assert moe.stats.lost_updates == 0


def test_jitter_changes_the_choice_only_and_repeats_under_checkpointing(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe, x = layer(stage, jitter=0.5), tokens(9)
    seen: list[Tensor] = []
    moe.gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    before = x.clone()
    checkpoint(moe, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert torch.equal(x, before)
    assert torch.equal(seen[0], seen[1])
    ratio = seen[0] / before
    assert 0.5 <= ratio.min() < 0.8 < 1.2 < ratio.max() <= 1.5
    torch.manual_seed(1)
    moe(x)
    assert not torch.equal(seen[2], seen[0])
    moe.eval()(x)
    assert torch.equal(seen[3], before)


def test_the_balance_loss_evens_out_what_experts_get(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe, x = layer(stage, k=1, balance_weight=1.0, z_weight=0.0), tokens(64)
    with torch.no_grad():
        moe.gate.projection.bias[0] += 2.0
    optimizer = torch.optim.SGD(moe.gate.parameters(), lr=0.5)
    moe(x)
    first = moe.stats
    assert math.isclose(sum(first.utilisation.values()), 1.0)
    for _ in range(30):
        optimizer.zero_grad()
        moe.aux_loss().backward()
        optimizer.step()
        before = moe.stats
        moe(x)
    last = moe.stats.since(before)
    assert last.tokens == 64
    assert last.imbalance < first.imbalance - 0.2
    assert 0.0 <= first.entropy < last.entropy <= 1.0


def test_each_thread_takes_the_losses_of_its_own_passes(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe, taken = layer(stage), {}
    moe(tokens(9))

    def other() -> None:
        taken["nothing"] = moe.aux_loss().item()
        moe(tokens(9))
        moe(tokens(9))
        taken["two"] = moe.aux_loss().item()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    one = moe.aux_loss().item()
    assert one > 0.0
    assert taken == {"nothing": 0.0, "two": pytest.approx(2 * one)}


def test_an_answer_that_is_far_too_large_is_none_and_its_host_is_avoided(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        liar = stage.hosts[0]
        moe = layer(stage, k=4, detect_anomalies=5.0).eval()
        for _ in range(12):
            await moe.forward_async(tokens(9))
        honest, _ = await moe.forward_async(tokens(9))
        assert stage.events.count(AnomalousAnswer) == 0
        for module in liar.experts.values():
            module.register_forward_hook(lambda _m, _i, out: out * 1e3)
        for _ in range(12):
            out, _ = await moe.forward_async(tokens(9))
            torch.testing.assert_close(out, honest)
        assert stage.events.count(AnomalousAnswer) > 0
        assert moe.stats.masked_tokens == 0

    memory_world.run(main)


def test_sizes_are_judged_by_the_usual_one_which_follows_a_layer_that_grows() -> None:
    sizes = AnswerSizes("layer", 10.0)
    assert all(sizes.judge("a", "forward", 1.0 + i / 10) is None for i in range(8))
    assert sizes.judge("b", "forward", 100.0) is not None, "a new expert is judged by the others"
    assert sizes.judge("b", "backward", 100.0) is None
    assert sizes.judge("a", "forward", 9.0) is None
    refused = 0
    while sizes.judge("a", "forward", 100.0) is not None:
        refused += 1
        assert refused < 32
    assert refused > 3
    assert copy.deepcopy(sizes) is sizes
    assert size_of([torch.tensor([[3.0, 4.0], [0.0, 0.0]])]) == pytest.approx(math.sqrt(12.5))
    assert size_of([torch.ones(2, 2)], [torch.full((2, 3), 4.0)]) == pytest.approx(0.25)
    assert size_of([torch.zeros(2, 2)]) is size_of([torch.ones(1, 1)], [torch.zeros(1, 1)]) is None


def test_settings_that_cannot_work_are_refused(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        for options in ({"capacity_factor": 0}, {"jitter": 1.0}, {"jitter": -0.1}, {"detect_anomalies": 1.0}):
            with pytest.raises(ConfigError):
                layer(stage, **options)

    memory_world.run(main)
