"""Adaptive deadlines under the load patterns that simpler rules got wrong."""

from __future__ import annotations

import random

from swarm.config import DeadlineConfig
from swarm.net import deadlines as module
from swarm.net.deadlines import MIN_SAMPLES, Deadlines, size_class
from tests.support import deterministic_identity

PEER = deterministic_identity("deadline").peer_id
PATH = "/swarm.pb.Test/Call"
CONFIG = DeadlineConfig(initial_s=10.0, floor_s=0.001, cap_s=60.0)


def call(deadlines: Deadlines, takes_s: float) -> bool:
    """One call that takes so long; returns whether it met its deadline."""
    budget_s = deadlines.budget_s(PEER, PATH)
    if takes_s > budget_s:
        deadlines.record_timeout(PEER, PATH, 0)
        return False
    deadlines.record(PEER, PATH, 0, takes_s)
    return True


def test_preset_until_enough_samples() -> None:
    deadlines = Deadlines(CONFIG)
    for _ in range(MIN_SAMPLES - 1):
        assert deadlines.budget_s(PEER, PATH) == 10.0
        deadlines.record(PEER, PATH, 0, 0.1)
    deadlines.record(PEER, PATH, 0, 0.1)
    assert deadlines.budget_s(PEER, PATH) == 0.2  # twice the median, as there is no spread


def test_recovers_from_a_step_in_load() -> None:
    deadlines, rng = Deadlines(CONFIG), random.Random(1)
    for _ in range(200):
        assert call(deadlines, rng.uniform(0.09, 0.11))
    met = [call(deadlines, rng.uniform(0.45, 0.55)) for _ in range(100)]
    assert met.count(False) <= 3
    assert all(met[4:])


def test_two_modes_cause_few_false_timeouts() -> None:
    deadlines, rng = Deadlines(CONFIG), random.Random(2)
    latencies = [rng.gauss(0.040, 0.002) if rng.random() < 0.2 else rng.gauss(0.005, 0.0005) for _ in range(5000)]
    timeouts = sum(not call(deadlines, latency) for latency in latencies)
    assert timeouts / len(latencies) < 0.02
    assert deadlines.budget_s(PEER, PATH) < 0.2  # and not by waiting for ever


def test_steady_latency_has_a_tight_deadline() -> None:
    deadlines, rng = Deadlines(CONFIG), random.Random(3)
    assert all(call(deadlines, rng.gauss(0.1, 0.005)) for _ in range(1000))
    assert 0.1 < deadlines.budget_s(PEER, PATH) < 0.25


def test_deadline_doubles_with_each_timeout_until_a_success() -> None:
    deadlines = Deadlines(CONFIG)
    for _ in range(64):
        deadlines.record(PEER, PATH, 0, 0.1)
    budgets = []
    for _ in range(5):
        budgets.append(deadlines.budget_s(PEER, PATH))
        deadlines.record_timeout(PEER, PATH, 0)
    assert [round(b / budgets[0], 3) for b in budgets] == [1, 2, 4, 8, 16]
    for _ in range(64):
        deadlines.record(PEER, PATH, 0, 0.1)
    assert deadlines.budget_s(PEER, PATH) < 0.3


def test_bounds_cap_and_advertised_time() -> None:
    deadlines = Deadlines(DeadlineConfig(initial_s=3.0, floor_s=0.5, cap_s=20.0))
    for _ in range(20):
        deadlines.record(PEER, PATH, 0, 0.001)
    assert deadlines.budget_s(PEER, PATH) == 0.5
    assert deadlines.budget_s(PEER, PATH, advertised_s=2.0) == 2.002
    assert deadlines.budget_s(PEER, PATH, advertised_s=99.0) == 20.0
    assert deadlines.budget_s(PEER, PATH, cap_s=0.1) == 0.1
    for _ in range(12):
        deadlines.record_timeout(PEER, PATH, 0)
    assert deadlines.budget_s(PEER, PATH) == 20.0


def test_sizes_learn_apart() -> None:
    deadlines = Deadlines(CONFIG)
    for _ in range(10):
        deadlines.record(PEER, PATH, 100, 0.01)
        deadlines.record(PEER, PATH, 64 << 20, 5.0)
    assert deadlines.budget_s(PEER, PATH, 200) == 0.02
    assert deadlines.budget_s(PEER, PATH, 63 << 20) == 10.0
    assert [size_class(s) for s in (0, 16383, 16384, 65535, 65536, 1 << 20)] == [0, 0, 1, 1, 2, 4]


def test_latency_is_a_moving_average() -> None:
    deadlines = Deadlines(CONFIG)
    assert deadlines.latency_s(PEER, PATH) is None
    for _ in range(50):
        deadlines.record(PEER, PATH, 0, 0.1)
    assert abs((deadlines.latency_s(PEER, PATH) or 0) - 0.1) < 1e-9
    for _ in range(50):
        deadlines.record(PEER, PATH, 1 << 20, 0.3)
    assert abs((deadlines.latency_s(PEER, PATH) or 0) - 0.3) < 1e-3


def test_memory_is_bounded() -> None:
    deadlines = Deadlines(CONFIG)
    for n in range(module.MAX_WINDOWS + 100):
        deadlines.record(PEER, f"/m/{n}", 0, 0.1)
    assert len(deadlines._windows) == len(deadlines._latency) == module.MAX_WINDOWS
    for _ in range(1000):
        deadlines.record(PEER, PATH, 0, 0.1)
    assert len(deadlines._samples(PEER, PATH, 0).ordered) == module.WINDOW
