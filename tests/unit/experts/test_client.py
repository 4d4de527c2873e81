"""What the client does when hosts fail, in virtual time, against hosts that fail as told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from swarm.errors import ClosedError, ConfigError, ExpertFailedError, HostBusyError, StaleRequestError, SwarmError
from swarm.experts.calls import (
    CallOptions,
    ExpertCall,
    ExpertCallFailed,
    ExpertsMasked,
    GradientMissing,
    LayerSnapshot,
    UpdateLost,
)
from swarm.experts.directory import PeerAvoided
from tests.support import MemoryWorld
from tests.unit.experts.fakes import DIM, GRID, FakeHost, Stage, local_experts, set_stage

UIDS = GRID.uids()
UID = UIDS[0]


def batch(tokens: int = 3) -> Tensor:
    return torch.randn(tokens, DIM, generator=torch.Generator().manual_seed(1))


def expected(uid: str, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = local_experts()[uid](x)
    (grad_x,) = torch.autograd.grad(out, x, grad)
    return out.detach(), grad_x


async def forward(
    stage: Stage, uids: Sequence[str] = (UID,), **options: object
) -> tuple[list[ExpertCall], CallOptions]:
    how = CallOptions("the layer", **options)  # type: ignore[arg-type]
    calls = [stage.experts.new_call(uid, 3, [batch()]) for uid in uids]
    await stage.experts.forward(calls, how)
    return calls, how


async def backward(stage: Stage, calls: Sequence[ExpertCall], how: CallOptions, grad: Tensor | None = None) -> None:
    for call in calls:
        call.grad_outputs = [torch.ones(3, DIM) if grad is None else grad]
    await stage.experts.backward(calls, how)


def applied(stage: Stage) -> list[int]:
    return [len(host.applied) for host in stage.hosts]


async def both(stage: Stage, **options: object) -> tuple[ExpertCall, LayerSnapshot]:
    calls, how = await forward(stage, **options)
    await backward(stage, calls, how)
    return calls[0], how.stats.snapshot()


def check_gradient(call: ExpertCall) -> None:
    assert call.grad_inputs is not None
    assert call.grad_inputs[0] is not None
    torch.testing.assert_close(call.grad_inputs[0], expected(call.uid, batch(), torch.ones(3, DIM))[1])


def two_hosts(stage: Stage) -> tuple[FakeHost, FakeHost]:
    primary = stage.primary(UID)
    return primary, stage.other(primary)


def test_one_rpc_per_host_carries_all_its_experts(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS[:2], UIDS[2:]])
        calls, how = await forward(stage, UIDS)
        await backward(stage, calls, how)
        for host in stage.hosts:
            assert [(r.direction, len(r.parts)) for r in host.requests] == [("forward", 2), ("backward", 2)]
            assert all(r.train for r in host.requests)
        for call in calls:
            assert call.outputs is not None
            torch.testing.assert_close(call.outputs[0], expected(call.uid, batch(), torch.ones(3, DIM))[0])
            check_gradient(call)
            assert call.applied
        stats = how.stats.snapshot()
        assert (stats.calls, stats.failed_calls, stats.lost_updates, stats.tokens, stats.masked_tokens) == (
            8,
            0,
            0,
            12,
            0,
        )
        assert stats.expert_tokens == dict.fromkeys(UIDS, 3)
        assert stats.forward_s is not None
        assert stats.backward_s is not None

    memory_world.run(main)


def test_hosts_are_asked_at_the_same_time(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [[u] for u in UIDS])
        await forward(stage, UIDS)  # hello with each
        clock = stage.endpoint.runtime.clock
        begun = clock.time()
        await forward(stage, UIDS[:1])
        one_s = clock.time() - begun
        begun = clock.time()
        await forward(stage, UIDS)
        assert clock.time() - begun < 2 * one_s

    memory_world.run(main)


def test_backward_goes_to_the_host_that_answered_forward_without_inputs(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        primary, other = two_hosts(stage)
        primary.script["forward"] = ["busy"]
        call, stats = await both(stage)
        assert other.log == [("forward", UID, False, False), ("backward", UID, True, False)]
        assert (primary.applied, len(other.applied)) == ([], 1)
        check_gradient(call)
        assert (stats.failed_calls, stats.retries, stats.lost_updates) == (1, 1, 0)
        assert stage.events.count(PeerAvoided) == 0, "a proper refusal is no reason to avoid the host"

    memory_world.run(main)


@pytest.mark.parametrize("failure", ["hang", "nan", "wrong_shape", "garbage", ExpertFailedError("bug"), "unknown"])
def test_a_failed_forward_goes_to_the_next_replica(memory_world: MemoryWorld, failure: object) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        primary, other = two_hosts(stage)
        primary.script["forward"] = [failure]
        call, stats = await both(stage)
        check_gradient(call)
        assert call.contact == other.transport.contact
        assert (stats.failed_calls, stats.retries, stats.masked_tokens) == (1, 1, 0)
        proper = failure == "unknown" or isinstance(failure, ExpertFailedError)
        assert stage.events.count(PeerAvoided) == (0 if proper else 1)
        if failure == "unknown":
            assert len(stage.experts.directory.replicas(UID)) == 1

    memory_world.run(main)


@pytest.mark.parametrize("failure", ["hang", "nan", "garbage", HostBusyError("full"), "unknown"])
def test_without_another_replica_the_expert_is_masked_with_a_reason(memory_world: MemoryWorld, failure: object) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS[:1], UIDS[1:]])
        stage.hosts[0].always["forward"] = failure
        calls, how = await forward(stage, UIDS, timeout_s=5.0)
        assert [c.answered for c in calls] == [False, True, True, True]
        assert calls[0].problems
        stats = how.stats.snapshot()
        assert (stats.masked_tokens, stats.masked_fraction) == (3, 0.25)
        [masked] = [s.event for s in stage.events.recent(ExpertsMasked)]
        assert masked.uids == (UID,)
        assert masked.reason
        assert stage.events.count(ExpertCallFailed) >= 1

    memory_world.run(main)


def test_the_timeout_caps_a_pass_over_all_attempts(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        for host in stage.hosts:
            host.always["forward"] = "hang"
        clock = stage.endpoint.runtime.clock
        begun = clock.time()
        calls, _ = await forward(stage, timeout_s=0.5)
        assert clock.time() - begun == pytest.approx(0.5, abs=0.05)
        assert not calls[0].answered

    memory_world.run(main)


def test_a_stalled_host_costs_a_learned_deadline_not_the_configured_one(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        for _ in range(10):
            await forward(stage)
        primary, _ = two_hosts(stage)
        primary.always["forward"] = "hang"
        clock = stage.endpoint.runtime.clock
        begun = clock.time()
        calls, _ = await forward(stage)
        assert calls[0].answered
        assert clock.time() - begun < 1.5
        begun = clock.time()
        await forward(stage)  # the circuit breaker is open
        assert clock.time() - begun < 0.2

    memory_world.run(main)


def test_a_busy_host_is_given_time_when_nobody_else_has_the_expert(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        stage.hosts[0].script = {"forward": ["busy", "busy"], "backward": ["busy"]}
        call, stats = await both(stage)
        check_gradient(call)
        assert (stats.retries, stats.lost_updates, applied(stage)) == (3, 0, [1])
        assert [entry[2:] for entry in stage.hosts[0].log if entry[0] == "backward"] == [(True, False)] * 2

    memory_world.run(main)


def test_a_forgetful_host_gets_the_inputs_again_and_may_apply(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        primary, other = two_hosts(stage)
        primary.script["backward"] = ["forgot"]
        call, stats = await both(stage)
        check_gradient(call)
        assert [e for e in primary.log if e[0] == "backward"] == [
            ("backward", UID, True, False),
            ("backward", UID, True, True),
        ]
        assert other.log == []
        assert (call.applied, stats.lost_updates, len(primary.applied)) == (True, 0, 1)

    memory_world.run(main)


@pytest.mark.parametrize("failure", ["busy", "unknown", HostBusyError("full")])
def test_after_a_definite_refusal_another_replica_applies(memory_world: MemoryWorld, failure: object) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        primary, other = two_hosts(stage)
        primary.script["backward"] = [failure]
        call, stats = await both(stage)
        check_gradient(call)
        assert other.log == [("backward", UID, True, True)]
        assert (len(primary.applied), len(other.applied), stats.lost_updates) == (0, 1, 0)

    memory_world.run(main)


def test_after_the_host_became_unreachable_another_replica_applies(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        primary, other = two_hosts(stage)
        calls, how = await forward(stage)
        await primary.transport.close()
        await backward(stage, calls, how)
        check_gradient(calls[0])
        assert len(other.applied) + how.stats.snapshot().lost_updates == 1

    memory_world.run(main)


@pytest.mark.parametrize("failure", ["hang", "apply_then_hang", "nan", "wrong_shape", "garbage"])
def test_after_an_ambiguous_failure_nobody_else_applies(memory_world: MemoryWorld, failure: object) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        primary, other = two_hosts(stage)
        primary.script["backward"] = [failure]
        call, stats = await both(stage)
        check_gradient(call)
        assert other.log == [("backward", UID, False, True)]
        assert other.applied == []
        confirmed = failure in ("nan", "wrong_shape")  # the host said so itself, only its gradients are useless
        assert call.applied == confirmed
        assert stats.lost_updates == (0 if confirmed else 1)
        assert stage.events.count(UpdateLost) == stats.lost_updates

    memory_world.run(main)


def test_a_host_that_knows_the_id_already_is_asked_for_input_gradients_only(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        primary, other = two_hosts(stage)
        primary.script["backward"] = [StaleRequestError("applied already")]
        call, stats = await both(stage)
        check_gradient(call)
        assert [e for e in primary.log if e[0] == "backward"] == [("backward", UID, False, True)]
        assert (primary.applied, other.log, stats.lost_updates) == ([], [], 1)

    memory_world.run(main)


def test_a_second_backward_pass_is_a_gradient_of_its_own(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        calls, how = await forward(stage)
        await backward(stage, calls, how)
        await backward(stage, calls, how)
        assert calls[0].applied
        assert len(set(stage.hosts[0].applied)) == 2
        assert how.stats.snapshot().lost_updates == 0

    memory_world.run(main)


def test_each_gradient_is_applied_at_most_once_whatever_fails(memory_world: MemoryWorld) -> None:
    failures = ["ok", "hang", "apply_then_hang", "nan", "busy", "forgot", "garbage", "unknown", "wrong_shape"]

    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS, UIDS], directory_refresh_s=0.5)
        rng = stage.endpoint.runtime.rng
        lost = 0
        for _ in range(60):
            for host in stage.hosts:
                host.script = {"forward": [], "backward": [rng.choice(failures) for _ in range(4)]}
            calls, how = await forward(stage, UIDS, timeout_s=20.0)
            await backward(stage, calls, how)
            lost += how.stats.snapshot().lost_updates
        everything = [key for host in stage.hosts for key in host.applied]
        assert len(everything) == len(set(everything))
        assert len(everything) + lost >= 60 * 4
        assert 0 < lost < 60 * 4

    memory_world.run(main, timeout_s=30.0)


def test_when_nobody_returns_the_gradient_it_is_missing_and_counted(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        stage.hosts[0].always["backward"] = "hang"
        call, stats = await both(stage, timeout_s=1.0)
        assert call.grad_inputs is None
        assert (stats.missing_gradients, stats.lost_updates) == (1, 1)
        [missing] = [s.event for s in stage.events.recent(GradientMissing)]
        assert missing.uid == UID
        assert missing.reason

    memory_world.run(main)


def test_without_training_nothing_is_kept_and_nothing_applied(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        call, stats = await both(stage, train=False)
        check_gradient(call)
        assert not any(r.train for r in stage.hosts[0].requests)
        assert stage.hosts[0].log[-1] == ("backward", UID, False, True)
        assert (applied(stage), stats.lost_updates, stage.hosts[0].cached) == ([0], 0, {})

    memory_world.run(main)


def test_large_calls_travel_as_streams_small_ones_as_messages(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        await both(stage, train=False)
        assert stage.hosts[0].streamed == 0
        x = torch.randn(20000, DIM)
        call, how = stage.experts.new_call(UID, len(x), [x]), CallOptions("the layer")
        await stage.experts.forward([call], how)
        call.grad_outputs = [torch.ones_like(x)]
        await stage.experts.backward([call], how)
        assert stage.hosts[0].streamed == 2
        assert call.outputs is not None
        assert call.grad_inputs is not None
        out, grad = expected(UID, x, torch.ones_like(x))
        torch.testing.assert_close(call.outputs[0], out)
        torch.testing.assert_close(call.grad_inputs[0], grad)

    memory_world.run(main)


@pytest.mark.parametrize("failure", [HostBusyError("The queue is full."), "garbage", "hang"])
def test_streams_fail_like_messages(memory_world: MemoryWorld, failure: object) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        primary, other = two_hosts(stage)
        primary.script["forward"] = [failure]
        x = torch.randn(20000, DIM)
        call = stage.experts.new_call(UID, len(x), [x])
        await stage.experts.forward([call], CallOptions("the layer"))
        assert call.contact == other.transport.contact

    memory_world.run(main)


def test_an_answer_far_larger_than_expected_is_not_accepted(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        primary, other = two_hosts(stage)
        primary.script["forward"] = ["huge"]
        calls, _ = await forward(stage)
        assert calls[0].contact == other.transport.contact
        [failed] = [s.event for s in stage.events.recent(ExpertCallFailed)]
        assert "bytes" in failed.reason

    memory_world.run(main)


def test_our_own_closed_transport_is_an_error_not_a_masked_expert(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS[:2], UIDS[2:]])
        await stage.endpoint.transport.close()
        with pytest.raises(ClosedError):
            await forward(stage, UIDS)

    memory_world.run(main)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("failure", [ClosedError("Closed there."), ConfigError("Not here.")])
def test_a_host_cannot_raise_errors_of_ours(memory_world: MemoryWorld, direction: str, failure: SwarmError) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS])
        primary, other = two_hosts(stage)
        primary.always[direction] = failure
        call, stats = await both(stage)
        check_gradient(call)
        assert stats.failed_calls == 1
        # whoever does not say that nothing was done may have applied the gradient
        assert len(other.applied) == (1 if direction == "forward" else 0)

    memory_world.run(main)
