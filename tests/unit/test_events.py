"""The event stream: counts, subscribers, files, and what happens when one of them fails."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarm.events import KEPT_EVENTS, Event, EventStream, Stamped, SubscriberFailed


class StepClock:
    """One second more at every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        self.now += 1.0
        return self.now

    def wall(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Happened(Event):
    what: str
    reason: str = "test"


@dataclass(frozen=True, slots=True)
class Other(Event):
    pass


@pytest.fixture
def stream() -> EventStream:
    return EventStream(StepClock())


def test_events_are_kept_in_order_with_their_time(stream: EventStream) -> None:
    stream.emit(Happened("a"))
    stream.emit(Other())
    stream.emit(Happened("b"))
    assert [s.time_s for s in stream.recent()] == [1.0, 2.0, 3.0]
    assert [s.event for s in stream.recent(Happened)] == [Happened("a"), Happened("b")]


def test_counts_outlive_the_kept_events(stream: EventStream) -> None:
    for _ in range(KEPT_EVENTS + 5):
        stream.emit(Other())
    assert stream.count(Other) == KEPT_EVENTS + 5
    assert stream.counts() == {"Other": KEPT_EVENTS + 5}
    assert len(stream.recent()) == KEPT_EVENTS
    assert stream.count(Happened) == 0


def test_subscribers_are_called_until_they_leave(stream: EventStream) -> None:
    seen: list[Stamped] = []
    leave = stream.subscribe(seen.append)
    stream.emit(Happened("a"))
    leave()
    leave()
    stream.emit(Happened("b"))
    assert [s.event for s in seen] == [Happened("a")]


def test_a_broken_subscriber_is_removed_and_reported(stream: EventStream) -> None:
    def broken(stamped: Stamped) -> None:
        raise ValueError("no")

    stream.subscribe(broken)
    stream.emit(Happened("a"))
    stream.emit(Happened("b"))
    failures = [s.event for s in stream.recent(SubscriberFailed)]
    assert failures == [SubscriberFailed(reason="ValueError('no')")]


def test_events_are_appended_to_a_file_as_json_lines(stream: EventStream, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    stream.emit(Happened("before"))
    stream.write_to(path)
    stream.emit(Happened("a"))
    stream.close()
    stream.emit(Happened("after"))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"time_s": 2.0, "kind": "Happened", "what": "a", "reason": "test"}
    ]


def test_closing_ends_subscriptions_and_is_idempotent(stream: EventStream) -> None:
    seen: list[Stamped] = []
    stream.subscribe(seen.append)
    stream.close()
    stream.close()
    stream.emit(Other())
    assert seen == []
    assert stream.count(Other) == 1


def test_an_event_names_itself_by_its_class() -> None:
    assert Happened.kind() == "Happened"
    assert Happened("a").to_dict() == {"kind": "Happened", "what": "a", "reason": "test"}
