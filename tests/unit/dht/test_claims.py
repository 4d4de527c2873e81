"""Claims of callers about where they are: bounded, each peer at most once an interval, oldest first."""

from __future__ import annotations

from swarm.dht.claims import MAX_CLAIMS, Claims
from swarm.identity import PeerId
from swarm.net.transport import Contact


def contact(number: int, address: str = "127.0.0.1:1") -> Contact:
    return Contact(PeerId(number.to_bytes(32, "big")), (address,))


def make(now: list[float]) -> Claims:
    return Claims(30.0, lambda: now[0])


def test_claims_are_taken_oldest_first_and_once() -> None:
    claims = make([0.0])
    for i in range(5):
        assert claims.add(contact(i))
    assert claims.take(2, lambda c: True) == [contact(0), contact(1)]
    assert claims.take(9, lambda c: True) == [contact(2), contact(3), contact(4)]
    assert claims.take(9, lambda c: True) == []


def test_the_latest_claim_of_a_peer_counts() -> None:
    claims = make([0.0])
    claims.add(contact(1, "127.0.0.1:1"))
    claims.add(contact(1, "127.0.0.1:2"))
    assert claims.take(9, lambda c: True) == [contact(1, "127.0.0.1:2")]


def test_a_peer_that_claims_again_and_again_is_dialled_once_an_interval() -> None:
    now = [0.0]
    claims = make(now)
    assert claims.add(contact(1, "127.0.0.1:1"))
    claims.begin(contact(1).peer_id)
    dialled = 1
    for i in range(100):
        now[0] += 1.0
        if claims.add(contact(1, f"10.0.0.{i}:1")):
            claims.begin(contact(1).peer_id)
            dialled += 1
        else:
            assert claims.take(9, lambda c: True) == []
    assert dialled == 4


def test_claims_that_nobody_wants_are_dropped() -> None:
    claims = make([0.0])
    for i in range(4):
        claims.add(contact(i))
    assert claims.take(9, lambda c: c == contact(2)) == [contact(2)]
    assert len(claims) == 0


def test_claims_are_bounded() -> None:
    claims = make([0.0])
    for i in range(MAX_CLAIMS + 7):
        claims.add(contact(i))
    assert len(claims) == MAX_CLAIMS
    assert claims.take(1, lambda c: True) == [contact(7)]
