"""Pauses of the own loop do not count as waiting for others."""

from __future__ import annotations

import asyncio
import time

import pytest

from swarm.averaging.lag import LoopLag


def test_a_pause_of_the_loop_is_not_counted() -> None:
    async def main() -> None:
        lag, arrived = LoopLag(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def pause() -> None:
            time.sleep(0.5)
            loop.call_later(0.05, arrived.set)  # what was sent meanwhile is handed over a little later

        loop.call_later(0.05, pause)
        async with lag.timeout(0.3):
            await arrived.wait()
        assert lag.total_s > 0.4
        assert lag._beat is None, "nobody waits: nothing beats"

    asyncio.run(main())


def test_whoever_does_not_come_is_given_up_in_time() -> None:
    async def main() -> None:
        lag, begun = LoopLag(), time.monotonic()
        with pytest.raises(TimeoutError):
            async with lag.timeout(0.1):
                await asyncio.Event().wait()
        assert time.monotonic() - begun >= 0.1
        async with asyncio.timeout(5.0):
            with pytest.raises(TimeoutError):
                async with lag.timeout(0.05), lag.timeout(3.0):
                    await asyncio.Event().wait()
        assert not lag._waits

    asyncio.run(main())


def test_a_wait_that_is_over_at_once_ends_at_once() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with LoopLag().timeout(0.0):
                await asyncio.sleep(1.0)

    asyncio.run(main())
