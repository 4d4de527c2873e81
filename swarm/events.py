"""The typed event stream: everything worth telling about a peer, in order, as small immutable values.

A module defines its events as frozen dataclasses that derive from `Event`, next to the code that emits them.
Degradations always carry a `reason`. Subscribers are called on the emitting thread and must return quickly.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from swarm.clock import Clock

KEPT_EVENTS = 4096


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. Fields of subclasses are plain values (str, int, float, bool, None, tuples of them)."""

    @classmethod
    def kind(cls) -> str:
        """The event's name on the wire and in files: the class name."""
        return cls.__name__

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind(), **{f.name: getattr(self, f.name) for f in fields(self)}}


@dataclass(frozen=True, slots=True)
class SubscriberFailed(Event):
    """A subscriber raised; it was removed."""

    reason: str


E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event with the peer's monotonic time at which it was emitted."""

    time_s: float
    event: Event


class EventStream:
    """The events of one peer: counts every kind, keeps the last `KEPT_EVENTS`, calls subscribers. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._recent: deque[Stamped] = deque(maxlen=KEPT_EVENTS)
        self._counts: Counter[str] = Counter()
        self._subscribers: list[Callable[[Stamped], None]] = []
        self._file: TextIO | None = None

    def emit(self, event: Event) -> None:
        """Record the event and hand it to every subscriber."""
        stamped = Stamped(self._clock.time(), event)
        with self._lock:
            self._recent.append(stamped)
            self._counts[event.kind()] += 1
            subscribers = list(self._subscribers)
            if self._file is not None:
                self._file.write(json.dumps({"time_s": stamped.time_s, **event.to_dict()}, default=str) + "\n")
                self._file.flush()
        for subscriber in subscribers:
            try:
                subscriber(stamped)
            except Exception as error:  # noqa: BLE001 - a broken observer must not break the peer; it is reported
                self.unsubscribe(subscriber)
                self.emit(SubscriberFailed(reason=repr(error)))

    def subscribe(self, subscriber: Callable[[Stamped], None]) -> Callable[[], None]:
        """Call `subscriber` with every later event; returns a function that ends the subscription."""
        with self._lock:
            self._subscribers.append(subscriber)
        return lambda: self.unsubscribe(subscriber)

    def unsubscribe(self, subscriber: Callable[[Stamped], None]) -> None:
        with self._lock:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

    def count(self, kind: type[Event]) -> int:
        """How many events of this class have been emitted since the start."""
        return self._counts[kind.kind()]

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def recent(self, kind: type[E] | None = None) -> list[Stamped]:
        """The kept events, oldest first, of one class or of all."""
        with self._lock:
            return [s for s in self._recent if kind is None or isinstance(s.event, kind)]

    def write_to(self, path: Path) -> None:
        """Append every later event to a file, one JSON object a line. Closed by `close`."""
        with self._lock:
            self._file = path.open("a", encoding="utf-8")

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._subscribers.clear()
