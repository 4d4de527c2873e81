"""The DHT at full size in virtual time: a thousand peers with losses, five thousand, churn, clocks that disagree.

Small versions run with the default suite (tests/integration/test_virtual_swarm.py). The figures are printed by
`benchmarks.dht_virtual`. All in all about an hour on one core, and 4 GB of memory for the largest.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.simulation.dht_scenarios import NetworkFigures, churn, growth, lossy, scale
from swarm.simulation.virtual import run_virtual


def check_operations(figures: NetworkFigures) -> None:
    assert figures.did.put_success >= 0.999
    assert figures.did.get_success >= 0.999
    assert figures.did.mean_depth <= 3.5
    assert figures.did.messages_per_put <= 60
    assert figures.did.messages_per_get <= 60
    assert figures.failed_tasks == 0


@pytest.mark.timeout(1800)
def test_a_thousand_peers_and_one_call_in_twenty_lost_whatever_the_clocks_say() -> None:
    agree, apart = (
        run_virtual(lambda skew_s=skew_s: lossy(1000, operations=2000, clock_skew_s=skew_s), real_timeout_s=None)
        for skew_s in (0.0, 600.0)
    )
    check_operations(agree)
    assert replace(apart, clock_skew_s=0.0, real_s=0.0, join_real_s=0.0) == replace(agree, real_s=0.0, join_real_s=0.0)


@pytest.mark.timeout(3600)
def test_costs_grow_with_the_logarithm_of_the_size() -> None:
    sizes = {n: run_virtual(lambda n=n: scale(n), real_timeout_s=None) for n in (250, 1000, 5000)}
    for figures in sizes.values():
        check_operations(figures)
    for cost in ("messages_per_put", "messages_per_get", "mean_depth"):
        fit = growth({n: getattr(figures.did, cost) for n, figures in sizes.items()})
        assert fit.worst_error < 0.1, cost
        assert fit.exponent < 0.25, cost  # twenty times as many peers cost less than twice as much


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("clock_skew_s", [0.0, 600.0])
def test_half_of_the_peers_replaced_with_a_median_lifetime_of_ten_minutes(clock_skew_s: float) -> None:
    figures = run_virtual(lambda: churn(500, clock_skew_s=clock_skew_s), real_timeout_s=None)
    assert figures.originals_left <= 0.5
    assert figures.reads >= 1000
    assert figures.found >= 0.995
    assert figures.ghost_reads >= 500
    assert figures.ghost_reads_everywhere >= 1000
    assert figures.ghosts == figures.ghosts_everywhere == 0
    assert figures.failed_tasks == 0
