"""Lookups as state machines: which peers to ask next, when to stop. No I/O.

A lookup asks the nearest known peers of a position, learns nearer ones from their answers, and is done when the `width`
nearest that are alive have answered (Kademlia, Maymounkov and Mazieres 2002), with two changes: it keeps `parallelism`
requests in flight at all times instead of waiting for the slowest of a batch, and a peer that takes long is no longer
counted among the nearest, while its answer is still welcome. A crawl runs several lookups at once and asks one peer
about all positions that it is near to in one request.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import itemgetter

from kademlia.node import Node, NodeHeap

from swarm.dht.records import Copy, EntryId, merge
from swarm.dht.routing import ID_BYTES, PeerNode

MAX_CANDIDATES = 256
"""Peers that one lookup considers; the farthest beyond are forgotten."""
MAX_BATCH = 64
"""Positions in one request."""


class State(Enum):
    NEW = auto()
    ASKED = auto()
    SLOW = auto()
    ANSWERED = auto()
    FAILED = auto()


class Candidates(NodeHeap):  # type: ignore[misc]
    """kademlia's heap of nodes by distance, kept sorted, with constant-time membership (the package's is linear)."""

    heap: list[tuple[int, PeerNode]]

    def __init__(self, target: int) -> None:
        super().__init__(Node(target.to_bytes(ID_BYTES, "big")), MAX_CANDIDATES)
        self._ids: dict[bytes, None] = {}

    def __contains__(self, node: Node) -> bool:
        return node.id in self._ids

    def push(self, nodes: Iterable[PeerNode]) -> None:
        target = self.node.long_id
        for node in nodes:
            if node.id not in self._ids:
                self._ids[node.id] = None
                insort(self.heap, (node.long_id ^ target, node), key=itemgetter(0))
        while len(self.heap) > MAX_CANDIDATES:
            del self._ids[self.heap.pop()[1].id]


class Lookup:
    """The search for the `width` nearest peers of a position.

    Args:
        target: The position.
        width: How many of the nearest must have answered.
        seeds: Candidates to start from.
        me: Ourselves, when we count among the nearest (we hold records too); none when we only look for others.
    """

    def __init__(self, target: int, width: int, seeds: Iterable[PeerNode], me: PeerNode | None = None) -> None:
        self.target = target
        self._width = width
        self._candidates = Candidates(target)
        self._state: dict[bytes, State] = {}
        self._asked = 0
        self._slow = 0
        if me is not None:
            self._candidates.push([me])
            self._state[me.id] = State.ANSWERED
        self._candidates.push(seeds)

    @property
    def width(self) -> int:
        """How many of the nearest must have answered."""
        return self._width

    def state(self, node: PeerNode) -> State:
        return self._state.get(node.id, State.NEW)

    @property
    def satisfied(self) -> bool:
        """Whether the answers so far suffice, although more peers could be asked."""
        return False

    @property
    def done(self) -> bool:
        """Whether nothing more needs to be asked or awaited."""
        if self.satisfied:
            return True
        window = self.window()
        if any(self.state(node) is not State.ANSWERED for node in window):
            return False
        return bool(window) or not self._slow

    def window(self) -> list[PeerNode]:
        """The `width` nearest candidates that have not failed and are not slow."""
        found: list[PeerNode] = []
        for _, node in self._candidates.heap:
            if self.state(node) not in (State.FAILED, State.SLOW):
                found.append(node)
                if len(found) == self.width:
                    break
        return found

    def nearest(self, count: int | None = None) -> list[PeerNode]:
        """The nearest peers that answered, nearest first."""
        answered = [node for _, node in self._candidates.heap if self.state(node) is State.ANSWERED]
        return answered[: count or self.width]

    def next(self, parallelism: int) -> list[PeerNode]:
        """Peers to ask now, so that `parallelism` requests are in flight; they count as asked."""
        if self._asked >= parallelism or self.satisfied:
            return []
        found = [n for n in self.window() if self.state(n) is State.NEW][: parallelism - self._asked]
        for node in found:
            self._state[node.id] = State.ASKED
        self._asked += len(found)
        return found

    def answered(self, node: PeerNode, nearer: Iterable[PeerNode]) -> None:
        self._leave(node, State.ANSWERED)
        self._candidates.push(nearer)

    def failed(self, node: PeerNode) -> None:
        self._leave(node, State.FAILED)

    def slow(self, node: PeerNode) -> None:
        """The peer has not answered for long; go on without it."""
        if self.state(node) is State.ASKED:
            self._leave(node, State.SLOW)
            self._slow += 1

    def _leave(self, node: PeerNode, state: State) -> None:
        before = self.state(node)
        if before is State.ASKED:
            self._asked -= 1
        elif before is State.SLOW:
            self._slow -= 1
        self._state[node.id] = state


class Read(Lookup):
    """A lookup of the records of one key.

    Args:
        key: The key.
        own: What we hold of it ourselves, as one of the replicas; none when we do not count.
        authored: Our own records of the key, which are merged in but do not count as a replica.
        agreement: Replicas that must hold exactly the merged union for an early end; 0 asks all `width`.
        wide: How many must have answered before the key counts as empty.
    """

    def __init__(
        self, key: str, target: int, width: int, seeds: Iterable[PeerNode], *, me: PeerNode, own: Sequence[Copy],
        authored: Sequence[Copy], agreement: int, wide: int = 0,
    ) -> None:  # fmt: skip
        self.merged: dict[EntryId, Copy] = merge([*own, *authored])
        self._wide = max(width, wide)
        super().__init__(target, width, seeds, me)
        self.key = key
        self._agreement = agreement
        self._replies: dict[bytes, dict[EntryId, Copy]] = {me.id: merge(own)}
        self._authored = list(authored)
        self._agreed = False

    @property
    def width(self) -> int:
        return self._width if self.merged else self._wide

    @property
    def satisfied(self) -> bool:
        return self._agreed

    def reply(self, node: PeerNode, copies: Sequence[Copy], nearer: Iterable[PeerNode]) -> None:
        """A replica answered with these checked copies."""
        self.answered(node, nearer)
        self._replies[node.id] = merge(copies)
        merge(copies, self.merged)
        if self._agreement and self.merged:
            union = {entry_id: copy.record.rank for entry_id, copy in self.merged.items()}
            agreeing = 0
            for holder in self.window():
                reply = self._replies.get(holder.id)
                if reply is not None and {e: c.record.rank for e, c in reply.items()} == union:
                    agreeing += 1
            self._agreed = agreeing >= self._agreement

    def stale(self) -> list[tuple[PeerNode, list[Copy]]]:
        """Replicas among the nearest that lack something of the union, with what they lack."""
        result: list[tuple[PeerNode, list[Copy]]] = []
        for node in self.window():
            if self.state(node) is not State.ANSWERED:
                continue
            reply = self._replies.get(node.id, {})
            lacking = [
                c for e, c in self.merged.items() if (held := reply.get(e)) is None or held.record.rank < c.record.rank
            ]
            if lacking:
                result.append((node, lacking))
        return result


@dataclass(eq=False, slots=True)
class Ask:
    """One request to send: a peer, and the lookups it is asked for."""

    node: PeerNode
    lookups: list[Lookup] = field(default_factory=list)


class Crawl:
    """Several lookups at once.

    Args:
        lookups: What to look for.
        parallelism: Requests in flight for each lookup.
    """

    def __init__(self, lookups: Sequence[Lookup], parallelism: int) -> None:
        self.lookups = lookups
        self._parallelism = parallelism

    @property
    def done(self) -> bool:
        return all(lookup.done for lookup in self.lookups)

    def next(self) -> list[Ask]:
        """Requests to send now, one for each peer and at most `MAX_BATCH` positions."""
        asks: dict[bytes, Ask] = {}
        full: list[Ask] = []
        for lookup in self.lookups:
            for node in lookup.next(self._parallelism):
                ask = asks.setdefault(node.id, Ask(node))
                ask.lookups.append(lookup)
                if len(ask.lookups) == MAX_BATCH:
                    full.append(asks.pop(node.id))
        return [*full, *asks.values()]

    def failed(self, ask: Ask) -> None:
        """The peer did not answer: no lookup waits for it or tries it again."""
        for lookup in ask.lookups:
            lookup.failed(ask.node)
        for lookup in self.lookups:
            if lookup.state(ask.node) is State.NEW:
                lookup.failed(ask.node)

    def slow(self, ask: Ask) -> None:
        for lookup in ask.lookups:
            lookup.slow(ask.node)
