"""Reads without a network: agreement of the nearest, digests, lifetimes, what is stale and what is doubtful."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from swarm.dht.digests import digest_of
from swarm.dht.reading import INLINE_BYTES, Read, Told
from swarm.dht.records import Copy, Record
from swarm.dht.routing import PeerNode
from swarm.errors import MalformedFrameError
from swarm.identity import PeerId
from swarm.net.transport import Contact
from tests.support import deterministic_identity

AUTHOR = deterministic_identity("author").public_key


def node(position: int) -> PeerNode:
    return PeerNode(Contact(PeerId(position.to_bytes(20, "big") + bytes(12)), ("127.0.0.1:1",)))


def copy(version: int = 1, subkey: str = "", expires_s: float = 9.0) -> Copy:
    return Copy(Record(AUTHOR, "key", subkey, b"\x01", version, 10_000, False, bytes(64)), expires_s)


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


def test_a_disputed_read_waits_for_a_slow_peer_that_is_one_of_the_nearest() -> None:
    nodes = [node(1), node(2), node(3), node(9)]
    reading = Read("key", 0, 2, nodes, me=node(2**159), own=[], authored=[], agreement=2)
    near, two = reading.next(2)
    reading.slow(near)
    reading.reply(two, [copy()], [])
    (three,) = reading.next(2)
    reading.reply(three, [], [])
    assert not reading.done
    reading.reply(near, [], [])
    assert reading.done
    assert sum(reading.holders().values()) == 1


def test_an_empty_read_asks_the_nearest_that_failed_once_more() -> None:
    reading = read(peers=5)
    for peer in reading.next(3):
        reading.failed(peer)
    for peer in reading.next(3):
        reading.reply(peer, [], [])
    assert reading.done
    assert reading.retry()
    again = reading.next(3)
    assert [n.long_id for n in again] == [1, 2, 3]
    for peer in again[:2]:
        reading.reply(peer, [copy(1)], [])
    assert reading.done
    assert list(reading.result().values()) == [copy(1)]


def test_a_read_that_found_something_or_missed_nobody_asks_nobody_again() -> None:
    found, whole = read(), read()
    near, two, three = found.next(3)
    found.failed(near)
    for peer in (two, three):
        found.reply(peer, [copy(1)], [])
    for peer in whole.next(3):
        whole.reply(peer, [], [])
    assert not found.retry()
    assert not whole.retry()
