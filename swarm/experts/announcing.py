"""A host's records in the DHT: writing its own, reading the others'."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from swarm.dht.node import Put
from swarm.endpoint import Endpoint
from swarm.errors import MalformedFrameError, SwarmError
from swarm.events import Event
from swarm.experts.prefixes import PrefixAnnouncer
from swarm.experts.records import HostRecord, merge_records, record_key
from swarm.experts.spec import ExpertGrid, parse_uid

NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AnnouncementFailed(Event):
    """The records of the host could not be written or read; it tries again."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostRecordIgnored(Event):
    """Another host's record makes no sense."""

    peer: str
    reason: str


class Announcer:
    """See the module's docstring. Failures are events, never errors.

    Args:
        grids: Names of the grids that the host could hold experts of.
        capacity: Experts that it is willing to hold.
        ttl_s: Lifetime of the records; the host writes them again well before.
        searched: Those of the grids that clients may search, so that prefixes are announced too.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        grids: Sequence[str],
        capacity: int,
        ttl_s: float,
        searched: Collection[ExpertGrid] = (),
    ) -> None:
        self._endpoint = endpoint
        self._runtime = endpoint.runtime
        self._grids = sorted(grids)
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._written: dict[str, int] = {}
        self._writing = asyncio.Lock()
        self._prefixes = PrefixAnnouncer(endpoint, searched, ttl_s)

    async def announce(
        self,
        held: Mapping[str, int],
        queue_s: float,
        leaving: bool,
        *,
        throughput: float = 0.0,
        busy: Mapping[str, int] = NOTHING,
        kept: Mapping[str, int] = NOTHING,
        taking: Mapping[str, int] = NOTHING,
    ) -> None:
        """Write what the host holds, one record or more for each grid; see `HostRecord` for the figures.

        Args:
            held: Weight versions by uid.
            kept: Checkpoints; what belongs to other grids is left out.
        """
        experts, rates, saved, coming = (self._by_grid(values) for values in (held, busy, kept, taking))
        async with self._writing:
            puts: list[Put] = []
            outdated: list[tuple[str, str]] = []
            for name in self._grids:
                record = HostRecord(
                    peer_id=self._endpoint.peer_id,
                    addresses=self._endpoint.contact.addresses,
                    experts=experts[name],
                    queue_s=queue_s,
                    capacity=self._capacity,
                    load=len(held),
                    leaving=leaving,
                    throughput=throughput,
                    busy=rates[name],
                    kept=saved[name],
                    taking=coming[name],
                )
                bodies = record.to_bodies(self._endpoint.config.dht.max_body_bytes)
                key = record_key(name)
                puts += [Put(key, body, self._ttl_s, subkey, renew=False) for subkey, body in bodies.items()]
                outdated += [(key, str(i)) for i in range(len(bodies), self._written.get(name, 0))]
                self._written[name] = len(bodies)
            try:
                accepted = await self._endpoint.dht.put_many(puts)
                for key, subkey in outdated:
                    await self._endpoint.dht.delete(key, subkey)
            except SwarmError as error:
                self._runtime.emit(AnnouncementFailed(str(error)))
            else:
                if not all(accepted):
                    self._runtime.emit(AnnouncementFailed("No peer took a record."))
        await self._prefixes.announce(held, leaving)

    def _by_grid(self, values: Mapping[str, int]) -> dict[str, dict[str, int]]:
        parted: dict[str, dict[str, int]] = {name: {} for name in self._grids}
        for uid, value in values.items():
            grid = parted.get(parse_uid(uid)[0])
            if grid is not None:
                grid[uid] = value
        return parted

    async def withdraw(self) -> None:
        """Delete every record."""
        await self._prefixes.withdraw()
        for name, count in sorted(self._written.items()):
            for i in range(count):
                try:
                    await self._endpoint.dht.delete(record_key(name), str(i))
                except SwarmError as error:
                    self._runtime.emit(AnnouncementFailed(f"A record could not be withdrawn: {error.message}"))

    async def look(self) -> list[HostRecord] | None:
        """The other hosts' records, all grids joined; none if the DHT cannot be read."""
        keys = [record_key(name) for name in self._grids]
        try:
            found = await self._endpoint.dht.get_many(keys, fresh=True)
        except SwarmError as error:
            self._runtime.emit(AnnouncementFailed(f"The records of the hosts cannot be read: {error.message}"))
            return None
        records: list[HostRecord] = []
        for key in keys:
            for entry in found[key]:
                if entry.author == self._endpoint.peer_id:
                    continue
                try:
                    records.append(HostRecord.from_body(entry.author, entry.body))
                except MalformedFrameError as error:
                    self._runtime.emit(HostRecordIgnored(str(entry.author), error.message))
        return merge_records(records)
