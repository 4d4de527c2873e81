"""The cache of earlier answers: what it may serve, what it must forget, how much it may keep."""

from __future__ import annotations

from collections.abc import Iterable

from swarm.config import DhtConfig
from swarm.dht.cache import ReadCache
from swarm.dht.records import Copy, EntryId, sign_record
from tests.support import RUN_ID, deterministic_identity

AUTHOR = deterministic_identity("author")
CONFIG = DhtConfig(cache_keys=3, cache_absent_keys=2, cache_bytes=10_000)


def copy(key: str, expires_s: float = 100.0, *, subkey: str = "", body: bytes = b"\x01", deleted: bool = False) -> Copy:
    record = sign_record(AUTHOR, RUN_ID, key, subkey, b"" if deleted else body, 1, 60_000, deleted=deleted)
    return Copy(record, expires_s)


def entries(copies: Iterable[Copy]) -> dict[EntryId, Copy]:
    return {c.record.entry_id: c for c in copies}


def filled(cache: ReadCache, read_s: float, **answers: list[Copy]) -> None:
    cache.finish(cache.begin(read_s), {key: entries(copies) for key, copies in answers.items()})


def test_an_answer_serves_those_who_take_one_that_old() -> None:
    cache = ReadCache(CONFIG)
    filled(cache, 10.0, k=[copy("k")], nothing=[])
    assert cache.get("k", 15.0, 5.0) == entries([copy("k")])
    assert cache.get("nothing", 15.0, 5.0) == {}
    assert cache.get("k", 15.1, 5.0) is None
    assert cache.get("nothing", 15.1, 5.0) is None
    assert cache.get("other", 10.0, 5.0) is None
    assert (cache.stats.hits, cache.stats.absent_hits, cache.stats.misses) == (1, 1, 3)


def test_no_answer_outlives_an_entry_of_it() -> None:
    cache = ReadCache(CONFIG)
    filled(cache, 0.0, k=[copy("k", 100.0), copy("k", 20.0, subkey="short")], gone=[copy("gone", 5.0, deleted=True)])
    assert cache.get("k", 19.9, 60.0) is not None
    assert cache.get("k", 20.0, 60.0) is None
    assert cache.get("gone", 30.0, 60.0) is not None  # what a tombstone says holds after its end


def test_what_we_wrote_is_forgotten_also_by_reads_that_were_under_way() -> None:
    cache = ReadCache(CONFIG)
    filled(cache, 0.0, k=[copy("k")], other=[copy("other")])
    reading = cache.begin(1.0)
    cache.invalidate(["k"])
    assert cache.get("k", 1.0, 60.0) is None
    assert cache.get("other", 1.0, 60.0) is not None
    cache.finish(reading, {"k": entries([copy("k")]), "new": entries([copy("new")])})
    assert cache.get("k", 1.0, 60.0) is None
    assert cache.get("new", 1.0, 60.0) is not None


def test_an_older_read_that_ends_later_changes_nothing() -> None:
    cache = ReadCache(CONFIG)
    early, late = cache.begin(1.0), cache.begin(2.0)
    cache.finish(late, {"k": entries([copy("k")])})
    cache.finish(early, {"k": {}})
    assert cache.get("k", 3.0, 60.0) == entries([copy("k")])


def test_bounds_hold_and_neither_kind_displaces_the_other() -> None:
    cache = ReadCache(CONFIG)
    filled(cache, 0.0, a=[copy("a")], b=[copy("b")])
    for i in range(50):
        filled(cache, 0.0, **{f"absent {i}": []})
    assert len(cache) == 4
    assert cache.get("a", 0.0, 1.0) is not None
    filled(cache, 0.0, c=[copy("c")], d=[copy("d")])
    assert cache.get("b", 0.0, 1.0) is None  # the least recently used of three
    assert cache.get("a", 0.0, 1.0) is not None
    assert cache.get("absent 49", 0.0, 1.0) == {}
    assert cache.stats.evicted == 49


def test_the_size_in_bytes_is_bounded() -> None:
    cache = ReadCache(CONFIG)
    big = bytes(3000)
    filled(cache, 0.0, a=[copy("a", body=big)], b=[copy("b", body=big)], c=[copy("c", body=big)])
    assert cache.size_bytes == sum(copy(k, body=big).wire_bytes for k in "abc")
    filled(cache, 0.0, d=[copy("d", body=big)])
    assert cache.size_bytes <= CONFIG.cache_bytes
    assert cache.get("d", 0.0, 1.0) is not None
    filled(cache, 0.0, huge=[copy("huge", subkey=str(i), body=big) for i in range(4)])
    assert cache.get("huge", 0.0, 1.0) is None
    assert cache.get("d", 0.0, 1.0) is not None  # it did not have to go for one that does not fit
    cache.invalidate(["a", "b", "c", "d"])
    assert (cache.size_bytes, len(cache)) == (0, 0)
