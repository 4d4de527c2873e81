"""Virtual time."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from swarm.simulation.virtual import (
    VirtualDeadlockError,
    VirtualLoop,
    VirtualRuntime,
    VirtualRunTooLongError,
    close_virtual,
    run_virtual,
)


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = [loop.time()]

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(loop.time())

        async with asyncio.TaskGroup() as group:
            for seconds in (3600, 1, 60):
                group.create_task(sleeper(seconds))
        return seen

    began = time.monotonic()
    assert run_virtual(main) == [0, 1, 60, 3600]
    assert time.monotonic() - began < 30  # an hour passed, not for us


def test_timeouts_work() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(10)
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 5


def test_timers_due_together_run_in_order_and_cancelled_ones_do_not() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        ran: list[int] = []
        timers = [loop.call_at(5.0 if n % 3 else 7.0, ran.append, n) for n in range(3000)]
        for n, timer in enumerate(timers):
            if n % 4:
                timer.cancel()
        await asyncio.sleep(6.0)
        assert ran == [n for n in range(3000) if n % 4 == 0 and n % 3]
        await asyncio.sleep(2.0)
        return ran

    ran = run_virtual(main)
    assert sorted(ran) == list(range(0, 3000, 4))


def test_collector_is_left_as_it_was() -> None:
    before = gc.get_threshold()

    async def main() -> None:
        assert gc.get_threshold() != before

    run_virtual(main)
    assert gc.get_threshold() == before


def test_waiting_for_nothing_is_reported() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(VirtualDeadlockError):
        run_virtual(main)


def test_run_that_never_ends_is_stopped() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(VirtualRunTooLongError):
        run_virtual(main, real_timeout_s=0.1)


def test_runtime_has_own_randomness_and_inline_offload() -> None:
    loop = VirtualLoop(seed=3)
    try:
        first, again, other = (VirtualRuntime(loop, loop.seed, name) for name in ("a", "a", "b"))
        numbers = [runtime.rng.random() for runtime in (first, again, other)]
        assert numbers[0] == numbers[1] != numbers[2]
        assert loop.run_until_complete(first.offload(lambda x: x + 1, 41)) == 42
        assert first.clock.time() == loop.time() == 0.001
        assert first.clock.wall() == 1_700_000_000.001
    finally:
        close_virtual(loop)


def test_left_over_tasks_are_cancelled() -> None:
    ended = []

    async def background() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(True)

    async def main() -> None:
        main.task = asyncio.create_task(background())  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    run_virtual(main)
    assert ended == [True]
