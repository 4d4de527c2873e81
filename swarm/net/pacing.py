"""Pacing of uploads: a configured limit is kept without letting more than about 200 ms of data queue up."""

from __future__ import annotations

import asyncio

from swarm.clock import Clock

IN_FLIGHT_S = 0.2


class UploadPacer:
    """Spaces out the chunks of all bulk streams of one peer.

    Without a limit it does nothing: HTTP/2 windows, which follow the measured bandwidth-delay product, bound what is
    in flight. With one, no more than 200 ms of it is handed to the network at once, so that other traffic gets through.

    Args:
        max_bytes_s: The limit, or none.
        clock: The peer's clock.
    """

    def __init__(self, max_bytes_s: float | None, clock: Clock) -> None:
        self._rate = max_bytes_s
        self._clock = clock
        self._free_s = clock.time()
        """When everything handed over so far will have left at the limited rate."""

    async def wait(self, size_bytes: int) -> None:
        """Wait until a chunk may be sent. Callers are served in the order in which they ask."""
        if self._rate is None:
            return
        now = self._clock.time()
        self._free_s = max(self._free_s, now) + size_bytes / self._rate
        ahead_s = self._free_s - now - IN_FLIGHT_S
        if ahead_s > 0:
            await asyncio.sleep(ahead_s)
