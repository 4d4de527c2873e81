"""Who uses the most of something that all share, and version floors that one author cannot wash out. No I/O."""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict

from swarm.dht.records import PlaceId
from swarm.identity import PeerId

SLACK = 64
"""Outdated heap items that are tolerated before a heap is rebuilt, beyond as many as there are live ones."""


class Usage:
    """Amounts by author, with the largest at hand. A change costs O(log n), amortised."""

    def __init__(self) -> None:
        self._amounts: dict[PeerId, int] = {}
        self._heap: list[tuple[int, int, PeerId]] = []
        self._pushes = 0

    def __len__(self) -> int:
        """Authors that use anything."""
        return len(self._amounts)

    def __getitem__(self, author: PeerId) -> int:
        return self._amounts.get(author, 0)

    def add(self, author: PeerId, amount: int) -> None:
        """Change what an author uses; negative amounts give back."""
        new = self._amounts.get(author, 0) + amount
        assert new >= 0
        if not new:
            self._amounts.pop(author, None)
            return
        self._amounts[author] = new
        self._pushes += 1
        heapq.heappush(self._heap, (-new, self._pushes, author))
        if len(self._heap) > SLACK + 2 * len(self._amounts):
            self._heap = [(-used, i, known) for i, (known, used) in enumerate(self._amounts.items())]
            heapq.heapify(self._heap)

    def heaviest(self) -> tuple[PeerId, int] | None:
        """Who uses the most, and how much; of equals, whoever reached it first."""
        while self._heap:
            amount, _, author = self._heap[0]
            if self._amounts.get(author) == -amount:
                return author, -amount
            heapq.heappop(self._heap)
        return None


class VersionFloors:
    """The versions of entries that are held no longer: whatever is not above them is a replay.

    At most `limit` are kept. The author with the most loses its oldest first, so that nobody washes out the floors of
    others by filling the memory with their own. Places are kept as digests: names of any length cost the same.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of_author: dict[PeerId, OrderedDict[bytes, int]] = {}
        self._usage = Usage()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def get(self, place_id: PlaceId) -> int:
        """The floor of a place, or 0."""
        floors = self._of_author.get(place_id[1])
        return 0 if floors is None else floors.get(_digest(place_id), 0)

    def raise_to(self, place_id: PlaceId, record_version: int) -> None:
        """Remember that versions up to this one are over."""
        author = place_id[1]
        floors = self._of_author.setdefault(author, OrderedDict())
        digest = _digest(place_id)
        known = floors.get(digest)
        floors[digest] = record_version if known is None else max(known, record_version)
        floors.move_to_end(digest)
        if known is not None:
            return
        self._total += 1
        self._usage.add(author, 1)
        while self._total > self._limit:
            heaviest = self._usage.heaviest()
            assert heaviest is not None
            loser = self._of_author[heaviest[0]]
            loser.popitem(last=False)
            if not loser:
                del self._of_author[heaviest[0]]
            self._usage.add(heaviest[0], -1)
            self._total -= 1


def _digest(place_id: PlaceId) -> bytes:
    key, _, subkey = place_id
    name = key.encode()
    return hashlib.blake2b(len(name).to_bytes(2, "big") + name + subkey.encode(), digest_size=16).digest()
