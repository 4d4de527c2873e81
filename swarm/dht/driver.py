"""Runs crawls over the network: sends what a crawl wants asked, tells it what came back, waits for no straggler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from swarm.dht.crawl import Ask, Crawl
from swarm.dht.pace import Pace
from swarm.errors import SwarmError
from swarm.runtime import Runtime

T = TypeVar("T")

PATIENCE_FRACTION = 0.25
"""A lookup goes on without a peer that has not answered after this part of the call timeout."""
CRAWL_TIMEOUTS = 4.0
"""Call timeouts that a whole crawl may take, if it is one of a few positions."""
POSITIONS_PER_CRAWL = 256
"""It may take as long again for so many further ones."""


class Driver:
    """Owns the DHT's tasks and drives crawls.

    Args:
        runtime: Events.
        call_timeout_s: Cap of one call; what a crawl may take derives from it.
    """

    def __init__(self, runtime: Runtime, call_timeout_s: float) -> None:
        self._runtime = runtime
        self._patience_s = call_timeout_s * PATIENCE_FRACTION
        self._crawl_s = call_timeout_s * CRAWL_TIMEOUTS
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that `close` ends; its failure becomes an event."""
        task = self._runtime.spawn(coroutine, name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    async def drive(self, crawl: Crawl, send: Callable[[Ask], Awaitable[None]]) -> None:
        """Run a crawl to its end.

        Requests still under way at the end go on in the background until their own deadline: what they answer keeps the
        routing table fresh.

        Args:
            crawl: The state machine.
            send: Makes one request and tells the lookups what was answered; if it raises a `SwarmError`, the peer
                did not answer.
        """
        loop = asyncio.get_running_loop()
        results: asyncio.Queue[Ask] = asyncio.Queue()
        pace = Pace(self._patience_s)
        in_flight = 0
        give_up_s = loop.time() + self._crawl_s * (1 + (len(crawl.lookups) - 1) // POSITIONS_PER_CRAWL)

        async def one(ask: Ask) -> None:
            answered = False
            try:
                await send(ask)
                answered = True
            except SwarmError:
                pass  # the protocol has told the address book; the crawl goes on without this peer
            finally:
                if not answered:
                    crawl.failed(ask)
                results.put_nowait(ask)

        while True:
            for ask in crawl.next(pace.requests, pace.positions, pace.busy):
                self.spawn(one(ask), "dht-ask")
                pace.sent(ask, loop.time())
                in_flight += 1
            if crawl.done or not in_flight:
                return
            oldest = pace.oldest
            until_s = give_up_s if oldest is None else min(oldest[1], give_up_s)
            try:
                async with asyncio.timeout_at(until_s):
                    ask = await results.get()
            except TimeoutError:
                await asyncio.sleep(0)
                if not results.empty():
                    continue  # the loop was held up, not the peers
                if loop.time() >= give_up_s or oldest is None:
                    return
                pace.slow(oldest[0])
                crawl.slow(oldest[0])
                continue
            pace.ended(ask, loop.time())
            in_flight -= 1

    async def close(self) -> None:
        """Cancel every task and wait until they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
