"""Outcomes are values with a sentence for people."""

from __future__ import annotations

import pytest

from swarm.averaging.rounds import Alone, Group, Mismatch, Outcome, Round, RoundReport, TooFew, describe


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Group("00"), ()),
        (Alone(), ("nobody",)),
        (TooFew(1, 2, "b: busy"), ("1 of 2", "b: busy")),
        (Mismatch("peerid", "aa", "bb"), ("peerid", "aa", "bb")),
    ],
)
def test_every_outcome_but_a_group_is_explained(outcome: Outcome, words: tuple[str, ...]) -> None:
    text = describe(outcome)
    assert bool(text) == bool(words)
    assert all(word in text for word in words)
    assert Round(outcome).averaged is isinstance(outcome, Group)


def test_a_problem_is_noted_once() -> None:
    report = RoundReport()
    report.note("a is slow")
    report.note("a is slow")
    report.note("b is gone")
    assert report.problems == ["a is slow", "b is gone"]
