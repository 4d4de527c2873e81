"""Each gradient at most once."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import StaleRequestError
from swarm.experts.applied import AppliedIds
from swarm.identity import PeerId

A, B = PeerId(bytes(32)), PeerId(b"\1" * 32)


def rid(number: int, nonce: bytes = b"nonce-01") -> bytes:
    return nonce + struct.pack(">Q", number)


def test_an_id_counts_once_per_peer_and_process() -> None:
    applied = AppliedIds()
    for claim in ((A, rid(1)), (B, rid(1)), (A, rid(1, b"nonce-02")), (A, rid(2))):
        applied.claim(*claim)
        with pytest.raises(StaleRequestError, match="already"):
            applied.claim(*claim)


def test_ids_below_what_is_remembered_are_refused_though_never_seen() -> None:
    applied = AppliedIds(window=3)
    for number in (5, 7, 6, 9):
        applied.claim(A, rid(number))
    with pytest.raises(StaleRequestError, match="older"):
        applied.claim(A, rid(4))
    with pytest.raises(StaleRequestError, match="older"):
        applied.claim(A, rid(5))
    applied.claim(A, rid(8))
    applied.claim(A, rid(10))


def test_memory_is_bounded_by_clients() -> None:
    applied = AppliedIds(window=2, max_clients=3)
    for i in range(10):
        applied.claim(A, rid(1, i.to_bytes(8, "big")))
    assert len(applied._clients) == 3


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(1, 5))
def test_whatever_the_order_no_id_is_accepted_twice(numbers: list[int], window: int) -> None:
    applied, accepted = AppliedIds(window=window), []
    for number in numbers:
        try:
            applied.claim(A, rid(number))
            accepted.append(number)
        except StaleRequestError:
            pass
    assert len(accepted) == len(set(accepted))
