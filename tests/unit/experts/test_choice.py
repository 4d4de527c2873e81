"""Which replica is asked."""

import random

from swarm.experts import choice
from swarm.experts.choice import FRESH_S, Chooser, HostLoads
from swarm.identity import PeerId

A, B, C = (PeerId(bytes([i]) * 32) for i in range(3))


def chooser(loads: HostLoads, now_s: float = 0.0) -> Chooser:
    return Chooser(loads, random.Random(0), now_s)


def answer(loads: HostLoads, peer: PeerId, elapsed_s: float, **reported: float) -> None:
    told = {"queue_s": 0.0, "compute_s": 0.0, "now_s": 0.0, **reported}
    loads.answered(peer, "ffn", 10, elapsed_s, **told)


def test_without_knowledge_the_first_in_order_is_taken() -> None:
    assert chooser(HostLoads()).choose([B, A], "ffn", 10) == B


def test_the_faster_of_two_is_taken_and_close_ones_keep_their_order() -> None:
    loads = HostLoads()
    answer(loads, A, 0.100)
    answer(loads, B, 0.085)
    assert chooser(loads).choose([A, B], "ffn", 10) == A, "hardly slower"
    for _ in range(20):
        answer(loads, A, 0.500)
    assert chooser(loads).choose([A, B], "ffn", 10) == B
    assert chooser(loads).choose([A], "ffn", 10) == A


def test_a_host_nobody_asked_is_like_the_typical_one() -> None:
    loads = HostLoads()
    for _ in range(30):
        answer(loads, A, 0.010)
    answer(loads, B, 0.500)
    assert chooser(loads).choose([A, C], "ffn", 10) == A
    assert chooser(loads).choose([B, C], "ffn", 10) == C


def test_queues_count_until_they_are_old_and_only_those_of_other_callers() -> None:
    loads = HostLoads()
    answer(loads, A, 0.260, queue_s=0.25)
    answer(loads, B, 0.010)
    assert chooser(loads).choose([A, B], "ffn", 10) == B
    assert loads.queue_s(A, FRESH_S + 1.0) == 0.0
    assert chooser(loads, FRESH_S + 1.0).choose([A, B], "ffn", 10) == A
    # parts of one request wait for each other: that is computing, not a queue
    answer(loads, B, 0.110, queue_s=0.08, compute_s=0.1)
    assert loads.queue_s(B, 0.0) == 0.0


def test_a_host_is_congested_when_requests_usually_wait_for_longer_than_they_compute() -> None:
    loads = HostLoads()
    answer(loads, A, 0.03, queue_s=0.02)
    assert not loads.congested(A, 0.0), "once is not usually"
    for _ in range(10):
        answer(loads, A, 0.03, queue_s=0.02)
        answer(loads, B, 0.9, queue_s=0.6, compute_s=0.4)
        answer(loads, C, 0.9, queue_s=0.85, compute_s=0.1)
    assert [loads.congested(p, 0.0) for p in (A, B, C)] == [True, False, True]
    assert not loads.congested(A, FRESH_S + 1.0)


def test_announced_queues_and_throughput_count_where_no_answer_is_newer() -> None:
    loads = HostLoads()
    loads.announced(A, 2.0, 0.0, 0.0)
    assert chooser(loads).choose([A, B], "ffn", 10) == B
    answer(loads, A, 0.010)
    loads.announced(A, 2.0, 0.0, 1.0)
    assert loads.queue_s(A, 1.0) == 0.0
    loads.announced(B, 0.0, 100.0, 0.0)
    assert loads.expected_s(B, "new-grid", 50, 0.0) > 0.5


def test_requests_travel_together_unless_that_takes_longer() -> None:
    loads = HostLoads()
    light = chooser(loads)
    assert [light.choose(pair, "ffn", 10) for pair in ([A, B], [B, A], [B, C])] == [A, A, B]
    for peer in (A, B):
        for _ in range(20):
            answer(loads, peer, 0.051, compute_s=0.05)  # 5 ms a token
    heavy = chooser(loads)
    assert [heavy.choose([A, B], "ffn", 10) for _ in range(4)] == [A, B, A, B]


def test_requests_under_way_count_as_a_queue_until_they_are_done() -> None:
    loads = HostLoads()
    for peer in (A, B):
        for _ in range(20):
            answer(loads, peer, 0.051, compute_s=0.05)
    loads.asked(A, 10)
    assert chooser(loads).choose([A, B], "ffn", 10) == B
    loads.done(A, 10)
    assert chooser(loads).choose([A, B], "ffn", 10) == A


def test_of_many_replicas_two_random_ones_are_compared() -> None:
    loads = HostLoads()
    for peer in (A, B, C):
        answer(loads, peer, 0.010)
    answer(loads, C, 9.0)
    picked = [Chooser(loads, random.Random(seed), 0.0).choose([A, B, C], "ffn", 10) for seed in range(60)]
    assert C not in picked, "the slowest of three loses every comparison"
    assert picked.count(A) > 2 * picked.count(B) / 3
    assert picked.count(B) > 10


def test_a_host_cannot_make_itself_attractive_by_what_it_says() -> None:
    loads = HostLoads()
    for _ in range(20):
        answer(loads, A, 0.4, queue_s=1e9, compute_s=1e9)
        answer(loads, B, 0.1)
    assert chooser(loads).choose([A, B], "ffn", 10) == B
    assert loads.expected_s(A, "ffn", 10, 0.0) < 61.0


def test_what_was_slow_is_measured_again_and_may_come_back() -> None:
    loads = HostLoads()
    for _ in range(30):
        answer(loads, A, 0.010)
    loads.waited(B, 0.7, 0.0)
    assert loads.slow([A, B, C], 1.0, 3.0) == [], "measured just now"
    assert loads.slow([A, B, C], 4.0, 3.0) == [B]
    for _ in range(12):
        loads.probed(B, 0.010, 4.0)
    assert loads.slow([A, B, C], 8.0, 3.0) == []
    assert chooser(loads).choose([B, A], "ffn", 10) == B


def test_memory_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(choice, "MAX_HOSTS", 3)
    loads = HostLoads()
    for i in range(6):
        loads.waited(PeerId(bytes([i]) * 32), 5.0, 0.0)
    assert len(loads.slow([PeerId(bytes([i]) * 32) for i in range(6)], 9.0, 1.0)) == 3
