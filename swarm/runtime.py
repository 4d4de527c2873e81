"""What protocol code needs from its surroundings: a clock, randomness, events, and a place for heavy work."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, ParamSpec, TypeVar

from swarm.clock import Clock, SystemClock
from swarm.events import Event, EventStream

P = ParamSpec("P")
T = TypeVar("T")


@lru_cache(maxsize=1)
def codec_pool() -> ThreadPoolExecutor:
    """The process's one bounded pool for encoding, hashing and reduction of anything that takes more than 0.2 ms."""
    return ThreadPoolExecutor(max_workers=max(2, min(8, os.cpu_count() or 2)), thread_name_prefix="swarm-codec")


@dataclass(frozen=True, slots=True)
class TaskFailed(Event):
    """A background task of the peer ended with an error it did not handle."""

    task: str
    reason: str


class Runtime:
    """Surroundings of one peer. `VirtualRuntime` in `swarm.simulation.virtual` is the same in virtual time.

    Attributes:
        clock: The only source of time for protocol code.
        rng: Randomness of protocol decisions (jitter, sampling). Keys, nonces and tokens never come from it.
        events: Where everything worth telling is emitted.
    """

    virtual: ClassVar[bool] = False
    """True in virtual time, where nothing may wait for a thread."""

    def __init__(
        self, clock: Clock | None = None, rng: random.Random | None = None, events: EventStream | None = None
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.rng = rng or random.Random()
        self.events = events or EventStream(self.clock)
        self._tasks: dict[asyncio.Task[Any], None] = {}

    async def offload(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn` on the codec pool (inline in virtual time) and return its result."""
        return await asyncio.get_running_loop().run_in_executor(codec_pool(), lambda: fn(*args, **kwargs))

    def emit(self, event: Event) -> None:
        self.events.emit(event)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a background task that this runtime owns: kept alive, its failure becomes a `TaskFailed` event."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.emit(TaskFailed(task=task.get_name(), reason=repr(error)))

    def abandon_tasks(self) -> list[asyncio.Task[Any]]:
        """Cancel every task started by `spawn` but the current one, without waiting; returns them."""
        tasks = [t for t in self._tasks if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    async def cancel_tasks(self) -> None:
        """Cancel every task started by `spawn` and wait until they have ended."""
        tasks = self.abandon_tasks()
        await asyncio.gather(*tasks, return_exceptions=True)
