"""Lookups as state machines: which peers to ask next, when to stop. No I/O.

A lookup asks the nearest known peers of a position, learns nearer ones from their answers, and is done when the `width`
nearest that are alive have answered (Kademlia, Maymounkov and Mazieres 2002), with two changes: it keeps `parallelism`
requests in flight at all times instead of waiting for the slowest of a batch, and a peer that takes long is no longer
counted among the nearest, while its answer is still welcome. A crawl runs several lookups at once and asks one peer
about many positions in one request; an answer costs work for the lookups that it concerns, however many there are.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import nlargest
from itertools import islice
from operator import itemgetter
from typing import TypeAlias

from kademlia.node import Node, NodeHeap

from swarm.dht.hearsay import Hearsay
from swarm.dht.routing import ID_BYTES, PeerNode

MAX_CANDIDATES = 256
"""Peers that one lookup considers; the farthest beyond are forgotten."""
MAX_ELSEWHERE = 3
"""Further addresses of one candidate that are tried when the first do not lead to it."""
MAX_NEAR_PER_SUBNET = 2
"""Peers with public addresses in one /24 or /64 among the nearest that count, while there are others: ids near a key
can be searched for, but not in many subnets."""
MAX_BATCH = 64
"""Positions in one request."""


class State(Enum):
    NEW = auto()
    ASKED = auto()
    SLOW = auto()
    TOLD = auto()
    """It answered by a digest of entries that are not known here yet."""
    ANSWERED = auto()
    FAILED = auto()


class Candidates(NodeHeap):  # type: ignore[misc]
    """kademlia's heap of nodes by distance, kept sorted, with constant-time membership (the package's is linear)."""

    heap: list[tuple[int, PeerNode]]

    def __init__(self, target: int) -> None:
        super().__init__(Node(target.to_bytes(ID_BYTES, "big")), MAX_CANDIDATES)
        self._by_id: dict[bytes, PeerNode] = {}
        self._elsewhere: dict[bytes, list[PeerNode]] = {}
        """The same peers at other addresses: one of two who name them may lie."""

    def __contains__(self, node: Node) -> bool:
        return node.id in self._by_id

    def push(self, nodes: Iterable[PeerNode]) -> None:
        target = self.node.long_id
        for node in nodes:
            known = self._by_id.get(node.id)
            if known is None:
                self._by_id[node.id] = node
                insort(self.heap, (node.long_id ^ target, node), key=itemgetter(0))
            elif known.contact.addresses != node.contact.addresses:
                others = self._elsewhere.setdefault(node.id, [])
                if len(others) < MAX_ELSEWHERE and all(o.contact != node.contact for o in others):
                    others.append(node)
        while len(self.heap) > MAX_CANDIDATES:
            gone = self.heap.pop()[1]
            del self._by_id[gone.id]
            self._elsewhere.pop(gone.id, None)

    def current(self, node: PeerNode) -> bool:
        """Whether a candidate is looked for at just these addresses."""
        known = self._by_id.get(node.id)
        return known is None or known.contact.addresses == node.contact.addresses

    def redirect(self, node: PeerNode) -> bool:
        """Look for a candidate at other addresses from now on; false if none are known."""
        others = self._elsewhere.get(node.id)
        if not others or node.id not in self._by_id:
            return False
        other = others.pop(0)
        self._by_id[node.id] = other
        at = bisect_left(self.heap, node.long_id ^ self.node.long_id, key=itemgetter(0))
        self.heap[at] = (self.heap[at][0], other)
        return True


def _spread(nodes: Iterable[PeerNode], count: int) -> list[PeerNode]:
    """The first `count`, of which at most `MAX_NEAR_PER_SUBNET` in one public subnet, unless there are too few."""
    found: list[PeerNode] = []
    spare: list[PeerNode] = []
    taken: Counter[str] = Counter()
    for node in nodes:
        if subnets := node.subnets:
            if any(taken[subnet] >= MAX_NEAR_PER_SUBNET for subnet in subnets):
                spare.append(node)
                continue
            taken.update(subnets)
        found.append(node)
        if len(found) == count:
            break
    return found + spare[: count - len(found)]


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
        self._depth: dict[bytes, int] = {}
        """Of candidates that were not known from the start: so many answers led there."""
        self._answered: dict[bytes, None] = {}
        self._hearsay = Hearsay()
        self._window: list[PeerNode] | None = None
        self.on_change: Callable[[Lookup], None] | None = None
        """Called after everything that may change `wanted` and `done`, except `asked`."""
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
        return bool(self._answered) or not self._slow

    @property
    def depth(self) -> int:
        """Requests in a row that it took to learn of the nearest that answered; 0 if only we ourselves did."""
        return max((self._depth.get(node.id, 1) for node in self.nearest() if node.id in self._answered), default=0)

    def window(self) -> list[PeerNode]:
        """The `width` nearest candidates that count: not failed, not slow, named by somebody who is believed."""
        if self._window is None:
            self._window = _spread((node for _, node in self._candidates.heap if self._eligible(node)), self.width)
        return self._window

    def _eligible(self, node: PeerNode) -> bool:
        state = self.state(node)
        if state is State.NEW:
            return self._hearsay.counts(node.id)
        return state not in (State.FAILED, State.SLOW)

    def nearest(self, count: int | None = None) -> list[PeerNode]:
        """The nearest peers that answered, nearest first."""
        answered = (node for _, node in self._candidates.heap if self.state(node) is State.ANSWERED)
        return _spread(answered, count or self.width)

    def wanted(self, parallelism: int) -> list[PeerNode]:
        """Peers to ask now, so that `parallelism` requests are in flight."""
        if self._asked >= parallelism or self.satisfied:
            return []
        return [n for n in self._useful() if self.state(n) is State.NEW][: parallelism - self._asked]

    def asked(self, node: PeerNode) -> None:
        """A peer that is wanted has been asked."""
        self._state[node.id] = State.ASKED
        self._asked += 1

    def next(self, parallelism: int) -> list[PeerNode]:
        """The wanted peers, who count as asked from now on."""
        found = self.wanted(parallelism)
        for node in found:
            self.asked(node)
        return found

    def _useful(self) -> list[PeerNode]:
        """Who should be asked, if it has not been yet."""
        return self.window()

    def answered(self, node: PeerNode, nearer: Iterable[PeerNode]) -> None:
        self._hear(node, State.ANSWERED, nearer)

    def _hear(self, node: PeerNode, state: State, nearer: Iterable[PeerNode]) -> None:
        self._leave(node, state)
        self._answered[node.id] = None
        self._hearsay.proved(node.id)
        self.learn(node, nearer)

    def learn(self, node: PeerNode, nearer: Iterable[PeerNode]) -> None:
        """A peer, perhaps none of the candidates, names others."""
        nearer = list(nearer)
        new = [n for n in nearer if n not in self._candidates]
        for other in nearer:
            # who is known first-hand, or has answered, needs nobody's word
            if self.state(other) is State.NEW and (other in new or not self._hearsay.first_hand(other.id)):
                self._hearsay.named(other.id, node.id)
        self._candidates.push(nearer)
        self._depth.update(dict.fromkeys((n.id for n in new), self._depth.get(node.id, 1) + 1))
        self._changed()

    def failed(self, node: PeerNode) -> None:
        if self._candidates.current(node):
            self._gone(node, State.FAILED)

    def _gone(self, node: PeerNode, state: State) -> None:
        """A candidate is not at these addresses; others may be known."""
        if self._candidates.redirect(node):
            self._leave(node, State.NEW)
            return
        if self.state(node) is State.ASKED:
            self._hearsay.refuted(node.id)
        self._leave(node, state)

    def slow(self, node: PeerNode) -> None:
        """The peer has not answered for long; go on without it."""
        if self.state(node) is State.ASKED and self._candidates.current(node):
            self._gone(node, State.SLOW)
            if self.state(node) is State.SLOW:
                self._slow += 1

    def _leave(self, node: PeerNode, state: State) -> None:
        before = self.state(node)
        if before is State.ASKED:
            self._asked -= 1
        elif before is State.SLOW:
            self._slow -= 1
        self._state[node.id] = state
        if before is not State.NEW or node in self._candidates:
            self._changed()

    def _changed(self) -> None:
        self._window = None
        if self.on_change is not None:
            self.on_change(self)


@dataclass(eq=False, slots=True)
class Ask:
    """One request to send: a peer, and the lookups it is asked for."""

    node: PeerNode
    lookups: list[Lookup]


_Address: TypeAlias = tuple[bytes, tuple[str, ...]]


class _Wanted:
    """A peer at certain addresses, and the lookups that want to ask it."""

    __slots__ = ("address", "lookups", "node")

    def __init__(self, node: PeerNode) -> None:
        self.node = node
        self.address: _Address = (node.id, node.contact.addresses)
        self.lookups: dict[Lookup, None] = {}


class Crawl:
    """Several lookups at once.

    Args:
        lookups: What to look for.
        parallelism: Requests in flight for each lookup.
    """

    def __init__(self, lookups: Sequence[Lookup], parallelism: int) -> None:
        self.lookups = lookups
        self._parallelism = parallelism
        self._open: dict[Lookup, None] = {}
        """Lookups that are not done, as of when they last changed."""
        self._changed: dict[Lookup, None] = dict.fromkeys(lookups)
        self._wanted: dict[_Address, _Wanted] = {}
        self._wanting: dict[Lookup, list[_Wanted]] = {lookup: [] for lookup in lookups}
        for lookup in lookups:
            lookup.on_change = self._note

    def _note(self, lookup: Lookup) -> None:
        self._changed[lookup] = None

    @property
    def done(self) -> bool:
        self._review()
        return not self._open

    def _review(self) -> None:
        """Look again at the lookups that have changed."""
        while self._changed:
            changed, self._changed = self._changed, {}
            for lookup in changed:
                self._withdraw(lookup)
                for node in lookup.wanted(self._parallelism):
                    wanted = _Wanted(node)
                    wanted = self._wanted.setdefault(wanted.address, wanted)
                    wanted.lookups[lookup] = None
                    self._wanting[lookup].append(wanted)
                if lookup.done:
                    self._open.pop(lookup, None)
                else:
                    self._open[lookup] = None

    def _withdraw(self, lookup: Lookup) -> None:
        for wanted in self._wanting[lookup]:
            del wanted.lookups[lookup]
            if not wanted.lookups:
                del self._wanted[wanted.address]
        self._wanting[lookup].clear()

    def next(self, room: int = sys.maxsize, positions: int = sys.maxsize, busy: Container[bytes] = ()) -> list[Ask]:
        """Requests to send now, each of at most `MAX_BATCH` positions.

        Args:
            room: So many at most, those of most positions first.
            positions: Of so many positions all together; the last request may exceed that.
            busy: Ids of peers that are to be asked only what fills a request.
        """
        self._review()
        if room <= 0:
            return []
        ready = [w for w in self._wanted.values() if len(w.lookups) >= MAX_BATCH or w.node.id not in busy]
        if len(ready) > room:
            ready = nlargest(room, ready, key=lambda wanted: len(wanted.lookups))
        asks: list[Ask] = []
        for wanted in ready:
            least = MAX_BATCH if wanted.node.id in busy else 1
            while len(wanted.lookups) >= least and len(asks) < room and positions > 0:
                lookups = list(islice(wanted.lookups, MAX_BATCH))
                positions -= len(lookups)
                for lookup in lookups:
                    del wanted.lookups[lookup]
                    self._wanting[lookup].remove(wanted)
                    lookup.asked(wanted.node)
                asks.append(Ask(wanted.node, lookups))
            if not wanted.lookups:
                del self._wanted[wanted.address]
        return asks

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
