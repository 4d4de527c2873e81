"""What hosts announce about grids too large to be read whole: which coordinates come next under a prefix that is alive.

Key `prefixes/<prefix>`, e.g. `prefixes/ffn`, `prefixes/ffn.3`, `prefixes/ffn.3.17` for a grid of three dimensions;
author = host, subkeys "0", "1", ... as many as the size limit of a record body needs. The entries of all hosts together
list what is alive. The last prefix of an expert also says where its host is reached, so that whoever has searched his
way down to an expert can call it. Nothing in these records changes while a host holds the same experts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swarm.dht.node import Put
from swarm.dht.schemas import MAX_ADDRESSES, Schema, addresses, flag, integer, items
from swarm.endpoint import Endpoint
from swarm.errors import MalformedFrameError, SwarmError
from swarm.events import Event
from swarm.experts.spec import MAX_EXPERTS_PER_GRID, ExpertGrid, parse_uid
from swarm.identity import PeerId

PREFIXES = "prefixes"
"""The namespace of these records."""
Prefix = tuple[int, ...]
"""The first coordinates of some expert; fewer than its grid has dimensions."""
MAX_LISTED = 4096
"""Coordinates of one body."""
_FIXED_BODY_BYTES = 64
_COORDINATE_BYTES = 5


def _place(_author: PeerId, key: str, subkey: str) -> str | None:
    try:
        parse_uid(key.partition("/")[2])
    except MalformedFrameError:
        return "its key names no prefix of an expert"
    return None if subkey.isascii() and subkey.isdecimal() and len(subkey) <= 4 else "its subkey is no small number"


PREFIX_SCHEMA = Schema(
    required={"next": items(integer(0, MAX_EXPERTS_PER_GRID - 1), MAX_LISTED)},
    optional={"addresses": addresses(), "leaving": flag()},
    place=_place,
)
"""What is kept under `prefix_key`."""


def prefix_key(grid: str, prefix: Prefix) -> str:
    """The DHT key under which hosts list what comes after a prefix."""
    return f"{PREFIXES}/{'.'.join([grid, *map(str, prefix)])}"


@dataclass(frozen=True, slots=True)
class PrefixRecord:
    """What one host says about one prefix.

    Attributes:
        next: Coordinates that come next in experts that it holds, ascending.
        addresses: Where it can be reached; only where the next coordinate is an expert's last.
        leaving: It hands its experts over and will be gone soon.
    """

    next: tuple[int, ...]
    addresses: tuple[str, ...] = ()
    leaving: bool = False

    @classmethod
    def from_body(cls, body: Any) -> PrefixRecord:
        """Read one body. Raises `MalformedFrameError`."""
        complaint = PREFIX_SCHEMA.complaint(body)
        if complaint is not None:
            raise MalformedFrameError(f"This is no record of a prefix: {complaint}.")
        return cls(tuple(body["next"]), tuple(body.get("addresses", ())), body.get("leaving", False))


def prefix_bodies(
    grid: ExpertGrid, uids: Iterable[str], own_addresses: Iterable[str], leaving: bool, max_body_bytes: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """The bodies, by key and subkey, that list these experts of a grid; each at most `max_body_bytes` when packed."""
    below: dict[Prefix, dict[int, None]] = {}
    for uid in uids:
        _, coordinates = parse_uid(uid)
        for depth, coordinate in enumerate(coordinates):
            below.setdefault(coordinates[:depth], {})[coordinate] = None
    contact = list(own_addresses)[:MAX_ADDRESSES]
    bodies: dict[tuple[str, str], dict[str, Any]] = {}
    for prefix, found in sorted(below.items()):
        last = len(prefix) == len(grid.dims) - 1
        extra: dict[str, Any] = {"addresses": contact, "leaving": leaving} if last else {}
        room = max_body_bytes - _FIXED_BODY_BYTES - (sum(len(a.encode()) + 5 for a in contact) if last else 0)
        size = max(1, min(MAX_LISTED, room // _COORDINATE_BYTES))
        listed = sorted(found)
        for i in range(0, len(listed), size):
            bodies[prefix_key(grid.name, prefix), str(i // size)] = {"next": listed[i : i + size], **extra}
    return bodies


@dataclass(frozen=True, slots=True)
class PrefixesNotAnnounced(Event):
    """Some records of prefixes could not be written or deleted; the host tries again with its next announcement."""

    grid: str
    reason: str


class PrefixAnnouncer:
    """Keeps a host's records of prefixes as they should be: writes what changed, deletes what is over.

    The records are renewed by the DHT along with all others of this peer. Failures are events, never errors.

    Args:
        endpoint: Whose DHT is written.
        grids: The grids that are announced so.
        ttl_s: Lifetime of the records.
    """

    def __init__(self, endpoint: Endpoint, grids: Collection[ExpertGrid], ttl_s: float) -> None:
        self._endpoint = endpoint
        self._grids = {grid.name: grid for grid in sorted(grids, key=lambda grid: grid.name)}
        self._ttl_s = ttl_s
        self._written: dict[str, dict[tuple[str, str], dict[str, Any]]] = {name: {} for name in self._grids}
        self._writing = asyncio.Lock()

    async def announce(self, held: Collection[str], leaving: bool) -> None:
        """Announce these experts; those of other grids are left out."""
        by_grid: dict[str, list[str]] = {name: [] for name in self._grids}
        for uid in held:
            name = parse_uid(uid)[0]
            if name in by_grid:
                by_grid[name].append(uid)
        own = self._endpoint.contact.addresses
        max_body_bytes = self._endpoint.config.dht.max_body_bytes
        async with self._writing:
            for name, grid in self._grids.items():
                await self._write(name, prefix_bodies(grid, by_grid[name], own, leaving, max_body_bytes))

    async def withdraw(self) -> None:
        """Delete every record."""
        async with self._writing:
            for name in self._grids:
                await self._write(name, {})

    async def _write(self, name: str, bodies: Mapping[tuple[str, str], dict[str, Any]]) -> None:
        written = self._written[name]
        changed = [place for place, body in bodies.items() if written.get(place) != body]
        over = [place for place in written if place not in bodies]
        dht = self._endpoint.dht
        try:
            accepted = await dht.put_many([Put(key, bodies[key, sub], self._ttl_s, sub) for key, sub in changed])
            written.update({place: bodies[place] for place, n in zip(changed, accepted, strict=True) if n})
            if not all(accepted):
                self._failed(name, f"No peer took {accepted.count(0)} of {len(accepted)} records.")
        except SwarmError as error:
            self._failed(name, error.message)
        for place, problem in zip(over, await asyncio.gather(*(self._delete(*place) for place in over)), strict=True):
            if problem is None:
                del written[place]
            else:
                self._failed(name, problem)

    async def _delete(self, key: str, subkey: str) -> str | None:
        """What went wrong."""
        try:
            await self._endpoint.dht.delete(key, subkey)
        except SwarmError as error:
            return error.message
        return None

    def _failed(self, grid: str, reason: str) -> None:
        self._endpoint.runtime.emit(PrefixesNotAnnounced(grid, reason))
