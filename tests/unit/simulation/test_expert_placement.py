"""Placement under churn, small; tests/long/test_expert_placement.py has the sizes that count."""

from __future__ import annotations

import pytest

from swarm.simulation.expert_placement import PlacementModel, PlacementSimulation, predicted_losses


def test_predicted_losses_are_those_of_the_chain() -> None:
    # one replica, always there: it dies at the rate of deaths while it lives
    assert predicted_losses(1, 0.02, 0.001, 10.0, 100, 60.0) == pytest.approx(100 * 60 * 0.001 / 1.01)
    # two, repaired fast: 2 * go * repair time of all time with one
    assert predicted_losses(2, 1e-4, 1e-5, 10.0, 1, 1.0) == pytest.approx(2e-4 * 10 * 1e-5, rel=0.01)
    assert predicted_losses(3, 0.0, 0.0, 10.0, 100, 60.0) == 0


def test_usual_churn_loses_nothing_and_moves_little() -> None:
    model = PlacementModel(hosts=60, experts=200, minutes=10.0)
    figures = PlacementSimulation(model).run()
    assert figures.deaths + figures.leaves > 2
    assert figures.losses == figures.anew == figures.incomplete == 0
    assert figures.flaps == 0
    assert figures.moves_per_host_hour <= 12
    assert figures.under_replicated < 0.02
    assert figures.least_load >= 5
    assert figures.most_load <= 15


def test_the_same_seed_leads_to_the_same_course() -> None:
    model = PlacementModel(hosts=20, experts=40, minutes=3.0, churn=0.2)
    figures = PlacementSimulation(model).run()
    assert figures.deaths
    assert PlacementSimulation(model).run() == figures
    assert PlacementSimulation(model, seed=1).run() != figures


def test_losses_under_heavy_churn_are_those_that_the_repair_times_predict() -> None:
    figures = PlacementSimulation(
        PlacementModel(hosts=60, experts=200, minutes=10.0, churn=0.1, graceful=0.0, replicas=2, checkpoint_s=60.0)
    ).run()
    assert figures.losses > 10
    assert figures.ratio <= 1.5
    assert figures.restored == figures.losses
    assert figures.lost_versions <= 7, "an interval of checkpoints, and what was under way"
