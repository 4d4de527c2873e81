"""Clocks. Protocol code reads time only through a `Clock`, so that it runs in virtual time unchanged."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: `time` for durations, never compared between peers; `wall` for the expiry of invites only."""

    def time(self) -> float:
        """Monotonic seconds; agrees with the event loop's `loop.time()`."""
        ...

    def wall(self) -> float:
        """Unix seconds as this machine believes them; may be wrong by any amount."""
        ...


class SystemClock:
    """The machine's clocks. asyncio's own loops use `time.monotonic` too, so `time` agrees with them."""

    def time(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class LoopClock:
    """The time of an event loop, real or virtual, with a wall clock that starts at `wall_epoch` (skewed at will)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wall_epoch: float = 1_700_000_000.0) -> None:
        self._loop = loop
        self._wall_epoch = wall_epoch

    def time(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._wall_epoch + self._loop.time()
