"""Virtual time: an asyncio loop whose clock jumps to the next timer, so that hours of protocol run in seconds.

The same seed gives the same order of events. Nothing here waits for threads or sockets: work that a real peer would
hand to its codec pool runs inline and costs modelled time.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar

from swarm.clock import LoopClock
from swarm.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")

WALL_EPOCH_S = 1_700_000_000.0
_CHECK_EVERY = 1024


class VirtualDeadlockError(RuntimeError):
    """Every task waits and no timer is set: in virtual time nothing can ever happen again."""


class VirtualRunTooLongError(RuntimeError):
    """The run used more real time than it was given."""


class _JumpingSelector(selectors.BaseSelector):
    """Instead of waiting for sockets, moves the loop's clock forward."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.real_deadline_s: float | None = None
        self._turns = 0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, -1, events, data)  # the loop's own wake-up socket; never polled
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlockError("Every task waits and no timer is set.")
        if timeout > 0:
            self.now_s += timeout
        self._turns += 1
        if (
            self.real_deadline_s is not None
            and self._turns % _CHECK_EVERY == 0
            and time.monotonic() > self.real_deadline_s
        ):
            raise VirtualRunTooLongError(f"Out of real time after {self.now_s:.1f} virtual seconds.")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. `loop.time()` starts at zero; `seed` is for whoever builds runtimes on it."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now_s

    def limit_real_time(self, seconds: float | None) -> None:
        """Raise `VirtualRunTooLongError` out of the loop when it runs longer than this in real time from now on."""
        self._jumping.real_deadline_s = None if seconds is None else time.monotonic() + seconds


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
