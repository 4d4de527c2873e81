"""Following a key: its live entries now, and again whenever one is added, changes, is deleted or expires.

Watchers of one key share a poller, which reads the key while somebody waits for news: soon after a change, less and
less often while there is none, early enough before an entry's end to see that it was renewed, and at once when we write
there ourselves. An entry's end needs no reading: it is told on time even if nobody can be asked. What a poller knows
only moves forward: an entry that one read misses is still there until it expires or its tombstone is seen.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

from swarm.config import DhtConfig
from swarm.dht.records import Copy, Entry, EntryId, to_entry
from swarm.errors import ClosedError, DhtError, SwarmError, UsageError
from swarm.runtime import Runtime

GROWTH = 1.5
"""By how much the interval grows with each read that brings nothing new."""
JITTER = 0.2
"""Reads come up to this fraction early, so that those of many peers spread out."""
RENEWAL_LEAD = 0.5
"""A key is read again after this part of what is left of the entry that ends first."""
LINGER_S = 30.0
"""How long a poller that nobody waits for is kept, resting."""

_Shown: TypeAlias = list[tuple[EntryId, bytes]]


class WatchedKey:
    """What is known of a watched key; it changes by what is read and by the passing of time. No I/O.

    Args:
        max_ended: Entries whose end is remembered, lest a holder brings them back.
    """

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._copies: dict[EntryId, Copy] = {}
        self._ended: OrderedDict[EntryId, int] = OrderedDict()

    def learn(self, found: Mapping[EntryId, Copy], now_s: float) -> bool:
        """Take what a read found; whether a reader would notice. No holder can prolong a version known already."""
        changed = False
        for entry_id, copy in found.items():
            held = self._copies.get(entry_id)
            if copy.expires_s <= now_s or copy.record.record_version <= self._ended.get(entry_id, 0):
                continue
            if held is not None and held.record.rank >= copy.record.rank:
                continue
            before = None if held is None or held.record.deleted else held.record.body
            after = None if copy.record.deleted else copy.record.body
            changed = changed or before != after
            self._copies[entry_id] = copy
        return changed

    def expire(self, now_s: float) -> bool:
        """Drop what has ended; whether a reader would notice."""
        over = [entry_id for entry_id, copy in self._copies.items() if copy.expires_s <= now_s]
        changed = False
        for entry_id in over:
            record = self._copies.pop(entry_id).record
            changed = changed or not record.deleted
            self._ended[entry_id] = record.record_version
            self._ended.move_to_end(entry_id)
            if len(self._ended) > self._max_ended:
                self._ended.popitem(last=False)
        return changed

    def next_end_s(self) -> float:
        """When the next entry that readers see ends."""
        return min((c.expires_s for c in self._copies.values() if not c.record.deleted), default=math.inf)

    def copies(self) -> list[Copy]:
        """All that is known, tombstones included."""
        return list(self._copies.values())

    def live(self) -> list[Copy]:
        """The entries that readers see, in their order."""
        return [self._copies[i] for i in sorted(self._copies) if not self._copies[i].record.deleted]


class Poller:
    """Reads one key for everybody who waits for news of it.

    Args:
        key: The key.
        watches: Whose it is.
    """

    def __init__(self, key: str, watches: Watches) -> None:
        self.key = key
        self._watches = watches
        self._config = watches.config
        self._runtime = watches.runtime
        self.state = WatchedKey(watches.config.max_entries_per_key)
        self.current = False
        """Whether the state has been read, and has been followed since."""
        self._waiters: dict[asyncio.Future[None], float] = {}
        self._kicked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._interval_s = self._config.watch_min_s

    def kick(self) -> None:
        """Read again now."""
        self._interval_s = self._config.watch_min_s
        self._kicked.set()

    async def news(self, every_s: float) -> None:
        """Wait until something may have changed. Raises `ClosedError`, `DhtError`."""
        waiter = asyncio.get_running_loop().create_future()
        resting = not self._waiters
        self._waiters[waiter] = every_s
        if self._task is None:
            self._task = self._watches.spawn(self._run(), "dht-watch")
        elif resting or every_s < self._interval_s:
            self._kicked.set()
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    def fail(self, error: SwarmError) -> None:
        """End everybody's wait."""
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_exception(error)

    def tell(self) -> None:
        """End everybody's wait: they look for themselves."""
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_result(None)

    async def _run(self) -> None:
        try:
            while await self._wanted():
                self._kicked.clear()
                changed = await self._read()
                if changed is not None and (changed or not self.current):
                    self.current = True
                    self.tell()
                bounds = self._config.watch_min_s, self._config.watch_max_s
                self._interval_s = bounds[0] if changed else min(self._interval_s * GROWTH, bounds[1])
                await self._rest()
        finally:
            self.current = False
            self._task = None
            self._watches.ended(self)
            self.fail(DhtError(f"The watch of {self.key!r} ended unexpectedly.", fix="Watch it again."))

    async def _wanted(self) -> bool:
        """Whether somebody waits, or does again within `LINGER_S`."""
        if not self._waiters:
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._kicked.wait()
            except TimeoutError:
                pass  # judged by who waits now
        self.state.expire(self._runtime.clock.time())
        return bool(self._waiters)

    async def _read(self) -> bool | None:
        """Read the key while time goes on; whether a reader would notice what it brought, none if it failed."""
        now_s = self._runtime.clock.time
        task = self._watches.spawn(self._watches.read(self.key, self.state.copies()), "dht-watch-read")
        while not task.done():
            end_s = self.state.next_end_s()
            await asyncio.wait([task], timeout=None if math.isinf(end_s) else max(0.0, end_s - now_s()))
            self._expire()
        try:
            found = task.result()
        except SwarmError:
            return None  # what is known holds until it ends; the next read may fare better
        return self.state.learn(found, now_s())

    async def _rest(self) -> None:
        """Until the next read is due, telling who waits when an entry ends."""
        begun_s = self._runtime.clock.time()
        jitter = 1 - JITTER * self._runtime.rng.random()
        while not self._kicked.is_set():
            now_s, end_s = self._runtime.clock.time(), self.state.next_end_s()
            least_s = self._config.watch_min_s
            interval_s = max(least_s, min(self._interval_s, *self._waiters.values(), math.inf)) * jitter
            due_s = begun_s + min(interval_s, max(least_s, (end_s - begun_s) * RENEWAL_LEAD))
            if now_s >= due_s:
                return
            try:
                async with asyncio.timeout_at(min(due_s, end_s)):
                    await self._kicked.wait()
            except TimeoutError:
                self._expire()

    def _expire(self) -> None:
        if self.state.expire(self._runtime.clock.time()):
            self._interval_s = self._config.watch_min_s
            self.tell()


class Watch(AsyncIterator[list[Entry]]):
    """The live entries of a key, and again after each change. Changes that come while nobody waits are told as one.

    It holds nothing while nobody waits for its next item, so that it may simply be dropped.
    """

    def __init__(self, watches: Watches, key: str, every_s: float) -> None:
        self._watches = watches
        self._key = key
        self._every_s = every_s
        self._shown: _Shown | None = None
        self._closed = False
        self._poller: Poller | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Entry]:
        """The entries, ordered by author and subkey: at once at first, later when they differ from those before.

        Raises:
            ClosedError: The DHT was closed.
        """
        while not self._closed:
            poller = self._poller = self._watches.poller(self._key)
            if poller.current:
                now_s = self._watches.runtime.clock.time()
                copies = [copy for copy in poller.state.live() if copy.expires_s > now_s]
                shown = [(copy.record.entry_id, copy.record.body) for copy in copies]
                if shown != self._shown:
                    self._shown = shown
                    return [to_entry(copy, now_s) for copy in copies]
            await poller.news(self._every_s)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration. Never needed, but allowed, as with an asynchronous generator."""
        self._closed = True
        if self._poller is not None:
            self._poller.tell()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Watches:
    """The watched keys of one peer.

    Args:
        config: Bounds of the interval.
        runtime: Clock and randomness.
        read: Reads a key, of which we know these copies already; tombstones included.
        spawn: Starts a task that ends with the DHT.
    """

    def __init__(
        self,
        config: DhtConfig,
        runtime: Runtime,
        read: Callable[[str, Sequence[Copy]], Coroutine[Any, Any, Mapping[EntryId, Copy]]],
        spawn: Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]],
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.read = read
        self.spawn = spawn
        self._pollers: dict[str, Poller] = {}
        self._closed = False

    def __len__(self) -> int:
        """Keys followed at this moment."""
        return len(self._pollers)

    def watch(self, key: str, every_s: float | None) -> Watch:
        """A new watch. Raises `UsageError` for an interval that cannot be."""
        if every_s is not None and not every_s > 0:
            raise UsageError(f"A key cannot be watched every {every_s} s.", fix="Give a positive number, or none.")
        return Watch(self, key, math.inf if every_s is None else every_s)

    def poller(self, key: str) -> Poller:
        """The one for a key. Raises `ClosedError`."""
        if self._closed:
            raise _closed()
        if key not in self._pollers:
            self._pollers[key] = Poller(key, self)
        return self._pollers[key]

    def ended(self, poller: Poller) -> None:
        if self._pollers.get(poller.key) is poller:
            del self._pollers[poller.key]

    def written(self, keys: Mapping[str, Any]) -> None:
        """We have written under these keys."""
        for key in keys:
            if key in self._pollers:
                self._pollers[key].kick()

    def close(self) -> None:
        """End every wait with `ClosedError`."""
        self._closed = True
        for poller in list(self._pollers.values()):
            poller.fail(_closed())


def _closed() -> ClosedError:
    return ClosedError("The DHT is closed.")
