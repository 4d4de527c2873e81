"""Digests of what is held under a key: equal exactly for the same statements, whatever their order and lifetimes."""

from __future__ import annotations

import random

from swarm.dht.digests import DIGEST_BYTES, digest_of
from swarm.dht.records import Copy, Record
from tests.support import deterministic_identity

AUTHORS = [deterministic_identity(name).public_key for name in ("one", "two")]


def copy(
    author: int = 0, subkey: str = "a", version: int = 1, signature: bytes = bytes(64), expires_s: float = 5.0
) -> Copy:
    return Copy(Record(AUTHORS[author], "key", subkey, b"\x01", version, 1000, False, signature), expires_s)


def test_order_and_lifetimes_do_not_count() -> None:
    copies = [copy(a, subkey) for a in (0, 1) for subkey in ("", "a", "b", "ä")]
    digest = digest_of(copies)
    assert len(digest) == DIGEST_BYTES
    for seed in range(10):
        shuffled = [copy(c.record.author == AUTHORS[1], c.record.subkey, expires_s=seed) for c in copies]
        random.Random(seed).shuffle(shuffled)
        assert digest_of(shuffled) == digest


def test_every_other_difference_counts() -> None:
    sets = [
        [],
        [copy()],
        [copy(1)],
        [copy(version=2)],
        [copy(subkey="b")],
        [copy(signature=b"\x01" * 64)],
        [copy(), copy(1)],
        [copy(), copy(subkey="b")],
        [copy(subkey=""), copy(subkey="ab")],
        [copy(subkey="a"), copy(subkey="b")],
    ]
    digests = [digest_of(copies) for copies in sets]
    assert len(dict.fromkeys(digests)) == len(sets) - 1  # one set is there twice
    assert digests[0] == b""
