"""Who else should hold what we hold: records go to peers that come nearer to them, and onwards when we leave."""

from __future__ import annotations

import asyncio

from swarm.dht.fairness import SLACK
from swarm.dht.operations import Operations
from swarm.dht.records import Copy, position_of
from swarm.dht.routing import PeerNode
from swarm.identity import PeerId

PUSHERS = 2
"""So many of a record's nearest holders hand it to a new neighbour (one could be frozen)."""
SPARE_HEIRS = 3
"""Peers considered beyond `replication` when we leave: others may have gone shortly before us."""


class Handover:
    """Remembers who presumably holds each of our records.

    Args:
        operations: The network.
    """

    def __init__(self, operations: Operations) -> None:
        self._do = operations
        self._book = operations.book
        self._holders: dict[str, tuple[bytes, ...]] = {}
        operations.protocol.on_held = self._note_holders

    def nearest(self, key: str) -> list[PeerNode]:
        """The `replication` nearest known peers of a key, ourselves included."""
        target = _target(key)
        count = self._do.config.replication
        nodes = [*self._book.table.nearest(target, count), self._book.me]
        return sorted(nodes, key=lambda n: n.long_id ^ target)[:count]

    def _note_holders(self, key: str) -> None:
        """Who a key's record went to, as far as we can tell: the nearest at the time when it came."""
        if key not in self._holders:
            if len(self._holders) > SLACK + 2 * len(self._do.storage):  # a flood that gave way again
                self._holders = {k: ids for k, ids in self._holders.items() if self._do.storage.holds(k)}
            self._holders[key] = tuple(node.id for node in self.nearest(key))

    async def to_newcomers(self) -> None:
        """Give our records to peers that became one of a key's nearest since the last time."""
        now_s = self._do.runtime.clock.time()
        table, me = self._book.table, self._book.me
        gifts: dict[bytes, tuple[PeerNode, list[Copy]]] = {}
        holders: dict[str, tuple[bytes, ...]] = {}
        for key in self._do.storage.held_keys():
            nearest = self.nearest(key)
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

    async def to_heirs(self, withdrawn: PeerId | None) -> None:
        """We leave: give every record to the next nearest peers that are alive and do not have it yet.

        Args:
            withdrawn: An author whose records are being deleted, and need no heir.
        """
        if not self._do.protocol.may_store:
            return
        now_s, count = self._do.runtime.clock.time(), self._do.config.replication
        copies: dict[str, list[Copy]] = {}
        candidates: dict[str, list[PeerNode]] = {}
        for key in self._do.storage.held_keys():
            mine = [c for c in self._do.storage.entries(key, now_s) if c.record.author_id != withdrawn]
            if mine:
                copies[key] = mine
                candidates[key] = self._book.table.nearest(_target(key), count + SPARE_HEIRS)
        alive = await self._alive({node.id: node for nodes in candidates.values() for node in nodes})
        gifts: dict[bytes, tuple[PeerNode, list[Copy]]] = {}
        for key, nodes in candidates.items():
            before = self._holders.get(key) or tuple(node.id for node in self.nearest(key))
            for node in [node for node in nodes if node.id in alive][:count]:
                if node.id not in before:
                    gifts.setdefault(node.id, (node, []))[1].extend(copies[key])
        await asyncio.gather(*(self._do.give(node, given) for node, given in gifts.values()))

    async def _alive(self, nodes: dict[bytes, PeerNode]) -> dict[bytes, PeerNode]:
        answers = await asyncio.gather(*(self._do.protocol.ping(node) for node in nodes.values()))
        return {i: node for (i, node), answered in zip(nodes.items(), answers, strict=True) if answered}


def _target(key: str) -> int:
    return int.from_bytes(position_of(key), "big")
