"""Virtual time: an asyncio loop whose clock jumps to the next timer, so that hours of protocol run in seconds.

The same seed gives the same order of events. Nothing here waits for threads or sockets: work that a real peer would
hand to its codec pool runs inline and costs modelled time.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from swarm.clock import LoopClock
from swarm.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WALL_EPOCH_S = 1_700_000_000.0
_CHECK_EVERY = 1024
_SWEEP_CANCELLED = 512
_GC_THRESHOLD = (100_000, 20, 100)
"""Large networks are millions of objects that live long: looking through them rarely saves a fifth of the time."""


class _BaseLoop(asyncio.BaseEventLoop):
    """What asyncio's loops have in common and typeshed does not tell."""

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _check_closed: Callable[[], None]


class VirtualDeadlockError(RuntimeError):
    """Every task waits and no timer is set: in virtual time nothing can ever happen again."""


class VirtualRunTooLongError(RuntimeError):
    """The run used more real time than it was given."""


class VirtualLoop(_BaseLoop):
    """An event loop in virtual time, without sockets. `loop.time()` starts at zero; `seed` is for whoever builds
    runtimes on it.

    Callbacks that are due at the same time run in the order in which they were scheduled.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self._now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._scheduled_count = 0
        self._cancelled_count = 0
        self._turns = 0
        self._real_deadline_s: float | None = None

    def time(self) -> float:
        return self._now_s

    def run_forever(self) -> None:
        before = gc.get_threshold()
        gc.set_threshold(*_GC_THRESHOLD)
        try:
            super().run_forever()
        finally:
            gc.set_threshold(*before)

    def limit_real_time(self, seconds: float | None) -> None:
        """Raise `VirtualRunTooLongError` out of the loop when it runs longer than this in real time from now on."""
        self._real_deadline_s = None if seconds is None else time.monotonic() + seconds

    # asyncio's own timers are compared in Python, by their time alone; tuples are compared in C, ties in order

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._scheduled_count += 1
        heapq.heappush(self._timers, (when, self._scheduled_count, timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_count += 1  # some of them have run or left already: this only decides when to sweep
        if self._cancelled_count > _SWEEP_CANCELLED and self._cancelled_count > len(self._timers) // 2:
            self._timers[:] = [timer for timer in self._timers if timer[2] is not handle and not timer[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled_count = 0

    def _run_once(self) -> None:
        """One turn: move the clock if nothing is ready, then run what is. Called by `run_forever`."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise VirtualDeadlockError("Every task waits and no timer is set.")
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        self._turns += 1
        if (
            self._turns % _CHECK_EVERY == 0
            and self._real_deadline_s is not None
            and time.monotonic() > self._real_deadline_s
        ):
            raise VirtualRunTooLongError(f"Out of real time after {self._now_s:.1f} virtual seconds.")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """Nothing ever blocks the loop, so that nothing has to wake it up."""


class VirtualRuntime(Runtime):
    """Surroundings of one virtual peer.

    Args:
        loop: The loop whose time is the clock.
        seed: Seed of the run.
        name: Tells the peers of one run apart: each has its own stream of randomness.
        offload_cost_s: Virtual time that offloaded work takes.
        wall_offset_s: How far the peer's wall clock is ahead of the others'.
    """

    virtual = True

    def __init__(
        self, loop: VirtualLoop, seed: int, name: str, offload_cost_s: float = 0.001, *, wall_offset_s: float = 0.0
    ) -> None:
        super().__init__(LoopClock(loop, WALL_EPOCH_S + wall_offset_s), random.Random(f"{seed}/{name}"))
        self._offload_cost_s = offload_cost_s

    async def offload(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        result = fn(*args, **kwargs)
        await asyncio.sleep(self._offload_cost_s)
        return result


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], seed: int = 0, *, real_timeout_s: float | None = 55.0) -> T:
    """Run `await main()` on a fresh virtual loop and return its result; cancels what is left.

    Raises:
        VirtualDeadlockError: `main` waits for something that cannot happen.
        VirtualRunTooLongError: `real_timeout_s` of real time have passed.
    """
    loop = VirtualLoop(seed)
    try:
        loop.limit_real_time(real_timeout_s)
        return loop.run_until_complete(main())
    finally:
        close_virtual(loop)


def close_virtual(loop: VirtualLoop) -> None:
    """Cancel the tasks that are left, let them end, close the loop."""
    loop.limit_real_time(5.0)
    try:
        tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
