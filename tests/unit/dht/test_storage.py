"""Storage: highest version wins, tombstones, floors against replay, quotas, expiry, paging."""

from __future__ import annotations

import pytest

from swarm.config import DhtConfig
from swarm.dht.records import Copy, Record
from swarm.dht.storage import Storage, cursor
from swarm.errors import RecordRefusedError
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
