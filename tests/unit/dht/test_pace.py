"""How many positions may be under way: more while answers are quick, fewer when peers are slow, within bounds."""

from __future__ import annotations

from swarm.dht.crawl import Ask, Lookup
from swarm.dht.pace import CALM_REQUESTS, FIRST_POSITIONS, LEAST_POSITIONS, MAX_REQUESTS, MOST_POSITIONS, Pace
from swarm.dht.routing import PeerNode
from swarm.identity import PeerId
from swarm.net.transport import Contact

PATIENCE_S = 1.0


def ask(positions: int, peer: int = 1) -> Ask:
    node = PeerNode(Contact(PeerId(peer.to_bytes(20, "big") + bytes(12)), ("127.0.0.1:1",)))
    return Ask(node, [Lookup(i, 1, []) for i in range(positions)])


def test_what_is_under_way_takes_room_until_it_has_ended() -> None:
    pace = Pace(PATIENCE_S)
    first, second = ask(60), ask(4)
    assert pace.oldest is None
    pace.sent(first, 10.0)
    pace.sent(second, 10.5)
    assert (pace.requests, pace.positions) == (MAX_REQUESTS - 2, FIRST_POSITIONS - 64)
    assert pace.oldest == (first, 10.0 + PATIENCE_S)
    pace.ended(first, 10.9)  # neither quick nor slow
    assert (pace.requests, pace.positions) == (MAX_REQUESTS - 1, FIRST_POSITIONS - 4)
    assert pace.oldest == (second, 10.5 + PATIENCE_S)


def test_room_grows_by_quick_answers_and_falls_by_slow_peers_within_bounds() -> None:
    pace = Pace(PATIENCE_S)
    for i in range(100):
        quick = ask(64)
        pace.sent(quick, float(i))
        pace.ended(quick, i + 0.1)
        assert pace.positions == min(MOST_POSITIONS, FIRST_POSITIONS + 64 * (i + 1))
    for i in range(100):
        slow = ask(64)
        before = pace.positions
        pace.sent(slow, float(i))
        pace.slow(slow)
        assert LEAST_POSITIONS <= pace.positions < before or before == LEAST_POSITIONS
        left = pace.positions
        pace.ended(slow, i + 2.0)  # a late answer changes nothing any more
        assert pace.positions == left
    assert pace.positions == LEAST_POSITIONS


def test_peers_that_owe_an_answer_are_busy_once_much_is_under_way() -> None:
    pace = Pace(PATIENCE_S)
    for i in range(CALM_REQUESTS):
        pace.sent(ask(1, i + 1), 0.0)
    assert list(pace.busy) == []
    pace.sent(ask(1, 1), 0.0)
    assert len(pace.busy) == CALM_REQUESTS
