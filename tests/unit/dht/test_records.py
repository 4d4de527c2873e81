"""Records: which of two wins, what is signed and what is not."""

from __future__ import annotations

import dataclasses

import pytest

from swarm.dht.bodies import encode_body
from swarm.dht.records import Copy, check_ttl_ms, merge, position_of, sign_record
from swarm.errors import RecordRefusedError
from tests.support import RUN_ID, deterministic_identity

AUTHOR = deterministic_identity("author")


def signed(body: object = None, version: int = 7, ttl_ms: int = 60_000, key: str = "key", subkey: str = "s") -> Copy:
    record = sign_record(AUTHOR, RUN_ID, key, subkey, encode_body(body), version, ttl_ms)
    return Copy(record, 100.0 + ttl_ms / 1000)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_impossible_lifetimes_are_refused(ttl_s: float) -> None:
    with pytest.raises(RecordRefusedError, match="lifetime"):
        check_ttl_ms(ttl_s)


def test_an_author_does_not_sign_what_nobody_would_take() -> None:
    with pytest.raises(RecordRefusedError) as caught:
        sign_record(AUTHOR, RUN_ID, "key", "", bytes(4097), 1, 1000)
    assert caught.value.reason == "too_large"
    assert caught.value.fix


def test_merge_keeps_the_newest_of_each_author_and_subkey() -> None:
    old, new, other = signed("old", 1), signed("new", 2), signed("other", 1, subkey="t")
    merged = merge([new, old, other])
    assert list(merged.values()) == [new, other]


def test_two_statements_of_one_version_merge_the_same_way_everywhere() -> None:
    one, two = signed("one", 5), signed("two", 5)
    assert merge([one, two]) == merge([two, one])


def test_positions_are_stable() -> None:
    assert position_of("peers/a") == position_of("peers/a") != position_of("peers/b")
    assert len(position_of("x")) == 20


def test_records_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        signed().record.body = b""  # type: ignore[misc]
