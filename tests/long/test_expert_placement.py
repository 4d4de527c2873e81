"""Placement at full size: 500 hosts, 2,000 experts, an hour of churn. About two minutes of one core."""

from __future__ import annotations

import pytest

from swarm.simulation.expert_placement import PlacementModel, PlacementSimulation


@pytest.mark.timeout(1200)
def test_an_hour_of_usual_churn() -> None:
    figures = PlacementSimulation(PlacementModel()).run()
    assert figures.losses <= 1.5 * figures.predicted_losses
    assert figures.restored == figures.losses
    assert figures.flaps == 0
    assert figures.moves_per_host_hour <= 6


@pytest.mark.timeout(1200)
def test_losses_at_ten_times_the_churn_without_hand_overs_are_those_predicted() -> None:
    figures = PlacementSimulation(PlacementModel(churn=0.1, graceful=0.0, replicas=2, minutes=20.0)).run()
    assert figures.losses > 100
    assert figures.ratio <= 1.5
    assert figures.restored >= 0.98 * figures.losses
