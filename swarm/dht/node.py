"""The DHT of one peer: publish records, read them, find peers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.config import DhtConfig
from swarm.dht.author import Author, Draft
from swarm.dht.bodies import encode_body
from swarm.dht.cache import CacheStats, ReadCache
from swarm.dht.driver import Driver
from swarm.dht.handover import Handover
from swarm.dht.known import KnownPeers, KnownPeersFile
from swarm.dht.operations import DhtStats, Operations
from swarm.dht.protocol import Protocol
from swarm.dht.records import Copy, Entry, EntryId, check_names, check_ttl_ms, to_entry
from swarm.dht.routing import AddressBook
from swarm.dht.schemas import Schema
from swarm.dht.storage import Storage
from swarm.dht.upkeep import Upkeep
from swarm.dht.views import is_view
from swarm.dht.watch import Watch, Watches
from swarm.errors import BootstrapError, ClosedError, NotStoredError
from swarm.identity import PeerId
from swarm.net.transport import Contact, Transport
from swarm.runtime import Runtime

LEAVE_TIMEOUTS = 2.0
"""Call timeouts that the withdrawal of our records, and the hand-over of others', may take at `close`."""

Merged = Mapping[str, Mapping[EntryId, Copy]]


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

    All methods run on the transport's event loop; `BlockingDht` is the same for other threads. Reads are served by the
    network, except for readers who say how old an answer may be (`max_age_s`); reads of one key that are under way at
    the same time share one answer.

    Args:
        transport: Started before `bootstrap`.
        config: Kademlia parameters and limits.
        runtime: Clock, randomness, events.
        known_file: Where peers to return to are kept for the next start; none keeps them in memory.
    """

    def __init__(
        self, transport: Transport, config: DhtConfig, runtime: Runtime, *, known_file: Path | None = None
    ) -> None:
        self._transport = transport
        self._call_timeout_s = config.call_timeout_s
        book = AddressBook(Contact(transport.peer_id, ()), config.bucket_size, config.maintenance_s, runtime.clock.time)
        self._storage = Storage(config, transport.peer_id.node_id)
        self._driver = Driver(runtime, config.call_timeout_s)
        self._protocol = Protocol(transport, config, runtime, book, self._storage)
        self._do = Operations(config, runtime, book, self._storage, self._protocol, self._driver)
        self._author = Author(self._do, transport.identity, transport.run_id)
        self._handover = Handover(self._do)
        self._known = KnownPeers(
            transport.peer_id, config.known_peers, config.maintenance_s, runtime.clock.time, runtime.rng
        )
        self._known_file = (
            None if known_file is None else KnownPeersFile(known_file, transport.run_id, self._known, runtime)
        )
        self._remembered: list[Contact] = []
        self._upkeep = Upkeep(self._do, self._handover, self._known, self._author.renew_all, self._save_soon)
        self._cache = ReadCache(config)
        self._watches = Watches(config, runtime, self._read_watched, self._driver.spawn)
        self._reads: dict[str, asyncio.Task[Merged]] = {}
        self._started = False
        self._closed = False

    @property
    def held(self) -> int:
        """How many live records this peer keeps for the run."""
        self._storage.expire(self._do.runtime.clock.time())
        return len(self._storage)

    @property
    def stats(self) -> DhtStats:
        """What this peer's lookups have cost so far; a live object."""
        return self._do.stats

    @property
    def cache_stats(self) -> CacheStats:
        """What the cache of earlier answers did so far."""
        return self._cache.stats

    @property
    def remembered(self) -> list[Contact]:
        """Peers that an earlier start of this peer met, best first: join through them. Valid after `start`."""
        return list(self._remembered)

    def declare(self, namespace: str, schema: Schema) -> None:
        """Publish, hold and read under the keys of a namespace (`swarm.dht.schemas`) only what fits. Before `start`."""
        self._protocol.schemas.add(namespace, schema)

    async def start(self) -> None:
        """Serve the DHT's calls and begin the upkeep. Idempotent."""
        self._check_open()
        if not self._started:
            self._started = True
            if self._known_file is not None:
                self._remembered = await self._known_file.load()
            self._protocol.serve()
            self._driver.spawn(self._upkeep.run(), "dht-upkeep")
            self._driver.spawn(self._author.run(), "dht-renew")
            self._save_soon()

    def _save_soon(self) -> None:
        if self._known_file is not None and not self._closed:
            self._driver.spawn(self._known_file.save(self._transport.contact), "dht-remember")

    async def bootstrap(self, contacts: Sequence[Contact], *, seeds: Sequence[tuple[str, PeerId | None]] = ()) -> None:
        """Join through these peers, who are also returned to when all others are lost. No contacts: we are the first.

        Args:
            contacts: Who answered at an address of the run.
            seeds: Addresses to return to from time to time even though they have not answered yet, as an invite
                names them; those without a peer id are left out.

        Raises:
            BootstrapError: None of them answered; `reasons` says why for each address.
        """
        self._check_open()
        others = [contact for contact in contacts if contact.peer_id != self._transport.peer_id]
        for contact in [*others, *(Contact(peer_id, (address,)) for address, peer_id in seeds if peer_id is not None)]:
            self._known.pin(contact)
        if not others:
            return
        reasons = await self._upkeep.greet(others)
        if not self.peers():
            message = f"None of {len(others)} bootstrap peers answered."
            raise BootstrapError(message, fix="Check the addresses, or try later.", reasons=reasons)
        await self._upkeep.join()
        self._upkeep.remember_table()
        self._save_soon()

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
            RecordRefusedError: Too large, not made of plain values, not what its namespace holds, or more entries than
                `max_entries_per_author`.
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
        try:
            accepted = dict(zip(drafts, await self._author.publish(list(drafts.values())), strict=True))
        finally:
            self._written(draft.key for draft in drafts.values())
        return [accepted[item.key, item.subkey] for item in wanted]

    async def delete(self, key: str, subkey: str = "") -> None:
        """Withdraw our entry, if there is one: a tombstone takes its place until every copy of it has expired."""
        self._check_open()
        try:
            await self._author.delete(key, subkey)
        finally:
            self._written([key])

    def _written(self, keys: Iterable[str]) -> None:
        """We have written there: neither an answer kept nor one under way tells what holds now."""
        changed = dict.fromkeys(keys)
        self._cache.invalidate(changed)
        for key in changed:
            self._reads.pop(key, None)
        self._watches.written(changed)

    async def get(self, key: str, *, fresh: bool = False, max_age_s: float = 0.0) -> list[Entry]:
        """The live entries of a key, ordered by author and subkey; empty if there are none.

        Every entry has been checked against its author's signature. The entries of several replicas are merged; the
        read ends when two of the nearest agree with the merged whole, or all `replication` nearest have answered.

        Args:
            fresh: Ask all `replication` nearest, and do not share the answer of a read that is already under way.
            max_age_s: Take an answer of an earlier read, also that there is nothing, if it is at most this old, none of
                its entries has ended since, and we have not written there since. Not with `fresh`.
        """
        return (await self.get_many([key], fresh=fresh, max_age_s=max_age_s))[key]

    async def get_many(
        self, keys: Iterable[str], *, fresh: bool = False, max_age_s: float = 0.0
    ) -> dict[str, list[Entry]]:
        """`get` for several keys with shared lookups and requests; every key is in the result."""
        self._check_open()
        wanted = list(dict.fromkeys(keys))
        for key in wanted:
            check_names(key)
        now_s = self._do.runtime.clock.time
        kept: dict[str, Mapping[EntryId, Copy]] = {}
        if max_age_s > 0 and not fresh:
            for key in wanted:
                answer = self._cache.get(key, now_s(), max_age_s)
                if answer is not None:
                    kept[key] = answer
        tasks = {} if fresh else {key: self._reads[key] for key in wanted if key not in kept and key in self._reads}
        missing = [key for key in wanted if key not in kept and key not in tasks]
        if missing:
            task = self._driver.spawn(self._read(missing, fresh=fresh), "dht-read")
            tasks.update(dict.fromkeys(missing, task))
            if not fresh:
                self._reads.update(dict.fromkeys(missing, task))
        result: dict[str, list[Entry]] = {}
        for key in wanted:
            answer = kept[key] if key in kept else (await self._shared(tasks[key]))[key]
            result[key] = _entries(answer, now_s())
        return result

    async def _read(
        self, keys: Sequence[str], *, fresh: bool, known: Mapping[str, Sequence[Copy]] | None = None
    ) -> Merged:
        now_s = self._do.runtime.clock.time()
        if known is None:
            known = {key: self._cache.known(key, now_s) for key in keys}
        reading = self._cache.begin(now_s)
        try:
            found = await self._do.read(self._author.own(keys), full=fresh, known=known)
            self._author.notice(copy for entries in found.values() for copy in entries.values())
            self._cache.finish(reading, found)
            return found
        finally:
            self._cache.abandon(reading)
            task = asyncio.current_task()
            for key in keys:
                if self._reads.get(key) is task:
                    del self._reads[key]

    async def _read_watched(self, key: str, known: Sequence[Copy]) -> Mapping[EntryId, Copy]:
        return (await self._read([key], fresh=True, known={key: known}))[key]

    def watch(self, key: str, *, every_s: float | None = None) -> Watch:
        """Follow a key: yields its live entries at once, and again after each change.

        A change is an entry that is new, has another body, was deleted or has ended; changes that come while nobody
        waits are told as one. Watchers of a key share one reader, whose interval adapts between `watch_min_s` and
        `watch_max_s`; the end of an entry is told on time. Dropping the iterator ends the watch.

            async for entries in dht.watch("experts/ffn"):
                ...

        Args:
            key: The key.
            every_s: Read at least this often while we wait, though not more often than `watch_min_s`.

        Raises:
            RecordRefusedError: It is no key. UsageError: `every_s` is not positive.
            ClosedError: The DHT is closed; raised from the iteration when it closes later.
        """
        self._check_open()
        check_names(key)
        return self._watches.watch(key, every_s)

    async def _shared(self, task: asyncio.Task[Merged]) -> Merged:
        """The result of a task that others wait for too, and that our own cancellation must not end."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._check_open()
            waiter = asyncio.current_task()
            if task.cancelled() and not (waiter and waiter.cancelling()):
                raise ClosedError("The peer was ended while it read.") from None
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

    def held_entries(self, key: str) -> list[Entry]:
        """What this peer itself keeps under a key for the run, ordered by author and subkey; asks nobody."""
        now_s = self._do.runtime.clock.time()
        live = [copy for copy in self._storage.entries(key, now_s) if not copy.record.deleted]
        return [to_entry(copy, now_s) for copy in live]

    def view(self) -> bytes:
        """A few bytes that tell others which network we are in, for a record of ours; see `swarm.dht.views`."""
        return self._upkeep.view()

    async def compare_view(self, contact: Contact, view: bytes) -> bool:
        """Whether a peer whose record carries this view is in the same network as we are; if not, join its network too.

        Costs a lookup.
        """
        self._check_open()
        return not is_view(view) or await self._upkeep.compare(contact, view)

    async def close(self, *, withdraw: bool = False, handover: bool = False) -> None:
        """End all tasks. Idempotent, bounded in time.

        Args:
            withdraw: Delete our records first, which otherwise stay until they expire.
            handover: Give the records that we hold to the next nearest peers first, so that no copy is missing.
        """
        if self._closed:
            return
        self._closed = True
        self._watches.close()
        if self._started:
            steps = [self._author.withdraw()] if withdraw else []
            if handover:
                steps.append(self._handover.to_heirs(self._transport.peer_id if withdraw else None))
            try:
                async with asyncio.timeout(LEAVE_TIMEOUTS * self._call_timeout_s):
                    await asyncio.gather(*steps)
            except TimeoutError:
                pass  # records expire by themselves, and others hold copies
            self._upkeep.remember_table()
            if self._known_file is not None:
                await self._known_file.save(self._transport.contact)
        await self._driver.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The DHT is closed.")


def _entries(merged: Mapping[EntryId, Copy], now_s: float) -> list[Entry]:
    live = [merged[entry_id] for entry_id in sorted(merged) if merged[entry_id].expires_s > now_s]
    return [to_entry(copy, now_s) for copy in live if not copy.record.deleted]
