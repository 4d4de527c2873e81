"""The DHT among liars, cut in two, flooded and besieged: small networks in virtual time. Large ones are in tests/long.

On the in-memory network only: scores of peers, minutes of upkeep and misbehaving handlers in a second or two.
"""

from __future__ import annotations

import pytest

from swarm.simulation.adversaries import MIXES
from swarm.simulation.dht_attacks import malicious
from swarm.simulation.dht_floods import eclipse, flood
from swarm.simulation.dht_splits import HEALED_S, split
from swarm.simulation.virtual import run_virtual


def test_honest_peers_read_what_honest_peers_wrote_while_a_fifth_lies_in_every_way() -> None:
    figures = run_virtual(lambda: malicious(50, 0.2, records=8, seed=1, clock_skew_s=600.0), seed=1)
    assert sum(figures.lies.values()) > 300
    assert figures.put_rate == 1.0
    assert figures.get_rate >= 0.99
    assert (figures.forged, figures.replayed, figures.deleted, figures.expired) == (0, 0, 0, 0)
    assert figures.failures == 0


@pytest.mark.parametrize("kind", ["forge", "deny"])
def test_each_lie_alone_costs_little(kind: str) -> None:
    figures = run_virtual(lambda: malicious(25, 0.2, kinds=[kind], records=4, seed=2), seed=2)
    assert set(figures.lies) <= {type(behaviour).__name__ for behaviour in MIXES[kind]}
    assert figures.get_rate == 1.0
    assert figures.forged == 0
    assert figures.messages_per_put <= 60
    if kind == "forge":
        assert figures.dropped > 0
        assert sum(figures.refused.values()) > 0


def test_two_halves_are_one_network_soon_after_they_meet_again() -> None:
    figures = run_virtual(lambda: split(30, records=8, samples=12, seed=1, clock_skew_s=600.0), seed=1)
    assert figures.within == 1.0
    assert figures.one_s <= HEALED_S
    assert figures.failures == 0


def test_a_flood_is_refused_counted_and_bounded_while_everybody_else_works() -> None:
    figures = run_virtual(lambda: flood(20, requests=21, bound=500, work_per_s=100, records=5, seed=1), seed=1)
    assert figures.throttled > 0
    assert figures.refused["MalformedFrameError"] > 0
    assert figures.held <= figures.bound
    assert figures.honest_rate == 1.0
    assert figures.victim_rate == 1.0
    assert figures.failures == 0


def test_one_subnet_does_not_besiege_a_peer_even_if_its_peers_claim_others() -> None:
    figures = run_virtual(lambda: eclipse(24, sybils=12, records=6, spoof=True, seed=1), seed=1)
    assert figures.fullest <= 4
    assert figures.neighbours_kept == 1.0
    assert figures.get_rate == 1.0
