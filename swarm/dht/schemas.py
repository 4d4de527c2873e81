"""What may be kept under our own namespaces: typed schemas, checked where records are written, held and read.

A namespace is the beginning of a key up to its first `/` or `.`, e.g. `peers` in `peers/a`. The module that owns the
records declares their schema; the peer registers all of them with its DHT. Fields that a schema does not name are let
through, so that newer peers can add some. Keys in other namespaces, or without a `/`, are anybody's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from swarm.dht.refusals import Refusal, refused
from swarm.identity import PeerId

MAX_ADDRESSES = 8
MAX_ADDRESS_CHARS = 260
"""A name of 253 characters, a port."""

Check: TypeAlias = Callable[[Any], str | None]
"""What is wrong with a value, in words that follow its name; none if it is fine."""
PlaceCheck: TypeAlias = Callable[[PeerId, str, str], str | None]
"""What is wrong with an author writing under this key and subkey; none if it is fine."""


def anything() -> Check:
    """Whatever newer peers may write there."""
    return lambda value: None


def text(max_chars: int) -> Check:
    """A string of at most so many characters."""

    def check(value: Any) -> str | None:
        fits = isinstance(value, str) and len(value) <= max_chars
        return None if fits else f"is not a text of at most {max_chars} characters"

    return check


def raw(max_bytes: int) -> Check:
    """A byte string of at most so many bytes."""

    def check(value: Any) -> str | None:
        fits = isinstance(value, bytes) and len(value) <= max_bytes
        return None if fits else f"is not at most {max_bytes} bytes"

    return check


def integer(low: int, high: int) -> Check:
    """A whole number from `low` to `high`; truth values are none."""

    def check(value: Any) -> str | None:
        return None if type(value) is int and low <= value <= high else f"is not a whole number from {low} to {high}"

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """A finite number from `low` to `high`; truth values are none."""

    def check(value: Any) -> str | None:
        fits = type(value) in (int, float) and low <= value <= high and math.isfinite(value)
        return None if fits else f"is not a finite number from {low} to {high}"

    return check


def flag() -> Check:
    """True or false."""
    return lambda value: None if isinstance(value, bool) else "is neither true nor false"


def items(each: Check, max_items: int) -> Check:
    """A list of at most so many values that pass `each`."""

    def check(value: Any) -> str | None:
        if not isinstance(value, list | tuple) or len(value) > max_items:
            return f"is not a list of at most {max_items}"
        for i, item in enumerate(value):
            complaint = each(item)
            if complaint is not None:
                return f"has an item {i} that {complaint}"
        return None

    return check


def addresses() -> Check:
    """Where a peer can be reached: a few `host:port`."""
    return items(text(MAX_ADDRESS_CHARS), MAX_ADDRESSES)


def table(key: Check, value: Check, max_items: int) -> Check:
    """A table of at most so many keys and values that pass their checks."""

    def check(found: Any) -> str | None:
        if not isinstance(found, dict) or len(found) > max_items:
            return f"is not a table of at most {max_items}"
        for name, item in found.items():
            complaint = key(name)
            if complaint is not None:
                return f"has a key that {complaint}"
            complaint = value(item)
            if complaint is not None:
                return f"has a value of {name!r} that {complaint}"
        return None

    return check


@dataclass(frozen=True, slots=True)
class Schema:
    """What a body is: a table with these fields, perhaps with more.

    Attributes:
        required: Checks of the fields that must be there.
        optional: Checks of fields that may be missing.
        place: Who may write where; none for anybody anywhere in the namespace.
    """

    required: Mapping[str, Check] = field(default_factory=dict)
    optional: Mapping[str, Check] = field(default_factory=dict)
    place: PlaceCheck | None = None

    def complaint(self, body: Any) -> str | None:
        """What is wrong with a body, beginning with the field's name; none if it fits."""
        if not isinstance(body, dict):
            return "the body is not a table"
        for name, check in self.required.items():
            if name not in body:
                return f"{name!r} is missing"
            complaint = check(body[name])
            if complaint is not None:
                return f"{name!r} {complaint}"
        for name, check in self.optional.items():
            complaint = check(body[name]) if name in body else None
            if complaint is not None:
                return f"{name!r} {complaint}"
        return None


def only_subkey(*subkeys: str) -> PlaceCheck:
    """Everybody writes under these subkeys only."""

    def check(_author: PeerId, _key: str, subkey: str) -> str | None:
        return None if subkey in subkeys else f"the subkey {subkey[:40]!r} is none of {', '.join(map(repr, subkeys))}"

    return check


def namespace_of(key: str) -> str:
    """The beginning of a key up to its first `/` or `.`; empty for keys without a `/`."""
    name, slash, _ = key.partition("/")
    return name.partition(".")[0] if slash else ""


class Schemas:
    """The schemas of one peer, by namespace."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, Schema] = {}

    def add(self, namespace: str, schema: Schema) -> None:
        """Check records of a namespace from now on."""
        if not namespace or "/" in namespace or "." in namespace:
            raise ValueError(f"A namespace is a word without '/' and '.', not {namespace!r}.")
        self._by_namespace[namespace] = schema

    def check(self, author: PeerId, key: str, subkey: str, body: Any) -> None:
        """Raise `RecordRefusedError`, naming the field, where a body is not what is kept under the key."""
        namespace = namespace_of(key)
        schema = self._by_namespace.get(namespace)
        if schema is None:
            return
        complaint = schema.place(author, key, subkey) if schema.place is not None else None
        complaint = complaint or schema.complaint(body)
        if complaint is not None:
            raise refused(
                Refusal.SCHEMA,
                f"This is no record of {namespace!r}: {complaint}.",
                f"Write what belongs there, or use a key that does not begin with {namespace!r}.",
            )
