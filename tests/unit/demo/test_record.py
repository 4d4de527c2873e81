from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.demo.record import DemoRecord, judge


def progress(step: int, tokens: int, failed: int = 0, routed: int = 100, masked: int = 0) -> dict[str, Any]:
    return {
        "kind": "DemoProgress",
        "step": step,
        "tokens": tokens,
        "failed_calls": failed,
        "routed": routed,
        "masked": masked,
    }


def started(step: int, synced_from: str = "") -> dict[str, Any]:
    return {"kind": "DemoStarted", "step": step, "synced_from": synced_from}


def held_out(step: int, loss: float, masked: float | None = None) -> dict[str, Any]:
    return {"kind": "DemoHeldOut", "step": step, "loss": loss, "loss_masked": masked}


def test_totals_outlive_a_restart() -> None:
    record = DemoRecord(["t"])
    for event in (started(0), progress(5, 500, failed=1, masked=4), started(9, "donor"), progress(10, 100, masked=6)):
        record.take("t", event)
    assert record.total("tokens") == 600
    assert record.total("failed_calls") == 1
    assert record.masked_fraction == pytest.approx(10 / 200)
    assert record.trainers["t"].resumed_at == 9
    assert record.step == 10


def test_a_restart_without_a_donor_is_no_resumption() -> None:
    record = DemoRecord(["t"])
    record.take("t", started(0))
    record.take("t", started(0))
    assert record.trainers["t"].resumed_at is None


def test_windows_take_the_means_around_each_fault() -> None:
    record = DemoRecord(["t"])
    for step, loss in enumerate([5.0, 4.0, 3.0]):
        record.take("t", held_out(step, loss))
    assert record.measured_since_fault == 3
    record.mark("kill x")
    assert record.measured_since_fault == 0
    for step, loss in enumerate([2.0, 1.0], start=3):
        record.take("t", held_out(step, loss))
    assert record.windows() == [{"fault": "kill x", "before": 4.0, "after": 1.5}]
    record.mark("kill y")
    assert record.windows()[1] == {"fault": "kill y", "before": 3.0, "after": None}


def test_spread_is_that_of_the_last_shared_round(tmp_path: Path) -> None:
    record = DemoRecord(["a", "b"])

    degraded = {40}

    def add(trainer: str, group: str, step: int, before: float, after: float) -> None:
        file = tmp_path / f"{trainer}-{group}.npy"
        np.save(file, np.array([[before, 0.0], [after, 0.0]], dtype=np.float32))
        event = {"kind": "DemoRound", "number": step, "group": group, "members": [], "file": str(file)}
        record.take(trainer, {**event, "whole": step not in degraded})

    assert record.spreads(["a", "b"]) is None
    add("a", "g1", 10, 1.0, 0.5)
    add("b", "g1", 10, 4.0, 0.75)
    add("a", "g2", 20, 1.0, 3.0)
    add("b", "g2", 20, 3.0, 3.0)
    add("a", "alone", 30, 0.0, 9.0)
    assert record.spreads(["a", "b"]) == (2.0, 0.0)
    assert record.spreads(["a"]) is None
    add("a", "g3", 40, 1.0, 3.0)
    add("b", "g3", 40, 3.0, 4.0)
    assert record.spreads(["a", "b"]) == (2.0, 0.0), "the last one that nothing happened in"
    (tmp_path / "b-g2.npy").unlink()
    assert record.spreads(["a", "b"]) == (3.0, 0.25)


def good() -> dict[str, Any]:
    return {
        "final_loss": 2.0,
        "final_loss_experts_masked": 2.5,
        "unigram_loss": 3.26,
        "spread_before_round": 0.1,
        "spread_after_round": 0.0,
        "trainers": ["a", "b"],
        "killed": ["host-3", "b"],
        "frozen": ["host-0"],
        "windows": [{"fault": "kill b", "before": 2.5, "after": 2.2}],
        "resumed": {"b": 40},
        "failed_processes": [],
    }


def test_a_good_demo_has_no_problems() -> None:
    assert judge(good(), faults=True, builtin_text=True) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"final_loss": 2.95, "final_loss_experts_masked": 3.5}, "above 2.900"),
        ({"final_loss": None}, "no trainer measured"),
        ({"final_loss_experts_masked": 2.05}, "experts help less"),
        ({"spread_before_round": None, "spread_after_round": None}, "shared an averaging round"),
        ({"spread_before_round": 0.0}, "did not differ"),
        ({"spread_after_round": 1e-5}, "after the last round"),
        ({"killed": ["b"]}, "not every planned fault"),
        ({"frozen": []}, "not every planned fault"),
        ({"windows": [{"fault": "kill b", "before": 2.2, "after": 2.2}]}, "did not fall"),
        ({"windows": [{"fault": "kill b", "before": 2.2, "after": None}]}, "was not measured"),
        ({"resumed": {}}, "did not take over"),
        ({"failed_processes": ["host-1"]}, "host-1"),
    ],
)
def test_each_goal_can_be_missed(change: dict[str, Any], why: str) -> None:
    problems = judge({**good(), **change}, faults=True, builtin_text=True)
    assert len(problems) == 1
    assert why in problems[0]


def test_without_faults_and_with_another_text_other_goals_hold() -> None:
    calm = {**good(), "killed": [], "frozen": [], "windows": [], "resumed": {}, "final_loss": 3.2}
    calm["final_loss_experts_masked"] = 3.5
    assert judge(calm, faults=False, builtin_text=False) == []
    assert len(judge(calm, faults=False, builtin_text=True)) == 1
