"""What a reader has seen, so that nobody can take it back: older versions, deleted entries, lives without end. No I/O.

Signatures do not tell whether a record is the author's latest, nor how much of its lifetime is left: holders say that,
and some lie. Whoever has seen a version takes no older one any more, and takes the same one for no longer than the
author's signed lifetime after it was first seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from swarm.dht.records import Copy, EntryId, PlaceId

WITNESSED_KEPT = 8192
"""Entries remembered; those that have not been read for longest are forgotten."""


class Witness:
    """The latest statements that one reader has seen, in bounded memory."""

    def __init__(self) -> None:
        self._seen: OrderedDict[PlaceId, tuple[tuple[int, bytes], float]] = OrderedDict()

    def admit(self, entries: Mapping[EntryId, Copy], now_s: float) -> dict[EntryId, Copy]:
        """What of a read's result agrees with what was seen before; remembered from now on.

        Args:
            entries: Checked copies, deletions included.
            now_s: Local time.
        """
        result = {}
        for entry_id, copy in entries.items():
            record = copy.record
            rank, end_s = self._seen.pop(record.place_id, (record.rank, 0.0))
            if record.rank > rank or not end_s:
                rank, end_s = record.rank, now_s + record.ttl_ms / 1000
            self._seen[record.place_id] = (rank, end_s)
            if record.rank == rank:
                result[entry_id] = copy if copy.expires_s <= end_s else Copy(record, end_s)
        while len(self._seen) > WITNESSED_KEPT:
            self._seen.popitem(last=False)
        return result
