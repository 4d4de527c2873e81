"""The use of a host's experts."""

from __future__ import annotations

import asyncio
import math

import pytest

from swarm.experts.batching import Batcher, BatchKey, Work
from swarm.experts.statistics import ExpertUse, Statistics


def work(uid: str, tokens: int, queue_s: float) -> Work:
    loop = asyncio.new_event_loop()
    try:
        future = loop.create_future()
    finally:
        loop.close()
    return Work(BatchKey(uid, "forward", True, 1.0, ()), tokens, 1e9, None, future, queue_s=queue_s)


def test_totals_and_means_by_expert() -> None:
    statistics = Statistics()
    statistics.observe([work("a.0", 10, 0.5), work("a.0", 20, 0.25)], 0.1, 100.0)
    statistics.observe([work("a.0", 30, 0.0)], 0.2, 100.0)
    statistics.observe([work("a.1", 1, 0.0)], 0.3, 100.0)
    use = statistics.use(["a.0", "a.1", "a.2"], 100.0)
    assert use["a.0"].requests == 3
    assert (use["a.0"].tokens, use["a.0"].batches, use["a.0"].mean_batch) == (60, 2, 1.5)
    assert (use["a.0"].queue_s, use["a.0"].compute_s) == (0.75, pytest.approx(0.3))
    assert use["a.1"].tokens == 1
    assert use["a.2"] == ExpertUse()
    assert use["a.2"].mean_batch == 0.0
    statistics.forget("a.0")
    assert statistics.use(["a.0"], 100.0)["a.0"] == ExpertUse()


def test_the_rate_follows_what_is_asked_and_is_forgotten() -> None:
    statistics = Statistics()
    now_s = 0.0
    for _ in range(2000):
        now_s += 0.1
        statistics.observe([work("a.0", 50, 0.0)], 0.01, now_s)
    assert statistics.use(["a.0"], now_s)["a.0"].tokens_per_s == pytest.approx(500.0, rel=0.02)
    assert statistics.busy(now_s)["a.0"] == pytest.approx(500, rel=0.02)
    assert statistics.busy(now_s + 30.0)["a.0"] == pytest.approx(500 / math.e, rel=0.02)
    assert statistics.busy(now_s + 600.0) == {}


def test_a_batcher_tells_its_observer_and_knows_its_speed() -> None:
    statistics = Statistics()
    batcher = Batcher(100, 100, statistics.observe)
    assert batcher.tokens_per_s == 0.0
    batcher.done([work("a.0", 50, 0.0)], 0.5, 7.0)
    assert batcher.tokens_per_s == 100.0
    assert statistics.use(["a.0"], 7.0)["a.0"].tokens == 50
