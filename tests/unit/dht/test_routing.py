"""The routing table: aligned buckets, splitting, ping before evict, subnet caps, lost peers."""

from __future__ import annotations

import random

import pytest
from kademlia.node import Node
from kademlia.routing import RoutingTable

from swarm.dht.routing import ID_BITS, LOST_KEPT, MAX_PER_SUBNET, UNREACHED_KEPT, AddressBook, PeerNode, Table
from swarm.identity import PeerId
from swarm.net.transport import Contact


def contact(position: int, address: str = "127.0.0.1:1") -> Contact:
    return Contact(PeerId(position.to_bytes(20, "big") + bytes(12)), (address,))


def node(position: int, address: str = "127.0.0.1:1") -> PeerNode:
    return PeerNode(contact(position, address))


def table(own: int = 0, ksize: int = 4) -> Table:
    return Table(node(own), ksize, lambda: 0.0)


def test_buckets_cover_the_ids_exactly_and_are_aligned() -> None:
    filled = table()
    for i in range(200):
        filled.add_contact(node((i * 0x9E3779B97F4A7C15F39CC0605CEDC8341082276B) % 2**ID_BITS))
    assert filled.buckets[0].range[0] == 0
    assert filled.buckets[-1].range[1] == 2**ID_BITS - 1
    for left, right in zip(filled.buckets, filled.buckets[1:], strict=False):
        assert left.range[1] + 1 == right.range[0]
    for bucket in filled.buckets:
        width = bucket.range[1] - bucket.range[0] + 1
        assert width & (width - 1) == 0
        assert bucket.range[0] % width == 0
        assert all(bucket.range[0] <= n.long_id <= bucket.range[1] for n in bucket.nodes.values())
        assert not bucket.nodes.keys() & bucket.replacement_nodes.keys()


@pytest.mark.parametrize("position", [0, 1, 2**159 - 1, 2**159, 2**160 - 1])
def test_ids_at_the_bounds_have_a_bucket(position: int) -> None:
    filled = table(own=12345, ksize=1)
    for i in range(8):
        filled.add_contact(node(2**150 * i + 7))
    filled.add_contact(node(position))
    bucket = filled.buckets[filled.get_bucket_for(node(position))]
    assert bucket.range[0] <= position <= bucket.range[1]


def test_the_package_alone_misses_the_nearest() -> None:
    """The fault that `Table` mends is real: if this fails, the package was repaired and `Table` may shrink."""
    own, target = node(0), 2**159 + 2**158
    theirs, ours = RoutingTable(None, 4, Node(own.id)), table()
    for position in [2**159 + i for i in range(4)] + [target ^ 1, target ^ 2]:
        theirs.add_contact(Node(node(position).id))
        ours.add_contact(node(position))
    nearest = [n.long_id for n in ours.nearest(target, 2)]
    assert nearest == [target ^ 1, target ^ 2]
    assert [n.long_id for n in theirs.find_neighbors(Node(node(target).id), 1)] != [target ^ 1]


def test_we_are_never_in_our_own_table() -> None:
    own = table(own=5)
    own.add_contact(node(5))
    assert own.all_nodes() == []


def test_a_full_bucket_names_its_oldest_for_a_ping_and_the_new_one_waits() -> None:
    filled = table(own=0, ksize=2)
    far = [node(2**159 + (i << 120)) for i in range(40)]
    to_ping = [filled.add_contact(n) for n in far]
    named = [n for n in to_ping if n is not None]
    assert named
    old = named[-1]
    assert filled.has(old.id)
    bucket = filled.buckets[filled.get_bucket_for(old)]
    waiting = len(bucket.replacement_nodes)
    assert waiting > 0
    filled.remove_contact(old)
    assert len(bucket.nodes) == 2
    assert len(bucket.replacement_nodes) == waiting - 1


def test_completeness_is_claimed_only_while_fewer_are_known_than_a_bucket_holds() -> None:
    filled = table(own=0, ksize=3)
    for i in range(2):
        filled.add_contact(node(2**159 + i))
    assert filled.complete
    filled.add_contact(node(5))
    assert not filled.complete


def test_gaps_are_positions_at_the_distances_at_which_few_are_known() -> None:
    filled = table(own=0, ksize=20)
    for position in (2**159 + 1, 2**159 + 2, 2**157 + 1, 2**155):
        filled.add_contact(node(position))
    gaps = filled.gaps(2, random.Random(0))
    assert [gap.bit_length() for gap in gaps] == [159, 158, 157, 156]  # two are known at 160
    assert filled.gaps(2, random.Random(1)) != gaps
    assert [gap.bit_length() for gap in table().gaps(1, random.Random(0))] == [160]


def test_a_subnet_of_public_addresses_has_few_places() -> None:
    filled = table(ksize=20)
    for i in range(10):
        filled.add_contact(node(1000 + i, f"8.8.8.{i}:1"))
        filled.add_contact(node(2000 + i, f"127.0.0.1:{i}"))
        filled.add_contact(node(3000 + i, f"[2001:4860:4860::{i}]:1"))
    addresses = [n.contact.addresses[0] for n in filled.all_nodes()]
    assert sum(a.startswith("8.8.8.") for a in addresses) == MAX_PER_SUBNET
    assert sum(a.startswith("[2001:") for a in addresses) == MAX_PER_SUBNET
    assert sum(a.startswith("127.") for a in addresses) == 10


def book(clock: list[float]) -> AddressBook:
    return AddressBook(contact(0), 20, 30.0, lambda: clock[0])


def test_one_sure_failure_or_two_passing_ones_end_a_contact() -> None:
    now = [0.0]
    peers = book(now)
    peers.seen(contact(1))
    peers.seen(contact(2))
    assert peers.failed(contact(1), surely=True)
    assert not peers.failed(contact(2), surely=False)
    peers.seen(contact(2))  # a sign of life clears the strike
    assert not peers.failed(contact(2), surely=False)
    assert peers.failed(contact(2), surely=False)
    assert peers.table.all_nodes() == []


def test_hints_leave_out_ourselves_and_those_that_failed_lately() -> None:
    now = [0.0]
    peers = book(now)
    peers.seen(contact(1))
    peers.failed(contact(1), surely=True)
    assert [n.long_id for n in peers.hints([contact(0), contact(1), contact(2)])] == [2]
    assert peers.table.all_nodes() == []  # a hint is not a contact
    now[0] = 31.0
    assert [n.long_id for n in peers.hints([contact(1)])] == [1]


def test_a_contact_that_moved_is_found_at_its_new_address() -> None:
    peers = book([0.0])
    peers.seen(contact(1, "127.0.0.1:1"))
    peers.seen(contact(1, "127.0.0.1:2"))
    assert [n.contact.addresses for n in peers.table.all_nodes()] == [("127.0.0.1:2",)]


def test_what_a_caller_says_of_its_addresses_changes_nothing() -> None:
    now = [0.0]
    peers = book(now)
    assert not peers.called(contact(1))
    assert peers.table.all_nodes() == []
    peers.seen(contact(1))
    peers.failed(contact(1), surely=False)
    now[0] = 5.0
    assert peers.called(contact(1))  # a sign of life from where we had reached it
    (known,) = peers.table.all_nodes()
    assert (known.seen_s, known.strikes) == (5.0, 0)
    now[0] = 9.0
    assert not peers.called(contact(1, "127.0.0.1:2"))
    assert (known.contact, known.seen_s) == (contact(1), 5.0)
    assert peers.called(Contact(contact(3).peer_id, ()))  # it can be called nowhere: nothing to verify
    assert peers.called(contact(0))  # ourselves
    assert len(peers.table.all_nodes()) == 1


def test_it_matters_at_once_where_neighbours_are_and_peers_that_moved() -> None:
    peers = book([0.0])
    for i in range(30):
        peers.seen(contact(2**159 + (i << 100)))
    far, near, moved = contact(2**159 + 2**158), contact(1), contact(2**159 + (3 << 100), "127.0.0.1:2")
    assert not peers.table.complete
    assert peers.matters(near)
    assert peers.matters(moved)
    assert not peers.matters(far)
    small = book([0.0])
    assert small.matters(far)  # while everybody is known, everybody matters


def test_a_table_wants_those_for_whom_there_is_a_place() -> None:
    filled = table(own=0, ksize=4)
    far = [node(2**159 + i) for i in range(50)]
    assert filled.wants(far[0])
    for n in far:
        filled.add_contact(n)
    assert not filled.wants(node(2**159 + 60))  # full, and of a depth at which it is not split
    assert not filled.wants(filled.all_nodes()[0])
    assert not filled.wants(node(0))
    assert filled.wants(node(7))


def test_a_peer_that_timed_out_is_tried_again_before_it_is_given_up() -> None:
    peers = book([0.0])
    peers.seen(contact(1))
    peers.failed(contact(1), surely=False)
    assert [n.long_id for n in peers.table.nearest(1, 5)] == [1]
    assert peers.may_try(contact(1))
    peers.failed(contact(1), surely=False)
    assert peers.table.all_nodes() == []
    assert not peers.may_try(contact(1))
    assert contact(1).peer_id in peers.lost  # upkeep comes back to it


def test_a_peer_without_addresses_stays_out() -> None:
    peers = book([0.0])
    peers.seen(Contact(contact(1).peer_id, ()))
    assert peers.table.all_nodes() == []


def test_lost_peers_are_remembered_within_bounds() -> None:
    peers = book([0.0])
    for i in range(1, LOST_KEPT + 10):
        peers.seen(contact(i))
        peers.failed(contact(i), surely=True)
    assert len(peers.lost) == LOST_KEPT


def test_a_wrong_address_that_a_liar_told_costs_the_peer_nothing() -> None:
    peers = book([0.0])
    peers.seen(contact(1, "127.0.0.1:1"))
    assert not peers.failed(contact(1, "127.0.0.1:666"), surely=True)
    assert [n.contact.addresses for n in peers.table.all_nodes()] == [("127.0.0.1:1",)]
    peers.failed(contact(2, "127.0.0.1:666"), surely=True)
    assert peers.hints([contact(2, "127.0.0.1:666")]) == []
    assert [n.contact.addresses for n in peers.hints([contact(2, "127.0.0.1:2")])] == [("127.0.0.1:2",)]


def test_invented_contacts_do_not_displace_the_peers_that_one_could_return_to() -> None:
    peers = book([0.0])
    peers.seen(contact(1))
    peers.failed(contact(1), surely=True)
    for i in range(2, 2 * UNREACHED_KEPT):
        peers.failed(contact(i), surely=True)
    assert [c for c, _ in peers.lost.values()] == [contact(1)]
