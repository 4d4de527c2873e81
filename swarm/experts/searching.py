"""Reads the records of prefixes for beam search: what is known is searched at once, what is missing is read meanwhile.

Only a search that would find fewer experts than it wants waits for the DHT; one that finds enough notes what it lacked
for the background task, which also reads again what beams hold.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm.dht.records import Entry
from swarm.endpoint import Endpoint
from swarm.errors import DhtError, MalformedFrameError, NetworkError
from swarm.events import Event
from swarm.experts.beam import Found, Holder, PrefixCache, Told, Trie
from swarm.experts.prefixes import Prefix, PrefixRecord, prefix_key
from swarm.experts.spec import ExpertGrid, parse_uid
from swarm.identity import PeerId
from swarm.net.transport import Contact

KEYS_AT_ONCE = 2048
"""Prefixes that one read asks for."""
MAX_NOTED = 1 << 16
"""Prefixes that searches have noted for the background task."""
LOOKS_PER_REFRESH = 8
"""Times per refresh interval at which the background task looks whether there is something to read."""


@dataclass(frozen=True, slots=True)
class PrefixesNotRead(Event):
    """Records of `count` prefixes could not be read; what was known before stays in use until it expires."""

    grid: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrefixRecordIgnored(Event):
    """A host's record of a prefix makes no sense."""

    grid: str
    peer: str
    reason: str


class ExpertSearch:
    """The best experts of grids that are too large to be read whole, and who holds them.

    `find`, `holders` and `live_changed` are thread-safe and never wait; everything else belongs on the endpoint's loop.

    Args:
        endpoint: Whose DHT is read.
        grids: The grids to search, by name.
        avoids: Whether a peer is not to be called at present.
    """

    def __init__(self, endpoint: Endpoint, grids: Mapping[str, ExpertGrid], avoids: Callable[[PeerId], bool]) -> None:
        self._endpoint = endpoint
        self._runtime = endpoint.runtime
        self._config = endpoint.config.client
        self._avoids = avoids
        refresh_s, most = self._config.directory_refresh_s, self._config.search_cache_prefixes
        self._caches = {name: PrefixCache(grid, refresh_s, most) for name, grid in grids.items()}
        self._tries = {name: Trie(grid, {}, {}) for name, grid in grids.items()}
        self._usable: dict[str, tuple[Trie, Tensor]] = {}
        self._lock = threading.Lock()
        self._used: dict[str, dict[Prefix, None]] = {name: {} for name in grids}
        self._missing: dict[str, dict[Prefix, None]] = {name: {} for name in grids}
        self._reading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def __contains__(self, grid: str) -> bool:
        return grid in self._caches

    async def start(self) -> None:
        """Read the first coordinates of every grid, then keep fresh what searches use."""
        if self._caches:
            for name in self._caches:
                await self._read(name, [()])
            self._task = self._runtime.spawn(self._keep_fresh(), "expert-prefixes")

    async def close(self) -> None:
        """Stop reading. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    # Without waiting

    def find(self, grid: str, logits: Sequence[Tensor], k: int) -> Found:
        """The best experts among what is known; what is missing under the beams is read in the background.

        Experts whose hosts are all avoided are left out, unless there are no others.

        Args:
            grid: A grid that is searched.
            logits: The gate's logits for each dimension. Each [tokens, dims[i]]
            k: Experts per token; fewer are found where fewer are known.
        """
        trie = self._tries[grid]
        found = trie.search(logits, k, self._config.beam_width, self._usable_of(grid, trie))
        if not found.experts.shape[1]:
            found = trie.search(logits, k, self._config.beam_width, trie.announced())
        with self._lock:
            for noted, prefixes in ((self._used[grid], found.used), (self._missing[grid], found.missing)):
                if len(noted) < MAX_NOTED:
                    noted.update(dict.fromkeys(prefixes))
        return found

    def _usable_of(self, grid: str, trie: Trie) -> Tensor:
        with self._lock:
            kept = self._usable.get(grid)
            if kept is None or kept[0] is not trie:
                kept = self._usable[grid] = (trie, trie.usable(self._avoids))
            return kept[1]

    def holders(self, uid: str) -> tuple[Holder, ...]:
        """Who holds an expert, primary first, as far as its last prefix has been read; else it will be soon."""
        name, coordinates = parse_uid(uid)
        trie = self._tries.get(name)
        if trie is None:
            return ()
        holders = trie.holders.get(coordinates)
        if holders is None or coordinates[:-1] not in self._used[name]:
            with self._lock:
                noted = self._missing[name] if holders is None else self._used[name]
                if len(noted) < MAX_NOTED:
                    noted[coordinates[:-1]] = None
        return holders or ()

    def live_uids(self, grid: str) -> list[str]:
        """Known experts with a holder that is not avoided, in row-major order."""
        trie = self._tries[grid]
        make = self._caches[grid].grid.uid
        usable = self._usable_of(grid, trie).tolist()
        return [make(*at) for at, is_usable in zip(trie.experts, usable, strict=True) if is_usable]

    def contacts(self) -> dict[PeerId, Contact]:
        """How to reach the holders of all known experts."""
        held = (h.contact for trie in self._tries.values() for holders in trie.holders.values() for h in holders)
        return {contact.peer_id: contact for contact in held}

    def live_changed(self) -> None:
        """Other peers are avoided than before."""
        with self._lock:
            self._usable = {}

    def forget(self, uid: str, peer_id: PeerId) -> None:
        """The peer says that it does not hold this expert."""
        name, coordinates = parse_uid(uid)
        if name in self._caches and coordinates:
            self._caches[name].gone(coordinates, peer_id)
            trie = self._tries[name]
            if coordinates in trie.holders:
                left = tuple(h for h in trie.holders[coordinates] if h.contact.peer_id != peer_id)
                trie.holders[coordinates] = left
            self.live_changed()

    # Reading

    async def search(self, grid: str, logits: Sequence[Tensor], k: int, *, complete: bool = False) -> Found:
        """The best experts; while fewer than `k` are known, what is missing is read first, one read per dimension.

        Args:
            grid, logits, k: As for `find`.
            complete: Read all that is missing under the beams, however many experts are known already.
        """
        asked: dict[Prefix, None] = {}
        while True:
            found = await self._runtime.offload(self.find, grid, logits, k)
            unread = [prefix for prefix in found.missing if prefix not in asked]
            if not unread or (found.experts.shape[1] >= k and not complete):
                return found
            asked.update(dict.fromkeys(unread))
            await self._read(grid, unread)

    async def look_up(self, grid: str, experts: Collection[Prefix]) -> None:
        """Read who holds these experts."""
        prefixes = {at[:depth]: None for at in experts for depth in range(len(at))}
        await self._read(grid, sorted(prefixes), again=True)

    async def look_around(self, grid: str, count: int) -> None:
        """Read prefixes, those with experts first, until so many live experts are known or all prefixes are read."""
        await self._read(grid, [()], again=True)
        asked: dict[Prefix, None] = {}
        while len(self.live_uids(grid)) < count:
            unread = [prefix for prefix in self._tries[grid].unread() if prefix not in asked][:count]
            if not unread:
                return
            asked.update(dict.fromkeys(unread))
            await self._read(grid, unread)

    async def _read(self, grid: str, prefixes: Sequence[Prefix], *, again: bool = False) -> None:
        """Read prefixes that are not known yet, or all of them `again`, and make a new trie of what is known then."""
        cache, keys = self._caches[grid], {prefix_key(grid, prefix): prefix for prefix in prefixes}
        async with self._reading:
            wanted = [key for key, prefix in keys.items() if again or prefix not in cache]
            for i in range(0, len(wanted), KEYS_AT_ONCE):
                part = wanted[i : i + KEYS_AT_ONCE]
                try:
                    found = await self._endpoint.dht.get_many(part)
                except (DhtError, NetworkError) as error:
                    cache.failed((keys[key] for key in part), self._runtime.clock.time())
                    self._runtime.emit(PrefixesNotRead(grid, len(part), error.message))
                    continue
                now_s = self._runtime.clock.time()
                for key in part:
                    cache.answered(keys[key], self._told(grid, found[key], now_s), now_s)
            cache.trim()
            self._tries[grid] = await self._runtime.offload(cache.trie, self._runtime.clock.time())

    def _told(self, grid: str, entries: Sequence[Entry], now_s: float) -> list[tuple[PeerId, str, Told]]:
        told = []
        for entry in entries:
            try:
                record = PrefixRecord.from_body(entry.body)
            except MalformedFrameError as error:
                self._runtime.emit(PrefixRecordIgnored(grid, str(entry.author), error.message))
            else:
                told.append((entry.author, entry.subkey, Told(record, entry.record_version, now_s + entry.ttl_s)))
        return told

    async def _keep_fresh(self) -> None:
        runtime, refresh_s = self._runtime, self._config.directory_refresh_s
        while True:
            await asyncio.sleep(refresh_s / LOOKS_PER_REFRESH * runtime.rng.uniform(0.8, 1.2))
            for name, cache in self._caches.items():
                now_s = runtime.clock.time()
                with self._lock:
                    used, self._used[name] = self._used[name], {}
                    missing, self._missing[name] = self._missing[name], {}
                async with self._reading:  # a trie may be being made of the cache
                    cache.used(used, now_s)
                    due = cache.due(now_s)
                new = [prefix for prefix in missing if prefix not in cache]
                if new:
                    await self._read(name, new[:KEYS_AT_ONCE])
                if due or cache.next_expiry_s <= now_s:
                    await self._read(name, due[:KEYS_AT_ONCE], again=True)
