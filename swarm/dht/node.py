"""The DHT of one peer: publish records, read them, find peers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.config import DhtConfig
from swarm.dht.author import Author, Draft
from swarm.dht.driver import Driver
from swarm.dht.operations import Operations
from swarm.dht.protocol import Protocol
from swarm.dht.records import Copy, Entry, EntryId, check_names, check_ttl_ms, encode_body, to_entry
from swarm.dht.routing import AddressBook
from swarm.dht.storage import Storage
from swarm.dht.upkeep import Upkeep
from swarm.errors import BootstrapError, ClosedError, NotStoredError
from swarm.identity import PeerId
from swarm.net.transport import Contact, Transport
from swarm.runtime import Runtime

WITHDRAW_TIMEOUTS = 2.0
"""Call timeouts that the withdrawal of our records at `close` may take."""

Merged = dict[str, dict[EntryId, Copy]]


@dataclass(frozen=True, slots=True)
class Put:
    """One entry to publish, see `Dht.put`."""

    key: str
    body: Any
    ttl_s: float
    subkey: str = ""
    renew: bool = True

    def draft(self) -> Draft:
        """Encoded. Raises `RecordRefusedError`."""
        return Draft(self.key, self.subkey, encode_body(self.body), check_ttl_ms(self.ttl_s), self.renew)


class Dht:
    """One peer's part of the distributed hash table.

    A key holds entries by (author, subkey); every peer writes only its own entries, signed, with a lifetime. Records
    are kept by the `replication` peers nearest to the key. They are hints: whoever acts on one confirms it by a hello.

    All methods run on the transport's event loop. Reads are served by the network, never from a cache; reads of one key
    that are under way at the same time share one answer.

    Args:
        transport: Started before `bootstrap`.
        config: Kademlia parameters and limits.
        runtime: Clock, randomness, events.
    """

    def __init__(self, transport: Transport, config: DhtConfig, runtime: Runtime) -> None:
        self._transport = transport
        self._call_timeout_s = config.call_timeout_s
        book = AddressBook(Contact(transport.peer_id, ()), config.bucket_size, config.maintenance_s, runtime.clock.time)
        self._storage = Storage(config)
        self._driver = Driver(runtime, config.call_timeout_s)
        self._protocol = Protocol(transport, config, runtime, book, self._storage)
        self._do = Operations(config, runtime, book, self._storage, self._protocol, self._driver)
        self._upkeep = Upkeep(self._do)
        self._author = Author(self._do, transport.identity, transport.run_id)
        self._reads: dict[str, asyncio.Task[Merged]] = {}
        self._started = False
        self._closed = False

    @property
    def held(self) -> int:
        """How many live records this peer keeps for the run."""
        self._storage.expire(self._do.runtime.clock.time())
        return len(self._storage)

    async def start(self) -> None:
        """Serve the DHT's calls and begin the upkeep. Idempotent."""
        self._check_open()
        if not self._started:
            self._started = True
            self._protocol.serve()
            self._driver.spawn(self._upkeep.run(), "dht-upkeep")
            self._driver.spawn(self._author.run(), "dht-renew")

    async def bootstrap(self, contacts: Sequence[Contact]) -> None:
        """Join through these peers, who are also returned to when all others are lost. No contacts: we are the first.

        Raises:
            BootstrapError: None of them answered; `reasons` says why for each address.
        """
        self._check_open()
        others = [contact for contact in contacts if contact.peer_id != self._transport.peer_id]
        if not others:
            return
        self._upkeep.remember(others)
        reasons = await self._upkeep.greet(others)
        if not self.peers():
            message = f"None of {len(others)} bootstrap peers answered."
            raise BootstrapError(message, fix="Check the addresses, or try later.", reasons=reasons)
        await self._upkeep.join()

    async def put(self, key: str, body: Any, *, subkey: str = "", ttl_s: float, renew: bool = True) -> int:
        """Publish our entry of a key, replacing an earlier one with the same subkey.

        Args:
            key: 1 to 256 bytes of UTF-8.
            body: Plain values (None, bool, int, float, str, bytes, list, dict), at most `max_body_bytes` as msgpack.
            subkey: At most 256 bytes.
            ttl_s: Lifetime, 1 ms to 30 days.
            renew: Publish it again after `republish_fraction` of its lifetime, until it is deleted or we close.
                Without, it ends after `ttl_s` unless it is put again.

        Returns:
            How many peers hold it, ourselves included where we are one of the nearest.

        Raises:
            RecordRefusedError: Too large, not made of plain values, or more entries than `max_entries_per_author`.
            NotStoredError: Nobody took it.
        """
        accepted = (await self.put_many([Put(key, body, ttl_s, subkey, renew)]))[0]
        if not accepted:
            raise NotStoredError(
                f"No peer took the record under {key!r}.", fix="Try again when more peers are reachable."
            )
        return accepted

    async def put_many(self, items: Iterable[Put]) -> list[int]:
        """Publish several entries with shared lookups and requests.

        Returns:
            How many peers hold each, in order; 0 where nobody took it.

        Raises:
            RecordRefusedError: One of them cannot be published; then none was.
        """
        self._check_open()
        wanted = list(items)
        drafts = {(item.key, item.subkey): item.draft() for item in wanted}
        accepted = dict(zip(drafts, await self._author.publish(list(drafts.values())), strict=True))
        return [accepted[item.key, item.subkey] for item in wanted]

    async def delete(self, key: str, subkey: str = "") -> None:
        """Withdraw our entry, if there is one: a tombstone takes its place until every copy of it has expired."""
        self._check_open()
        await self._author.delete(key, subkey)

    async def get(self, key: str, *, fresh: bool = False) -> list[Entry]:
        """The live entries of a key, ordered by author and subkey; empty if there are none.

        Every entry has been checked against its author's signature. The entries of several replicas are merged; the
        read ends when two of the nearest agree with the merged whole, or all `replication` nearest have answered.

        Args:
            fresh: Ask all `replication` nearest, and do not share the answer of a read that is already under way.
        """
        return (await self.get_many([key], fresh=fresh))[key]

    async def get_many(self, keys: Iterable[str], *, fresh: bool = False) -> dict[str, list[Entry]]:
        """`get` for several keys with shared lookups and requests; every key is in the result."""
        self._check_open()
        wanted = list(dict.fromkeys(keys))
        for key in wanted:
            check_names(key)
        missing = wanted if fresh else [key for key in wanted if key not in self._reads]
        tasks = {} if fresh else {key: self._reads[key] for key in wanted if key in self._reads}
        if missing:
            task = self._driver.spawn(self._read(missing, fresh=fresh), "dht-read")
            tasks.update(dict.fromkeys(missing, task))
            if not fresh:
                self._reads.update(dict.fromkeys(missing, task))
        now_s = self._do.runtime.clock.time
        result: dict[str, list[Entry]] = {}
        for key in wanted:
            result[key] = _entries((await self._shared(tasks[key]))[key], now_s())
        return result

    async def _read(self, keys: Sequence[str], *, fresh: bool) -> Merged:
        try:
            return await self._do.read(self._author.own(keys), full=fresh)
        finally:
            if not fresh:
                for key in keys:
                    self._reads.pop(key, None)

    async def _shared(self, task: asyncio.Task[Merged]) -> Merged:
        """The result of a task that others wait for too, and that our own cancellation must not end."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._check_open()
            raise

    def peers(self) -> list[Contact]:
        """Everybody in the routing table, least recently seen first within a bucket."""
        return [node.contact for node in self._do.book.table.all_nodes()]

    async def find_peer(self, peer_id: PeerId) -> Contact | None:
        """How to reach a peer: from the routing table, else by a lookup that it must answer itself."""
        self._check_open()
        if peer_id == self._transport.peer_id:
            return self._transport.contact
        known = self._do.book.table.get(peer_id)
        return known.contact if known is not None else await self._do.find_peer(peer_id)

    async def close(self, *, withdraw: bool = False) -> None:
        """End all tasks. Idempotent, bounded in time.

        Args:
            withdraw: Delete our records first, which otherwise stay until they expire.
        """
        if self._closed:
            return
        self._closed = True
        if withdraw and self._started:
            try:
                async with asyncio.timeout(WITHDRAW_TIMEOUTS * self._call_timeout_s):
                    await self._author.withdraw()
            except TimeoutError:
                pass  # they expire by themselves
        await self._driver.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The DHT is closed.")


def _entries(merged: Mapping[EntryId, Copy], now_s: float) -> list[Entry]:
    live = [merged[entry_id] for entry_id in sorted(merged) if merged[entry_id].expires_s > now_s]
    return [to_entry(copy, now_s) for copy in live if not copy.record.deleted]
