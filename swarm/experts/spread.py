"""Which experts of a grid too large for its hosts should live: as many as there is room for, spread over the grid.

All hosts number the experts of such a grid alike, in a pseudo-random order, and a prefix of that order lives: it grows
as hosts join. What somebody holds or has a checkpoint of lives on even when hosts leave. Nobody goes through the grid.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence

from swarm.experts.records import HostRecord
from swarm.experts.spec import ExpertGrid, parse_uid


class Order:
    """The experts of a grid in their pseudo-random order, each once; computed as far as it is asked for."""

    def __init__(self, grid: ExpertGrid) -> None:
        self._grid = grid
        self._found: dict[str, None] = {}
        self._drawn = 0

    def first(self, count: int) -> list[str]:
        """The first so many, or all."""
        count = min(count, self._grid.size)
        while len(self._found) < count:
            digest = hashlib.sha256(f"{self._grid.name}/{self._drawn}".encode()).digest()
            self._drawn += 1
            self._found[self._grid.uid_at(int.from_bytes(digest[:8], "big") % self._grid.size)] = None
        return list(itertools.islice(self._found, count))


class Spread:
    """How many hosts should hold each expert that should live.

    Args:
        grids: The grids of the manifest.
        above: Grids with more experts are spread; of the others every expert should live.
    """

    def __init__(self, grids: Sequence[ExpertGrid], above: int) -> None:
        self._whole = {uid: grid.replicas for grid in grids if grid.size <= above for uid in grid.uids()}
        self._demand = sum(self._whole.values())
        self._large = {grid.name: grid for grid in grids if grid.size > above}
        self._orders = {name: Order(grid) for name, grid in self._large.items()}

    def replicas(self, capacity: int, held: Mapping[str, int], others: Sequence[HostRecord]) -> dict[str, int]:
        """For every expert that should live, how many hosts should hold it.

        Args:
            capacity: Experts that this host is willing to hold.
            held: What it holds or has a checkpoint of.
            others: The other hosts' records.
        """
        wanted = dict(self._whole)
        if not self._large:
            return wanted
        staying = [host for host in others if not host.leaving]
        room = max(0, capacity + sum(host.capacity for host in staying) - self._demand)
        able = sum(c > 0 for c in (capacity, *(host.capacity for host in staying)))
        per_round = sum(min(grid.replicas, max(1, able)) for grid in self._large.values())
        for name, grid in self._large.items():
            wanted |= dict.fromkeys(self._orders[name].first(room // per_round), grid.replicas)
        for uid in itertools.chain(held, *(itertools.chain(host.experts, host.kept) for host in others)):
            if uid not in wanted:
                found = self._large.get(parse_uid(uid)[0])
                if found is not None and uid in found:
                    wanted[uid] = found.replicas
        return wanted
