"""A group that is looked for, and sealed, before its round begins: kept until the round claims it or its time ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from swarm.averaging.board import MatchmakingImpaired
from swarm.averaging.decisions import Concluded
from swarm.endpoint import Endpoint


class Ahead:
    """One search that was begun before its round.

    Args:
        search: Looks for a group.
        give_up: Ends the search soon, with the outcome that it has then.
        leave: Told the nonce of a sealed group that this peer will not enter.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        key: str,
        search: Callable[[], Coroutine[Any, Any, Concluded]],
        give_up: Callable[[str], object],
        leave: Callable[[bytes], None],
    ) -> None:
        self.awaited = False
        """Whether a member of the group waits for us to enter."""
        self._endpoint = endpoint
        self._key = key
        self._give_up = give_up
        self._leave = leave
        self.nonce = b""
        """Of the sealed group, once there is one."""
        self._sealed_at = 0.0
        self._over = False
        self._expiry: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Concluded] = endpoint.runtime.spawn(self._look(search), f"averaging {key}: next group")

    @property
    def useless(self) -> bool:
        """Whether there is no group to claim, and none will come."""
        return self._over or (self._task.done() and not self.nonce)

    @property
    def _now(self) -> float:
        return self._endpoint.runtime.clock.time()

    async def _look(self, search: Callable[[], Coroutine[Any, Any, Concluded]]) -> Concluded:
        concluded = await search()
        if concluded.seal is not None and not self._over:
            self.nonce, self._sealed_at = concluded.seal.nonce, self._now
            patience_s = concluded.seal.enter_within_s + self._endpoint.config.averaging.chunk_timeout_s
            self._expiry = self._endpoint.runtime.spawn(self._expire(patience_s), f"averaging {self._key}")
        return concluded

    async def _expire(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not self._over:
            self._over = True
            self._leave(self.nonce)
            reason = f"the group prepared ahead was not used within {after_s:.1f} s"
            self._endpoint.runtime.emit(MatchmakingImpaired(self._key, reason))

    async def claim(self, timeout_s: float | None) -> Concluded | None:
        """What the search found; `enter_within_s` of its seal is what is left of it now. None without a group."""
        try:
            async with asyncio.timeout(timeout_s):
                concluded = await asyncio.shield(self._task)
        except TimeoutError:
            self._give_up("it took too long")
            concluded = await self._task
        except asyncio.CancelledError:
            self.abandon()
            raise
        if self._over:
            return None
        self._over = True
        if self._expiry is not None:
            self._expiry.cancel()
        if concluded.seal is None:
            return None
        left_s = max(0.0, concluded.seal.enter_within_s - (self._now - self._sealed_at))
        return replace(concluded, seal=replace(concluded.seal, enter_within_s=left_s))

    def abandon(self) -> None:
        """Give up; members of a group that was sealed do without us."""
        self._over = True
        self._task.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        if self.nonce:
            self._leave(self.nonce)
