"""When a trainer looks for the group of its next round."""

from __future__ import annotations

from swarm.training.averaging import LEAST_LEAD_S, RoundPlanner


def plans(every: int, step_s: float, search_s: float, rounds: int = 3) -> list[tuple[int, float]]:
    """At which step since the last round, and for in how many seconds, each round was planned."""
    planner, found, now = RoundPlanner(every, longest_s=10.0), [], 0.0
    for _ in range(rounds):
        for since in range(1, every + 1):
            now += step_s
            planner.stepped(now)
            if since == every:
                planner.round_began()
                planner.searched(search_s)
            elif (in_s := planner.due(since)) is not None:
                found.append((since, in_s))
    return found


def test_the_search_begins_as_long_before_the_round_as_it_takes() -> None:
    for since, in_s in plans(every=100, step_s=0.1, search_s=1.0)[1:]:
        assert abs(0.1 * (100 - since) - in_s) < 1e-6
        assert 1.0 <= in_s <= LEAST_LEAD_S + 1.5


def test_it_is_planned_once_a_round_and_never_in_the_first_half() -> None:
    found = plans(every=10, step_s=0.01, search_s=5.0, rounds=5)
    assert [since for since, _ in found] == [5] * 5


def test_long_steps_leave_no_time_to_plan_but_the_last_step() -> None:
    assert plans(every=4, step_s=100.0, search_s=1.0) == []
    assert plans(every=1, step_s=0.1, search_s=1.0) == []
    assert [since for since, _ in plans(every=4, step_s=1.5, search_s=3.0, rounds=4)] == [2, 2, 2]
