"""Deadlines and hedging against modelled hosts."""

from __future__ import annotations

from swarm.experts.hedging import BURST, FRACTION
from swarm.simulation.expert_latency import LatencyFigures, ServiceTime, heavy_tail, load_step, play, steady, two_modes
from swarm.simulation.virtual import run_virtual

LOAD, HOSTS = 0.9, 4
PATIENT_S = 100.0
"""A floor under deadlines that nothing reaches, where hedging alone is looked at."""


def simulate(service: ServiceTime, **how: float) -> LatencyFigures:
    return run_virtual(lambda: play(service, **how))  # type: ignore[arg-type]


def test_a_load_step_is_followed_with_few_false_timeouts() -> None:
    figures = simulate(load_step(0.1, 0.5, 200), calls=500)
    assert figures.timeouts > 0
    assert figures.false_timeouts < 0.02
    assert figures.masked <= 2


def test_two_modes_are_followed_with_few_false_timeouts() -> None:
    figures = simulate(two_modes(0.005, 0.04), calls=500)
    assert figures.false_timeouts < 0.02
    assert figures.masked == 0


def test_steady_hosts_are_neither_hedged_nor_given_up() -> None:
    figures = simulate(steady(0.05), calls=200)
    assert (figures.hedges, figures.timeouts, figures.requests) == (0, 0, 200)


def test_under_heavy_load_hedging_does_not_raise_the_tail() -> None:
    service = heavy_tail(0.05, 0.5, 0.002)
    gap_s = 0.051 / HOSTS / LOAD
    without, hedged = (
        simulate(service, hosts=HOSTS, calls=2500, gap_s=gap_s, fraction=fraction, floor_s=PATIENT_S)
        for fraction in (0.0, FRACTION)
    )
    assert without.hedges == 0
    assert hedged.hedges < FRACTION * hedged.requests, "hosts that report queues are left alone"
    # queues near saturation are chaotic: a handful of hedges reorders them, so that the percentiles of two runs differ
    assert hedged.p99_s <= 1.25 * without.p99_s


def test_where_hosts_are_idle_hedging_cuts_the_tail_within_its_budget() -> None:
    service = heavy_tail(0.05, 2.0, 0.015)
    without, hedged = (
        simulate(service, hosts=HOSTS, calls=1500, gap_s=0.1, fraction=fraction, floor_s=PATIENT_S)
        for fraction in (0.0, FRACTION)
    )
    assert hedged.hedge_wins > hedged.hedges / 3
    assert hedged.hedges <= FRACTION * hedged.requests + BURST
    assert hedged.p95_s <= without.p95_s
    assert hedged.dropped > 0, "losers that had not begun were dropped before their turn"
