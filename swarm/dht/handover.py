"""Who else should hold what we hold: records go to peers that come nearer to them, and onwards when we leave."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.dht.fairness import SLACK
from swarm.dht.messages import MAX_STORED
from swarm.dht.operations import Operations
from swarm.dht.records import Copy, position_of, worth_sending
from swarm.dht.routing import ID_BITS, PeerNode
from swarm.errors import RateLimitedError, SwarmError
from swarm.identity import PeerId

PUSHERS = 2
"""So many of a record's nearest holders hand it to a new neighbour (one could be frozen)."""
SPARE_HEIRS = 3
"""Peers considered beyond `replication` when we leave: others may have gone shortly before us."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""How long to wait after each refusal in a row by a peer that takes no more work from us for now."""
SLICE = 2048
"""Keys looked at, some milliseconds, before others get their turn on the loop."""


@dataclass(slots=True)
class _Share:
    """Who presumably holds a key of ours."""

    target: int
    holders: tuple[bytes, ...]
    reach: int
    """A newcomer that is nearer than this is one of the key's nearest."""
    settled: bool = False
    """Whether all newcomers so far have been considered, and those it concerns have its records."""


class Handover:
    """Remembers who presumably holds each of our records.

    Args:
        operations: The network.
    """

    def __init__(self, operations: Operations) -> None:
        self._do = operations
        self._book = operations.book
        self._shares: dict[str, _Share] = {}
        self._present: dict[bytes, None] = {}
        """Who was in the table when newcomers were looked for last, and ourselves."""
        operations.storage.on_held = self._note

    def neighbours(self) -> list[PeerNode]:
        """Everybody in the table who presumably shares records with us."""
        shared: dict[bytes, None] = {}
        for share in self._shares.values():
            shared.update(dict.fromkeys(share.holders))
        return [node for node in self._book.table.all_nodes() if node.id in shared]

    def _nearest(self, target: int) -> list[PeerNode]:
        """The `replication` nearest known peers of a position, ourselves included."""
        count = self._do.config.replication
        nodes = [*self._book.table.nearest(target, count), self._book.me]
        return sorted(nodes, key=lambda n: n.long_id ^ target)[:count]

    def _share(self, target: int, nearest: Sequence[PeerNode]) -> _Share:
        full = len(nearest) == self._do.config.replication
        reach = nearest[-1].long_id ^ target if full else 1 << ID_BITS
        return _Share(target, tuple(node.id for node in nearest), reach)

    def _note(self, key: str) -> None:
        """A record has come. It went, as far as we can tell, to those who are its key's nearest now."""
        if key not in self._shares:
            if len(self._shares) > SLACK + 2 * len(self._do.storage):  # a flood that gave way again
                self._forget()
            target = _target(key)
            self._shares[key] = self._share(target, self._nearest(target))

    def _forget(self) -> None:
        self._shares = {key: share for key, share in self._shares.items() if self._do.storage.holds(key)}

    async def to_newcomers(self) -> None:
        """Give our records to peers that became one of a key's nearest since the last time.

        Ends after an interval of upkeep; what a peer has not taken by then is offered to it again the next time.
        """
        self._forget()
        nodes = self._book.table.all_nodes()
        came = [node.long_id for node in nodes if node.id not in self._present]
        self._present = dict.fromkeys([self._book.me.id, *(node.id for node in nodes)])
        gifts: dict[bytes, tuple[PeerNode, list[str]]] = {}
        for i, (key, share) in enumerate(list(self._shares.items())):
            if i % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            if not share.settled or self._is_affected(share, came):
                for node in self._settle(share):
                    gifts.setdefault(node.id, (node, []))[1].append(key)
        if self._do.protocol.may_store:
            until_s = self._do.runtime.clock.time() + self._do.config.maintenance_s
            await asyncio.gather(*(self._give_keys(node, keys, until_s) for node, keys in gifts.values()))

    def _is_affected(self, share: _Share, came: Sequence[int]) -> bool:
        """Whether one of a key's holders has left, or somebody has come who is nearer."""
        if not all(holder in self._present for holder in share.holders):
            return True
        return any(position ^ share.target < share.reach for position in came)

    def _settle(self, share: _Share) -> list[PeerNode]:
        """Take a key's nearest for its holders from now on; returns those to whom we should give its records."""
        me, table = self._book.me, self._book.table
        nearest, before = self._nearest(share.target), share.holders
        now = self._share(share.target, nearest)
        share.holders, share.reach, share.settled = now.holders, now.reach, True
        alive = [holder for holder in before if holder == me.id or table.has(holder)]
        if me.id in before and me.id not in alive[:PUSHERS]:
            return []
        return [node for node in nearest if node.id not in before and node is not me]

    async def _give_keys(self, node: PeerNode, keys: Sequence[str], until_s: float) -> None:
        given = 0
        while given < len(keys):
            part: list[Copy] = []
            upto = given
            while upto < len(keys) and len(part) < MAX_STORED:
                part += self._do.storage.entries(keys[upto], self._do.runtime.clock.time())
                upto += 1
            if not await self._give(node, part, until_s):
                break
            given = upto
        for key in keys[given:]:
            share = self._shares.get(key)
            if share is not None:
                share.holders = tuple(holder for holder in share.holders if holder != node.id)
                share.settled = False

    async def _give(self, node: PeerNode, copies: Sequence[Copy], until_s: float = math.inf) -> bool:
        """Store copies with a peer at the pace at which it takes them; whether it has seen all. Refusals are events."""
        for start in range(0, len(copies), MAX_STORED):
            if not await self._offer(node, copies[start : start + MAX_STORED], until_s):
                return False
        return True

    async def _offer(self, node: PeerNode, copies: Sequence[Copy], until_s: float) -> bool:
        clock = self._do.runtime.clock
        for pause_s in PAUSES_S:
            try:
                await self._do.protocol.store(node, worth_sending(copies, clock.time()))
            except RateLimitedError:
                if clock.time() + pause_s > until_s:
                    return False
                await asyncio.sleep(pause_s)
            except SwarmError:
                return False  # the protocol has told the address book
            else:
                return True
        return False

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
            share = self._shares.get(key)
            before = share.holders if share is not None else ()
            for node in [node for node in nodes if node.id in alive][:count]:
                if node.id not in before:
                    gifts.setdefault(node.id, (node, []))[1].extend(copies[key])
        await asyncio.gather(*(self._give(node, given) for node, given in gifts.values()))

    async def _alive(self, nodes: dict[bytes, PeerNode]) -> dict[bytes, PeerNode]:
        answers = await asyncio.gather(*(self._do.protocol.ping(node) for node in nodes.values()))
        return {i: node for (i, node), answered in zip(nodes.items(), answers, strict=True) if answered}


def _target(key: str) -> int:
    return int.from_bytes(position_of(key), "big")
