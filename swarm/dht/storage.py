"""The records that this peer holds for others. No I/O and no clock: every method is told the time."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator

from swarm.config import DhtConfig
from swarm.dht.records import Copy, EntryId, PlaceId, Refusal, refused
from swarm.identity import PeerId


class Storage:
    """Held copies by key and (author, subkey), within quotas, until they expire.

    The highest version of an entry wins. After a record has expired its version stays behind as a floor, so that nobody
    can replay it; floors are kept in a bounded LRU. No other copy of the same version prolongs a held copy's lifetime.

    Args:
        config: Quotas.
    """

    def __init__(self, config: DhtConfig) -> None:
        self._config = config
        self._keys: dict[str, dict[EntryId, Copy]] = {}
        self._of_author: Counter[PeerId] = Counter()
        self._total = 0
        self._expiries: list[tuple[float, int, Copy]] = []
        self._pushes = 0
        self._floors: OrderedDict[PlaceId, int] = OrderedDict()

    def __len__(self) -> int:
        """Copies held, tombstones included (some may have expired since the last `expire`)."""
        return self._total

    def held_keys(self) -> list[str]:
        """The keys with at least one copy, in the order they came."""
        return list(self._keys)

    def offer(self, copy: Copy, now_s: float) -> bool:
        """Hold a checked copy.

        Returns:
            True if it is new here, false if the same statement was held already.

        Raises:
            RecordRefusedError: Outdated (with the version known here), expired, or over a quota.
        """
        self.expire(now_s)
        record = copy.record
        if copy.expires_s <= now_s:
            raise refused(Refusal.EXPIRED, "The record has expired.")
        entries = self._keys.get(record.key)
        held = entries.get(record.entry_id) if entries is not None else None
        if held is not None:
            if record.rank == held.record.rank:
                return False
            if record.rank < held.record.rank:
                raise refused(
                    Refusal.OUTDATED,
                    "A newer version of this entry is held.",
                    record_version=held.record.record_version,
                )
        else:
            floor = self._floors.get(record.place_id)
            if floor is not None and record.record_version <= floor:
                raise refused(
                    Refusal.OUTDATED, "This version or a newer one has expired already.", record_version=floor
                )
            self._check_quotas(copy, 0 if entries is None else len(entries))
            self._of_author[record.author_id] += 1
            self._total += 1
        self._keys.setdefault(record.key, {})[record.entry_id] = copy
        self._pushes += 1
        heapq.heappush(self._expiries, (copy.expires_s, self._pushes, copy))
        if len(self._expiries) > 64 + 4 * self._total:
            self._compact()
        return True

    def _check_quotas(self, copy: Copy, entries_of_key: int) -> None:
        config = self._config
        if self._total >= config.max_entries:
            raise refused(Refusal.QUOTA, f"This peer holds {config.max_entries} records already.", "Store elsewhere.")
        if self._of_author[copy.record.author_id] >= config.max_entries_per_author:
            raise refused(
                Refusal.QUOTA, f"This author has {config.max_entries_per_author} records here.", "Delete some."
            )
        if entries_of_key >= config.max_entries_per_key:
            raise refused(
                Refusal.QUOTA, f"This key has {config.max_entries_per_key} entries.", "Spread over several keys."
            )

    def entries(self, key: str, now_s: float) -> list[Copy]:
        """The live copies of a key, tombstones included, ordered by author and subkey."""
        held = self._keys.get(key)
        if held is None:
            return []
        return [held[entry_id] for entry_id in sorted(held) if held[entry_id].expires_s > now_s]

    def page(self, key: str, now_s: float, after: bytes, budget_bytes: int) -> tuple[list[Copy], bool]:
        """Some live copies of a key in order.

        Args:
            after: `cursor` of the last entry already seen; empty starts.
            budget_bytes: Bound of the copies' size in a message; at least one copy is returned where there is one.

        Returns:
            The copies, and whether there are more.
        """
        page: list[Copy] = []
        for copy in self.entries(key, now_s):
            if after and cursor(copy) <= after:
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
            copy = heapq.heappop(self._expiries)[2]
            record = copy.record
            entries = self._keys.get(record.key)
            if entries is None or entries.get(record.entry_id) is not copy:
                continue  # replaced by a newer version meanwhile
            del entries[record.entry_id]
            if not entries:
                del self._keys[record.key]
            self._total -= 1
            self._of_author[record.author_id] -= 1
            if not self._of_author[record.author_id]:
                del self._of_author[record.author_id]
            self._remember(record.place_id, record.record_version)
            dropped += 1
        return dropped

    def floor(self, key: str, author: PeerId, subkey: str) -> int:
        """The version that was held last and has expired, or 0."""
        return self._floors.get((key, author, subkey), 0)

    def copies(self) -> Iterator[Copy]:
        """Every copy held, by key."""
        for entries in self._keys.values():
            yield from entries.values()

    def _remember(self, place_id: PlaceId, record_version: int) -> None:
        self._floors[place_id] = max(record_version, self._floors.get(place_id, 0))
        self._floors.move_to_end(place_id)
        while len(self._floors) > self._config.max_version_floors:
            self._floors.popitem(last=False)

    def _compact(self) -> None:
        self._expiries = [item for item in self._expiries if self._is_held(item[2])]
        heapq.heapify(self._expiries)

    def _is_held(self, copy: Copy) -> bool:
        return self._keys.get(copy.record.key, {}).get(copy.record.entry_id) is copy


def cursor(copy: Copy) -> bytes:
    """An entry's place in the order in which a key's entries are paged."""
    return copy.record.author_id.digest + copy.record.subkey.encode()
