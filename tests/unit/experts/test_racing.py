"""Hedged calls in virtual time: what a stalled host costs, and that a hedge never applies a gradient."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from swarm.errors import HostBusyError
from swarm.experts.calls import CallOptions, ExpertCall, UpdateLost
from swarm.experts.directory import PeerAvoided
from swarm.experts.hedging import BURST, FRACTION
from tests.support import MemoryWorld
from tests.unit.experts.fakes import DIM, GRID, FakeHost, Stage, set_stage

UIDS = GRID.uids()
UID = UIDS[0]
PATIENT = {"initial_s": 5.0, "floor_s": 3.0, "cap_s": 10.0}


def batch() -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(1))


async def run_both(
    stage: Stage, how: CallOptions, uids: Sequence[str] = (UID,), *, before_backward: object = None
) -> list[ExpertCall]:
    calls = [stage.experts.new_call(uid, 3, [batch()]) for uid in uids]
    await stage.experts.forward(calls, how)
    if callable(before_backward):
        before_backward()
    for call in calls:
        call.grad_outputs = [torch.ones(3, DIM)]
    await stage.experts.backward(calls, how)
    return calls


async def warm_stage(world: MemoryWorld, holdings: Sequence[Sequence[str]] = (UIDS, UIDS)) -> tuple[Stage, CallOptions]:
    """A stage whose hosts' usual answer times are known."""
    stage = await set_stage(world, holdings, deadline=PATIENT, directory_refresh_s=1000.0)
    how = CallOptions("the layer")
    for _ in range(12):
        await run_both(stage, how)
    return stage, how


def hosts_of(stage: Stage) -> tuple[FakeHost, FakeHost]:
    primary = stage.primary(UID)
    return primary, stage.other(primary)


def test_a_frozen_host_costs_a_hedge_delay_and_is_out_of_the_way_afterwards(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage, how = await warm_stage(memory_world)
        primary, other = hosts_of(stage)
        clock = stage.endpoint.runtime.clock
        usual = how.stats.snapshot()
        for kind in ("forward", "backward", "probe"):
            primary.always[kind] = "hang"
        for _ in range(20):
            begun = clock.time()
            [call] = await run_both(stage, how)
            assert clock.time() - begun < 0.5
            assert call.contact == other.transport.contact
            assert call.applied
        stats = how.stats.snapshot().since(usual)
        assert (stats.hedges, stats.hedge_wins) == (1, 1), "the second call already went to the other replica"
        assert (stats.failed_calls, stats.lost_updates, stats.masked_tokens) == (0, 0, 0)
        await asyncio.sleep(PATIENT["initial_s"] + 1.0)
        assert stage.events.count(PeerAvoided) == 1, "the trial call of the suspect found nobody"

    memory_world.run(main)


@pytest.mark.parametrize(("then", "lost"), [("slow", 0), ("hang", 1), ("apply_then_hang", 1)])
def test_a_hedged_backward_never_applies_and_what_became_of_the_update_is_counted(
    memory_world: MemoryWorld, then: str, lost: int
) -> None:
    async def main() -> None:
        stage, how = await warm_stage(memory_world)
        primary, other = hosts_of(stage)
        applied_before = len(primary.applied)
        primary.always["probe"] = "hang"
        clock = stage.endpoint.runtime.clock

        begun = clock.time()
        [call] = await run_both(stage, how, before_backward=lambda: primary.always.update(backward=then))
        assert clock.time() - begun < 0.5, "the step did not wait for the host that was to apply"
        assert call.grad_inputs is not None
        assert other.log == [("backward", UID, False, True)]
        assert how.stats.snapshot().lost_updates == 0, "not known yet"
        await asyncio.sleep(6.0)
        assert other.applied == []
        assert len(primary.applied) == applied_before + (then != "hang")
        assert how.stats.snapshot().lost_updates == lost
        assert stage.events.count(UpdateLost) == lost

    memory_world.run(main)


def test_a_host_that_was_only_late_once_is_trusted_again_at_once(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage, how = await warm_stage(memory_world)
        primary, other = hosts_of(stage)
        primary.script["forward"] = ["slow"]
        await run_both(stage, how)
        assert len(other.log) == 2
        await asyncio.sleep(0.5)
        assert stage.events.count(PeerAvoided) == 0
        assert stage.experts.directory.candidates(UID, [])[0].peer_id == primary.transport.peer_id

    memory_world.run(main)


def test_hedges_stay_within_their_budget(memory_world: MemoryWorld) -> None:
    """Both hosts take a second for one call in three: unbudgeted, every one of those would be hedged."""

    async def main() -> None:
        stage, how = await warm_stage(memory_world)
        for host in stage.hosts:
            host.script["forward"] = ["slow" if i % 3 == 2 else "ok" for i in range(500)]
        for _ in range(300):
            [call] = await run_both(stage, how)
            assert call.answered
        stats = how.stats.snapshot()
        assert 0 < stats.hedges <= FRACTION * stats.requests + BURST
        assert stats.lost_updates == 0

    memory_world.run(main, timeout_s=30.0)


def test_nobody_is_hedged_after_a_refusal_for_lack_of_room(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage, how = await warm_stage(memory_world)
        primary, other = hosts_of(stage)
        other.script["forward"] = [HostBusyError("full")]
        primary.script["forward"] = [HostBusyError("full")]
        await run_both(stage, how)  # refused by one, then by the other, then given time
        primary.always["forward"] = other.always["forward"] = "slow"
        before = how.stats.snapshot()
        await run_both(stage, how)
        assert how.stats.snapshot().since(before).hedges == 0

    memory_world.run(main)


def test_a_group_of_experts_is_hedged_at_as_many_hosts_as_hold_them(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS[:2], UIDS[2:]], deadline=PATIENT, directory_refresh_s=1000.0)
        how = CallOptions("the layer")
        big = stage.hosts[0]
        for host in stage.hosts[1:]:
            stage.experts.loads.waited(host.transport.peer_id, 10.0, 0.0)
        for _ in range(12):
            await run_both(stage, how, UIDS)
        assert all(host.log == [] for host in stage.hosts[1:])
        big.always.update(forward="hang", probe="hang")
        before = how.stats.snapshot()
        calls = await run_both(stage, how, UIDS)
        stats = how.stats.snapshot().since(before)
        assert (stats.hedges, stats.hedge_wins, stats.masked_tokens) == (2, 1, 0)
        assert all(call.applied for call in calls)
        assert [len(host.log) for host in stage.hosts[1:]] == [4, 4]

    memory_world.run(main)


def test_the_hedge_of_a_host_that_then_fails_is_its_retry(memory_world: MemoryWorld) -> None:
    """The first host fails ambiguously while the hedge is under way: nobody is asked a third time."""

    async def main() -> None:
        stage, how = await warm_stage(memory_world)
        primary, other = hosts_of(stage)
        primary.always.update(backward="late_garbage", probe="hang")
        other.always["backward"] = "slow"
        [call] = await run_both(stage, how)
        assert call.grad_inputs is not None
        assert other.log == [("backward", UID, False, True)]
        assert other.applied == []
        assert how.stats.snapshot().lost_updates == 1

    memory_world.run(main)


def test_work_left_behind_when_the_client_goes_counts_as_lost(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage, how = await warm_stage(memory_world)
        primary, _ = hosts_of(stage)
        primary.always["probe"] = "hang"
        await run_both(stage, how, before_backward=lambda: primary.always.update(backward="hang"))
        assert how.stats.snapshot().lost_updates == 0
        await stage.experts.close()
        assert how.stats.snapshot().lost_updates == 1

    memory_world.run(main)
