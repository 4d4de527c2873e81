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
        self._fresh: OrderedDict[Key, CachedForward] = OrderedDict()
        self._spent: OrderedDict[Key, CachedForward] = OrderedDict()
        self._graphs: OrderedDict[Key, CachedForward] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._spent)

    def put(self, key: Key, entry: CachedForward) -> None:
        """Remember a forward pass, in place of one of the same key."""
        self._forget(key)
        self._fresh[key] = entry
        self.nbytes += entry.input_bytes
        if entry.graph is not None:
            self._graphs[key] = entry
            self.nbytes += entry.graph_bytes
        self._evict()

    def take(self, key: Key) -> tuple[list[Tensor], KeptGraph | None] | None:
        """Inputs and graph for a backward pass, or none. A graph serves once; inputs stay for a retry."""
        entry = self._fresh.pop(key, None) or self._spent.pop(key, None)
        if entry is None:
            return None
        graph = entry.graph
        self._drop_graph(key)
        self._spent[key] = entry
        return entry.inputs, graph

    def drop_graphs(self, uid: str) -> None:
        """The weights of an expert have changed: its graphs are of no use any more."""
        for key in [k for k in self._graphs if k[1] == uid]:
            self._drop_graph(key)

    def drop_expert(self, uid: str) -> None:
        """The expert is no longer held."""
        for key in [k for k in (*self._fresh, *self._spent) if k[1] == uid]:
            self._forget(key)

    def clear(self) -> None:
        self._fresh.clear()
        self._spent.clear()
        self._graphs.clear()
        self.nbytes = 0

    def _drop_graph(self, key: Key) -> None:
        entry = self._graphs.pop(key, None)
        if entry is not None:
            entry.graph = None
            self.nbytes -= entry.graph_bytes

    def _forget(self, key: Key) -> None:
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
