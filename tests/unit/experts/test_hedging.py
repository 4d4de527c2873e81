"""When another replica is asked, and how often."""

from __future__ import annotations

import pytest

from swarm.experts import hedging
from swarm.experts.hedging import (
    BURST,
    BUSY_QUIET_S,
    FRACTION,
    LATE_FACTOR,
    STALLED_FACTOR,
    Hedge,
    Hedging,
    Wait,
)
from swarm.identity import PeerId

A, B = PeerId(bytes(32)), PeerId(bytes([1]) * 32)
P95_S = 0.1
LATE_S = LATE_FACTOR * P95_S


def test_a_full_budget_is_spent_after_the_95th_percentile() -> None:
    h = Hedging()
    assert h.first_look_s(P95_S) == LATE_S
    assert h.decide(LATE_S, P95_S) == Hedge()
    early = h.decide(LATE_S - 0.06, P95_S)
    assert isinstance(early, Wait)
    assert early.seconds == pytest.approx(0.06)
    assert h.first_look_s(0.0001) == hedging.MIN_DELAY_S


def test_half_of_it_is_kept_for_requests_that_stall() -> None:
    h = Hedging()
    while isinstance(h.decide(LATE_S, P95_S), Hedge):
        assert h.spend()
    assert h.hedges == BURST / 2
    waits = h.decide(LATE_S, P95_S)
    assert isinstance(waits, Wait)
    assert waits.seconds == pytest.approx(STALLED_FACTOR * P95_S - LATE_S)
    stalled = 0
    while isinstance(h.decide(STALLED_FACTOR * P95_S, P95_S), Hedge):
        assert h.spend()
        stalled += 1
    assert stalled == BURST / 2
    assert not h.spend()
    assert h.decide(1e9, P95_S) is None


def test_never_more_than_its_fraction_of_requests_and_one_burst() -> None:
    h = Hedging()
    for _ in range(10_000):
        h.requested()
        if isinstance(h.decide(1.0, P95_S), Hedge):
            h.spend()
    assert h.requests == 10_000
    assert FRACTION * 10_000 - 1 <= h.hedges <= FRACTION * 10_000 + BURST


def test_unused_budget_is_not_saved_up_beyond_a_burst() -> None:
    h = Hedging()
    for _ in range(10_000):
        h.requested()
    made = 0
    while h.spend():
        made += 1
    assert made == BURST


def test_a_fraction_of_zero_turns_it_off() -> None:
    h = Hedging(fraction=0.0)
    h.requested()
    assert h.decide(1e9, P95_S) is None
    assert not h.spend()


def test_hosts_that_had_no_room_are_left_alone_for_a_while() -> None:
    h = Hedging()
    assert not h.refusing([A, B], 0.0)
    h.refused(B, 10.0)
    assert h.refusing([A, B], 10.1)
    assert not h.refusing([A], 10.1)
    assert not h.refusing([A, B], 10.0 + BUSY_QUIET_S)


def test_memory_of_refusals_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedging, "MAX_BUSY", 2)
    h = Hedging()
    peers = [PeerId(bytes([i]) * 32) for i in range(5)]
    for peer in peers:
        h.refused(peer, 0.0)
    assert [h.refusing([p], 0.0) for p in peers] == [False, False, False, True, True]
