"""Lookups without a network: convergence, slow and failed peers, early ends, batching."""

from __future__ import annotations

import random

from swarm.dht.crawl import MAX_BATCH, MAX_CANDIDATES, Crawl, Lookup, Read, State
from swarm.dht.records import Copy, Record
from swarm.dht.routing import PeerNode
from swarm.identity import PeerId
from swarm.net.transport import Contact
from tests.support import deterministic_identity

AUTHOR = deterministic_identity("author").public_key


def node(position: int) -> PeerNode:
    return PeerNode(Contact(PeerId(position.to_bytes(20, "big") + bytes(12)), ("127.0.0.1:1",)))


def copy(version: int = 1, subkey: str = "") -> Copy:
    return Copy(Record(AUTHOR, "key", subkey, b"\x01", version, 1000, False, bytes(64)), 9.0)


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


def test_candidates_are_bounded_to_the_nearest() -> None:
    lookup = Lookup(0, MAX_CANDIDATES * 2, [node(i) for i in range(1000, 0, -1)])
    assert [n.long_id for n in lookup.window()] == list(range(1, MAX_CANDIDATES + 1))


def read(*, agreement: int = 2, own: list[Copy] | None = None, authored: list[Copy] | None = None) -> Read:
    return Read(
        "key",
        0,
        3,
        [node(i) for i in (1, 2, 3, 4)],
        me=node(2**159),
        own=own or [],
        authored=authored or [],
        agreement=agreement,
    )


def test_a_read_ends_when_two_replicas_agree() -> None:
    reading = read()
    one, two, _ = reading.next(3)
    reading.reply(one, [copy(2)], [])
    assert not reading.done
    reading.reply(two, [copy(2)], [])
    assert reading.done


def test_a_read_goes_on_while_replicas_differ_and_names_the_stale() -> None:
    reading = read()
    one, two, three = reading.next(3)
    reading.reply(one, [copy(2)], [])
    reading.reply(two, [copy(1)], [])
    assert not reading.done
    reading.reply(three, [], [])
    assert reading.done  # all of the nearest have answered
    assert reading.merged == {copy().record.entry_id: copy(2)}
    assert [(n.long_id, len(c)) for n, c in reading.stale()] == [(2, 1), (3, 1)]


def test_agreement_means_the_union_and_not_just_each_other() -> None:
    reading = read()
    one, two, _ = reading.next(3)
    reading.reply(one, [copy(1, "a")], [])
    reading.reply(two, [copy(1, "b")], [])
    assert not reading.done
    assert len(reading.merged) == 2


def test_a_full_read_asks_all_of_the_nearest() -> None:
    reading = read(agreement=0)
    nodes = reading.next(3)
    for peer in nodes[:2]:
        reading.reply(peer, [copy()], [])
    assert not reading.done
    reading.reply(nodes[2], [copy()], [])
    assert reading.done


def test_finding_nothing_takes_the_word_of_all_of_the_nearest() -> None:
    reading = read()
    nodes = reading.next(3)
    for peer in nodes[:2]:
        reading.reply(peer, [], [])
    assert not reading.done
    reading.reply(nodes[2], [], [])
    assert reading.done
    assert reading.merged == {}


def test_our_own_records_are_merged_in() -> None:
    assert list(read(authored=[copy(3)]).merged.values()) == [copy(3)]


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


def test_a_peer_that_failed_is_tried_by_no_other_lookup_of_the_crawl() -> None:
    peers = [node(1), node(2)]
    first, second = Lookup(0, 1, peers), Lookup(3, 1, peers)
    crawl = Crawl([first, second], 1)
    dead = next(ask for ask in crawl.next() if ask.node is peers[0])
    crawl.failed(dead)
    assert second.state(peers[0]) in (State.FAILED, State.NEW, State.ANSWERED, State.ASKED)
    assert first.state(peers[0]) is State.FAILED
    assert peers[0] not in second.window() or second.state(peers[0]) is not State.NEW
