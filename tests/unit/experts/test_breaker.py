from swarm.experts import breaker
from swarm.experts.breaker import CircuitBreaker
from swarm.identity import PeerId

A, B = PeerId(bytes(32)), PeerId(bytes([1]) * 32)


def test_a_failure_opens_and_an_answer_closes() -> None:
    b = CircuitBreaker(pause_s=1.0, max_pause_s=10.0)
    assert not b.avoids(A)
    assert b.failed(A, now_s=5.0) == 1.0
    assert b.avoids(A)
    assert not b.avoids(B)
    assert b.succeeded(A, 5.0)
    assert not b.avoids(A)
    assert not b.succeeded(A, 5.0)


def test_a_trial_is_due_once_after_the_pause_which_doubles_up_to_a_limit() -> None:
    b = CircuitBreaker(pause_s=1.0, max_pause_s=3.0)
    now, pauses = 0.0, []
    for _ in range(4):
        pause = b.failed(A, now)
        assert pause is not None
        pauses.append(pause)
        assert b.take_due(now + pause - 0.01) == []
        now += pause
        assert b.take_due(now) == [A]
        assert b.take_due(now) == [], "a trial is under way"
        assert b.avoids(A), "half-open: only the trial goes there"
    assert pauses == [1.0, 2.0, 3.0, 3.0]


def test_failures_of_calls_that_were_under_way_do_not_lengthen_the_pause() -> None:
    b = CircuitBreaker(pause_s=1.0, max_pause_s=8.0)
    assert b.failed(A, 0.0) == 1.0
    assert b.failed(A, 0.5) is None
    assert b.take_due(1.0) == [A]


def test_memory_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(breaker, "MAX_AVOIDED", 3)
    b = CircuitBreaker(pause_s=1.0, max_pause_s=8.0)
    peers = [PeerId(bytes([i]) * 32) for i in range(5)]
    for peer in peers:
        b.failed(peer, 0.0)
    assert [b.avoids(p) for p in peers] == [False, False, True, True, True]


def test_a_peer_that_answers_trials_but_fails_again_is_where_it_was() -> None:
    b = CircuitBreaker(pause_s=1.0, max_pause_s=60.0)
    now, pauses = 0.0, []
    for _ in range(4):
        pause = b.failed(A, now)
        assert pause is not None
        pauses.append(pause)
        now += pause
        assert b.take_due(now) == [A]
        assert b.succeeded(A, now)
        now += 0.5
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert b.failed(A, now + 1000.0) == 1.0, "that was long ago"


def test_recovered_peers_are_remembered_within_bounds(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(breaker, "MAX_AVOIDED", 2)
    b = CircuitBreaker(pause_s=1.0, max_pause_s=8.0)
    peers = [PeerId(bytes([i]) * 32) for i in range(4)]
    for peer in peers:
        b.failed(peer, 0.0)
        b.succeeded(peer, 0.0)
    assert [b.failed(p, 0.1) for p in peers] == [1.0, 1.0, 2.0, 2.0]
