"""Storage: highest version wins, tombstones, floors against replay, quotas, expiry, paging."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from swarm.config import DhtConfig
from swarm.dht.fairness import Usage, VersionFloors
from swarm.dht.records import Copy, Record, position_of
from swarm.dht.storage import ENTRY_BYTES, Storage, cursor
from swarm.errors import RecordRefusedError
from swarm.identity import PeerId
from tests.support import deterministic_identity

AUTHORS = [deterministic_identity(f"author {i}").public_key for i in range(4)]


def copy(
    version: int = 1,
    *,
    author: int = 0,
    key: str = "k",
    subkey: str = "",
    expires_s: float = 10.0,
    body: bytes = b"\x01",
    deleted: bool = False,
    signature: bytes = bytes(64),
) -> Copy:
    """A copy whose signature nobody checks here."""
    return Copy(Record(AUTHORS[author], key, subkey, body, version, 100_000, deleted, signature), expires_s)


def refusal(storage: Storage, offered: Copy, now_s: float = 0.0) -> RecordRefusedError:
    with pytest.raises(RecordRefusedError) as caught:
        storage.offer(offered, now_s)
    return caught.value


def test_the_highest_version_wins() -> None:
    storage = Storage(DhtConfig())
    assert storage.offer(copy(2), 0.0)
    assert storage.offer(copy(3), 0.0)
    error = refusal(storage, copy(1))
    assert (error.reason, error.record_version) == ("outdated", 3)
    assert [c.record.record_version for c in storage.entries("k", 0.0)] == [3]
    assert len(storage) == 1


def test_the_same_statement_changes_nothing_and_never_prolongs_a_lifetime() -> None:
    storage = Storage(DhtConfig())
    storage.offer(copy(1, expires_s=5.0), 0.0)
    assert not storage.offer(copy(1, expires_s=50.0), 0.0)
    assert storage.entries("k", 0.0)[0].expires_s == 5.0
    assert storage.expire(6.0) == 1


def test_a_shorter_lifetime_of_the_same_statement_cannot_end_a_record_early() -> None:
    storage = Storage(DhtConfig())
    storage.offer(copy(1, expires_s=50.0), 0.0)
    storage.offer(copy(1, expires_s=1.0), 0.0)
    assert len(storage.entries("k", 2.0)) == 1


def test_entries_are_kept_apart_by_author_and_subkey() -> None:
    storage = Storage(DhtConfig())
    for author in range(2):
        for subkey in ("a", "b"):
            storage.offer(copy(author=author, subkey=subkey), 0.0)
    entries = storage.entries("k", 0.0)
    assert [c.record.entry_id for c in entries] == sorted(c.record.entry_id for c in entries)
    assert len(entries) == 4


def test_an_expired_record_is_gone_and_cannot_be_replayed() -> None:
    storage = Storage(DhtConfig())
    storage.offer(copy(5, expires_s=1.0), 0.0)
    assert storage.entries("k", 1.0) == []
    assert storage.expire(1.0) == 1
    assert storage.held_keys() == []
    error = refusal(storage, copy(5, expires_s=9.0), 2.0)
    assert (error.reason, error.record_version) == ("outdated", 5)
    assert storage.offer(copy(6, expires_s=9.0), 2.0)


def test_a_tombstone_replaces_a_record_and_keeps_it_out() -> None:
    storage = Storage(DhtConfig())
    storage.offer(copy(1), 0.0)
    storage.offer(copy(2, deleted=True, body=b""), 0.0)
    assert refusal(storage, copy(1)).reason == "outdated"
    assert [c.record.deleted for c in storage.entries("k", 0.0)] == [True]
    storage.expire(11.0)
    assert refusal(storage, copy(1, expires_s=20.0), 12.0).reason == "outdated"


def test_an_already_expired_record_is_refused() -> None:
    assert refusal(Storage(DhtConfig()), copy(expires_s=1.0), 1.0).reason == "expired"


def test_floors_are_bounded() -> None:
    storage = Storage(DhtConfig(max_version_floors=2))
    for i in range(3):
        storage.offer(copy(5, subkey=str(i), expires_s=1.0 + i), 0.0)
    storage.expire(10.0)
    author = copy().record.author_id
    assert [storage.floor("k", author, str(i)) for i in range(3)] == [0, 5, 5]


@pytest.mark.parametrize(
    ("config", "offers", "extra"),
    [
        (DhtConfig(max_entries=3), [copy(author=i) for i in range(3)], copy(author=3)),
        (DhtConfig(max_entries_per_author=3), [copy(key=f"k{i}") for i in range(3)], copy(key="more")),
        (DhtConfig(max_entries_per_key=3), [copy(subkey=str(i), author=i) for i in range(3)], copy(subkey="more")),
    ],
)
def test_quotas_refuse_more_entries_but_not_newer_versions(config: DhtConfig, offers: list[Copy], extra: Copy) -> None:
    storage = Storage(config)
    for offered in offers:
        storage.offer(offered, 0.0)
    assert refusal(storage, extra).reason == "quota"
    first = offers[0].record
    newer = Copy(Record(first.author, first.key, first.subkey, b"\x02", 9, 100_000, False, bytes(64)), 10.0)
    assert storage.offer(newer, 0.0)
    storage.expire(11.0)
    assert storage.offer(Copy(extra.record, 20.0), 12.0)  # places are free again


def test_a_key_is_read_in_pages_that_cover_it_exactly_once() -> None:
    storage = Storage(DhtConfig())
    for author in range(4):
        for i in range(25):
            storage.offer(copy(author=author, subkey=f"{i:02d}", body=bytes(1000)), 0.0)
    seen: list[Copy] = []
    after, more, pages = b"", True, 0
    while more:
        page, more = storage.page("k", 0.0, after, 10_000)
        assert page
        assert len(page) < 10
        seen += page
        after, pages = cursor(page[-1]), pages + 1
    assert seen == storage.entries("k", 0.0)
    assert pages > 10


def test_a_page_always_advances() -> None:
    storage = Storage(DhtConfig())
    storage.offer(copy(subkey="a"), 0.0)
    storage.offer(copy(subkey="b"), 0.0)
    page, more = storage.page("k", 0.0, b"", 1)
    assert (len(page), more) == (1, True)


def test_replacing_a_record_often_does_not_leak() -> None:
    storage = Storage(DhtConfig())
    for version in range(1, 1001):
        storage.offer(copy(version, expires_s=1e6 + version), 0.0)
    assert len(storage) == 1
    assert len(storage._expiries) < 200


# Fair eviction

LATE_S = 1e6


def writer(name: int | str) -> bytes:
    return hashlib.sha256(f"writer {name}".encode()).digest()


def written(by: int | str, key: str, subkey: str = "", *, version: int = 1, body: bytes = b"", **more: Any) -> Copy:
    expires_s = more.pop("expires_s", LATE_S)
    record = Record(writer(by), key, subkey, body, version, 10**9, more.pop("deleted", False), bytes(64), **more)
    return Copy(record, expires_s)


def offer(storage: Storage, offered: Copy) -> bool:
    try:
        return storage.offer(offered, 0.0)
    except RecordRefusedError as error:
        assert error.reason == "quota"  # noqa: PT017 - the only refusal there is here
        return False


def count(storage: Storage, by: int | str) -> int:
    return sum(c.record.author == writer(by) for c in storage.copies())


def distance(key: str, position: int = 0) -> int:
    return int.from_bytes(position_of(key), "big") ^ position


def test_the_flood_of_one_author_never_displaces_the_few_records_of_others() -> None:
    storage = Storage(DhtConfig(max_entries=50))
    for author in range(8):
        for i in range(3):
            assert offer(storage, written(author, f"quiet {i}"))
    for i in range(500):
        offer(storage, written("flood", f"flood {i}"))
    assert [count(storage, author) for author in range(8)] == [3] * 8
    assert count(storage, "flood") == 26
    assert offer(storage, written("late", "late"))  # a newcomer still finds room
    assert len(storage) == 50
    kept = [distance(c.record.key) for c in storage.copies() if c.record.author == writer("flood")]
    assert max(kept) <= sorted(distance(f"flood {i}") for i in range(500))[26]  # the nearest of the flood are left


def test_floods_wear_each_other_down() -> None:
    storage = Storage(DhtConfig(max_entries=60))
    assert offer(storage, written("quiet", "quiet"))
    for i in range(300):
        offer(storage, written("first", f"first {i}"))
    for i in range(300):
        offer(storage, written("second", f"second {i}"))
    assert count(storage, "quiet") == 1
    assert abs(count(storage, "first") - count(storage, "second")) <= 1


def test_among_very_many_authors_the_farthest_record_gives_way() -> None:
    position = 1 << 159
    storage = Storage(DhtConfig(max_entries=2000), position)
    keys = [f"key {i}" for i in range(3000)]
    evicted: list[str] = []
    storage.on_evicted = lambda copy, bound: evicted.append(bound)
    for i, key in enumerate(keys):
        offer(storage, written(i, key))
    nearest = sorted(keys, key=lambda key: distance(key, position))[:2000]
    assert sorted(storage.held_keys()) == sorted(nearest)
    assert set(evicted) == {"entries"}
    assert refusal(storage, written("late", max(keys, key=lambda k: distance(k, position)))).reason == "quota"


def test_bytes_are_bounded_and_a_larger_version_needs_room_too() -> None:
    room = 4 * (ENTRY_BYTES + 2000)
    storage = Storage(DhtConfig(max_total_bytes=room))
    for i in range(4):
        assert offer(storage, written(i, "k", str(i), body=bytes(1900)))
    assert not offer(
        storage, written("more", "k", "more", body=bytes(1900))
    )  # nobody uses more than the newcomer would
    assert refusal(storage, written(0, "k", "0", version=2, body=bytes(4000))).reason == "quota"
    assert storage.entries("k", 0.0)[0].record.record_version == 1
    assert storage.used_bytes <= room
    for i in range(4):  # a deletion, and whatever is not larger, always fits
        assert offer(storage, written(i, "k", str(i), version=3, deleted=True))
    assert offer(storage, written("more", "k", "more", body=bytes(1900)))


def test_a_full_key_takes_from_who_has_the_most_entries_in_it() -> None:
    storage = Storage(DhtConfig(max_entries_per_key=6))
    for i in range(5):
        offer(storage, written("most", "k", str(i), expires_s=LATE_S - (i == 3)))
    offer(storage, written("one", "k"))
    assert offer(storage, written("two", "k"))
    subkeys = {c.record.subkey for c in storage.entries("k", 0.0) if c.record.author == writer("most")}
    assert subkeys == {"0", "1", "2", "4"}  # number 3 would have ended first
    for name in ("three", "four", "five"):
        assert offer(storage, written(name, "k"))
    assert refusal(storage, written("six", "k")).reason == "quota"  # all have one entry now
    assert count(storage, "most") == 1
    assert offer(storage, written("six", "another key"))


def test_an_author_has_so_many_entries_under_one_key() -> None:
    storage = Storage(DhtConfig(max_entries_per_key_and_author=2))
    assert [offer(storage, written("a", "k", str(i))) for i in range(3)] == [True, True, False]
    assert offer(storage, written("b", "k"))
    assert offer(storage, written("a", "other"))
    assert offer(storage, written("a", "k", "0", version=2))


def test_what_gave_way_may_come_back_but_nothing_older() -> None:
    storage = Storage(DhtConfig(max_entries=2))
    near, far = sorted(("k0", "k1"), key=distance)
    for key in (near, far):
        offer(storage, written("flood", key, version=5))
    assert offer(storage, written("other", "x", expires_s=9.0))
    assert far not in storage.held_keys()
    error = refusal(storage, written("flood", far, version=4), 1.0)
    assert (error.reason, error.record_version) == ("outdated", 4)
    assert storage.offer(written("flood", far, version=5), 10.0)


def test_nobody_washes_out_the_floors_of_others() -> None:
    floors = VersionFloors(20)
    authors = [PeerId(writer(i)) for i in range(4)]
    for author in authors[1:]:
        floors.raise_to(("k", author, ""), 7)
    for i in range(500):
        floors.raise_to((f"k{i}", authors[0], ""), 1 + i)
    assert len(floors) == 20
    assert [floors.get(("k", author, "")) for author in authors[1:]] == [7, 7, 7]
    assert floors.get(("k499", authors[0], "")) == 500
    assert floors.get(("k0", authors[0], "")) == 0
    floors.raise_to(("k", authors[1], ""), 3)
    assert floors.get(("k", authors[1], "")) == 7  # a floor never sinks


def test_a_floor_belongs_to_one_place() -> None:
    floors = VersionFloors(20)
    author, other = PeerId(writer(1)), PeerId(writer(2))
    floors.raise_to(("ab", author, "c"), 7)
    assert [floors.get(place) for place in (("a", author, "bc"), ("abc", author, ""), ("ab", other, "c"))] == [0] * 3


def test_usage_knows_the_heaviest() -> None:
    usage, authors = Usage(), [PeerId(writer(i)) for i in range(3)]
    assert usage.heaviest() is None
    for i in range(1000):
        usage.add(authors[i % 3], 1)
    assert usage.heaviest() == (authors[0], 334)
    usage.add(authors[0], -2)
    assert usage.heaviest() == (authors[1], 333)
    assert len(usage._heap) < 200
    for author in authors:
        usage.add(author, -usage[author])
    assert (usage.heaviest(), len(usage)) == (None, 0)


def test_a_probe_tells_what_is_outdated_and_keeps_nothing() -> None:
    storage = Storage(DhtConfig())
    storage.check(copy(2), 0.0)
    assert len(storage) == 0
    storage.offer(copy(2), 0.0)
    storage.check(copy(2), 0.0)
    for held_s in (0.0, 11.0):  # while a newer version is held, and after it has ended
        with pytest.raises(RecordRefusedError) as caught:
            storage.check(copy(1, expires_s=20.0), held_s)
        assert (caught.value.reason, caught.value.record_version) == ("outdated", 2)
