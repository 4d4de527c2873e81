"""The DHT's bars among liars, after a split and with wrong clocks, at full size: `pytest tests/long`.

A thousand peers take minutes. The figures are printed: run with `-s` to see them.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

from swarm.simulation.adversaries import MIXES
from swarm.simulation.dht_attacks import MaliciousFigures, malicious
from swarm.simulation.dht_floods import eclipse, flood
from swarm.simulation.dht_splits import HEALED_S, split
from swarm.simulation.virtual import run_virtual

PEERS = 1000

pytestmark = pytest.mark.timeout(1800)


def among_liars(
    peers: int, fraction: float, *, seed: int = 0, clock_skew_s: float = 0.0, loss: float = 0.0
) -> MaliciousFigures:
    figures = run_virtual(
        lambda: malicious(peers, fraction, seed=seed, clock_skew_s=clock_skew_s, loss=loss),
        seed=seed,
        real_timeout_s=None,
    )
    print(asdict(figures))
    assert figures.failures == 0
    assert figures.forged == 0
    assert figures.replayed_to_witness == 0
    assert figures.messages_per_get <= 60
    assert figures.messages_per_put <= 60
    return figures


@pytest.mark.parametrize(("seed", "clock_skew_s"), [(0, 0.0), (1, 0.0), (0, 600.0)])
def test_a_fifth_lies(seed: int, clock_skew_s: float) -> None:
    figures = among_liars(PEERS, 0.2, seed=seed, clock_skew_s=clock_skew_s)
    assert figures.put_rate >= 0.99
    assert figures.get_rate >= 0.99
    assert (figures.replayed, figures.deleted, figures.expired) == (0, 0, 0)


def test_three_tenths_lie() -> None:
    figures = among_liars(PEERS, 0.3)
    assert figures.put_rate >= 0.97
    assert figures.get_rate >= 0.97


def test_a_fifth_lies_and_calls_are_lost() -> None:
    assert among_liars(300, 0.2, loss=0.05).get_rate >= 0.99


@pytest.mark.parametrize("kind", list(MIXES))
def test_a_fifth_tells_the_same_lie(kind: str) -> None:
    figures = run_virtual(lambda: malicious(200, 0.2, kinds=[kind], records=60), real_timeout_s=None)
    print(kind, asdict(figures))
    assert (figures.forged, figures.replayed_to_witness, figures.failures) == (0, 0, 0)
    assert figures.put_rate >= 0.99
    # where a majority of a key's nearest says the same, nobody can tell it from the truth: 6 % of keys at a fifth
    assert figures.get_rate >= (0.88 if kind in ("replay", "collude-replay", "expire") else 0.98)


@pytest.mark.parametrize("clock_skew_s", [0.0, 600.0])
def test_two_halves_are_one_network_within_two_minutes(clock_skew_s: float) -> None:
    figures = run_virtual(lambda: split(PEERS, clock_skew_s=clock_skew_s), real_timeout_s=None)
    print(asdict(figures))
    assert figures.within >= 0.99
    assert figures.one_s <= HEALED_S
    assert figures.failures == 0


def test_a_flood_is_bounded() -> None:
    figures = run_virtual(lambda: flood(100), real_timeout_s=None)
    print(asdict(figures))
    assert figures.throttled > 0
    assert figures.held <= figures.bound
    assert figures.honest_rate >= 0.99
    assert figures.victim_rate >= 0.99


@pytest.mark.parametrize("spoof", [False, True])
def test_many_of_one_subnet_do_not_besiege_a_peer(spoof: bool) -> None:
    figures = run_virtual(lambda: eclipse(200, spoof=spoof), real_timeout_s=None)
    print(asdict(figures))
    assert figures.fullest <= 4
    assert figures.neighbours_kept >= 0.95
    assert figures.get_rate >= 0.99
