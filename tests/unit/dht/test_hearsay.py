"""Whose word counts in a lookup."""

from __future__ import annotations

import random

from swarm.dht.hearsay import MISSES, TELLERS, Hearsay, is_thin


def test_a_teller_loses_its_word_when_nobody_it_named_answers() -> None:
    hearsay = Hearsay()
    for i in range(MISSES + 2):
        hearsay.named(b"invented %d" % i, b"liar")
    for i in range(MISSES):
        assert hearsay.counts(b"invented %d" % (MISSES + 1))
        hearsay.refuted(b"invented %d" % i)
    assert not hearsay.counts(b"invented %d" % (MISSES + 1))


def test_dead_contacts_among_live_ones_cost_an_honest_teller_nothing() -> None:
    hearsay = Hearsay()
    for i in range(10):
        hearsay.named(b"peer %d" % i, b"honest")
    for i in range(0, 8, 2):
        hearsay.proved(b"peer %d" % i)
        hearsay.refuted(b"peer %d" % (i + 1))
    assert hearsay.counts(b"peer 9")


def test_one_believed_teller_is_enough_and_first_hand_knowledge_needs_none() -> None:
    hearsay = Hearsay()
    for i in range(MISSES):
        hearsay.named(b"invented %d" % i, b"liar")
        hearsay.refuted(b"invented %d" % i)
    hearsay.named(b"peer", b"liar")
    assert not hearsay.counts(b"peer")
    hearsay.named(b"peer", b"honest")
    assert hearsay.counts(b"peer")
    assert hearsay.counts(b"from the table")
    assert hearsay.first_hand(b"from the table")


def test_liars_who_came_first_do_not_keep_out_an_honest_word() -> None:
    hearsay = Hearsay()
    for i in range(TELLERS):
        hearsay.named(b"peer", b"liar %d" % i)
    hearsay.named(b"peer", b"one too many")
    for i in range(TELLERS):
        for j in range(MISSES):
            hearsay.named(b"%d %d" % (i, j), b"liar %d" % i)
            hearsay.refuted(b"%d %d" % (i, j))
    assert not hearsay.counts(b"peer")
    hearsay.named(b"peer", b"honest")
    assert hearsay.counts(b"peer")


def nearest(rng: random.Random, peers: int, count: int) -> list[int]:
    """Distances of the nearest of so many uniform ids."""
    return sorted(rng.getrandbits(160) for _ in range(peers))[:count]


def test_a_fifth_or_three_tenths_of_all_peers_cannot_pass_for_all_of_them() -> None:
    rng = random.Random(1)
    runs = 300
    honest = sum(is_thin(nearest(rng, 1000, 8), nearest(rng, 1000, 20)) for _ in range(runs))
    fifth = sum(is_thin(nearest(rng, 200, 8), nearest(rng, 1000, 20)) for _ in range(runs))
    more = sum(is_thin(nearest(rng, 300, 8), nearest(rng, 1000, 20)) for _ in range(runs))
    assert honest <= runs / 50
    assert fifth >= 0.9 * runs
    assert more >= 0.6 * runs
    assert not is_thin([], [1])
    assert not is_thin([1], [])
