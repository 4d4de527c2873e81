"""What keeps the table alive: liveness checks, meeting neighbours, hand-over of records to them, rejoining."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarm.dht.crawl import Lookup
from swarm.dht.events import Rejoined
from swarm.dht.operations import Operations
from swarm.dht.records import Copy, position_of
from swarm.dht.routing import PeerNode
from swarm.errors import SwarmError
from swarm.identity import PeerId
from swarm.net.transport import Contact

PINGS = 16
"""Peers checked in one round of upkeep."""
GAP_WIDTH = 1
"""Peers that a lookup at a distance at which few are known must reach."""
MEET_ROUNDS = 5
"""In the first of so many rounds a peer looks for its neighbours again: those that joined when it did, through the same
peer, may not have met it."""
GUIDES = 2
"""Peers chosen at random that are asked about our neighbourhood."""
JOIN_PARALLELISM = 8
"""Requests in flight while a peer looks for its neighbours: it has many of them to meet."""
GREET_GRACE = 0.1
"""Call timeouts that further first contacts get once one has answered."""
PUSHERS = 2
"""So many of a record's nearest holders hand it to a new neighbour (one could be frozen)."""


class Upkeep:
    """Periodic work of one peer. Its rounds are spread out at random."""

    def __init__(self, operations: Operations) -> None:
        self._do = operations
        self._book = operations.book
        self._holders: dict[str, tuple[bytes, ...]] = {}
        self._seeds: dict[PeerId, Contact] = {}
        self._rounds = 0
        operations.protocol.on_held = self._note_holders

    def remember(self, contacts: Sequence[Contact]) -> None:
        """Peers to return to when everybody else is lost."""
        self._seeds.update({contact.peer_id: contact for contact in contacts})

    async def run(self) -> None:
        """Rounds until cancelled."""
        interval_s = self._do.config.maintenance_s
        while True:
            await asyncio.sleep(interval_s * self._do.runtime.rng.uniform(0.75, 1.25))
            await self.round()

    async def round(self) -> None:
        """One round."""
        self._do.storage.expire(self._do.runtime.clock.time())
        await self._check_neighbours()
        if self._rounds % MEET_ROUNDS == 0:
            await self.join()
        self._rounds += 1
        await self._hand_over()
        await self._rejoin()

    async def _check_neighbours(self) -> None:
        """Ping those that share records with us and the heads of buckets, if they have been silent for a round."""
        silent_since_s = self._do.runtime.clock.time() - self._do.config.maintenance_s
        nodes = {node.id: node for node in self._do.protocol.take_pings()}
        for key in self._do.storage.held_keys():
            nodes.update({node.id: node for node in self._nearest(key) if node is not self._book.me})
        for bucket in self._book.table.buckets:
            if bucket.nodes:
                nodes.setdefault(bucket.head().id, bucket.head())
        silent = sorted((n for n in nodes.values() if n.seen_s <= silent_since_s), key=lambda n: n.seen_s)[:PINGS]
        await asyncio.gather(*(self._do.protocol.ping(node) for node in silent))

    def _nearest(self, key: str) -> list[PeerNode]:
        """The `replication` nearest known peers of a key, ourselves included."""
        target = int.from_bytes(position_of(key), "big")
        count = self._do.config.replication
        nodes = [*self._book.table.nearest(target, count), self._book.me]
        return sorted(nodes, key=lambda n: n.long_id ^ target)[:count]

    def _note_holders(self, key: str) -> None:
        """Who a key's record went to, as far as we can tell: the nearest at the time when it came."""
        if key not in self._holders:
            self._holders[key] = tuple(node.id for node in self._nearest(key))

    async def _hand_over(self) -> None:
        """Give our records to peers that became one of a key's nearest since the last round."""
        now_s = self._do.runtime.clock.time()
        table, me = self._book.table, self._book.me
        gifts: dict[bytes, tuple[PeerNode, list[Copy]]] = {}
        holders: dict[str, tuple[bytes, ...]] = {}
        for key in self._do.storage.held_keys():
            nearest = self._nearest(key)
            ids = tuple(node.id for node in nearest)
            before = self._holders.get(key, ids)
            alive = [i for i in before if i == me.id or table.has(i)]
            holders[key] = ids
            if me.id in before and me.id not in alive[:PUSHERS]:
                continue
            for node in nearest:
                if node.id not in before and node is not me:
                    gifts.setdefault(node.id, (node, []))[1].extend(self._do.storage.entries(key, now_s))
        self._holders = holders
        if self._do.protocol.may_store:
            for node, copies in gifts.values():
                await self._do.give(node, copies)

    async def _rejoin(self) -> None:
        """Try a remembered peer that is not in the table: all of them when the table is empty, else one."""
        table = self._book.table
        remembered = {**{c.peer_id: c for c, _ in self._book.lost.values()}, **self._seeds}
        missing = [
            c
            for c in remembered.values()
            if c.peer_id != self._book.me.contact.peer_id and table.get(c.peer_id) is None
        ]
        if not missing:
            return
        lonely = not table.all_nodes()
        chosen = missing if lonely else [self._do.runtime.rng.choice(missing)]
        answers = await asyncio.gather(*(self._do.protocol.ping(PeerNode(contact)) for contact in chosen[:PINGS]))
        if any(answers):
            await self.join()
            if lonely:
                self._do.runtime.emit(Rejoined(peers=len(table.all_nodes()), reason="every known peer had been lost"))

    async def greet(self, contacts: Sequence[Contact]) -> dict[str, str]:
        """Ping peers all at once, until one has answered and the others have had a moment to.

        Returns:
            Why each address failed, as far as known.
        """
        reasons: dict[str, str] = {}
        answered = asyncio.Event()
        left = len(contacts)

        async def one(contact: Contact) -> None:
            nonlocal left
            try:
                await self._do.protocol.greet(PeerNode(contact))
            except SwarmError as error:
                reasons.update(dict.fromkeys(contact.addresses, str(error)))
            else:
                answered.set()
            finally:
                left -= 1
                if not left:
                    answered.set()

        tasks = [self._do.driver.spawn(one(contact), "dht-greet") for contact in contacts]
        await answered.wait()
        await asyncio.wait(tasks, timeout=GREET_GRACE * self._do.config.call_timeout_s)
        return reasons

    async def join(self) -> None:
        """Find our neighbours, who thereby learn of us, and somebody at every distance.

        Neighbours that know only each other would answer for each other: a few others, chosen at random, are asked too.
        """
        own, config, table = self._book.me.long_id, self._do.config, self._book.table
        await self._meet([own], config.bucket_size, max(config.parallelism, JOIN_PARALLELISM))
        if not table.complete:
            await self._meet(table.gaps(config.parallelism, self._do.runtime.rng), GAP_WIDTH, config.parallelism)

    async def _meet(self, targets: Sequence[int], width: int, parallelism: int) -> None:
        nodes = self._book.table.all_nodes()
        guides = self._do.runtime.rng.sample(nodes, min(GUIDES, len(nodes)))
        told = await asyncio.gather(*(self._do.ask(guide, targets) for guide in guides))
        lookups = []
        for i, target in enumerate(targets):
            hints = [node for answer in told if answer for node in answer[i]]
            lookups.append(Lookup(target, width, [*self._do.seeds(target), *hints]))
        await self._do.lookup(lookups, parallelism)
