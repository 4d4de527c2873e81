"""What a peer does in the table: find neighbourhoods, place copies there, read keys."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.config import DhtConfig
from swarm.dht.crawl import Ask, Crawl, Lookup
from swarm.dht.driver import Driver
from swarm.dht.events import RecordRefused, UnderReplicated
from swarm.dht.hearsay import is_thin
from swarm.dht.messages import MAX_TARGETS, STORE, Want
from swarm.dht.protocol import Protocol
from swarm.dht.reading import Read
from swarm.dht.records import Copy, EntryId, PlaceId, position_of
from swarm.dht.refusals import Refusal
from swarm.dht.repair import Repair
from swarm.dht.routing import AddressBook, PeerNode
from swarm.dht.storage import Storage
from swarm.dht.witness import Witness
from swarm.errors import NotAuthorizedError, RecordRefusedError, SwarmError
from swarm.identity import PeerId
from swarm.net.transport import Contact
from swarm.runtime import Runtime

SEARCH_FACTOR = 1.6
"""While not everybody is known, so many times `replication` peers must answer before a neighbourhood counts as found,
or a key as empty. Fewer sometimes know only each other."""
GUIDES = 4
"""Peers chosen at random that are asked where such a lookup should go on."""
SPARE_CONTACTS = 3
"""Contacts asked for beyond `replication`, against dead ones among them."""


@dataclass(slots=True)
class Placed:
    """How a copy fared: who holds it, the highest version that an "outdated" refusal named, and what another process of
    our identity had written in its place."""

    accepted: int = 0
    outdated_by: int = 0
    others: list[Copy] = field(default_factory=list)


class Seek(Lookup):
    """A lookup that ends as soon as the peer at the target itself has answered."""

    @property
    def satisfied(self) -> bool:
        return any(node.long_id == self.target for node in self.nearest(1))


@dataclass(slots=True)
class DhtStats:
    """What the operations of one peer have cost so far.

    Attributes:
        lookups: Positions looked up, by searches for peers, puts and reads alike.
        depth_total: Sum of their depths: requests in a row that it took to learn of the nearest that answered.
        messages: Requests sent for them and answers received; repairs and upkeep do not count.
    """

    lookups: int = 0
    depth_total: int = 0
    messages: int = 0


class Operations:
    """Network operations of one peer, on the parts that it owns.

    Attributes:
        stats: What they have cost.
        book: Who is known.
        storage: What is held.
        protocol: The calls.
        driver: Tasks and crawls.
    """

    def __init__(
        self,
        config: DhtConfig,
        runtime: Runtime,
        book: AddressBook,
        storage: Storage,
        protocol: Protocol,
        driver: Driver,
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.book = book
        self.storage = storage
        self.protocol = protocol
        self.driver = driver
        self.stats = DhtStats()
        self._repair = Repair(runtime, book, storage, protocol)
        self._witness = Witness()
        callers = protocol.callers
        callers.spawn = lambda contact: driver.spawn(callers.verify(contact), "dht-verify")

    # Searching

    def seeds(self, target: int) -> list[PeerNode]:
        """Known peers to start a lookup from."""
        return self.book.table.nearest(target, self.config.bucket_size)

    async def lookup(self, lookups: Sequence[Lookup], parallelism: int | None = None) -> None:
        """Run lookups of peers."""
        width = max((lookup.width for lookup in lookups), default=0)
        count = min(self.config.bucket_size, width + SPARE_CONTACTS)

        async def send(ask: Ask) -> None:
            self.stats.messages += 1
            found = await self.protocol.find(ask.node, [_position(lookup.target) for lookup in ask.lookups], count)
            self.stats.messages += 1
            for lookup, part in zip(ask.lookups, found, strict=True):
                lookup.answered(ask.node, part.nearest)

        if lookups:
            await self._drive(lookups, send, parallelism or self.config.parallelism)
            self._count(lookups)

    async def _drive(self, lookups: Sequence[Lookup], send: Callable[[Ask], Awaitable[None]], parallelism: int) -> None:
        """Run lookups to their end; those that end where peers are suspiciously few go on from other starts.

        Liars can name one another only, and so lead a lookup that began among them past everybody else. But ids are
        uniform: where only a part of all peers is shown, those found are farther from the position than our neighbours
        are from us.
        """
        await self.driver.drive(Crawl(lookups, parallelism), send)
        thin = [lookup for lookup in lookups if self._thin(lookup)]
        if not thin:
            return
        nodes = self.book.table.all_nodes()
        guides = self.runtime.rng.sample(nodes, min(GUIDES, len(nodes)))
        self.stats.messages += 2 * len(guides)
        told = await asyncio.gather(*(self.ask(guide, [lookup.target for lookup in thin]) for guide in guides))
        for guide, answer in zip(guides, told, strict=True):
            for lookup, nearer in zip(thin, answer, strict=False):
                lookup.learn(guide, nearer)
        await self.driver.drive(Crawl(thin, parallelism), send)

    def _thin(self, lookup: Lookup) -> bool:
        """Whether much fewer answered around the position than we know around us."""
        if self.book.table.complete or lookup.width < self.config.replication:
            return False
        own = self.book.me.long_id
        ours = self.book.table.nearest(own, self.config.bucket_size)
        found = [node.long_id ^ lookup.target for node in lookup.nearest()]
        return is_thin(found, [node.long_id ^ own for node in ours])

    def _count(self, lookups: Sequence[Lookup]) -> None:
        self.stats.lookups += len(lookups)
        self.stats.depth_total += sum(lookup.depth for lookup in lookups)

    async def ask(self, node: PeerNode, targets: Sequence[int]) -> list[list[PeerNode]]:
        """Whom one peer knows near positions; empty if it does not answer."""
        positions = [_position(target) for target in targets[:MAX_TARGETS]]
        try:
            found = await self.protocol.find(node, positions, self.config.bucket_size)
        except SwarmError:
            return []  # the protocol has told the address book
        return [part.nearest for part in found]

    def _search_width(self) -> int:
        factor = 1 if self.book.table.complete else SEARCH_FACTOR
        return max(self.config.replication, min(self.config.bucket_size, round(factor * self.config.replication)))

    async def find_peer(self, peer_id: PeerId) -> Contact | None:
        """A peer that is not in the table; none if it did not answer."""
        seek = Seek(peer_id.node_id, self.config.replication, self.seeds(peer_id.node_id))
        await self.lookup([seek])
        for node in seek.nearest(1):
            if node.contact.peer_id == peer_id:
                return node.contact
        return None

    def check_writer(self) -> None:
        """Raises `NotAuthorizedError` if our role writes no records."""
        if not self.protocol.may_store:
            raise NotAuthorizedError(
                f"Records are not written in the role {', '.join(sorted(self.protocol.roles)) or 'of nobody'}.",
                fix=f"Join with an invite for one of the roles {', '.join(sorted(STORE.roles))}.",
            )

    async def place(self, copies: Sequence[Copy]) -> dict[PlaceId, Placed]:
        """Store copies with the `replication` nearest peers of their keys, ourselves included where we are one of them.

        While all peers are known, the copies go straight to the nearest peers, whose answers
        name any nearer ones: one round trip. Else a lookup comes first, so that no far peer is left with a copy.
        """
        placed = {copy.record.place_id: Placed() for copy in copies}
        by_position: dict[int, list[Copy]] = {}
        for copy in copies:
            by_position.setdefault(int.from_bytes(position_of(copy.record.key), "big"), []).append(copy)
        width, me, table = self.config.replication, self.book.me, self.book.table
        search = self._search_width()
        far = {} if table.complete else {p: Lookup(p, search, self.seeds(p), me) for p in by_position}
        if far:
            await self.lookup(list(far.values()))
        stores = [Lookup(p, width, far[p].nearest() if p in far else self.seeds(p), me) for p in by_position]
        for store in stores:
            if me in store.window():
                self._hold(by_position[store.target], placed)

        async def send(ask: Ask) -> None:
            batch = [copy for lookup in ask.lookups for copy in by_position[lookup.target]]
            self.stats.messages += 1
            answers = iter(await self.protocol.store(ask.node, batch, width))
            self.stats.messages += 1
            for lookup in ask.lookups:
                nearer: list[PeerNode] = []
                for copy in by_position[lookup.target]:
                    answer = next(answers)
                    nearer = answer.nearest or nearer
                    outcome = placed[copy.record.place_id]
                    if answer.other is not None:
                        outcome.others.append(answer.other)
                    if answer.refusal is Refusal.NONE:
                        outcome.accepted += 1
                    elif answer.refusal is Refusal.OUTDATED:
                        outcome.outdated_by = max(outcome.outdated_by, answer.record_version)
                lookup.answered(ask.node, nearer)

        await self.driver.drive(Crawl(stores, width), send)
        if not far:
            self._count(stores)
        wanted = min(width, len(table.nearest(0, width)) + 1)
        for (key, _, _), outcome in placed.items():
            if outcome.accepted < (wanted + 1) // 2 and not outcome.outdated_by:
                reason = f"{outcome.accepted} of {wanted} peers took the record"
                self.runtime.emit(UnderReplicated(key=key, accepted=outcome.accepted, reason=reason))
        return placed

    def _hold(self, copies: Sequence[Copy], placed: Mapping[PlaceId, Placed]) -> None:
        for copy in copies:
            outcome = placed[copy.record.place_id]
            held = self.storage.get(*copy.record.place_id)
            if held is not None and held.record.incarnation != copy.record.incarnation:
                outcome.others.append(held)
            try:
                self.storage.offer(copy, self.runtime.clock.time())
            except RecordRefusedError as error:
                outcome.outdated_by = max(outcome.outdated_by, error.record_version)
                self.runtime.emit(RecordRefused(reason=error.reason, sender=str(self.book.me.contact.peer_id)))
            else:
                outcome.accepted += 1

    async def read(
        self, keys: Mapping[str, Sequence[Copy]], *, full: bool, known: Mapping[str, Sequence[Copy]] | None = None
    ) -> dict[str, dict[EntryId, Copy]]:
        """The merged entries of keys, from several replicas each; replicas found stale are repaired in the background.

        Where few of the replicas have an entry, the others are asked first: if more of them have seen it end than show
        it, it is left out, so that nobody can keep it alive by showing it.

        Args:
            keys: Each key with our own records of it.
            full: Ask all `replication` nearest peers; else a read ends once the nearest of them, a majority of
                `replication`, all hold just the union.
            known: Entries of some of the keys from earlier reads: where replicas still hold just these, they answer
                in a few bytes.
        """
        now_s, config = self.runtime.clock.time(), self.config
        reads: list[Read] = []
        for key, authored in keys.items():
            target = int.from_bytes(position_of(key), "big")
            reads.append(
                Read(
                    key, target, config.replication, self.seeds(target), me=self.book.me,
                    own=self.storage.entries(key, now_s), authored=authored,
                    agreement=0 if full else config.replication // 2 + 1, wide=self._search_width(),
                    known=known.get(key, ()) if known else (),
                )
            )  # fmt: skip
        count = config.replication + SPARE_CONTACTS
        by_lookup = {id(read): read for read in reads}

        async def send(ask: Ask) -> None:
            asked = [by_lookup[id(lookup)] for lookup in ask.lookups]
            self.stats.messages += 1
            found = await self.protocol.find(ask.node, [Want(r.key, *r.want(ask.node)) for r in asked], count)
            self.stats.messages += 1
            for read, part in zip(asked, found, strict=True):
                if part.told is None:
                    read.reply(ask.node, part.copies, part.nearest)
                else:
                    read.told(ask.node, part.told, part.nearest)

        await self._drive(reads, send, config.parallelism)
        if again := [read for read in reads if read.retry()]:
            await self.driver.drive(Crawl(again, config.parallelism), send)
        self._count(reads)
        results = {read.key: self._admitted(read.result()) for read in reads}
        lacking: dict[bytes, tuple[PeerNode, list[Copy]]] = {}
        holders: Counter[tuple[PlaceId, int]] = Counter()
        for read in reads:
            holders += read.holders()
            for node, copies in read.stale():
                lacking.setdefault(node.id, (node, []))[1].extend(copies)
        if lacking and self.protocol.may_store:
            doubtful = {(read.key, *entry_id): None for read in reads for entry_id in read.doubtful()}
            if doubtful:
                await self._repair.settle(list(lacking.values()), doubtful, holders)
            self.driver.spawn(self._repair.give(list(lacking.values())), "dht-repair")
        return {key: self._repair.without_ended(entries) for key, entries in results.items()}

    def _admitted(self, found: dict[EntryId, Copy]) -> dict[EntryId, Copy]:
        """What of a read's result agrees with what we have seen before."""
        admitted = self._witness.admit(found, self.runtime.clock.time())
        for _ in range(len(found) - len(admitted)):
            self.runtime.emit(RecordRefused(reason=Refusal.OUTDATED.reason, sender=""))
        return admitted


def _position(target: int) -> bytes:
    return target.to_bytes(20, "big")
