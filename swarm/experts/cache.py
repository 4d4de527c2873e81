"""What a host keeps of forward passes for the backward passes that may come: inputs always, a graph while it is of use.

Bounded by bytes. Evicted first: passes whose backward came already (kept for retries); then graphs, oldest first, since
they can be recomputed; then inputs, oldest first, since their owner can send them again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from swarm.experts.backend import KeptGraph
from swarm.identity import PeerId

Key = tuple[PeerId, str, bytes]
"""Who asked, which expert, which request."""
_Flat = tuple[bytes, str, bytes]
"""A key of values that remember their hash."""


@dataclass(slots=True)
class CachedForward:
    """A forward pass. `graph_bytes` is what the graph holds besides the inputs."""

    inputs: list[Tensor]
    graph: KeptGraph | None = None
    graph_bytes: int = 0

    @property
    def input_bytes(self) -> int:
        return sum(t.nbytes for t in self.inputs)


class ForwardCache:
    """See the module's docstring. Used from the event loop only.

    Args:
        max_bytes: Inputs and graphs together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._fresh: OrderedDict[_Flat, CachedForward] = OrderedDict()
        self._spent: OrderedDict[_Flat, CachedForward] = OrderedDict()
        self._graphs: OrderedDict[_Flat, CachedForward] = OrderedDict()
        # an expert's graphs go with its every step, however many others have
        self._graphs_of: dict[str, dict[_Flat, None]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._spent)

    def put(self, by: Key, entry: CachedForward) -> None:
        """Remember a forward pass, in place of one of the same key."""
        key = (by[0].digest, by[1], by[2])
        self._forget(key)
        self._fresh[key] = entry
        self.nbytes += entry.input_bytes
        if entry.graph is not None:
            self._graphs[key] = entry
            self._graphs_of.setdefault(key[1], {})[key] = None
            self.nbytes += entry.graph_bytes
        self._evict()

    def take(self, by: Key) -> tuple[list[Tensor], KeptGraph | None] | None:
        """Inputs and graph for a backward pass, or none. A graph serves once; inputs stay for a retry."""
        key = (by[0].digest, by[1], by[2])
        entry = self._fresh.pop(key, None) or self._spent.pop(key, None)
        if entry is None:
            return None
        graph = entry.graph
        self._drop_graph(key)
        self._spent[key] = entry
        return entry.inputs, graph

    def drop_graphs(self, uid: str) -> None:
        """The weights of an expert have changed: its graphs are of no use any more."""
        for key in list(self._graphs_of.get(uid, ())):
            self._drop_graph(key)

    def drop_expert(self, uid: str) -> None:
        """The expert is no longer held."""
        for key in [k for k in (*self._fresh, *self._spent) if k[1] == uid]:
            self._forget(key)

    def clear(self) -> None:
        self._fresh.clear()
        self._spent.clear()
        self._graphs.clear()
        self._graphs_of.clear()
        self.nbytes = 0

    def _drop_graph(self, key: _Flat) -> None:
        entry = self._graphs.pop(key, None)
        if entry is not None:
            entry.graph = None
            self.nbytes -= entry.graph_bytes
            of_expert = self._graphs_of[key[1]]
            del of_expert[key]
            if not of_expert:
                del self._graphs_of[key[1]]

    def _forget(self, key: _Flat) -> None:
        self._drop_graph(key)
        entry = self._fresh.pop(key, None) or self._spent.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.input_bytes

    def _evict(self) -> None:
        while self.nbytes > self._max_bytes:
            if self._spent:
                self._forget(next(iter(self._spent)))
            elif self._graphs:
                self._drop_graph(next(iter(self._graphs)))
            else:
                self._forget(next(iter(self._fresh)))
