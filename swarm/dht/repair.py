"""What readers do about replicas that disagree: ask who has seen an entry end, give the others what they lack."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from swarm.dht.events import RecordRefused
from swarm.dht.protocol import Protocol
from swarm.dht.records import Copy, EntryId, PlaceId, worth_sending
from swarm.dht.refusals import Refusal
from swarm.dht.routing import AddressBook, PeerNode
from swarm.dht.storage import Storage
from swarm.errors import RecordRefusedError, SwarmError
from swarm.runtime import Runtime

ENDED_KEPT = 4096
"""Entries remembered that most of their replicas have seen end."""


class Repair:
    """Offers what some replicas lack, and remembers what most of them have seen end.

    Args:
        runtime: Clock and events.
        book: Ourselves, and who fails.
        storage: What we hold; its version floors tell what we have seen end.
        protocol: The calls.
    """

    def __init__(self, runtime: Runtime, book: AddressBook, storage: Storage, protocol: Protocol) -> None:
        self._runtime = runtime
        self._book = book
        self._storage = storage
        self._protocol = protocol
        self._ended: OrderedDict[PlaceId, int] = OrderedDict()

    async def settle(
        self,
        lacking: Sequence[tuple[PeerNode, Sequence[Copy]]],
        doubtful: Mapping[PlaceId, None],
        holders: Counter[tuple[PlaceId, int]],
    ) -> None:
        """Ask replicas that lack doubtful entries why. What more of them have seen end than show it has ended.

        They are not offered the entries meanwhile: those who do not know would keep for others what has ended.

        Args:
            lacking: Replicas, each with what it lacks.
            doubtful: Places of the entries in question.
            holders: How many show each statement, by place and version.
        """
        votes: Counter[tuple[PlaceId, int]] = Counter()

        async def ask(node: PeerNode, copies: Sequence[Copy]) -> None:
            try:
                answers = await self._protocol.store(node, copies, probe=True)
            except SwarmError:
                return  # the protocol has told the address book
            for copy, answer in zip(copies, answers, strict=True):
                record = copy.record
                if answer.refusal is Refusal.OUTDATED and answer.record_version >= record.record_version:
                    votes[record.place_id, record.record_version] += 1

        questions = [
            (node, self._alive(c for c in copies if c.record.place_id in doubtful)) for node, copies in lacking
        ]
        others = [(node, copies) for node, copies in questions if copies and node is not self._book.me]
        await asyncio.gather(*(ask(node, copies) for node, copies in others))
        for (place_id, version), count in votes.items():
            if count > max(holders[place_id, version], 1):  # one alone could end whatever one other shows
                self._ended[place_id] = version
                self._ended.move_to_end(place_id)
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def _alive(self, copies: Iterable[Copy]) -> list[Copy]:
        return worth_sending(copies, self._runtime.clock.time())

    async def give(self, lacking: Sequence[tuple[PeerNode, Sequence[Copy]]]) -> None:
        """Give copies to replicas that lack them, but for what has ended."""
        gifts = [(node, [copy for copy in copies if not self._has_ended(copy)]) for node, copies in lacking]
        await asyncio.gather(*(self._give(node, self._alive(copies)) for node, copies in gifts))

    async def _give(self, node: PeerNode, copies: Sequence[Copy]) -> None:
        """Store copies with one peer, perhaps ourselves. Refusals are events."""
        if node is not self._book.me:
            try:
                await self._protocol.store(node, copies)
            except SwarmError:
                return  # the protocol has told the address book; upkeep finds another holder
            return
        for copy in copies:
            try:
                self._storage.offer(copy, self._runtime.clock.time())
            except RecordRefusedError as error:
                self._runtime.emit(RecordRefused(reason=error.reason, sender=str(node.contact.peer_id)))

    def _has_ended(self, copy: Copy) -> bool:
        place_id = copy.record.place_id
        return copy.record.record_version <= max(self._ended.get(place_id, 0), self._storage.floor(*place_id))

    def without_ended(self, entries: dict[EntryId, Copy]) -> dict[EntryId, Copy]:
        return {entry_id: copy for entry_id, copy in entries.items() if not self._has_ended(copy)}
