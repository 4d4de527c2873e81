"""A host of four is killed while two trainers learn: no step fails, nothing stays masked, replicas return."""

import pytest

from benchmarks.survival import measure


@pytest.mark.timeout(1800)
def test_a_killed_host_costs_training_nothing() -> None:
    result = measure(calm=5, kills=4, steps=300)
    print({key: value for key, value in result.items() if key != "calm"})
    for run in result["disturbed"]:
        assert run["failed_steps"] == 0
        assert run["masked_later"] == 0
        assert run["repaired_s"] <= 30.0
    assert result["worst_loss"] <= result["allowed_loss"]
