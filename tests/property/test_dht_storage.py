"""Properties of a holder's storage under adversarial writers, and of reading bodies that anybody may have written."""

from __future__ import annotations

import contextlib
import hashlib
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import DhtConfig
from swarm.dht.bodies import MAX_NESTING, _scan, decode_body, encode_body
from swarm.dht.fairness import SLACK
from swarm.dht.records import Copy, Record
from swarm.dht.storage import ENTRY_BYTES, Storage, cost_bytes, cursor
from swarm.errors import RecordRefusedError

# Storage under adversarial writers

WRITERS = [hashlib.sha256(bytes([i])).digest() for i in range(5)]
TINY = DhtConfig(
    max_entries=10, max_entries_per_author=6, max_entries_per_key=5, max_entries_per_key_and_author=3,
    max_total_bytes=8 * (ENTRY_BYTES + 1000), max_version_floors=7,
)  # fmt: skip

offers = st.builds(
    lambda author, key, subkey, version, size, deleted, ttl: (
        Record(
            WRITERS[author],
            f"k{key}",
            f"s{subkey}",
            b"" if deleted else bytes(size),
            version,
            10**6,
            deleted,
            bytes(64),
        ),
        float(ttl),
    ),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(1, 6),
    st.sampled_from([0, 100, 4096]),
    st.booleans(),
    st.integers(1, 30),
)


def check_bounds(storage: Storage, config: DhtConfig) -> None:
    held = list(storage.copies())
    assert len(held) == len(storage) <= config.max_entries
    assert storage.used_bytes == sum(cost_bytes(c) for c in held) <= config.max_total_bytes
    assert max(Counter(c.record.author for c in held).values(), default=0) <= config.max_entries_per_author
    assert max(Counter(c.record.key for c in held).values(), default=0) <= config.max_entries_per_key
    of_both = Counter((c.record.key, c.record.author) for c in held)
    assert max(of_both.values(), default=0) <= config.max_entries_per_key_and_author
    assert len(storage._floors) <= config.max_version_floors
    assert sorted(storage.held_keys()) == sorted({c.record.key for c in held})
    assert len(storage._usage) == len(storage._authors) == len({c.record.author for c in held})
    for author, known in storage._authors.items():
        mine = [c for c in held if c.record.author_id == author]
        assert known.entries == len(mine)
        assert storage._usage[author] == sum(cost_bytes(c) for c in mine)
        assert len(known.farthest) <= SLACK + 2 * known.entries
    assert max(len(storage._expiries), len(storage._farthest)) <= SLACK + 2 * len(held)
    for name, key in storage._keys.items():
        assert key.order == sorted(key.entries) == [cursor(c) for c in storage.entries(name, 0.0)]


@given(st.lists(st.tuples(st.floats(0, 3), offers), max_size=120))
@settings(max_examples=60)
def test_nothing_that_writers_do_makes_storage_exceed_its_bounds(
    steps: list[tuple[float, tuple[Record, float]]],
) -> None:
    storage, now_s = Storage(TINY), 0.0
    for wait_s, (record, ttl_s) in steps:
        now_s += wait_s
        before = {c.record.place_id: c.record.record_version for c in storage.copies()}
        try:
            held = storage.offer(Copy(record, now_s + ttl_s), now_s)
        except RecordRefusedError as error:
            assert error.reason in ("outdated", "quota")  # noqa: PT017 - nothing else may be refused here
            held = False
        check_bounds(storage, TINY)
        if held:
            assert before.get(record.place_id, 0) <= record.record_version
            assert storage.get(*record.place_id) is not None
    storage.expire(now_s + 100)
    assert (len(storage), storage.used_bytes, storage.held_keys()) == (0, 0, [])
    check_bounds(storage, TINY)


@given(st.lists(offers, max_size=60), st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True))
@settings(max_examples=40)
def test_who_uses_little_keeps_all_of_it(flood: list[tuple[Record, float]], quiet: list[int]) -> None:
    """One author floods, with tombstones and large bodies alike; each of the others has one small record."""
    storage = Storage(TINY)
    others = [author for author in quiet if author != 0]
    for author in others:
        storage.offer(Copy(Record(WRITERS[author], "mine", "", b"", 1, 10**6, False, bytes(64)), 1e6), 0.0)
    for record, ttl_s in flood:
        theirs = replace(record, author=WRITERS[0])
        with contextlib.suppress(RecordRefusedError):
            storage.offer(Copy(theirs, ttl_s), 0.0)
    assert {c.record.author for c in storage.entries("mine", 0.0)} == {WRITERS[author] for author in others}
    check_bounds(storage, TINY)


# Bodies


@given(st.binary(max_size=200))
def test_scanning_and_decoding_agree(body: bytes) -> None:
    """The scan before decoding refuses what is too deep, too greedy or no plain value, and nothing else."""

    def refused(read: Callable[[bytes], object]) -> bool:
        try:
            read(body)
        except (ValueError, TypeError, OverflowError, IndexError, msgpack.UnpackException):
            return True
        return False

    if refused(_scan):
        with pytest.raises(RecordRefusedError):
            decode_body(body)
    elif not refused(lambda data: msgpack.unpackb(data, strict_map_key=False)):
        decode_body(body)


@given(st.integers(1, 60), st.booleans())
def test_bodies_nest_only_so_deep(depth: int, tables: bool) -> None:
    body: object = 0
    for _ in range(depth):
        body = {"a": body} if tables else [body]
    if depth <= MAX_NESTING:
        assert decode_body(encode_body(body)) == body
        return
    for refuse in (lambda: encode_body(body), lambda: decode_body(msgpack.packb(body))):
        with pytest.raises(RecordRefusedError):
            refuse()


@given(st.lists(st.sampled_from([b"\xdc\x0f\xff", b"\xdd\x00\x00\x0f\xff", b"\xde\x07\xff", b"\xdf\x7f\xff\xff\xff"])))
def test_a_small_body_cannot_ask_for_much_memory(openings: list[bytes]) -> None:
    body = b"".join(openings)[:4096]
    tracemalloc.start()
    try:
        with contextlib.suppress(RecordRefusedError):
            decode_body(body)
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()
