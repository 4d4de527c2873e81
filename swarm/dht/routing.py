"""Who is where: the routing table of the `kademlia` package, with its faults mended, and the peers lost lately.

What kademlia 2.2.3 gets wrong and these subclasses put right: `find_neighbors` returns the first k nodes of a bucket
walk, not the k nearest; the root bucket reaches to 2**160, one past the last id, so that no bucket is an aligned
subtree; clocks are `time.monotonic`; a full bucket pings its head in a task that nobody awaits; a node may be in
a bucket and in its replacement cache at once; nothing bounds how many nodes of one subnet a bucket takes.
"""

from __future__ import annotations

import ipaddress
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from kademlia.node import Node
from kademlia.routing import KBucket, RoutingTable

from swarm.identity import PeerId
from swarm.net.transport import Contact

T = TypeVar("T")

ID_BITS = 160
ID_BYTES = ID_BITS // 8
MAX_PER_SUBNET = 4
"""Peers with public addresses in one /24 (IPv4) or /64 (IPv6) that a bucket takes."""
LOST_KEPT = 256
"""Peers remembered after they left the table."""
UNREACHED_KEPT = 1024
"""Hints that led nowhere, remembered for a while."""
NEIGHBOURS = 10
"""The nearest peers, whose claims about where they are get verified at once."""
STRIKES = 2
"""Ambiguous failures in a row after which a peer leaves the table."""


class PeerNode(Node):  # type: ignore[misc]
    """A peer in the table or in a lookup.

    Attributes:
        contact: How to reach it.
        seen_s: Local time of the last sign of life; 0 for a hint.
        strikes: Ambiguous failures since then.
    """

    id: bytes
    long_id: int

    def __init__(self, contact: Contact, seen_s: float = 0.0) -> None:
        super().__init__(contact.peer_id.digest[:ID_BYTES])
        self.contact = contact
        self.seen_s = seen_s
        self.strikes = 0

    @property
    def subnets(self) -> tuple[str, ...]:
        """What the subnet caps count by: all of its public addresses, lest a made-up first one hide the others."""
        return _subnets(self.contact.addresses)


@lru_cache(maxsize=4096)
def _subnets(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(subnet for a in addresses if (subnet := _subnet(a)) is not None))


def _subnet(address: str) -> str | None:
    host = address.rpartition(":")[0].strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    if not ip.is_global:
        return None
    return str(ipaddress.ip_network(f"{ip}/{24 if ip.version == 4 else 64}", strict=False))


class Bucket(KBucket):  # type: ignore[misc]
    """A subtree of the id space: `range` is inclusive and aligned to a power of two."""

    nodes: OrderedDict[bytes, PeerNode]
    replacement_nodes: OrderedDict[bytes, PeerNode]
    range: tuple[int, int]
    ksize: int

    def __init__(self, lower: int, upper: int, ksize: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last_updated = 0.0
        super().__init__(lower, upper, ksize)

    def touch_last_updated(self) -> None:
        self.last_updated = self._clock()

    def split(self) -> tuple[Bucket, Bucket]:
        middle = (self.range[0] + self.range[1]) // 2
        one = Bucket(self.range[0], middle, self.ksize, self._clock)
        two = Bucket(middle + 1, self.range[1], self.ksize, self._clock)
        for node in [*self.nodes.values(), *self.replacement_nodes.values()]:
            (one if node.long_id <= middle else two).add_node(node)
        one.last_updated = two.last_updated = self.last_updated
        return one, two

    def add_node(self, node: PeerNode) -> bool:
        if not super().add_node(node):
            return False
        self.replacement_nodes.pop(node.id, None)
        return True

    def depth(self) -> int:
        """Bits that all ids of this range share (the package counts what the present nodes happen to share)."""
        return ID_BITS - (self.range[1] - self.range[0]).bit_length()

    def full(self) -> bool:
        return len(self.nodes) >= self.ksize

    def crowded(self, node: PeerNode) -> bool:
        """Whether one of the node's subnets has all the places here that it may have."""
        subnets = node.subnets
        if not subnets or node.id in self.nodes:
            return False
        taken = Counter(subnet for other in self.nodes.values() for subnet in other.subnets)
        return any(taken[subnet] >= MAX_PER_SUBNET for subnet in subnets)

    def least(self, target: int) -> int:
        """The smallest distance that an id of this range can have to the target."""
        width = (self.range[1] - self.range[0]).bit_length()
        return ((self.range[0] ^ target) >> width) << width


class Table(RoutingTable):  # type: ignore[misc]
    """Peers that have proved who they are, `ksize` a bucket.

    Args:
        me: Our own node, which is never in the table.
        ksize: Peers a bucket holds.
        clock: Seconds, monotonic.
    """

    buckets: list[Bucket]

    def __init__(self, me: PeerNode, ksize: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        super().__init__(None, ksize, me)

    def flush(self) -> None:
        self.buckets = [Bucket(0, 2**ID_BITS - 1, self.ksize, self._clock)]

    def get_bucket_for(self, node: Node) -> int:
        return self._index(node.long_id)

    def _index(self, position: int) -> int:
        low, high = 0, len(self.buckets) - 1
        while low < high:
            middle = (low + high) // 2
            if position <= self.buckets[middle].range[1]:
                high = middle
            else:
                low = middle + 1
        return low

    def get(self, peer_id: PeerId) -> PeerNode | None:
        node: PeerNode | None = self.buckets[self._index(peer_id.node_id)].nodes.get(peer_id.digest[:ID_BYTES])
        return node

    def has(self, node_id: bytes) -> bool:
        """Whether a node of this id is in the table."""
        return node_id in self.buckets[self._index(int.from_bytes(node_id, "big"))].nodes

    def add_contact(self, node: PeerNode) -> PeerNode | None:
        """Add a node, or mark it as the most recently seen.

        Returns:
            A node of the same bucket that should be pinged: the bucket is full, and the new one waits for a place.
        """
        while True:
            bucket = self.buckets[self.get_bucket_for(node)]
            if node.id == self.node.id or bucket.crowded(node):
                return None
            if bucket.add_node(node):
                return None
            if not self._splits(bucket):
                head: PeerNode = bucket.head()
                return head
            self.split_bucket(self.get_bucket_for(node))

    def wants(self, node: PeerNode) -> bool:
        """Whether there is a place for a node that is not in the table."""
        bucket = self.buckets[self.get_bucket_for(node)]
        if node.id == self.node.id or node.id in bucket.nodes or bucket.crowded(node):
            return False
        return not bucket.full() or self._splits(bucket)

    def _splits(self, bucket: Bucket) -> bool:
        return bool(bucket.has_in_range(self.node)) or bucket.depth() % 5 != 0

    def find_neighbors(self, node: Node, k: int | None = None, exclude: Node | None = None) -> list[PeerNode]:
        return self.nearest(node.long_id, k or self.ksize, None if exclude is None else exclude.id)

    def nearest(self, target: int, k: int, exclude: bytes | None = None) -> list[PeerNode]:
        """Exactly the k nearest known nodes, nearest first.

        Buckets are disjoint subtrees, so that every node of one is nearer than every node of the next, the target's own
        bucket first.
        """
        found = _by_distance(self.buckets[self._index(target)], target, exclude)
        if len(found) < k:
            found = []
            for bucket in sorted(self.buckets, key=lambda b: b.least(target)):
                found += _by_distance(bucket, target, exclude)
                if len(found) >= k:
                    break
        return found[:k]

    @property
    def complete(self) -> bool:
        """Whether everybody is known: who joins looks for as many neighbours as a bucket holds, and found fewer."""
        return len(self) < int(self.ksize)

    def __len__(self) -> int:
        return sum(len(bucket.nodes) for bucket in self.buckets)

    def gaps(self, wanted: int, rng: random.Random) -> list[int]:
        """Random positions at the distances at which fewer than `wanted` nodes are known, farthest first.

        Going by distance (the length of the prefix shared with us) instead of by bucket finds also the empty parts of a
        bucket that has never been split.
        """
        own: int = self.node.long_id
        lengths = Counter(ID_BITS - (node.long_id ^ own).bit_length() for node in self.all_nodes())
        gaps = []
        for length in range(max(lengths, default=0) + 1):
            if lengths[length] < wanted:
                low_bits = ID_BITS - 1 - length
                gaps.append(own ^ (1 << low_bits) ^ rng.getrandbits(low_bits + 1) % (1 << low_bits))
        return gaps

    def all_nodes(self) -> list[PeerNode]:
        return [node for bucket in self.buckets for node in bucket.nodes.values()]


def _by_distance(bucket: Bucket, target: int, exclude: bytes | None) -> list[PeerNode]:
    nodes = sorted(bucket.nodes.values(), key=lambda n: n.long_id ^ target)
    return nodes if exclude is None else [n for n in nodes if n.id != exclude]


class AddressBook:
    """The table and the peers that left it, changed only by what happened. No I/O.

    Args:
        me: Our own contact.
        bucket_size: Peers a bucket holds.
        forgive_s: How long a peer that failed is left out of lookups.
        clock: Seconds, monotonic.
    """

    def __init__(self, me: Contact, bucket_size: int, forgive_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._forgive_s = forgive_s
        self.me = PeerNode(me)
        self.table = Table(self.me, bucket_size, clock)
        self.lost: OrderedDict[PeerId, tuple[Contact, float]] = OrderedDict()
        self._unreached: OrderedDict[Contact, float] = OrderedDict()

    def called(self, contact: Contact) -> bool:
        """A peer called us and says that it can be reached at these addresses.

        Returns:
            Whether that is no news: we have reached it at just these, or it can be called nowhere.
        """
        if contact.peer_id == self.me.contact.peer_id or not contact.addresses:
            return True
        node = self.table.get(contact.peer_id)
        if node is None or not set(contact.addresses) <= set(node.contact.addresses):
            return False
        self.seen(node.contact)
        return True

    def seen(self, contact: Contact) -> PeerNode | None:
        """We have reached a peer at one of these addresses, or know that they are still those where we had reached it.

        Returns:
            A node to ping, see `Table.add_contact`.
        """
        if contact.peer_id == self.me.contact.peer_id or not contact.addresses:
            return None
        node = self.table.get(contact.peer_id) or PeerNode(contact)
        node.contact = contact
        node.seen_s = self._clock()
        node.strikes = 0
        self.lost.pop(contact.peer_id, None)
        self._unreached.pop(contact, None)
        return self.table.add_contact(node)

    def matters(self, contact: Contact) -> bool:
        """Whether it matters now where a caller can be reached: it is a neighbour of ours for whom there is a place in
        the table, or a peer in the table that says it has moved."""
        if self.table.get(contact.peer_id) is not None:
            return True
        node = PeerNode(contact)
        if not self.table.wants(node):
            return False
        near = self.table.nearest(self.me.long_id, NEIGHBOURS)
        farthest = near[-1].long_id ^ self.me.long_id if len(near) == NEIGHBOURS else 1 << ID_BITS
        return self.table.complete or node.long_id ^ self.me.long_id < farthest

    def failed(self, contact: Contact, *, surely: bool) -> bool:
        """A call to the peer failed.

        What fails at addresses that others told us counts against these addresses alone: a liar who sends us elsewhere
        must not make us forget the peer, nor whom else we could return to.

        Args:
            surely: It cannot be reached, or is not of this run; else the failure may be a passing one.

        Returns:
            Whether it left the table.
        """
        node = self.table.get(contact.peer_id)
        own = node is not None and node.contact.addresses == contact.addresses
        if node is not None and own:
            node.strikes += 1
            if not surely and node.strikes < STRIKES:
                return False
            self.table.remove_contact(node)
            self.lost[contact.peer_id] = (contact, self._clock())
            self.lost.move_to_end(contact.peer_id)
            _shrink(self.lost, LOST_KEPT)
        self._unreached[contact] = self._clock()
        self._unreached.move_to_end(contact)
        _shrink(self._unreached, UNREACHED_KEPT)
        return own

    def may_try(self, contact: Contact) -> bool:
        """False for a peer that failed at these addresses a moment ago, and for ourselves."""
        failed_s = self._unreached.get(contact)
        return contact.peer_id != self.me.contact.peer_id and (
            failed_s is None or self._clock() - failed_s > self._forgive_s
        )

    def hints(self, contacts: Sequence[Contact]) -> list[PeerNode]:
        """Contacts that somebody told us, as lookup candidates. They enter the table only when they answer."""
        known = [(self.table.get(c.peer_id), c) for c in contacts if c.addresses]
        return [node or PeerNode(c) for node, c in known if node is not None or self.may_try(c)]


def _shrink(kept: OrderedDict[T, Any], bound: int) -> None:
    while len(kept) > bound:
        kept.popitem(last=False)
