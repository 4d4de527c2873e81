"""The mixture layer on hosts that fail as told: in virtual time where the two-step backward will do, else over gRPC."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swarm.errors import (
    ConfigError,
    LoopThreadError,
    NonFiniteError,
    NotEnoughExpertsError,
    SchemaMismatchError,
    UnknownExpertError,
    UsageError,
)
from swarm.experts.moe import MixtureOfExperts
from tests.support import GrpcWorld, MemoryWorld, World
from tests.unit.experts.fakes import DIM, GRID, Stage, local_experts, set_stage

UIDS = GRID.uids()


def layer(stage: Stage, **options: object) -> MixtureOfExperts:
    torch.manual_seed(3)
    return MixtureOfExperts(stage, "tanh", DIM, **options)  # type: ignore[arg-type]


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(5))


def mixture(moe: MixtureOfExperts, experts: dict[str, nn.Module], x: Tensor, dead: set[str] = frozenset()) -> Tensor:  # type: ignore[assignment]
    """What the layer should give, computed densely in this process; `dead` experts were chosen but did not answer."""
    flat = x.reshape(-1, DIM)
    first, second = moe.gate.projection(flat).split((2, 2), dim=-1)
    scores = (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(1)
    top = scores.topk(moe.k, dim=-1)
    alive = torch.tensor([uid not in dead for uid in UIDS])[top.indices]
    mixed = top.values.masked_fill(~alive, -torch.inf).softmax(-1)
    weights = torch.zeros_like(scores).scatter(1, top.indices, mixed)
    answers = torch.stack([experts[uid](flat) for uid in UIDS], dim=1)
    return torch.einsum("te,teo->to", weights, answers).reshape(x.shape)


def remote_step(stage: Stage, moe: MixtureOfExperts, x: Tensor, target: Tensor) -> Tensor:
    """Forward and backward through the blocking layer, from this thread."""
    out = moe(x)
    (out - target).square().sum().backward()
    return out.detach()


def check_parity(stage: Stage, moe: MixtureOfExperts, run: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Outputs, gradients of input and gate, and the experts after an SGD step equal those of local experts."""
    experts = local_experts()
    here = copy.deepcopy(moe)
    for shape in [(7, 5), (40,), (1,)]:
        x, target = tokens(*shape), torch.ones(*shape, DIM)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        moe.zero_grad()
        here.zero_grad()
        got = run(theirs, target)
        out = mixture(here, experts, mine)
        (out - target).square().sum().backward()
        torch.testing.assert_close(got, out.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-5, atol=1e-5)
        for a, b in zip(moe.gate.parameters(), here.gate.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            for module in experts.values():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
        for uid, module in experts.items():
            for a, b in zip(stage.primary(uid).experts[uid].parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-5)


def test_equals_local_experts_in_two_steps(world: World) -> None:
    async def main() -> None:
        stage = await set_stage(world, [UIDS[:2], UIDS[2:]])
        moe = layer(stage)
        for shape in [(7, 5), (1,)]:
            x, mine = tokens(*shape).requires_grad_(), tokens(*shape).requires_grad_()
            moe.zero_grad()
            experts = {uid: copy.deepcopy(stage.primary(uid).experts[uid]) for uid in UIDS}
            out, pending = await moe.forward_async(x)
            out.square().sum().backward()
            await pending.backward()
            here = copy.deepcopy(moe)
            here.zero_grad()
            reference = mixture(here, experts, mine)
            reference.square().sum().backward()
            torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(x.grad, mine.grad, rtol=1e-5, atol=1e-5)
            for a, b in zip(moe.gate.parameters(), here.gate.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)
        assert moe.stats.lost_updates == 0

    world.run(main)


def test_equals_local_experts_with_autograd(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS[:2], UIDS[2:]]))
    moe = layer(stage)
    check_parity(stage, moe, lambda x, target: remote_step(stage, moe, x, target))
    stats = moe.stats
    assert (stats.failed_calls, stats.masked_fraction, stats.lost_updates) == (0, 0.0, 0)
    assert sum(stats.expert_tokens.values()) == stats.tokens == 2 * (35 + 40 + 1)


def test_experts_are_trained_also_where_no_input_needs_a_gradient(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe = layer(stage).requires_grad_(False)
    moe(tokens(20)).sum().backward()
    assert stage.hosts[0].applied


def test_without_gradients_hosts_keep_nothing(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe = layer(stage)
    with torch.no_grad():
        quiet = moe(tokens(20))
    moe.eval()
    x = tokens(20).requires_grad_()
    loud = moe(x)
    torch.testing.assert_close(quiet, loud)
    loud.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert (stage.hosts[0].cached, stage.hosts[0].applied) == ({}, [])
    assert moe.aux_loss().item() == 0.0


def test_missing_experts_are_masked_and_the_gate_renormalised(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS[:1], UIDS[1:]])
        moe = layer(stage, k=3, forward_timeout_s=1.0)
        stage.hosts[0].always["forward"] = "hang"
        x, mine = tokens(30).requires_grad_(), tokens(30).requires_grad_()
        out, pending = await moe.forward_async(x)
        out.square().sum().backward()
        await pending.backward()
        here = copy.deepcopy(moe)
        here.zero_grad()
        reference = mixture(here, local_experts(), mine, dead={UIDS[0]})
        reference.square().sum().backward()
        torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(x.grad, mine.grad, rtol=1e-5, atol=1e-5)
        for a, b in zip(moe.gate.parameters(), here.gate.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)
        assert 0 < moe.stats.masked_fraction < 1 / 3
        again, _ = await moe.forward_async(x)  # now it is known to be away: the gate chooses among the others
        assert moe.stats.failed_calls == 1
        assert torch.isfinite(again).all()

    memory_world.run(main)


def test_too_few_answers_are_an_error_that_names_why(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS[:1], UIDS[1:]])
        moe = layer(stage, k_min=2, forward_timeout_s=1.0)
        stage.hosts[0].always["forward"] = "nan"
        with pytest.raises(NotEnoughExpertsError, match=r"3 of 4 experts answered.*tanh\.0\.0 .*NaN"):
            await moe.forward_async(tokens(30))
        stage.hosts[1].always["forward"] = "hang"
        with pytest.raises(NotEnoughExpertsError, match=r"0 of 3 experts answered.*k_min is 2"):
            await moe.forward_async(tokens(30))

    memory_world.run(main)


def test_with_k_min_zero_a_token_without_answers_gets_zeros(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        moe = layer(stage, k_min=0, forward_timeout_s=1.0)
        stage.hosts[0].always["forward"] = "hang"
        x = tokens(3).requires_grad_()
        out, pending = await moe.forward_async(x)
        assert out.abs().sum().item() == 0.0
        out.sum().backward()
        await pending.backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()

    memory_world.run(main)


def test_no_host_at_all_is_an_error_with_a_fix(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [])
        with pytest.raises(NotEnoughExpertsError, match="hosts announce 0 of them"):
            await layer(stage).forward_async(tokens(3))

    memory_world.run(main)


def test_nan_inf_and_wrong_shapes_are_refused_before_anything_is_sent(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe = layer(stage)
    for bad in (float("nan"), float("inf")):
        x = tokens(4)
        x[2, 1] = bad
        with pytest.raises(NonFiniteError, match=r"MixtureOfExperts\(tanh\)"):
            moe(x)
    for wrong in (torch.zeros(4, DIM + 1), torch.zeros(()), tokens(4).double(), tokens(4).bfloat16()):
        with pytest.raises(SchemaMismatchError):
            moe(wrong)
    assert stage.hosts[0].log == []


def test_gradients_that_are_not_finite_are_refused_before_anything_is_sent(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe = layer(stage)
    with pytest.raises(NonFiniteError, match="gradient"):
        (moe(tokens(4)).sum() * float("nan")).backward()
    assert stage.hosts[0].applied == []


def test_a_gradient_scaler_sees_overflows_and_experts_see_unscaled_gradients(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    moe = layer(stage, grad_scaler=scaler)
    plain, x, mine = local_experts(), tokens(9), tokens(9)
    scaler.scale(moe(x.requires_grad_()).square().sum()).backward()
    mixture(copy.deepcopy(moe), plain, mine.requires_grad_()).square().sum().backward()
    assert x.grad is not None
    assert mine.grad is not None
    torch.testing.assert_close(x.grad / 1024, mine.grad, rtol=1e-5, atol=1e-5)
    for uid, module in plain.items():
        for a, b in zip(stage.hosts[0].experts[uid].parameters(), module.parameters(), strict=True):
            step = 0 if b.grad is None else 0.1 * b.grad
            torch.testing.assert_close(a.detach(), b.detach() - step, rtol=1e-5, atol=1e-5)
    applied, x.grad = len(stage.hosts[0].applied), None
    (moe(x).sum() * float("inf")).backward()
    assert x.grad is not None
    assert not torch.isfinite(x.grad).all()
    assert len(stage.hosts[0].applied) == applied


def test_the_masked_layer_gives_zeros_and_calls_nobody(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe = layer(stage)
    with moe.masked():
        assert moe(tokens(2, 3)).abs().sum().item() == 0.0
    assert stage.hosts[0].log == []
    assert moe(tokens(2, 3)).abs().sum().item() > 0.0


def test_no_tokens_give_no_answers_and_gradients_of_that_shape(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe = layer(stage)
    x = tokens(2, 0).requires_grad_()
    out = moe(x)
    assert out.shape == (2, 0, DIM)
    (out.sum() + moe.aux_loss()).backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    with torch.no_grad():
        assert not moe(tokens(0)).requires_grad
    assert stage.hosts[0].log == []


def test_aux_loss_reaches_the_gate_and_counts_each_forward_pass_once(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe = layer(stage)
    moe(tokens(9))
    one = moe.aux_loss().item()
    assert one > 0.0
    x = tokens(9).requires_grad_()
    for _ in range(2):
        out = checkpoint(moe, x, use_reentrant=False) + checkpoint(moe, x, use_reentrant=False)
        loss = moe.aux_loss()
        assert loss.item() == pytest.approx(2 * one)
        moe.zero_grad()
        (loss + 0 * out.sum()).backward()  # repeats both forward passes
        assert moe.gate.projection.weight.grad is not None
        assert moe.gate.projection.weight.grad.abs().sum() > 0
    assert moe.aux_loss().item() == 0.0


def test_gradients_survive_activation_checkpointing(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe, experts = layer(stage), local_experts()
    x, mine = tokens(9).requires_grad_(), tokens(9).requires_grad_()
    checkpoint(lambda t: moe(t) * 2, x, use_reentrant=False).square().sum().backward()
    (mixture(copy.deepcopy(moe), experts, mine) * 2).square().sum().backward()
    torch.testing.assert_close(x.grad, mine.grad, rtol=1e-5, atol=1e-5)
    assert moe.stats.lost_updates == 0


def test_under_autocast_experts_get_their_own_dtype(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe, x = layer(stage), tokens(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = moe(x.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), moe(x.bfloat16().float()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
def test_lossy_codecs_stay_close(grpc_world: GrpcWorld, codec: str) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    exact, lossy = layer(stage), layer(stage, codec=codec)
    with torch.no_grad():
        a, b = exact(tokens(9)), lossy(tokens(9))
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert stage.hosts[0].requests[-1].reply_codec == codec


def test_settings_that_cannot_work_are_refused(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        for options in ({"k": 0}, {"k": 5}, {"k_min": 3}, {"k_min": -1}):
            with pytest.raises(ConfigError):
                layer(stage, **options)
        with pytest.raises(ConfigError, match=f"dim={DIM + 1}"):
            MixtureOfExperts(stage, "tanh", DIM + 1)
        with pytest.raises(UnknownExpertError, match="no grid 'gated'"):
            MixtureOfExperts(stage, "gated", DIM)
        with pytest.raises(UsageError, match="forward_timeout_s"):
            layer(stage, forward_timeout_s=0)
        with pytest.raises(UsageError):
            layer(stage, codec="zip")
        with pytest.raises(LoopThreadError):
            layer(stage)(tokens(3))  # nothing may block on a virtual loop

    memory_world.run(main)


def test_copies_share_the_client_and_pickling_says_what_to_do(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moe = layer(stage)
    moe(tokens(3))
    twin = copy.deepcopy(moe)
    torch.testing.assert_close(twin(tokens(3)), moe(tokens(3)))
    assert sorted(moe.state_dict()) == ["gate.projection.bias", "gate.projection.weight"]
    with pytest.raises(UsageError, match="pickled"):
        pickle.dumps(moe)
