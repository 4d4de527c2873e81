"""Work that one peer may cause: bursts, refill, one limit for each peer, told of once in a while."""

from __future__ import annotations

import pytest

from swarm.dht.flood import BURST_S, MAX_PEERS, TELL_S, FloodGuard
from swarm.errors import RateLimitedError
from swarm.identity import PeerId


class ManualClock:
    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def test_a_burst_is_let_through_and_then_as_much_as_flows_in() -> None:
    clock = ManualClock()
    guard = FloodGuard(10.0, clock)
    for _ in range(int(BURST_S)):
        guard.take(peer(1), 10.0)
    with pytest.raises(RateLimitedError):
        guard.take(peer(1), 10.0)
    clock.now_s += 1.0
    guard.take(peer(1), 10.0)
    with pytest.raises(RateLimitedError):
        guard.take(peer(1), 1.0)
    assert guard.refused == 2


def test_others_are_not_affected() -> None:
    guard = FloodGuard(10.0, ManualClock())
    guard.take(peer(1), 10 * BURST_S)
    with pytest.raises(RateLimitedError):
        guard.take(peer(1), 1.0)
    guard.take(peer(2), 1.0)


def test_a_flood_is_told_of_once_in_a_while() -> None:
    clock = ManualClock()
    guard = FloodGuard(10.0, clock)
    assert [guard.may_tell(peer(1)) for _ in range(5)] == [True] + [False] * 4
    assert guard.may_tell(peer(2))
    clock.now_s += TELL_S
    assert guard.may_tell(peer(1))


def test_memory_is_bounded_and_keeps_those_who_are_active() -> None:
    guard = FloodGuard(10.0, ManualClock())
    guard.take(peer(0), 10 * BURST_S)
    for i in range(1, MAX_PEERS + 10):
        guard.take(peer(i), 1.0)
        guard.may_tell(peer(i))
        with pytest.raises(RateLimitedError):
            guard.take(peer(0), 1.0)
    assert len(guard._rates) == MAX_PEERS
    assert len(guard._told_s) == MAX_PEERS
