"""What keeps the table alive: liveness checks, meeting neighbours, returning to lost peers, merging islands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from swarm.dht.crawl import Lookup
from swarm.dht.events import IslandMet, Rejoined, Resumed
from swarm.dht.handover import Handover
from swarm.dht.known import KnownPeers
from swarm.dht.operations import Operations
from swarm.dht.routing import PeerNode
from swarm.dht.views import VIEW_PEERS, disjoint, encode_view
from swarm.errors import SwarmError
from swarm.net.transport import Contact

PINGS = 16
"""Peers checked in one round of upkeep."""
RECALLS = 4
"""Peers outside the table that are tried in one round of upkeep, while the table is not empty."""
NEW_NEIGHBOURS = 3
"""New neighbours asked about our neighbourhood in one round: whoever joins two islands so makes them one, from
neighbour to neighbour."""
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


class Upkeep:
    """Periodic work of one peer. Its rounds are spread out at random.

    Args:
        operations: The network.
        handover: Passes records on.
        known: Peers to return to.
        on_return: Called when we come back after others may have lost our records.
        on_round: Called at the end of every round.
    """

    def __init__(
        self,
        operations: Operations,
        handover: Handover,
        known: KnownPeers,
        on_return: Callable[[], None],
        on_round: Callable[[], None],
    ) -> None:
        self._do = operations
        self._book = operations.book
        self._handover = handover
        self._known = known
        self._on_return = on_return
        self._on_round = on_round
        self._neighbours: dict[bytes, None] = {}
        self._had_peers = False
        self._lost_all = False
        self._rounds = 0

    async def run(self) -> None:
        """Rounds until cancelled."""
        interval_s, clock = self._do.config.maintenance_s, self._do.runtime.clock
        while True:
            pause_s = interval_s * self._do.runtime.rng.uniform(0.75, 1.25)
            before_s = clock.wall()
            await asyncio.sleep(pause_s)
            # the wall clock goes on while a machine sleeps; where it was only set, a needless round does no harm
            away_s = clock.wall() - before_s - pause_s
            if away_s > interval_s:
                self._do.runtime.emit(Resumed(away_s=away_s, reason="this machine or process was suspended"))
                self._rounds = 0
                self._on_return()
            await self.round()

    async def round(self) -> None:
        """One round."""
        self._do.storage.expire(self._do.runtime.clock.time())
        self._note_loneliness()
        await self._recall()
        await self._check_neighbours()
        await self._do.protocol.callers.verify_some()
        if self._rounds % MEET_ROUNDS == 0:
            await self.join()
        else:
            await self._ask_new_neighbours()
        self._rounds += 1
        self._note_loneliness()
        self._neighbours = dict.fromkeys(node.id for node in self._nearest_to_us())
        await self._handover.to_newcomers()
        self.remember_table()
        self._on_round()

    def _note_loneliness(self) -> None:
        if self._book.table.all_nodes():
            self._had_peers = True
        elif self._had_peers:
            self._lost_all = True

    def remember_table(self) -> None:
        """Note everybody in the table as a peer to return to."""
        self._note_loneliness()
        for node in self._book.table.all_nodes():
            self._known.met(node.contact, node.seen_s)

    def view(self) -> bytes:
        """Our own neighbourhood, see `swarm.dht.views`."""
        return encode_view(self._book.table.nearest(self._book.me.long_id, VIEW_PEERS))

    # Liveness

    async def _check_neighbours(self) -> None:
        """Ping those that share records with us and the heads of buckets, if they have been silent for a round."""
        silent_since_s = self._do.runtime.clock.time() - self._do.config.maintenance_s
        nodes = {node.id: node for node in self._do.protocol.callers.take_pings()}
        nodes.update({node.id: node for node in self._handover.neighbours()})
        for bucket in self._book.table.buckets:
            if bucket.nodes:
                nodes.setdefault(bucket.head().id, bucket.head())
        silent = sorted((n for n in nodes.values() if n.seen_s <= silent_since_s), key=lambda n: n.seen_s)[:PINGS]
        await asyncio.gather(*(self._do.protocol.ping(node) for node in silent))

    # Returning

    async def _recall(self) -> None:
        """Try a few remembered peers that are not in the table, and whatever network they are in; more when alone."""
        table = self._book.table
        alone = not table.all_nodes()
        chosen = self._known.due(
            PINGS if alone else RECALLS, lambda peer_id: table.get(peer_id) is not None, patient=not alone
        )
        nodes = [PeerNode(contact) for contact in chosen]
        answers = await asyncio.gather(*(self._do.protocol.ping(node) for node in nodes))
        answered = []
        for node, answer in zip(nodes, answers, strict=True):
            if answer:
                answered.append(node)
                self._known.met(node.contact)
            else:
                self._known.failed(node.contact.peer_id)
        if self._lost_all and table.all_nodes():  # through them, or through somebody who has called us meanwhile
            await self.join(answered)
            self._lost_all = False
            peers = len(table.all_nodes())
            self._do.runtime.emit(Rejoined(peers=peers, reason="every known peer had been lost"))
            self._on_return()
        elif alone and answered:
            await self.join(answered)
        elif answered:
            await self._meet_through(answered)

    async def _ask_new_neighbours(self) -> None:
        """Whom do those know that have become our neighbours since the last round?"""
        new = [node for node in self._nearest_to_us() if node.id not in self._neighbours]
        await self._meet_through(self._do.runtime.rng.sample(new, min(NEW_NEIGHBOURS, len(new))))

    async def _meet_through(self, nodes: Sequence[PeerNode]) -> None:
        """Ask peers whom they know near us; where that is somebody unknown, look for our neighbours through them."""
        own, table = self._book.me.long_id, self._book.table
        told = await asyncio.gather(*(self._do.ask(node, [own]) for node in nodes))
        near = self._nearest_to_us()
        reach = near[-1].long_id ^ own if len(near) >= self._do.config.bucket_size else 2**160
        through = []
        for node, answer in zip(nodes, told, strict=True):
            theirs = answer[0] if answer else []
            if any(not table.has(n.id) and n.long_id ^ own < reach for n in theirs):
                through.append(node)
        if through:
            await self._meet_neighbours(through)

    async def compare(self, contact: Contact, view: bytes) -> bool:
        """Whether the author of a view is in our network; if not, join its network too.

        Args:
            contact: The author.
            view: Its neighbourhood, see `swarm.dht.views`.
        """
        if contact.peer_id == self._book.me.contact.peer_id:
            return True
        node = PeerNode(contact)
        search = Lookup(node.long_id, VIEW_PEERS, self._do.seeds(node.long_id))
        await self._do.lookup([search])
        found = [n for n in search.nearest() if n.id != node.id]
        if not disjoint(view, [*found, *self._book.table.all_nodes(), self._book.me]):
            return True
        if await self._do.protocol.ping(node):
            await self.join([node])
            reason = "none of the author's neighbours is known in this network"
            self._do.runtime.emit(IslandMet(peer=str(contact.peer_id), reason=reason))
        return False

    # Meeting

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
                self._known.failed(contact.peer_id)
            else:
                self._known.met(contact)
                answered.set()
            finally:
                left -= 1
                if not left:
                    answered.set()

        tasks = [self._do.driver.spawn(one(contact), "dht-greet") for contact in contacts]
        await answered.wait()
        await asyncio.wait(tasks, timeout=GREET_GRACE * self._do.config.call_timeout_s)
        return reasons

    async def join(self, through: Sequence[PeerNode] = ()) -> None:
        """Find our neighbours, who thereby learn of us, and somebody at every distance.

        Neighbours that know only each other would answer for each other: a few others, chosen at random, are asked too.

        Args:
            through: Peers to ask besides, because they may know others than we do.
        """
        config, table = self._do.config, self._book.table
        await self._meet_neighbours(through)
        if not table.complete:
            gaps = table.gaps(config.parallelism, self._do.runtime.rng)
            await self._meet(gaps, GAP_WIDTH, config.parallelism, through)

    async def _meet_neighbours(self, through: Sequence[PeerNode]) -> None:
        config = self._do.config
        parallelism = max(config.parallelism, JOIN_PARALLELISM)
        await self._meet([self._book.me.long_id], config.bucket_size, parallelism, through)

    async def _meet(self, targets: Sequence[int], width: int, parallelism: int, through: Sequence[PeerNode]) -> None:
        nodes = self._book.table.all_nodes()
        guides = [*through, *self._do.runtime.rng.sample(nodes, min(GUIDES, len(nodes)))]
        told = await asyncio.gather(*(self._do.ask(guide, targets) for guide in guides))
        lookups = []
        for i, target in enumerate(targets):
            hints = [node for answer in told if answer for node in answer[i]]
            lookups.append(Lookup(target, width, [*self._do.seeds(target), *through, *hints]))
        await self._do.lookup(lookups, parallelism)

    def _nearest_to_us(self) -> list[PeerNode]:
        return self._book.table.nearest(self._book.me.long_id, self._do.config.bucket_size)
