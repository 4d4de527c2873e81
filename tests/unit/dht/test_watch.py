"""What a watched key is known to hold: it moves forward only, whatever single reads say."""

from __future__ import annotations

import math

import pytest

from swarm.dht.records import Copy, EntryId, sign_record
from swarm.dht.watch import WatchedKey
from tests.support import RUN_ID, deterministic_identity

AUTHOR = deterministic_identity("author")


def copy(
    version: int, expires_s: float = 100.0, *, subkey: str = "", body: bytes = b"\x01", deleted: bool = False
) -> Copy:
    record = sign_record(AUTHOR, RUN_ID, "k", subkey, b"" if deleted else body, version, 900_000, deleted=deleted)
    return Copy(record, expires_s)


def found(*copies: Copy) -> dict[EntryId, Copy]:
    return {c.record.entry_id: c for c in copies}


def bodies(key: WatchedKey) -> list[bytes]:
    return [c.record.body for c in key.live()]


def test_additions_and_new_bodies_are_news_and_renewals_are_not() -> None:
    key = WatchedKey(10)
    assert key.learn(found(copy(1)), 0.0)
    assert not key.learn(found(copy(1)), 0.0)
    assert not key.learn(found(copy(2, 200.0)), 0.0)  # renewed: lives longer, says the same
    assert key.next_end_s() == 200.0
    assert key.learn(found(copy(3, body=b"\x02")), 0.0)
    assert key.learn(found(copy(1, subkey="x")), 0.0)
    assert bodies(key) == [b"\x02", b"\x01"]


def test_a_read_that_misses_an_entry_or_shows_an_old_one_changes_nothing() -> None:
    key = WatchedKey(10)
    key.learn(found(copy(2, body=b"\x02")), 0.0)
    assert not key.learn({}, 0.0)
    assert not key.learn(found(copy(1)), 0.0)
    assert bodies(key) == [b"\x02"]


def test_a_tombstone_ends_an_entry_once() -> None:
    key = WatchedKey(10)
    key.learn(found(copy(1)), 0.0)
    assert key.learn(found(copy(2, deleted=True)), 0.0)
    assert not key.learn(found(copy(3, deleted=True)), 0.0)
    assert bodies(key) == []
    assert key.next_end_s() == math.inf
    assert not key.expire(100.0)  # the tombstone's own end is no news
    assert key.learn(found(copy(4)), 0.0)


@pytest.mark.parametrize("shown_s", [100.0, 5000.0])
def test_an_ended_entry_does_not_come_back_and_no_holder_prolongs_one(shown_s: float) -> None:
    key = WatchedKey(10)
    key.learn(found(copy(1, 50.0)), 0.0)
    assert not key.learn(found(copy(1, shown_s)), 0.0)
    assert not key.expire(49.9)
    assert key.expire(50.0)
    assert not key.learn(found(copy(1, shown_s)), 50.0)
    assert bodies(key) == []
    assert key.learn(found(copy(2, shown_s)), 50.0)


def test_the_memory_of_ended_entries_is_bounded() -> None:
    key = WatchedKey(3)
    key.learn(found(*(copy(1, 10.0 + i, subkey=str(i)) for i in range(5))), 0.0)
    for i in range(5):
        key.expire(10.0 + i)
    again = [i for i in range(5) if key.learn(found(copy(1, subkey=str(i))), 20.0)]
    assert again == [0, 1]
