"""Chains of remote experts on hosts that fail as told."""

from __future__ import annotations

import copy

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
from swarm.experts.calls import GradientMissing, UpdateLost
from swarm.experts.registry import profile
from swarm.experts.remote import RemoteExpert
from swarm.experts.sequential import RemoteSequential
from swarm.experts.spec import ExpertGrid
from tests.support import GrpcWorld, MemoryWorld, World
from tests.unit.experts.fakes import DIM, GRID, LR, Stage, local_experts, set_stage

UIDS = GRID.uids()


def chain(stage: Stage, **options: object) -> RemoteSequential:
    return RemoteSequential(stage, UIDS, **options)  # type: ignore[arg-type]


def rows(n: int, seed: int = 5) -> Tensor:
    return torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed))


class Local:
    """The same chain in this process."""

    def __init__(self) -> None:
        self.experts = local_experts()
        self.module = nn.Sequential(*self.experts.values())
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LR)

    def gradient(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Of the sum of squares of the outputs; trains the chain."""
        x = x.detach().clone().requires_grad_()
        self.module(x).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert x.grad is not None
        return scale * x.grad


def check_weights(stage: Stage, local: Local) -> None:
    for uid, module in local.experts.items():
        for a, b in zip(stage.primary(uid).experts[uid].parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)


async def step(moved: RemoteSequential, x: Tensor) -> None:
    out, pending = await moved.forward_async(x)
    out.square().sum().backward()
    await pending.backward()


def test_a_chain_is_a_sequence_of_its_stages(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    whole = chain(stage).eval()
    modules = list(local_experts().values())
    x = rows(3)
    assert len(whole) == 4
    torch.testing.assert_close(whole(x), nn.Sequential(*modules)(x))
    middle = whole[1:3]
    assert middle.uids == tuple(UIDS[1:3])
    assert not middle.training
    torch.testing.assert_close(middle(x), nn.Sequential(*modules[1:3])(x))
    assert isinstance(whole[-1], RemoteExpert)
    torch.testing.assert_close(whole[-1](x), modules[3](x))
    assert [part.uid for part in whole] == UIDS
    for index in (slice(2, 2), slice(4, None)):
        with pytest.raises(ConfigError, match="at least one"):
            whole[index]
    with pytest.raises(IndexError):
        whole[4]
    assert [s.calls for s in whole.stage_stats] == [1, 1, 1, 1]
    assert whole.stats.calls == 4
    assert whole.stats.forward_s is not None
    assert list(whole.state_dict()) == []
    torch.testing.assert_close(copy.deepcopy(whole)(x), whole(x))
    assert whole(torch.zeros(0, DIM)).shape == (0, DIM)


def test_settings_that_cannot_work_are_refused(memory_world: MemoryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        with pytest.raises(ConfigError, match="no order"):
            RemoteSequential(stage, "tanh")
        with pytest.raises(ConfigError, match="at least one"):
            RemoteSequential(stage, [])
        for wrong in (0, -1, 1.5, True):
            with pytest.raises(ConfigError, match="microbatches"):
                chain(stage, microbatches=wrong)
        with pytest.raises(UnknownExpertError):
            RemoteSequential(stage, "gated")
        with pytest.raises(UnknownExpertError):
            RemoteSequential(stage, [UIDS[0], "tanh.7.7"])
        with pytest.raises(LoopThreadError):
            chain(stage)(rows(3))  # nothing may block on a virtual loop
        wide = ExpertGrid("wide", "ffn", config={"hid": DIM + 1})
        half = ExpertGrid("block", "transformer", config={"hid": DIM, "heads": 1})
        for other, taken in ((wide, r"float32\[tokens, 7\]"), (half, r"float32\[tokens, \?, 6\]")):
            client = stage.experts
            monkeypatch.setitem(client.directory._grids, other.name, other)
            monkeypatch.setitem(client.directory._index, other.name, {other.name: 0})
            monkeypatch.setitem(client._profiles, other.name, profile(other))
            with pytest.raises(ConfigError, match=rf"Stage 1 \(tanh\.0\.1\) gives float32\[tokens, 6\].*takes {taken}"):
                RemoteSequential(stage, [*UIDS[:2], other.name])

    memory_world.run(main)


def test_inputs_that_cannot_be_used_are_refused_before_anything_is_sent(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moved, x = chain(stage), rows(4)
    for wrong in ((), (x, x), (x.double(),), (x[:, 1:],)):
        with pytest.raises(SchemaMismatchError, match="RemoteSequential"):
            moved(*wrong)
    with pytest.raises(NonFiniteError):
        moved(x / 0)
    assert stage.hosts[0].log == []
    with pytest.raises(NonFiniteError, match="gradient"):
        (moved(x).sum() * float("nan")).backward()
    assert stage.hosts[0].applied == []


def test_a_training_thread_waits_once_per_pass(grpc_world: GrpcWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS[:2], UIDS[2:]]))
    moved, local, waits = chain(stage), Local(), []
    loop = stage.endpoint.loop
    assert loop is not None
    run = loop.run
    monkeypatch.setattr(loop, "run", lambda *args: waits.append(1) or run(*args))
    for n in (1, 5, 8):
        x = rows(n).requires_grad_()
        moved(x).square().sum().backward()
        torch.testing.assert_close(x.grad, local.gradient(x), rtol=1e-5, atol=1e-6)
        check_weights(stage, local)
    assert len(waits) == 6
    moved(rows(4)).square().sum().backward()  # also where no input needs a gradient
    local.gradient(rows(4))
    check_weights(stage, local)


def test_stages_compute_at_once_on_micro_batches(memory_world: MemoryWorld) -> None:
    """In virtual time, where a stage takes a second however little it gets, and is asked for two things at once."""

    async def main() -> None:
        stage = await set_stage(memory_world, [[uid] for uid in UIDS])
        for host in stage.hosts:
            host.always = {"forward": "slow", "backward": "slow"}
        clock, took = stage.endpoint.runtime.clock, {}
        for parts in (1, 8):
            moved, began_s = chain(stage, microbatches=parts), clock.time()
            out, pending = await moved.forward_async(rows(8).requires_grad_())
            took["forward", parts] = clock.time() - began_s
            out.sum().backward()
            began_s = clock.time()
            await pending.backward()
            took["backward", parts] = clock.time() - began_s
            assert moved.stats.calls == 8 * parts
        # besides the seconds: connecting, and the way there and back
        assert took["forward", 1] == pytest.approx(4.0, abs=0.3)
        assert took["forward", 8] == pytest.approx(4.0 + 8 / 2 - 1, abs=0.3)
        assert took["backward", 1] == pytest.approx(4.0, abs=0.3)
        # the last of a stage's micro-batches waits for the others
        assert took["backward", 8] <= 4.0 + 8 / 2 + 1
        for host in stage.hosts:
            assert [r.parts[0].defer for r in host.requests[-8:]] == [True] * 7 + [False]

    memory_world.run(main)


def test_a_stage_that_fails_is_asked_of_another_replica_in_both_passes(world: World) -> None:
    async def main() -> None:
        stage = await set_stage(world, [UIDS, UIDS])
        moved, local = chain(stage, forward_timeout_s=20.0, backward_timeout_s=20.0), Local()
        stage.hosts[0].always["forward"] = "nan"
        x = rows(6).requires_grad_()
        out, pending = await moved.forward_async(x)
        torch.testing.assert_close(out.detach(), local.module(x).detach(), rtol=1e-5, atol=1e-6)
        stage.hosts[1].always["backward"] = "unknown"
        out.square().sum().backward()
        await pending.backward()
        torch.testing.assert_close(x.grad, local.gradient(x), rtol=1e-5, atol=1e-6)
        stats = moved.stats
        assert stats.failed_calls >= len(moved)
        assert (stats.missing_gradients, stats.lost_updates) == (0, 0)

    world.run(main)


def test_a_stage_that_nobody_answers_is_an_error_that_names_it(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS[:2], UIDS[2:]])
        stage.hosts[1].always["forward"] = "nan"
        for parts in (1, 3):
            with pytest.raises(NotEnoughExpertsError, match=r"stage 2 \(tanh\.1\.0\) did not answer: .*NaN"):
                await chain(stage, microbatches=parts, forward_timeout_s=2.0).forward_async(rows(6))
        stage.hosts[1].always["forward"] = "hang"
        began_s = stage.endpoint.runtime.clock.time()
        with pytest.raises(NotEnoughExpertsError, match=r"stage 2"):
            await chain(stage, forward_timeout_s=2.0).forward_async(rows(6))
        assert stage.endpoint.runtime.clock.time() - began_s <= 2.1

    memory_world.run(main)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_gradient_that_nobody_returns_ends_the_backward_pass(memory_world: MemoryWorld, parts: int) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS[:2], UIDS[2:3], UIDS[3:]])
        moved = chain(stage, microbatches=parts, backward_timeout_s=2.0)
        x = rows(6).requires_grad_()
        out, pending = await moved.forward_async(x)
        stage.hosts[1].always["backward"] = "hang"
        out.square().sum().backward()
        await pending.backward()
        assert x.grad is not None
        assert x.grad.abs().sum().item() == 0.0
        assert stage.hosts[0].applied == []
        assert [s.missing_gradients for s in moved.stage_stats] == [parts, parts, parts, 0]
        assert [s.lost_updates for s in moved.stage_stats] == [parts, parts, parts, 0]
        assert stage.events.count(GradientMissing) == stage.events.count(UpdateLost) == 3 * parts

    memory_world.run(main)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_survive_activation_checkpointing(grpc_world: GrpcWorld, reentrant: bool) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moved, local = chain(stage), Local()
    for _ in range(2):
        x = rows(6).requires_grad_()
        checkpoint(moved, x, use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close(x.grad, local.gradient(x), rtol=1e-5, atol=1e-6)
    check_weights(stage, local)
    assert moved.stats.lost_updates == 0


def test_several_forward_passes_may_be_outstanding(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moved, local = chain(stage).eval(), Local()
    xs = [rows(n, seed=n).requires_grad_() for n in (2, 5, 3)]
    outs = [moved(x) for x in xs]
    (outs[2].square().sum() + outs[0].square().sum()).backward()
    outs[1].square().sum().backward()
    for x in xs:
        mine = x.detach().clone().requires_grad_()
        local.module(mine).square().sum().backward()
        torch.testing.assert_close(x.grad, mine.grad, rtol=1e-5, atol=1e-6)
    moved.train()
    before = len(stage.hosts[0].applied)
    sum(moved(x).square().sum() for x in xs).backward()  # type: ignore[union-attr]
    assert len(stage.hosts[0].applied) == before + 3 * len(UIDS)


def test_without_gradients_or_in_evaluation_nobody_is_trained(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moved, local = chain(stage), Local()
    x = rows(6).requires_grad_()
    with torch.no_grad():
        assert not moved(x).requires_grad
    moved.eval()
    moved(x).square().sum().backward()
    torch.testing.assert_close(x.grad, local.gradient(x), rtol=1e-5, atol=1e-6)
    assert (stage.hosts[0].cached, stage.hosts[0].applied) == ({}, [])
    assert not moved(x.detach()).requires_grad


def test_a_gradient_scaler_sees_overflows_and_experts_see_unscaled_gradients(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    moved, local = chain(stage, grad_scaler=scaler), Local()
    x = rows(6).requires_grad_()
    scaler.scale(moved(x).square().sum()).backward()
    torch.testing.assert_close(x.grad, local.gradient(x, scale=1024.0), rtol=1e-5, atol=1e-2)
    check_weights(stage, local)
    applied, x.grad = len(stage.hosts[0].applied), None
    (moved(x).sum() * float("inf")).backward()
    assert x.grad is not None
    assert not torch.isfinite(x.grad).any()
    assert len(stage.hosts[0].applied) == applied


@pytest.mark.parametrize("single", [False, True])
def test_differentiating_twice_is_an_error_that_says_what_to_do(grpc_world: GrpcWorld, single: bool) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    layer = RemoteExpert(stage, UIDS[0]) if single else chain(stage)
    x = rows(6).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, gradient.detach())
    with pytest.raises(UsageError, match="cannot be differentiated again"):
        gradient.square().sum().backward()


def test_a_graph_may_be_used_for_several_backward_passes(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moved, x = chain(stage), rows(6).requires_grad_()
    out = moved(x).square().sum()
    out.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    out.backward()
    assert not torch.equal(x.grad, once)
    assert moved.stats.lost_updates == 0
    assert len(set(stage.hosts[0].applied)) == 2 * len(UIDS)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_under_autocast_the_first_stage_gets_its_own_dtype(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    moved, x = chain(stage).eval(), rows(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = moved(x.bfloat16())
    torch.testing.assert_close(out, moved(x.bfloat16().float()))
