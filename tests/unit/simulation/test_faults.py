from typing import Any

import pytest

from swarm.errors import UsageError
from swarm.simulation.faults import Fault, FaultTimeline, apply


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def kill(self, name: str) -> None:
        self.calls.append(("kill", name))

    def freeze(self, name: str, seconds: float | None = None) -> None:
        self.calls.append(("freeze", name, seconds))

    def thaw(self, name: str) -> None:
        self.calls.append(("thaw", name))

    def restart(self, name: str) -> None:
        self.calls.append(("restart", name))


def test_faults_come_in_order_and_once() -> None:
    timeline = FaultTimeline([Fault(30, "kill", "b"), Fault(10, "freeze", "a", 5.0), Fault(20, "kill", "c")])
    assert timeline.due(9.9) == []
    assert [f.target for f in timeline.due(20)] == ["a", "c"]
    assert timeline.due(25) == []
    assert [f.target for f in timeline.pending] == ["b"]
    assert [f.target for f in timeline.due(1000)] == ["b"]
    assert timeline.pending == ()


def test_faults_at_the_same_time_keep_their_order() -> None:
    timeline = FaultTimeline([Fault(1, "kill", "first"), Fault(1, "restart", "second")])
    assert [f.target for f in timeline.due(1)] == ["first", "second"]


def test_faults_can_be_taken_one_at_a_time() -> None:
    timeline = FaultTimeline([Fault(1, "kill", "a"), Fault(2, "kill", "b")])
    assert [f.target for f in timeline.due(5, most=1)] == ["a"]
    assert [f.target for f in timeline.due(5, most=1)] == ["b"]
    assert timeline.due(5, most=1) == []


def test_apply_does_what_the_fault_says() -> None:
    target = Recorder()
    faults = [Fault(0, "freeze", "a", 2.0), Fault(0, "thaw", "a"), Fault(0, "kill", "b"), Fault(0, "restart", "b")]
    for fault in faults:
        apply(fault, target)
    assert target.calls == [("freeze", "a", 2.0), ("thaw", "a"), ("kill", "b"), ("restart", "b")]


def test_a_duration_belongs_to_a_freeze() -> None:
    with pytest.raises(UsageError, match="kill"):
        Fault(0, "kill", "a", seconds=3.0)
    with pytest.raises(UsageError):
        Fault(0, "freeze", "a", seconds=0.0)
