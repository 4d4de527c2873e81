"""The notice board of an averaging key in the DHT: who averages under it, how many they are, and who is in which cell.

A peer announces itself under `rounds/<key>` while that record has fewer than `SPREAD_AT` entries, else under one of
`SHARDS` further ones, `rounds.<shard>/<key>`, so that no record grows hot; whoever finds the first one half full reads
the others too. In a grid it also announces itself in its cell, `rounds.<cells>.<index>/<key>`, and looks only there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarm.averaging.declarations import MAX_ADDRESSES, checked_addresses
from swarm.averaging.seals import MAX_GROUP
from swarm.dht.records import Entry
from swarm.dht.schemas import Schema, addresses, only_subkey
from swarm.endpoint import Endpoint
from swarm.errors import ClosedError, MalformedFrameError, SwarmError
from swarm.events import Event
from swarm.identity import PeerId
from swarm.net.transport import Contact

ROUNDS = "rounds"
"""The namespace of announcements."""
ROUNDS_SCHEMA = Schema(required={"addresses": addresses()}, place=only_subkey(""))
"""What is kept there."""
SPREAD_AT = 64
SHARDS = 16
MAX_READ = 4 * MAX_GROUP
"""Entries of one record that are looked at."""


@dataclass(frozen=True, slots=True)
class MatchmakingImpaired(Event):
    """A record could not be read or written, or a message not be delivered; matchmaking goes on without it."""

    key: str
    reason: str


class Board:
    """Announces one peer under one key and reads about the others. What fails is told as an event, never raised."""

    def __init__(self, endpoint: Endpoint, key: str) -> None:
        self.key = key
        self.population = 1
        """Peers that averaged under the key when they were last counted, this one included."""
        self._endpoint = endpoint
        self._base = f"rounds/{key}"
        self._shard = f"rounds.{endpoint.peer_id.digest[-1] % SHARDS}/{key}"
        self._home = ""
        self._cell = ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can call this peer; empty if they cannot, or shall not because it only sends."""
        sends_only = self._endpoint.config.averaging.sends_only
        return () if sends_only else self._endpoint.contact.addresses[:MAX_ADDRESSES]

    async def announce(self) -> None:
        """Announce this peer until it withdraws; the DHT renews it, also if nobody could take it now."""
        entries = await self._read([self._base])
        crowded = entries is not None and len(entries[self._base]) >= SPREAD_AT
        self._home = self._shard if crowded else self._base
        await self._put(self._home)

    async def withdraw(self) -> None:
        """Take every announcement back."""
        for record in (self._home, self._cell_record(self._cell)):
            if record:
                await self._delete(record)
        self._home = self._cell = ""

    async def enter(self, cell: str) -> None:
        """Be announced in this cell, and in no other."""
        if cell == self._cell:
            return
        left, self._cell = self._cell, cell
        if cell:
            await self._put(self._cell_record(cell))
        if left:
            await self._delete(self._cell_record(left))

    async def look(self, cell: str) -> list[Contact] | None:
        """Who is in a cell; with an empty one, who averages under the key at all. None if the DHT does not answer."""
        if cell:
            entries = await self._read([self._cell_record(cell)])
            return None if entries is None else self._contacts(entries.values())
        return await self.count()

    async def count(self) -> list[Contact] | None:
        """Everybody under the key. Sets `population`."""
        entries = await self._read([self._base])
        if entries is None:
            return None
        if len(entries[self._base]) >= SPREAD_AT // 2:
            shards = await self._read([f"rounds.{shard}/{self.key}" for shard in range(SHARDS)])
            entries.update(shards or {})
        elif self._home == self._shard:
            self._home = self._base
            await self._put(self._base)
            await self._delete(self._shard)
        found = self._contacts(entries.values())
        self.population = len(found) + 1
        return found

    def _cell_record(self, cell: str) -> str:
        return f"rounds.{cell}/{self.key}" if cell else ""

    def _contacts(self, records: Iterable[list[Entry]]) -> list[Contact]:
        found: dict[PeerId, Contact] = {}
        for entry in (entry for record in records for entry in record[:MAX_READ]):
            addresses = entry.body.get("addresses") if isinstance(entry.body, dict) else None
            if entry.author == self._endpoint.peer_id or not isinstance(addresses, list | tuple):
                continue
            try:
                found[entry.author] = Contact(entry.author, checked_addresses(addresses))
            except MalformedFrameError:
                continue
        return list(found.values())

    async def _read(self, records: list[str]) -> dict[str, list[Entry]] | None:
        try:
            return dict(await self._endpoint.dht.get_many(records, fresh=True))
        except SwarmError as error:
            self._impaired(error)
            return None

    async def _put(self, record: str) -> None:
        body = {"addresses": list(self.addresses)}
        try:
            await self._endpoint.dht.put(record, body, ttl_s=3 * self._endpoint.config.heartbeat_s)
        except SwarmError as error:
            self._impaired(error)

    async def _delete(self, record: str) -> None:
        try:
            await self._endpoint.dht.delete(record)
        except ClosedError:
            return  # announcements end with the peer
        except SwarmError as error:
            self._impaired(error)

    def _impaired(self, error: SwarmError) -> None:
        self._endpoint.runtime.emit(MatchmakingImpaired(self.key, error.message))
