"""Groups that are sealed ahead of their round, on both transports."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm.averaging.board import MatchmakingImpaired
from swarm.averaging.rounds import Group
from swarm.config import PeerConfig
from swarm.errors import ClosedError, UsageError
from tests.conformance.test_averaging import CONFIG, Mate, copies, mates, mean_of, random_values, step_all
from tests.support import World

QUICK = CONFIG.model_copy(update={"averaging": CONFIG.averaging.model_copy(update={"chunk_timeout_s": 0.4})})
UNHURRIED = PeerConfig.preset(
    "local", averaging={"matchmaking_s": 2.0, "chunk_timeout_s": 3.0, "round_timeout_s": 10.0}
)


async def prepared(group: list[Mate], at_s: float) -> None:
    """Prepare a group of all and wait until it is sealed."""
    assert all([await mate.averager.prepare_async(5.0, at_s) for mate in group])
    async with asyncio.timeout(5.0):
        for mate in group:
            seat = mate.averager._seat
            assert seat is not None
            while seat._ahead is None or not seat._ahead.nonce:
                await asyncio.sleep(0.01)


def test_a_prepared_group_is_used_at_once_with_the_weights_of_the_step(world: World) -> None:
    async def main() -> None:
        values, weights = random_values(3), [1.0, 0.0, 3.0]
        group = await mates(world, copies(values), config=UNHURRIED)
        await prepared(group, at_s=1.0)
        assert not await group[0].averager.prepare_async(), "one group at a time"
        rounds = await step_all(group, weights)
        for outcome in rounds:
            assert outcome.degraded == ()
            assert len(outcome.members) == 3
            assert isinstance(outcome.outcome, Group)
        for mate in group:
            for mine, exact in zip(mate.tensors, mean_of(values, weights), strict=True):
                torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-6)
        again = await step_all(group)
        assert all(len(r.members) == 3 for r in again), "the next round looks for its own group"

    world.run(main)


def test_members_that_are_early_wait_for_those_that_are_on_time(world: World) -> None:
    async def main() -> None:
        values = random_values(2)
        early, late = await mates(world, copies(values), config=UNHURRIED)
        await prepared([early, late], at_s=0.6)
        first = asyncio.create_task(early.averager.step_async())
        while not late.averager.others_waiting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        rounds = [await late.averager.step_async(), await first]
        assert all(r.averaged and r.degraded == () for r in rounds)
        for mate in (early, late):
            torch.testing.assert_close(mate.tensors[0], mean_of(values, [1, 1])[0])

    world.run(main)


def test_a_member_that_does_not_come_is_left_out(world: World) -> None:
    async def main() -> None:
        values = random_values(3)
        group = await mates(world, copies(values), config=QUICK)
        *coming, absent = group
        await prepared(group, at_s=0.2)
        rounds = await step_all(coming)
        assert all(isinstance(r.outcome, Group) and r.degraded for r in rounds)
        changed = mean_of(values[:2], [1, 1])
        kept = 0
        for column, tensor in enumerate(changed):
            for index, mate in enumerate(coming):
                mean = torch.isclose(mate.tensors[column], tensor, atol=1e-6)
                local = mate.tensors[column] == values[index][column]
                assert bool((mean | local).all()), "the survivors' mean or local values"
                kept += int((local & ~mean).sum())
        assert kept > 0, "the part of the absent member stays local"
        async with asyncio.timeout(5.0):
            while absent.endpoint.runtime.events.count(MatchmakingImpaired) == 0:
                await asyncio.sleep(0.02)
        assert all(torch.equal(a, b) for a, b in zip(absent.tensors, values[2], strict=True))
        again = await step_all(group)
        assert all(len(r.members) == 3 for r in again), "and may take part in the next round"

    world.run(main)


def test_prepared_and_unprepared_members_meet(world: World) -> None:
    async def main() -> None:
        values = random_values(2)
        one, two = await mates(world, copies(values), config=UNHURRIED)
        assert await one.averager.prepare_async(2.0, 0.5)
        blocking = asyncio.create_task(two.averager.step_async(4.0))
        while not one.averager.others_waiting:
            await asyncio.sleep(0.01)
        assert (await one.averager.step_async(1.0)).averaged
        assert (await blocking).degraded == ()
        torch.testing.assert_close(one.tensors[0], mean_of(values, [1, 4])[0])

    world.run(main)


def test_what_cannot_be_prepared_is_refused(world: World) -> None:
    async def main() -> None:
        (mate,) = await mates(world, random_values(1))
        for weight, at_s in ((-1.0, 1.0), (1.0, -1.0), (1.0, float("nan")), (1.0, float("inf"))):
            with pytest.raises(UsageError):
                await mate.averager.prepare_async(weight, at_s)
        assert await mate.averager.prepare_async()
        await mate.averager.aclose()
        with pytest.raises(ClosedError):
            await mate.averager.prepare_async()

    world.run(main)
