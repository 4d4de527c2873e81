"""Answers of earlier reads, for readers who say how old an answer may be. No I/O.

Keys with entries and keys without are kept apart, each within its bounds, so that neither a few large keys nor a walk
over names that nobody uses displaces the rest. The least recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarm.config import DhtConfig
from swarm.dht.records import Copy, EntryId


@dataclass(slots=True)
class CacheStats:
    """What the cache did: answers found, answers "there are none" found, not found, displaced for want of room."""

    hits: int = 0
    absent_hits: int = 0
    misses: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    entries: Mapping[EntryId, Copy]
    """Tombstones included."""
    read_s: float
    """When the read began: the answer may lack what came later."""
    expires_s: float
    """When the first live entry ends; its author may have renewed it since, so that the answer counts no longer."""
    size_bytes: int


@dataclass(eq=False, slots=True)
class Reading:
    """A read that is under way, and the keys that we changed meanwhile: its answer about those is not kept."""

    begun_s: float
    spoiled: dict[str, None] = field(default_factory=dict)


class ReadCache:
    """Answers by key.

    Args:
        config: Bounds.
    """

    def __init__(self, config: DhtConfig) -> None:
        self._config = config
        self._present: OrderedDict[str, _Answer] = OrderedDict()
        self._absent: OrderedDict[str, _Answer] = OrderedDict()
        self._bytes = 0
        self._under_way: dict[Reading, None] = {}
        self.stats = CacheStats()

    def __len__(self) -> int:
        return len(self._present) + len(self._absent)

    @property
    def size_bytes(self) -> int:
        """Of all entries kept."""
        return self._bytes

    def get(self, key: str, now_s: float, max_age_s: float) -> Mapping[EntryId, Copy] | None:
        """An answer whose read began at most `max_age_s` ago and of which no entry has expired since; else none."""
        kept = self._present if key in self._present else self._absent
        answer = kept.get(key)
        if answer is None or now_s - answer.read_s > max_age_s or answer.expires_s <= now_s:
            self.stats.misses += 1
            return None
        kept.move_to_end(key)
        if kept is self._present:
            self.stats.hits += 1
        else:
            self.stats.absent_hits += 1
        return answer.entries

    def known(self, key: str, now_s: float) -> list[Copy]:
        """What is left of an answer of any age: to be confirmed by the network, but it need not travel again."""
        answer = self._present.get(key)
        return [copy for copy in answer.entries.values() if copy.expires_s > now_s] if answer is not None else []

    def begin(self, now_s: float) -> Reading:
        """A read starts. Give its answer to `finish`, or call `abandon`."""
        reading = Reading(now_s)
        self._under_way[reading] = None
        return reading

    def finish(self, reading: Reading, answers: Mapping[str, Mapping[EntryId, Copy]]) -> None:
        """Keep what a read found."""
        self.abandon(reading)
        for key, entries in answers.items():
            if key not in reading.spoiled:
                self._keep(key, entries, reading.begun_s)

    def abandon(self, reading: Reading) -> None:
        """The read ended without an answer."""
        self._under_way.pop(reading, None)

    def invalidate(self, keys: Iterable[str]) -> None:
        """We have written under these keys: forget them, and what reads under way will say about them."""
        for key in keys:
            self._forget(key)
            for reading in self._under_way:
                reading.spoiled[key] = None

    def _keep(self, key: str, entries: Mapping[EntryId, Copy], read_s: float) -> None:
        before = self._present.get(key) or self._absent.get(key)
        if before is not None and before.read_s > read_s:
            return
        self._forget(key)
        live = [copy for copy in entries.values() if not copy.record.deleted]
        expires_s = min((copy.expires_s for copy in live), default=float("inf"))
        size_bytes = sum(copy.wire_bytes for copy in entries.values())
        if size_bytes > self._config.cache_bytes:
            return
        kept, most = (
            (self._present, self._config.cache_keys) if live else (self._absent, self._config.cache_absent_keys)
        )
        kept[key] = _Answer(dict(entries), read_s, expires_s, size_bytes)
        self._bytes += size_bytes
        while len(kept) > most:
            self._evict(kept)
        while self._bytes > self._config.cache_bytes:
            self._evict(self._present if self._present else self._absent)

    def _evict(self, kept: OrderedDict[str, _Answer]) -> None:
        _, answer = kept.popitem(last=False)
        self._bytes -= answer.size_bytes
        self.stats.evicted += 1

    def _forget(self, key: str) -> None:
        answer = self._present.pop(key, None) or self._absent.pop(key, None)
        if answer is not None:
            self._bytes -= answer.size_bytes
