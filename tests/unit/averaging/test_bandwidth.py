"""Bandwidth: what is measured, whose word counts, and the parts that follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.averaging.bandwidth import KEPT_PEERS, LEAST_BYTES, Bandwidths, Rate, consensus, parts
from swarm.identity import PeerId

A, B, C, D = (PeerId(bytes([i]) * 32) for i in range(4))
MIB = 1024 * 1024


def test_rates_are_smoothed_per_direction_and_small_transfers_ignored() -> None:
    seen = Bandwidths()
    seen.observe(A, MIB, 1.0, "up")
    seen.observe(A, 2 * MIB, 1.0, "up")
    seen.observe(A, LEAST_BYTES - 1, 1e-6, "down")
    seen.observe(A, MIB, 0.0, "down")
    assert seen.measured() == (Rate(A, 1.3 * MIB, 0.0),)
    seen.observe(A, MIB, 2.0, "down")
    assert seen.measured() == (Rate(A, 1.3 * MIB, 0.5 * MIB),)


def test_what_was_measured_last_is_kept_and_told() -> None:
    seen = Bandwidths()
    peers = [PeerId(index.to_bytes(32, "big")) for index in range(KEPT_PEERS + 10)]
    for peer in peers:
        seen.observe(peer, MIB, 1.0, "up")
    assert [rate.peer for rate in seen.measured(3)] == peers[:-4:-1]
    assert len(seen.measured(10_000)) == KEPT_PEERS


def test_the_median_of_others_counts() -> None:
    reports = {
        A: [Rate(A, 1e12, 1e12), Rate(B, 10.0, 30.0)],
        B: [Rate(A, 5.0, 4.0), Rate(C, 7.0, 0.0)],
        C: [Rate(A, 7.0, 9.0), Rate(B, 1e12, 20.0)],
        D: [Rate(A, 6.0, 5.0), Rate(B, 12.0, 10.0), Rate(PeerId(b"x" * 32), 1.0, 1.0)],
        PeerId(b"x" * 32): [Rate(D, 1.0, 1.0)],
    }
    assert consensus([A, B, C, D], reports) == [5.0, 12.0, 7.0, 0.0]


def test_one_peer_that_reports_twice_has_one_voice() -> None:
    assert consensus([A, B, C], {B: [Rate(A, 1.0, 1.0)] * 9, C: [Rate(A, 3.0, 3.0)]}) == [2.0, 0.0, 0.0]


@given(
    st.lists(st.tuples(st.floats(0, 1e12), st.booleans()), min_size=1, max_size=16),
    st.integers(1, 10**7),
)
def test_parts_cover_the_vector_and_nobody_takes_the_whole(members: list[tuple[float, bool]], numel: int) -> None:
    bandwidths, reduces = [b for b, _ in members], [r for _, r in members]
    sizes = parts(numel, bandwidths, reduces)
    if not any(reduces):
        assert sizes is None
        return
    assert sizes is not None
    assert sum(sizes) == numel
    assert all(size == 0 for size, may in zip(sizes, reduces, strict=True) if not may)
    cap = max(2 / len(members), 1 / sum(reduces))
    assert max(sizes) <= cap * numel * (1 + 1e-9) + 1


@pytest.mark.parametrize("bandwidths", [[0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 0.0, 6.0], [1.0, 1.4, 1.2, 1.1]])
def test_without_real_differences_parts_are_equal(bandwidths: list[float]) -> None:
    assert parts(1000, bandwidths, [True] * 4) == [250] * 4


def test_an_unknown_member_counts_as_the_usual_one() -> None:
    sizes = parts(1000, [8e6, 2e6, 0.0, 4e6], [True] * 4)
    assert sizes is not None
    assert sizes[2] == sizes[3] > sizes[1]
