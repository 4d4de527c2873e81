"""Lookups without a network: convergence, slow and failed peers, early ends, batching."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from swarm.dht.crawl import (
    INLINE_BYTES,
    MAX_BATCH,
    MAX_CANDIDATES,
    MAX_NEAR_PER_SUBNET,
    Crawl,
    Lookup,
    Read,
    State,
    Told,
)
from swarm.dht.digests import digest_of
from swarm.dht.records import Copy, Record
from swarm.dht.routing import PeerNode
from swarm.errors import MalformedFrameError
from swarm.identity import PeerId
from swarm.net.transport import Contact
from tests.support import deterministic_identity

AUTHOR = deterministic_identity("author").public_key


def node(position: int, address: str = "127.0.0.1:1") -> PeerNode:
    return PeerNode(Contact(PeerId(position.to_bytes(20, "big") + bytes(12)), (address,)))


def copy(version: int = 1, subkey: str = "", expires_s: float = 9.0) -> Copy:
    return Copy(Record(AUTHOR, "key", subkey, b"\x01", version, 10_000, False, bytes(64)), expires_s)


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


def read(
    *, agreement: int = 2, own: Sequence[Copy] = (), authored: Sequence[Copy] = (), width: int = 3,
    known: Sequence[Copy] = (), peers: int = 4,
) -> Read:  # fmt: skip
    return Read(
        "key", 0, width, [node(i) for i in range(1, peers + 1)], me=node(2**159), own=own, authored=authored,
        agreement=agreement, known=known,
    )  # fmt: skip


def told(*copies: Copy, lifetimes_s: Sequence[float] | None = None) -> Told:
    return Told(digest_of(copies), [9.0] * len(copies) if lifetimes_s is None else lifetimes_s, 0.0)


def test_a_read_ends_when_the_nearest_replicas_agree() -> None:
    reading = read()
    one, two, _ = reading.next(3)
    reading.reply(one, [copy(2)], [])
    assert not reading.done
    reading.reply(two, [copy(2)], [])
    assert reading.done


def test_two_stale_replicas_do_not_end_a_read_while_a_nearer_peer_has_not_answered() -> None:
    reading = read()
    near, two, three = reading.next(3)
    reading.reply(two, [copy(1)], [])
    reading.reply(three, [copy(1)], [])
    assert not reading.done
    reading.reply(near, [copy(2)], [])
    assert list(reading.result().values()) == [copy(2)]
    assert [n.long_id for n, _ in reading.stale()] == [2, 3]


@pytest.mark.parametrize("end", ["failed", "slow"])
def test_a_nearer_peer_that_does_not_answer_leaves_its_vote_to_the_next(end: str) -> None:
    reading = read()
    near, two, three = reading.next(3)
    reading.reply(two, [copy(1)], [])
    reading.reply(three, [copy(1)], [])
    getattr(reading, end)(near)
    assert reading.done


def test_nearer_peers_that_are_heard_of_late_are_asked_before_a_read_ends() -> None:
    reading = Read("key", 0, 3, [node(5), node(6), node(7)], me=node(2**159), own=[], authored=[], agreement=2)
    five, six, _ = reading.next(3)
    reading.reply(five, [copy(1)], [])
    reading.reply(six, [copy(1)], [node(1)])
    assert not reading.done
    assert [n.long_id for n in reading.next(3)] == [1]


def test_no_more_are_asked_than_are_needed_while_the_answers_do_not_differ() -> None:
    reading = read(agreement=3, width=5, peers=8)
    one, two, three = reading.next(3)
    reading.reply(one, [copy(2)], [])
    assert reading.next(3) == []
    reading.reply(two, [copy(1)], [])
    assert [n.long_id for n in reading.next(3)] == [4, 5]
    reading.reply(three, [copy(2)], [])
    assert not reading.done


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


def test_those_asked_later_hear_what_is_known_and_their_yes_counts_as_an_answer() -> None:
    reading = read()
    one, two, _ = reading.next(3)
    assert reading.want(one) == (b"", INLINE_BYTES)
    reading.reply(one, [copy(1, "a"), copy(1, "b")], [])
    assert reading.want(two) == (digest_of([copy(1, "b"), copy(1, "a")]), INLINE_BYTES)
    reading.told(two, told(copy(1, "a"), copy(1, "b")), [])
    assert reading.done
    assert reading.stale() == []


def test_a_large_key_is_fetched_from_one_replica() -> None:
    reading = read(agreement=3)
    entries = [copy(1, "a"), copy(1, "b")]
    one, two, three = reading.next(3)
    for peer in (two, three, one):
        reading.told(peer, told(*entries), [])
        assert not reading.done
    (asked,) = reading.next(3)
    assert reading.want(asked)[1] == 0
    assert reading.next(3) == []
    reading.reply(asked, entries, [])
    assert reading.next(3) == []
    assert reading.done
    assert list(reading.result().values()) == entries


def test_a_replica_that_cannot_give_what_it_named_is_replaced() -> None:
    reading = read(agreement=3, peers=3)
    one, two, three = reading.next(3)
    for peer in (one, two, three):
        reading.told(peer, told(copy(2)), [])
    (asked,) = reading.next(3)
    with pytest.raises(MalformedFrameError):
        reading.told(asked, told(copy(2)), [])
    reading.failed(asked)
    (other,) = reading.next(3)
    assert other is not asked
    reading.reply(other, [copy(2)], [])
    assert reading.next(3) == []
    assert reading.done


def test_replicas_whose_digests_differ_are_all_fetched() -> None:
    reading = read(agreement=3, peers=3)
    one, two, three = reading.next(3)
    reading.told(one, told(copy(1)), [])
    reading.told(two, told(copy(2)), [])
    reading.told(three, told(copy(2)), [])
    (first,) = reading.next(3)
    reading.reply(first, [copy(1)], [])
    (second,) = reading.next(3)
    reading.reply(second, [copy(2)], [])
    assert reading.next(3) == []
    assert reading.done
    assert list(reading.result().values()) == [copy(2)]
    assert [n.long_id for n, _ in reading.stale()] == [1]


def test_what_was_read_earlier_does_not_travel_again() -> None:
    reading = read(known=[copy(1)])
    one, two, _ = reading.next(3)
    assert reading.want(one)[0] == digest_of([copy(1)])
    assert reading.merged == {}  # known to the reader, said by nobody
    reading.told(one, told(copy(1), lifetimes_s=[3.0]), [])
    reading.told(two, told(copy(1), lifetimes_s=[3.0]), [])
    assert reading.done
    assert list(reading.result().values()) == [copy(1, expires_s=3.0)]


def test_lifetimes_must_be_as_many_as_the_entries_and_are_cut_to_what_was_signed() -> None:
    reading = read(known=[copy(1)])
    one, two, _ = reading.next(3)
    with pytest.raises(MalformedFrameError):
        reading.told(one, told(copy(1), lifetimes_s=[3.0, 4.0]), [])
    reading.told(two, told(copy(1), lifetimes_s=[1e6]), [])
    assert [c.expires_s for c in reading.result().values()] == [10.0]


@pytest.mark.parametrize("lie_s", [0.001, 9.9])
def test_one_replica_that_lies_about_lifetimes_changes_little(lie_s: float) -> None:
    reading = read(agreement=0)
    for peer, expires_s in zip(reading.next(3), (lie_s, 5.0, 5.1), strict=True):
        reading.reply(peer, [copy(1, expires_s=expires_s)], [])
    assert reading.done
    (entry,) = reading.result().values()
    assert entry.expires_s in (5.0, 5.1)


def test_replicas_are_repaired_with_the_lifetime_that_most_named() -> None:
    reading = read(agreement=0, peers=4, width=4)
    one, two, three = reading.next(3)
    reading.reply(one, [copy(1, expires_s=9.9)], [])
    reading.reply(two, [copy(1, expires_s=5.0)], [])
    reading.reply(three, [copy(1, expires_s=5.0)], [])
    (four,) = reading.next(3)
    reading.reply(four, [], [])
    assert [(n.long_id, [c.expires_s for c in copies]) for n, copies in reading.stale()] == [(4, [5.0])]


def test_what_few_replicas_have_is_doubtful_unless_it_is_our_own() -> None:
    def answered(**own: Sequence[Copy]) -> Read:
        reading = read(agreement=0, **own)  # type: ignore[arg-type]
        for peer, copies in zip(reading.next(3), ([copy(1)], [], []), strict=True):
            reading.reply(peer, copies, [])
        return reading

    assert answered().doubtful() == [copy().record.entry_id]
    assert answered(authored=[copy(1)]).doubtful() == []
    assert answered(own=[copy(1)]).doubtful() == []


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


def test_a_crawl_of_many_positions_sends_no_more_requests_than_there_is_room_for() -> None:
    rng = random.Random(3)
    peers = [node(rng.getrandbits(160)) for _ in range(400)]
    targets = [rng.getrandbits(160) for _ in range(100)]
    crawl = Crawl([Lookup(t, 3, sorted(peers, key=lambda n: n.long_id ^ t)[:8]) for t in targets], 3)
    flying = crawl.next(10)
    assert 10 <= len(flying) <= 12
    assert crawl.next(0) == []
    while flying:
        ask = flying.pop()
        for lookup in ask.lookups:
            lookup.answered(ask.node, [])
        flying += crawl.next(10 - len(flying))
        assert len(flying) <= 12
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


def test_an_empty_read_waits_for_a_slow_peer_that_is_one_of_the_nearest() -> None:
    nodes = [node(1), node(2), node(3), node(9)]
    reading = Read("key", 0, 2, nodes, me=node(2**159), own=[], authored=[], agreement=2)
    near, two = reading.next(2)
    reading.slow(near)
    reading.reply(two, [], [])
    (three,) = reading.next(2)
    reading.reply(three, [], [])
    assert not reading.done  # the nearest may hold it, and two liars after it must not decide that nobody does
    reading.reply(near, [copy()], [])
    assert reading.done
    assert len(reading.result()) == 1
