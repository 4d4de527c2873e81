"""Lookups without a network: convergence, slow and failed peers, early ends, batching."""

from __future__ import annotations

import random

from swarm.dht.crawl import MAX_BATCH, MAX_CANDIDATES, MAX_NEAR_PER_SUBNET, Crawl, Lookup, State
from swarm.dht.routing import PeerNode
from swarm.identity import PeerId
from swarm.net.transport import Contact
from tests.support import deterministic_identity

AUTHOR = deterministic_identity("author").public_key


def node(position: int, address: str = "127.0.0.1:1") -> PeerNode:
    return PeerNode(Contact(PeerId(position.to_bytes(20, "big") + bytes(12)), (address,)))


def test_a_lookup_finds_exactly_the_nearest_of_a_thousand() -> None:
    rng = random.Random(5)
    nodes = [node(rng.getrandbits(160)) for _ in range(1000)]
    target = rng.getrandbits(160)
    by_distance = sorted(nodes, key=lambda n: n.long_id ^ target)
    lookup = Lookup(target, 5, nodes[:3])
    asked = 0
    while not lookup.done:
        asks = lookup.next(3)
        assert len(asks) <= 3
        for peer in asks:
            asked += 1
            known = rng.sample(nodes, 40)  # what this peer knows: some peers at random, and its own neighbours
            known += sorted(nodes, key=lambda n: n.long_id ^ peer.long_id)[:30]
            lookup.answered(peer, sorted(known, key=lambda n: n.long_id ^ target)[:20])
    assert lookup.nearest() == by_distance[:5]
    assert asked < 40


def test_no_more_than_the_allowed_requests_are_in_flight() -> None:
    lookup = Lookup(0, 5, [node(i) for i in range(1, 10)])
    first = lookup.next(3)
    assert len(first) == 3
    assert lookup.next(3) == []
    lookup.answered(first[0], [])
    assert len(lookup.next(3)) == 1


def test_a_failed_peer_is_replaced_by_the_next_nearest() -> None:
    lookup = Lookup(0, 2, [node(1), node(2), node(3)])
    one, two = lookup.next(3)
    lookup.failed(one)
    lookup.answered(two, [])
    assert [n.long_id for n in lookup.next(3)] == [3]
    assert not lookup.done


def test_a_slow_peer_is_not_waited_for_but_its_late_answer_counts() -> None:
    lookup = Lookup(0, 2, [node(1), node(2), node(3)])
    slow, two = lookup.next(2)
    lookup.slow(slow)
    lookup.answered(two, [])
    (three,) = lookup.next(2)
    lookup.answered(three, [])
    assert lookup.done
    assert lookup.nearest() == [two, three]
    lookup.answered(slow, [])
    assert lookup.nearest() == [slow, two]


def test_a_lookup_whose_only_peer_is_slow_waits_for_it() -> None:
    lookup = Lookup(0, 2, [node(1)])
    (only,) = lookup.next(2)
    lookup.slow(only)
    assert not lookup.done
    lookup.failed(only)
    assert lookup.done


def test_our_own_word_is_not_enough_while_others_may_still_answer() -> None:
    me = node(2**159)
    lookup = Lookup(0, 2, [node(1)], me)
    (only,) = lookup.next(2)
    lookup.slow(only)
    assert not lookup.done
    lookup.failed(only)
    assert lookup.done
    assert lookup.nearest() == [me]


def test_as_many_requests_as_allowed_are_in_flight_at_all_times() -> None:
    rng = random.Random(8)
    nodes = [node(rng.getrandbits(160)) for _ in range(300)]
    for trial in range(30):
        lookup = Lookup(rng.getrandbits(160), 5, rng.sample(nodes, 4))
        flying: list[PeerNode] = []
        while not lookup.done:
            flying += lookup.next(3)
            idle = [n for n in lookup.window() if lookup.state(n) is State.NEW]
            in_flight = [n for n in flying if lookup.state(n) is State.ASKED]
            assert len(in_flight) == 3 or not idle, trial
            peer = flying.pop(rng.randrange(len(flying)))
            what = rng.random()
            if what < 0.2:
                lookup.failed(peer)
            elif what < 0.4 and lookup.state(peer) is State.ASKED:
                lookup.slow(peer)
                flying.append(peer)
            else:
                lookup.answered(peer, rng.sample(nodes, 8))


def test_depth_is_how_many_requests_in_a_row_led_to_the_nearest() -> None:
    me = node(2**159)
    lookup = Lookup(0, 2, [node(100), node(90)], me)
    assert lookup.depth == 0
    far, other = lookup.next(2)
    lookup.answered(far, [node(50)])
    lookup.answered(other, [])
    assert lookup.depth == 1
    (second,) = lookup.next(2)
    lookup.answered(second, [node(10)])
    (third,) = lookup.next(2)
    lookup.answered(third, [node(10), node(50)])
    assert lookup.done
    assert lookup.depth == 3


def test_candidates_are_bounded_to_the_nearest() -> None:
    lookup = Lookup(0, MAX_CANDIDATES * 2, [node(i) for i in range(1000, 0, -1)])
    assert [n.long_id for n in lookup.window()] == list(range(1, MAX_CANDIDATES + 1))


def test_lookups_of_one_crawl_share_requests() -> None:
    peers = [node(i << 150) for i in range(1, 6)]
    lookups = [Lookup(target, 5, peers) for target in range(200)]
    crawl = Crawl(lookups, 3)
    asks = crawl.next()
    assert sum(len(ask.lookups) for ask in asks) == 600
    assert all(len(ask.lookups) <= MAX_BATCH for ask in asks)
    assert len(asks) <= 600 // MAX_BATCH + 5
    while asks:
        for ask in asks:
            for lookup in ask.lookups:
                lookup.answered(ask.node, [])
        asks = crawl.next()
    assert crawl.done


def test_a_crawl_of_many_positions_sends_no_more_requests_than_there_is_room_for() -> None:
    rng = random.Random(3)
    peers = [node(rng.getrandbits(160)) for _ in range(400)]
    targets = [rng.getrandbits(160) for _ in range(100)]
    crawl = Crawl([Lookup(t, 3, sorted(peers, key=lambda n: n.long_id ^ t)[:8]) for t in targets], 3)
    flying = crawl.next(10)
    assert len(flying) == 10
    assert crawl.next(0) == []
    while flying:
        ask = flying.pop()
        for lookup in ask.lookups:
            lookup.answered(ask.node, [])
        flying += crawl.next(10 - len(flying))
        assert len(flying) <= 10
    assert crawl.done


class Counted(Lookup):
    """Counts how often it is looked at."""

    looks = 0

    @property
    def done(self) -> bool:
        Counted.looks += 1
        return super().done


def test_a_crawl_of_many_positions_ends_exactly_when_all_are_found_and_looks_at_those_that_changed() -> None:
    rng = random.Random(11)
    peers = [node(rng.getrandbits(160)) for _ in range(80)]
    dead = {peer.id for peer in rng.sample(peers, 8)}
    lookups = [Counted(rng.getrandbits(160), 5, rng.sample(peers, 6)) for _ in range(300)]
    crawl = Crawl(lookups, 3)
    Counted.looks = 0
    flying, told = crawl.next(20), 0
    while flying:
        ask = flying.pop(rng.randrange(len(flying)))
        told += len(ask.lookups)
        if rng.random() < 0.1:
            crawl.slow(ask)
            flying += crawl.next(20 - len(flying))
        if ask.node.id in dead:
            crawl.failed(ask)
            told += len(lookups)  # nobody is to try it
        else:
            for lookup in ask.lookups:
                lookup.answered(ask.node, sorted(peers, key=lambda n: n.long_id ^ lookup.target)[:8])
        looks, done = Counted.looks, all(lookup.done for lookup in lookups)
        Counted.looks = looks
        assert crawl.done == done
        flying += crawl.next(20 - len(flying))
        assert len(flying) <= 20
    assert crawl.done
    assert Counted.looks <= len(lookups) + 2 * told
    alive = [peer for peer in peers if peer.id not in dead]
    for lookup in lookups:
        assert lookup.nearest() == sorted(alive, key=lambda n: n.long_id ^ lookup.target)[:5]


def test_a_busy_peer_is_asked_only_what_fills_a_request() -> None:
    peers = [node(1 << 150), node(2 << 150)]
    lookups = [Lookup(target, 2, peers) for target in range(MAX_BATCH + 6)]
    crawl = Crawl(lookups, 2)
    busy = {peers[0].id}
    assert [len(ask.lookups) for ask in crawl.next(10, busy=busy) if ask.node is peers[0]] == [MAX_BATCH]
    few = Crawl([Lookup(target, 2, peers) for target in range(6)], 2)
    assert [ask.node for ask in few.next(10, busy=busy)] == [peers[1]]
    assert [(ask.node, len(ask.lookups)) for ask in few.next(10)] == [(peers[0], 6)]


def test_a_peer_that_failed_is_tried_by_no_other_lookup_of_the_crawl() -> None:
    peers = [node(1), node(2)]
    first, second = Lookup(0, 1, peers), Lookup(3, 1, peers)
    crawl = Crawl([first, second], 1)
    dead = next(ask for ask in crawl.next() if ask.node is peers[0])
    crawl.failed(dead)
    assert second.state(peers[0]) in (State.FAILED, State.NEW, State.ANSWERED, State.ASKED)
    assert first.state(peers[0]) is State.FAILED
    assert peers[0] not in second.window() or second.state(peers[0]) is not State.NEW


def test_whoever_invents_contacts_delays_a_lookup_only_a_little() -> None:
    honest = [node(1000 + i) for i in range(5)]
    lookup = Lookup(0, 3, [node(5000), node(6000)])
    for peer in lookup.next(3):
        lookup.answered(peer, [node(1 + i) for i in range(20)] if peer.long_id == 5000 else honest)
    wasted = 0
    while not lookup.done:
        for peer in lookup.next(3):
            if peer.long_id < 1000:
                wasted += 1
                lookup.failed(peer)
            else:
                lookup.answered(peer, honest)
    assert wasted == 3
    assert [n.long_id for n in lookup.nearest()] == [1000, 1001, 1002]


def test_a_peer_that_a_liar_named_at_a_wrong_address_is_found_at_the_right_one() -> None:
    lookup = Lookup(0, 1, [node(7), node(8)])
    (liar,), honest = lookup.next(3), node(8)
    lookup.answered(liar, [node(1, "127.0.0.1:666")])
    (wrong,) = lookup.next(3)
    assert wrong.contact.addresses == ("127.0.0.1:666",)
    lookup.answered(honest, [node(1, "127.0.0.1:1")])
    lookup.failed(wrong)
    (right,) = lookup.next(3)
    assert right.contact.addresses == ("127.0.0.1:1",)
    lookup.failed(wrong)  # its second failure, from another lookup's request, is not this one's
    lookup.answered(right, [])
    assert [n.contact.addresses for n in lookup.nearest()] == [("127.0.0.1:1",)]


def test_one_subnet_does_not_make_up_all_the_nearest_while_there_are_others() -> None:
    crowd = [node(1 + i, f"8.8.8.{i}:1") for i in range(10)]
    others = [node(100 + i, f"9.9.{i}.1:1") for i in range(10)]
    ids = [n.long_id for n in Lookup(0, 5, [*crowd, *others]).window()]
    assert ids == [1, 2, 100, 101, 102]
    assert MAX_NEAR_PER_SUBNET == 2
    assert [n.long_id for n in Lookup(0, 5, crowd).window()] == [1, 2, 3, 4, 5]
