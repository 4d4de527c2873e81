"""The table of sessions and its limits."""

from __future__ import annotations

import pytest

from swarm.errors import ExpiredInviteError, RateLimitedError, UnknownSessionError
from swarm.identity import KeyPair
from swarm.net import sessions as module
from swarm.net.hello import Met
from swarm.net.security import Admission
from swarm.net.sessions import RateLimit, SessionTable
from swarm.roles import Role


class ManualClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1e9 + self.now


def somebody(expires_wall_s: float | None = None) -> Met:
    identity = KeyPair.generate()
    return Met(identity.peer_id, identity.public_key, Admission(frozenset({Role.HOST}), expires_wall_s))


def test_token_opens_its_session_only() -> None:
    table = SessionTable(60.0, 100.0, ManualClock())
    ann, bob = somebody(), somebody()
    tokens = table.grant(ann, "a"), table.grant(bob, "b")
    assert tokens[0] != tokens[1]
    assert table.find(tokens[0]).context.peer_id == ann.peer_id
    assert table.find(tokens[1]).context.peer_id == bob.peer_id
    for wrong in (None, b"", tokens[0][:-1], bytes(32)):
        with pytest.raises(UnknownSessionError):
            table.find(wrong)


def test_use_keeps_a_session_alive_and_idleness_ends_it() -> None:
    clock = ManualClock()
    table = SessionTable(60.0, 100.0, clock)
    token = table.grant(somebody(), "a")
    for _ in range(5):
        clock.now += 50
        table.find(token)
    clock.now += 61
    with pytest.raises(UnknownSessionError, match="idle"):
        table.find(token)
    assert len(table) == 0


def test_open_stream_keeps_a_session_alive() -> None:
    clock = ManualClock()
    table = SessionTable(60.0, 100.0, clock)
    token = table.grant(somebody(), "a")
    table.find(token).on_end["stream"] = lambda: None
    clock.now += 1000
    table.sweep()
    table.find(token)


def test_credential_expiry_reads_the_wall_clock() -> None:
    clock = ManualClock()
    table = SessionTable(1e6, 100.0, clock)
    token = table.grant(somebody(expires_wall_s=1e9 + 200.0), "a")
    table.find(token)
    clock.now += 101
    with pytest.raises(ExpiredInviteError):
        table.find(token)


def test_ending_a_peer_ends_all_its_sessions_and_streams() -> None:
    table = SessionTable(60.0, 100.0, ManualClock())
    ann, bob = somebody(), somebody()
    tokens = [table.grant(ann, "a"), table.grant(ann, "a")]
    kept = table.grant(bob, "b")
    ended: list[str] = []
    table.find(tokens[0]).on_end["one"] = lambda: ended.append("one")
    table.find(tokens[0]).on_end["two"] = lambda: ended.append("two")
    assert table.end_peer(ann.peer_id) == 2
    assert ended == ["one", "two"]
    for token in tokens:
        with pytest.raises(UnknownSessionError):
            table.find(token)
    table.find(kept)
    assert table.end_peer(ann.peer_id) == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 20)
    clock = ManualClock()
    table = SessionTable(60.0, 100.0, clock)
    greedy = somebody()
    for _ in range(50):
        clock.now += 0.1
        table.grant(greedy, "a")
    assert len(table) == module.MAX_SESSIONS_PER_PEER
    for _ in range(50):
        table.grant(somebody(), "a")
    assert len(table) == 20
    assert len(table._rates) == 20


def test_rate_limit_has_a_burst_and_refills() -> None:
    clock = ManualClock()
    rate = RateLimit(10.0, clock)
    for _ in range(20):
        rate.take()
    with pytest.raises(RateLimitedError):
        rate.take()
    clock.now += 0.5
    for _ in range(5):
        rate.take()
    with pytest.raises(RateLimitedError):
        rate.take()


def test_rate_limit_is_one_for_all_sessions_of_a_peer() -> None:
    table = SessionTable(60.0, 1.0, ManualClock())
    ann = somebody()
    first, second = table.find(table.grant(ann, "a")), table.find(table.grant(ann, "a"))
    first.rate.take()
    second.rate.take()
    with pytest.raises(RateLimitedError):
        first.rate.take()
