"""The records that this peer holds for others. No I/O and no clock: every method is told the time.

What writers can do to it is bounded: by entry, by (key, author), by key, by author, in number and in bytes. An author
that exceeds its own share is refused and told so. Where a bound is shared by all, somebody's record gives way:

- While one author uses more than the writer and more than a light user's allowance, the heaviest loses the record whose
  key is farthest from us, the one that readers look for here the least. So a flood never displaces the few records of
  others, and two floods wear each other down.
- A flood by very many identities cannot be told from a large swarm. While nobody is heavy, the record farthest from us
  gives way if the new one is nearer; otherwise the newcomer is refused. Ids cost an admission, near keys a search.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from typing import TypeAlias

from swarm.config import DhtConfig
from swarm.dht.fairness import SLACK, Usage, VersionFloors
from swarm.dht.records import Copy, position_of
from swarm.dht.refusals import Refusal, refused
from swarm.identity import PeerId

ENTRY_BYTES = 2560
"""What an entry counts in our books beside body and names (measured: 2,490, each with its own key and author)."""
LIGHT_SHARE = 1024
"""Who uses less than this part of the storage is not made to give way as the heaviest."""
_AFTER_SUBKEYS = b"\xff"
"""Greater than any UTF-8 text."""


class _Held:
    """A copy in its place. It loses the copy when it is dropped: heaps may name it for a while longer."""

    __slots__ = ("copy", "cost_bytes", "key", "number")

    def __init__(self, copy: Copy, key: _Key, number: int) -> None:
        self.copy: Copy | None = copy
        self.key = key
        self.number = number
        self.cost_bytes = cost_bytes(copy)


class _Key:
    """The entries of one key, in order."""

    __slots__ = ("crowd", "distance", "entries", "name", "order")

    def __init__(self, name: str, distance: int) -> None:
        self.name = name
        self.distance = distance
        self.entries: dict[bytes, _Held] = {}
        self.order: list[bytes] = []
        self.crowd: Usage | None = None
        """Entries by author, counted from when the key is first full."""

    def of_author(self, author: PeerId) -> list[bytes]:
        return self.order[self._start(author) : self._end(author)]

    def count(self, author: PeerId) -> int:
        return self._end(author) - self._start(author)

    def _start(self, author: PeerId) -> int:
        return bisect_left(self.order, author.digest)

    def _end(self, author: PeerId) -> int:
        return bisect_left(self.order, author.digest + _AFTER_SUBKEYS)


_Heap: TypeAlias = list[tuple[float, int, _Held]]
"""What to order by, a number that decides between equals, and the held copy."""


class _Author:
    """The entries of one author."""

    __slots__ = ("entries", "farthest")

    def __init__(self) -> None:
        self.entries = 0
        self.farthest: _Heap = []


class Storage:
    """Held copies by key and (author, subkey), within quotas, until they expire.

    The highest version of an entry wins. After a record has expired its version stays behind as a floor, so that nobody
    can replay it; floors are bounded too. No other copy of the same version prolongs a held copy's lifetime.

    Args:
        config: Quotas.
        position: Our own place among the peers, as a number of 160 bits.
    """

    def __init__(self, config: DhtConfig, position: int = 0) -> None:
        self._config = config
        self._position = position
        self._keys: dict[str, _Key] = {}
        self._authors: dict[PeerId, _Author] = {}
        self._usage = Usage()
        self._total = 0
        self._bytes = 0
        self._number = 0
        self._expiries: _Heap = []
        self._farthest: _Heap = []
        self._floors = VersionFloors(config.max_version_floors)
        room_bytes = min(config.max_total_bytes, config.max_entries * ENTRY_BYTES)
        self._light_bytes = room_bytes // LIGHT_SHARE
        self.on_evicted: Callable[[Copy, str], None] | None = None
        """Called with every copy that gave way to another, and the bound that was reached."""
        self.on_held: Callable[[str], None] | None = None
        """Called with the key of every statement that is newly held."""

    def __len__(self) -> int:
        """Copies held, tombstones included (some may have expired since the last `expire`)."""
        return self._total

    @property
    def used_bytes(self) -> int:
        """Memory that the held copies take, see `cost_bytes`."""
        return self._bytes

    def holds(self, key: str) -> bool:
        """Whether there is at least one copy of a key."""
        return key in self._keys

    def count(self, key: str) -> int:
        """How many copies are held under a key."""
        held = self._keys.get(key)
        return 0 if held is None else len(held.entries)

    def held_keys(self) -> list[str]:
        """The keys with at least one copy, in the order they came."""
        return list(self._keys)

    def offer(self, copy: Copy, now_s: float) -> bool:
        """Hold a checked copy, if need be in place of somebody else's. O(log n), amortised.

        Returns:
            True if it is new here, false if the same statement was held already.

        Raises:
            RecordRefusedError: Outdated (with the version known here), expired, or over a quota.
        """
        self.check(copy, now_s)
        record = copy.record
        key = self._keys.get(record.key)
        held = key.entries.get(cursor(copy)) if key is not None else None
        if held is not None:
            assert held.copy is not None
            if record.rank == held.copy.record.rank:
                return False
        else:
            self._check_author(copy, key)
        if key is None:
            key = _Key(record.key, int.from_bytes(position_of(record.key), "big") ^ self._position)
        if held is None:
            self._make_room_in(key, record.author_id)
        self._make_room(copy, key, held)
        if held is not None:
            self._drop(held)
        self._add(copy, key)
        if self.on_held is not None:
            self.on_held(copy.record.key)
        return True

    def check(self, copy: Copy, now_s: float) -> None:
        """Whether nothing newer is known here than a checked copy. Raises `RecordRefusedError`: outdated, expired."""
        self.expire(now_s)
        record = copy.record
        if copy.expires_s <= now_s:
            raise refused(Refusal.EXPIRED, "The record has expired.")
        held = self.get(*record.place_id)
        if held is not None:
            if record.rank < held.record.rank:
                version = held.record.record_version
                raise refused(Refusal.OUTDATED, "A newer version of this entry is held.", record_version=version)
        elif record.record_version <= (floor := self.floor(*record.place_id)):
            raise refused(Refusal.OUTDATED, "This version or a newer one has expired already.", record_version=floor)

    def get(self, key: str, author: PeerId, subkey: str) -> Copy | None:
        """The held copy of one entry, perhaps just expired."""
        entries = self._keys.get(key)
        held = entries.entries.get(author.digest + subkey.encode()) if entries is not None else None
        return held.copy if held is not None else None

    def entries(self, key: str, now_s: float) -> list[Copy]:
        """The live copies of a key, tombstones included, ordered by author and subkey."""
        held = self._keys.get(key)
        if held is None:
            return []
        copies = (held.entries[at].copy for at in held.order)
        return [copy for copy in copies if copy is not None and copy.expires_s > now_s]

    def page(self, key: str, now_s: float, after: bytes, budget_bytes: int) -> tuple[list[Copy], bool]:
        """Some live copies of a key in order.

        Args:
            after: `cursor` of the last entry already seen; empty starts.
            budget_bytes: Bound of the copies' size in a message; at least one copy is returned where there is one.

        Returns:
            The copies, and whether there are more.
        """
        held = self._keys.get(key)
        if held is None:
            return [], False
        page: list[Copy] = []
        for i in range(bisect_right(held.order, after) if after else 0, len(held.order)):
            copy = held.entries[held.order[i]].copy
            if copy is None or copy.expires_s <= now_s:
                continue
            budget_bytes -= copy.wire_bytes
            if page and budget_bytes < 0:
                return page, True
            page.append(copy)
        return page, False

    def expire(self, now_s: float) -> int:
        """Drop what has expired, leaving version floors; returns how many copies were dropped."""
        dropped = 0
        while self._expiries and self._expiries[0][0] <= now_s:
            held = heapq.heappop(self._expiries)[2]
            copy = held.copy
            if copy is not None:  # else replaced by a newer version meanwhile
                self._drop(held)
                self._floors.raise_to(copy.record.place_id, copy.record.record_version)
                dropped += 1
        return dropped

    def floor(self, key: str, author: PeerId, subkey: str) -> int:
        """The version that was held last and has expired, or 0."""
        return self._floors.get((key, author, subkey))

    def copies(self) -> Iterator[Copy]:
        """Every copy held, by key."""
        for key in self._keys.values():
            for held in key.entries.values():
                if held.copy is not None:
                    yield held.copy

    # Room ------------------------------------------------------------------------------------------------------------

    def _check_author(self, copy: Copy, key: _Key | None) -> None:
        """An author's own shares. Whoever exceeds them is told, and nobody else has to give way."""
        author, config = copy.record.author_id, self._config
        known = self._authors.get(author)
        if known is not None and known.entries >= config.max_entries_per_author:
            raise refused(
                Refusal.QUOTA, f"This author has {config.max_entries_per_author} records here.", "Delete some."
            )
        if key is not None and key.count(author) >= config.max_entries_per_key_and_author:
            limit = config.max_entries_per_key_and_author
            raise refused(
                Refusal.QUOTA, f"This author has {limit} entries under this key.", "Spread them over several keys."
            )

    def _make_room_in(self, key: _Key, author: PeerId) -> None:
        """If the key is full, the author with the most entries in it loses the one that ends first."""
        limit = self._config.max_entries_per_key
        if len(key.entries) < limit:
            return
        if key.crowd is None:
            key.crowd = Usage()
            for held in key.entries.values():
                if held.copy is not None:
                    key.crowd.add(held.copy.record.author_id, 1)
        heaviest = key.crowd.heaviest()
        if heaviest is None or heaviest[1] <= key.count(author) + 1:
            raise refused(Refusal.QUOTA, f"This key has {limit} entries.", "Spread over several keys.")
        candidates = [key.entries[at] for at in key.of_author(heaviest[0])]
        self._evict(min(candidates, key=lambda held: (_expires_s(held), held.number)), "entries of one key")

    def _make_room(self, copy: Copy, key: _Key, replaced: _Held | None) -> None:
        """If the storage is full, somebody's record gives way (see the module's text), or the copy is refused."""
        config, author = self._config, copy.record.author_id
        freed_bytes = 0 if replaced is None else replaced.cost_bytes
        more, more_bytes = 0 if replaced is not None else 1, cost_bytes(copy) - freed_bytes
        while self._total + more > config.max_entries or self._bytes + more_bytes > config.max_total_bytes:
            bound = "entries" if self._total + more > config.max_entries else "bytes"
            if more_bytes <= 0 and not more:
                return  # it takes no more than what it replaces
            victim = self._victim(author, self._usage[author] + more_bytes, key.distance)
            if victim is None or victim is replaced:
                raise refused(Refusal.QUOTA, f"This peer's storage is full ({bound}).", "Store elsewhere.")
            self._evict(victim, bound)

    def _victim(self, author: PeerId, would_use: int, distance: int) -> _Held | None:
        heaviest = self._usage.heaviest()
        if heaviest is not None and heaviest[1] > max(would_use, self._light_bytes):
            return self._first(self._authors[heaviest[0]].farthest)
        if would_use > self._light_bytes:
            own = self._authors.get(author)
            last = self._first(own.farthest) if own is not None else None
        else:
            last = self._first(self._farthest)
        return last if last is not None and last.key.distance > distance else None

    @staticmethod
    def _first(heap: _Heap) -> _Held | None:
        while heap and heap[0][2].copy is None:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _evict(self, held: _Held, bound: str) -> None:
        copy = held.copy
        assert copy is not None
        self._drop(held)
        # the very same version may come back, for instance from a reader that repairs
        self._floors.raise_to(copy.record.place_id, copy.record.record_version - 1)
        if self.on_evicted is not None:
            self.on_evicted(copy, bound)

    # Bookkeeping -----------------------------------------------------------------------------------------------------

    def _add(self, copy: Copy, key: _Key) -> None:
        author, at = copy.record.author_id, cursor(copy)
        self._number += 1
        held = _Held(copy, key, self._number)
        self._keys.setdefault(key.name, key)
        key.entries[at] = held
        insort(key.order, at)
        if key.crowd is not None:
            key.crowd.add(author, 1)
        known = self._authors.setdefault(author, _Author())
        known.entries += 1
        self._usage.add(author, held.cost_bytes)
        self._total += 1
        self._bytes += held.cost_bytes
        heapq.heappush(self._expiries, (copy.expires_s, held.number, held))
        heapq.heappush(self._farthest, (-key.distance, held.number, held))
        heapq.heappush(known.farthest, (-key.distance, held.number, held))
        self._expiries = _compact(self._expiries, self._total)
        self._farthest = _compact(self._farthest, self._total)
        known.farthest = _compact(known.farthest, known.entries)

    def _drop(self, held: _Held) -> None:
        copy, key = held.copy, held.key
        assert copy is not None
        held.copy = None
        author, at = copy.record.author_id, cursor(copy)
        del key.entries[at]
        del key.order[bisect_left(key.order, at)]
        if key.crowd is not None:
            key.crowd.add(author, -1)
        if not key.entries:
            del self._keys[key.name]
        known = self._authors[author]
        known.entries -= 1
        if not known.entries:
            del self._authors[author]
        self._usage.add(author, -held.cost_bytes)
        self._total -= 1
        self._bytes -= held.cost_bytes


def _compact(heap: _Heap, live: int) -> _Heap:
    if len(heap) <= SLACK + 2 * live:
        return heap
    heap = [item for item in heap if item[2].copy is not None]
    heapq.heapify(heap)
    return heap


def _expires_s(held: _Held) -> float:
    return held.copy.expires_s if held.copy is not None else 0.0


def cost_bytes(copy: Copy) -> int:
    """Memory that a held copy is taken to need: its body, its names at their widest, and what Python adds."""
    record = copy.record
    return ENTRY_BYTES + len(record.body) + 4 * (len(record.key) + len(record.subkey))


def cursor(copy: Copy) -> bytes:
    """An entry's place in the order in which a key's entries are paged."""
    return copy.record.author_id.digest + copy.record.subkey.encode()
