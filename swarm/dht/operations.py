"""What a peer does in the table: find neighbourhoods, place copies there, read keys and repair stale replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.config import DhtConfig
from swarm.dht.crawl import Ask, Crawl, Lookup, Read
from swarm.dht.driver import Driver
from swarm.dht.events import RecordRefused, UnderReplicated
from swarm.dht.protocol import MAX_TARGETS, Protocol
from swarm.dht.records import Copy, EntryId, PlaceId, Refusal, position_of
from swarm.dht.routing import AddressBook, PeerNode
from swarm.dht.storage import Storage
from swarm.errors import RecordRefusedError, SwarmError
from swarm.identity import PeerId
from swarm.net.transport import Contact
from swarm.runtime import Runtime

AGREEMENT = 2
"""Replicas among the nearest that must hold exactly the merged union for a read to end early."""
SEARCH_FACTOR = 2
"""While not everybody is known, so many times `replication` peers must answer before a neighbourhood counts as found,
or a key as empty. Fewer sometimes know only each other."""
SPARE_CONTACTS = 3
"""Contacts asked for beyond `replication`, against dead ones among them."""


@dataclass(slots=True)
class Placed:
    """How a copy fared: who holds it, and the highest version that an "outdated" refusal named."""

    accepted: int = 0
    outdated_by: int = 0


class Seek(Lookup):
    """A lookup that ends as soon as the peer at the target itself has answered."""

    @property
    def satisfied(self) -> bool:
        return any(node.long_id == self.target for node in self.nearest(1))


class Operations:
    """Network operations of one peer, on the parts that it owns.

    Attributes:
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

    def seeds(self, target: int) -> list[PeerNode]:
        """Known peers to start a lookup from."""
        return self.book.table.nearest(target, self.config.bucket_size)

    async def lookup(self, lookups: Sequence[Lookup], parallelism: int | None = None) -> None:
        """Run lookups of peers."""
        width = max((lookup.width for lookup in lookups), default=0)
        count = min(self.config.bucket_size, width + SPARE_CONTACTS)

        async def send(ask: Ask) -> None:
            found = await self.protocol.find(ask.node, [_position(lookup.target) for lookup in ask.lookups], count)
            for lookup, part in zip(ask.lookups, found, strict=True):
                lookup.answered(ask.node, part.nearest)

        if lookups:
            await self.driver.drive(Crawl(lookups, parallelism or self.config.parallelism), send)

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
        return max(self.config.replication, min(self.config.bucket_size, factor * self.config.replication))

    async def find_peer(self, peer_id: PeerId) -> Contact | None:
        """A peer that is not in the table; none if it did not answer."""
        seek = Seek(peer_id.node_id, self.config.replication, self.seeds(peer_id.node_id))
        await self.lookup([seek])
        for node in seek.nearest(1):
            if node.contact.peer_id == peer_id:
                return node.contact
        return None

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
        stores = [Lookup(p, width, far[p].nearest(width) if p in far else self.seeds(p), me) for p in by_position]
        for store in stores:
            if me in store.window():
                self._hold(by_position[store.target], placed)

        async def send(ask: Ask) -> None:
            batch = [copy for lookup in ask.lookups for copy in by_position[lookup.target]]
            answers = iter(await self.protocol.store(ask.node, batch, 0 if far else width))
            for lookup in ask.lookups:
                nearer: list[PeerNode] = []
                for copy in by_position[lookup.target]:
                    answer = next(answers)
                    nearer = answer.nearest or nearer
                    outcome = placed[copy.record.place_id]
                    if answer.refusal is Refusal.NONE:
                        outcome.accepted += 1
                    elif answer.refusal is Refusal.OUTDATED:
                        outcome.outdated_by = max(outcome.outdated_by, answer.record_version)
                lookup.answered(ask.node, nearer)

        if self.protocol.may_store:
            await self.driver.drive(Crawl(stores, width), send)
        wanted = min(width, len(table.nearest(0, width)) + 1)
        for (key, _, _), outcome in placed.items():
            if outcome.accepted < (wanted + 1) // 2 and not outcome.outdated_by:
                reason = f"{outcome.accepted} of {wanted} peers took the record"
                self.runtime.emit(UnderReplicated(key=key, accepted=outcome.accepted, reason=reason))
        return placed

    def _hold(self, copies: Sequence[Copy], placed: Mapping[PlaceId, Placed]) -> None:
        for copy in copies:
            outcome = placed[copy.record.place_id]
            try:
                if self.storage.offer(copy, self.runtime.clock.time()) and self.protocol.on_held is not None:
                    self.protocol.on_held(copy.record.key)
            except RecordRefusedError as error:
                outcome.outdated_by = max(outcome.outdated_by, error.record_version)
                self.runtime.emit(RecordRefused(reason=error.reason, sender=str(self.book.me.contact.peer_id)))
            else:
                outcome.accepted += 1

    async def read(self, keys: Mapping[str, Sequence[Copy]], *, full: bool) -> dict[str, dict[EntryId, Copy]]:
        """The merged entries of keys, from several replicas each; replicas found stale are repaired in the background.

        Args:
            keys: Each key with our own records of it.
            full: Ask all `replication` nearest peers; else a read ends once `AGREEMENT` replicas agree with the union.
        """
        now_s = self.runtime.clock.time()
        reads: list[Read] = []
        for key, authored in keys.items():
            target = int.from_bytes(position_of(key), "big")
            reads.append(
                Read(
                    key, target, self.config.replication, self.seeds(target), me=self.book.me,
                    own=self.storage.entries(key, now_s), authored=authored, agreement=0 if full else AGREEMENT,
                    wide=self._search_width(),
                )
            )  # fmt: skip
        count = self.config.replication + SPARE_CONTACTS
        by_lookup = {id(read): read for read in reads}

        async def send(ask: Ask) -> None:
            asked = [by_lookup[id(lookup)] for lookup in ask.lookups]
            found = await self.protocol.find(ask.node, [read.key for read in asked], count)
            for read, part in zip(asked, found, strict=True):
                read.reply(ask.node, part.copies, part.nearest)

        await self.driver.drive(Crawl(reads, self.config.parallelism), send)
        merged = {read.key: dict(read.merged) for read in reads}
        lacking: dict[bytes, tuple[PeerNode, list[Copy]]] = {}
        for read in reads:
            for node, copies in read.stale():
                lacking.setdefault(node.id, (node, []))[1].extend(copies)
        if lacking and self.protocol.may_store:
            self.driver.spawn(self._repair(list(lacking.values())), "dht-repair")
        return merged

    async def _repair(self, lacking: Sequence[tuple[PeerNode, Sequence[Copy]]]) -> None:
        for node, copies in lacking:
            await self.give(node, copies)

    async def give(self, node: PeerNode, copies: Sequence[Copy]) -> bool:
        """Store copies with one peer (perhaps ourselves); false if it did not answer. Refusals are events."""
        now_s = self.runtime.clock.time()
        alive = [copy for copy in copies if copy.remaining_s(now_s) >= 0.001]
        if node is self.book.me:
            self._hold(alive, {copy.record.place_id: Placed() for copy in alive})
            return True
        try:
            await self.protocol.store(node, alive)
        except SwarmError:
            return False  # the protocol has told the address book; upkeep finds another holder
        return True


def _position(target: int) -> bytes:
    return target.to_bytes(20, "big")
