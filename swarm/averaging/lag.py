"""Timeouts for what others send, which do not count the time in which this peer's own event loop stood still.

When a loop resumes after a pause (a busy machine, a long garbage collection), what others sent meanwhile lies in the
sockets, but timers that have become due come first. Who was in time must not be left out for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LEAST_BEAT_S, LONGEST_BEAT_S = 0.02, 0.5


class LoopLag:
    """Measures how late a loop runs, by a beat that it keeps while somebody waits.

    Attributes:
        total_s: Time lost so far, up to a tenth of the shortest wait less for each pause.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._waits: dict[asyncio.Timeout, float] = {}
        self._beat: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Like `asyncio.timeout`: raises `TimeoutError` after this time, not counting pauses of the loop."""
        async with asyncio.timeout(seconds) as wait:
            self._waits[wait] = seconds
            self._arm()
            try:
                yield
            finally:
                del self._waits[wait]
                if not self._waits and self._beat is not None:
                    self._beat.cancel()
                    self._beat = None

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        beat_s = min(max(min(self._waits.values()) / 10, LEAST_BEAT_S), LONGEST_BEAT_S)
        due = loop.time() + beat_s
        if self._beat is None or due < self._beat.when():
            if self._beat is not None:
                self._beat.cancel()
            self._beat = loop.call_at(due, self._measure, due)

    def _measure(self, due: float) -> None:
        """Runs before the timers that have become due since, so that these can still be put off."""
        late_s = asyncio.get_running_loop().time() - due
        if late_s > LEAST_BEAT_S:
            self.total_s += late_s
            for wait in self._waits:
                when = wait.when()
                if when is not None and not wait.expired():
                    wait.reschedule(when + late_s)
        self._beat = None
        self._arm()
