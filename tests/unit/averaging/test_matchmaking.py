"""Matchmaking over generated interleavings in virtual time: everybody ends in time, and nobody is in two groups."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.averaging.allreduce import equal_parts
from swarm.averaging.decisions import (
    AnswerJoin,
    AnswerSeal,
    AskFailed,
    AskJoin,
    Begin,
    Committed,
    Concluded,
    GiveUp,
    Hinted,
    JoinAnswered,
    JoinAsked,
    MatchEvent,
    Nudge,
    OfferSeal,
    Released,
    SealAnswered,
    SealOffered,
    SendCommit,
    SendRelease,
    Terms,
    Tick,
    Timing,
    Verdict,
)
from swarm.averaging.matchmaking import Matchmaker
from swarm.averaging.rounds import Alone, Group, Member, Mismatch, Seal, TooFew
from swarm.averaging.search import Phase
from swarm.averaging.view import priority
from swarm.identity import PeerId

KEY = "trunk"
TIMING = Timing(window_s=4.0, poll_s=0.2, settle_s=0.4, answer_s=1.0)
SCHEMA = b"s" * 32


def peer_ids(count: int) -> list[PeerId]:
    """Ids in ascending order of their priority numbers."""
    ids = [PeerId(bytes([i]) * 32) for i in range(count)]
    return sorted(ids, key=lambda peer: priority(KEY, peer))


@dataclass
class Node:
    peer: PeerId
    maker: Matchmaker
    concluded: Concluded | None = None
    concluded_at: float = 0.0
    dead: bool = False
    pledges: list[bytes] = field(default_factory=list)


class Net:
    """Matchmakers on a network with random latencies, lost messages and deaths."""

    def __init__(
        self, count: int, seed: int, *, latency: float = 0.05, loss: float = 0.0, random_order: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.latency, self.loss = latency, loss
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.counter = itertools.count()
        self.nodes: dict[PeerId, Node] = {}
        self.seals: dict[bytes, Seal] = {}
        for peer in peer_ids(count):
            maker = Matchmaker(
                KEY,
                Member(peer, (), 1.0),
                TIMING,
                random.Random(self.rng.random()),
                new_nonce=lambda: self.rng.randbytes(16),
                random_order=random_order,
            )
            self.nodes[peer] = Node(peer, maker)

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (time, next(self.counter), action))

    def later(self, action: Callable[[], None]) -> None:
        self.at(self.now + self.latency * (0.1 + 1.9 * self.rng.random()), action)

    def begin(self, peer: PeerId, time: float, **terms: object) -> None:
        values = {"schema_hash": SCHEMA, "weight": 1.0, "numel": 1000, "min_group": 2, "max_group": 16, **terms}

        def start() -> None:
            self.feed(peer, Begin(Terms(**values)))  # type: ignore[arg-type]
            self.later(lambda: self.hint(peer))

        self.at(time, start)

    def hint(self, peer: PeerId) -> None:
        self.feed(peer, Hinted(tuple(self.nodes)))
        if self.nodes[peer].maker.phase is not Phase.IDLE and not self.nodes[peer].dead:
            self.at(self.now + 0.5, lambda: self.hint(peer))

    def feed(self, peer: PeerId, event: MatchEvent) -> object:
        node = self.nodes[peer]
        if node.dead:
            return None
        answer = None
        for instruction in node.maker.handle(event, self.now):
            if isinstance(instruction, AnswerJoin | AnswerSeal):
                answer = instruction
            else:
                self.carry_out(node, instruction)
        if node.maker.wake_at < float("inf"):
            wake = max(node.maker.wake_at, self.now)
            self.at(wake, lambda: self.tick(peer, wake))
        return answer

    def tick(self, peer: PeerId, due: float) -> None:
        node = self.nodes[peer]
        if not node.dead and node.maker.wake_at <= due:
            self.feed(peer, Tick())

    def call(
        self, to: PeerId, event: MatchEvent, answered: Callable[[object], None], failed: Callable[[], None]
    ) -> None:
        """One request with an answer; lost either way, it fails after the patience for an answer."""

        def arrive() -> None:
            answer = self.feed(to, event)
            if answer is None or self.rng.random() < self.loss:
                self.at(self.now + TIMING.answer_s, failed)
            else:
                self.later(lambda: answered(answer))

        if self.rng.random() < self.loss or self.nodes[to].dead:
            self.at(self.now + TIMING.answer_s, failed)
        else:
            self.later(arrive)

    def carry_out(self, node: Node, instruction: object) -> None:
        me = node.peer
        match instruction:
            case AskJoin(peer):
                terms = node.maker.terms
                assert terms is not None
                assert priority(KEY, peer) < priority(KEY, me)
                self.call(
                    peer,
                    JoinAsked(Member(me, (), terms.weight), terms.schema_hash, 1.0),
                    lambda a: self.feed(me, JoinAnswered(peer, a.verdict, a.seal_within_s, a.leader, a.schema_hash)),  # type: ignore[attr-defined]
                    lambda: self.feed(me, AskFailed(peer, "lost")),
                )
            case Nudge(peer):
                terms = node.maker.terms
                assert terms is not None
                assert priority(KEY, peer) > priority(KEY, me)
                self.call(
                    peer,
                    JoinAsked(Member(me, (), terms.weight), terms.schema_hash, 1.0),
                    lambda a: None,
                    lambda: self.feed(me, AskFailed(peer, "lost")),
                )
            case OfferSeal(seal):
                self.seals[seal.nonce] = seal
                for member in seal.members:
                    if member.peer_id != me:
                        self.offer(me, member.peer_id, seal)
            case SendCommit(seal):
                for member in seal.members:
                    if member.peer_id != me and self.rng.random() >= self.loss:
                        self.later(lambda to=member.peer_id: self.feed(to, Committed(seal.nonce)))  # type: ignore[misc]
            case SendRelease(peer, redirect):
                if self.rng.random() >= self.loss:
                    self.later(lambda: self.feed(peer, Released(me, redirect)))
            case Concluded():
                assert node.concluded is None
                node.concluded, node.concluded_at = instruction, self.now
            case _:
                raise AssertionError(instruction)

    def offer(self, leader: PeerId, to: PeerId, seal: Seal) -> None:
        def answered(answer: object) -> None:
            assert isinstance(answer, AnswerSeal)
            if answer.accepted:
                self.nodes[to].pledges.append(seal.nonce)
            self.feed(leader, SealAnswered(to, seal.nonce, answer.accepted, answer.reason))

        self.call(
            to,
            SealOffered(leader, seal),
            answered,
            lambda: self.feed(leader, SealAnswered(to, seal.nonce, False, "lost")),
        )

    def run(self) -> None:
        steps = 0
        while self.queue:
            self.now, _, action = heapq.heappop(self.queue)
            action()
            steps += 1
            assert steps < 200_000, "the matchmakers never rest"
            assert self.now < 60, "somebody waits for ever"

    def groups(self) -> dict[bytes, list[PeerId]]:
        found: dict[bytes, list[PeerId]] = {}
        for node in self.nodes.values():
            if node.concluded is not None and node.concluded.seal is not None:
                found.setdefault(node.concluded.seal.nonce, []).append(node.peer)
        return found

    def check(self) -> None:
        """Nobody waits beyond its budget; every group's members hold one seal, and are in it."""
        budget = 2 * TIMING.window_s + 3 * TIMING.answer_s
        for node in self.nodes.values():
            if not node.dead:
                assert node.concluded is not None
                assert node.maker.phase is Phase.IDLE
        for nonce, members in self.groups().items():
            seal = self.seals[nonce]
            named = [m.peer_id for m in seal.members]
            assert set(members) <= set(named)
            assert sum(m.part for m in seal.members) == 1000
            for peer in members:
                assert self.nodes[peer].concluded_at <= budget + 4
                assert self.nodes[peer].concluded.seal == seal  # type: ignore[union-attr]
            # Every member that is named pledged itself to exactly this seal before anybody concluded it.
            assert named[0] in self.nodes


@settings(max_examples=120, deadline=None)
@given(
    count=st.integers(2, 7),
    seed=st.integers(0, 2**32),
    spread=st.floats(0, 3.5),
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    deaths=st.integers(0, 2),
    max_group=st.sampled_from([2, 3, 16]),
    random_order=st.booleans(),
)
def test_every_interleaving_ends_in_consistent_groups(
    count: int, seed: int, spread: float, loss: float, deaths: int, max_group: int, random_order: bool
) -> None:
    net = Net(count, seed, loss=loss, random_order=random_order)
    for peer in net.nodes:
        net.begin(peer, spread * net.rng.random(), max_group=max_group)
    for peer in net.rng.sample(list(net.nodes), min(deaths, count - 1)):

        def die(peer: PeerId = peer) -> None:
            net.nodes[peer].dead = True

        net.at(4 * net.rng.random(), die)
    net.run()
    net.check()
    for members in net.groups().values():
        assert len(members) <= max_group


@settings(max_examples=40, deadline=None)
@given(count=st.integers(2, 8), seed=st.integers(0, 2**32), spread=st.floats(0, 2.0))
def test_without_faults_everybody_meets_in_one_group(count: int, seed: int, spread: float) -> None:
    net = Net(count, seed)
    for peer in net.nodes:
        net.begin(peer, spread * net.rng.random())
    net.run()
    assert [len(members) for members in net.groups().values()] == [count]
    # As soon as all are there, well before the window ends.
    assert max(node.concluded_at for node in net.nodes.values()) < spread + 1.5


@settings(max_examples=30, deadline=None)
@given(count=st.sampled_from([2, 4, 6]), seed=st.integers(0, 2**32))
def test_pairs_are_disjoint_and_most_find_one(count: int, seed: int) -> None:
    net = Net(count, seed, random_order=True)
    for peer in net.nodes:
        net.begin(peer, 0.1 * net.rng.random(), max_group=2)
    net.run()
    pairs = list(net.groups().values())
    assert all(len(pair) == 2 for pair in pairs)
    assert len(pairs) >= count // 2 - 1


def test_a_lone_peer_is_alone_soon() -> None:
    net = Net(1, 0)
    net.begin(next(iter(net.nodes)), 0.0)
    net.run()
    node = next(iter(net.nodes.values()))
    assert node.concluded == Concluded(Alone())
    assert node.concluded_at < 1.0


@pytest.mark.parametrize("looking", [0, 1])
def test_others_that_do_not_look_make_too_few_but_learn_of_it(looking: int) -> None:
    net = Net(2, 0)
    peers = list(net.nodes)
    high, low = peers[looking], peers[1 - looking]
    net.begin(high, 0.0)
    asleep = net.nodes[low]
    net.at(0.5, lambda: setattr(asleep, "pledges", [b"waiting"] if asleep.maker.others_waiting(net.now) else []))
    net.run()
    concluded = net.nodes[high].concluded
    assert concluded is not None
    assert isinstance(concluded.outcome, TooFew)
    assert (concluded.outcome.found, concluded.outcome.needed) == (1, 2)
    assert asleep.pledges == [b"waiting"]
    assert not asleep.maker.others_waiting(net.now + 10)


def test_dead_peers_alone_do_not_use_up_the_window() -> None:
    net = Net(2, 0)
    low, high = net.nodes
    net.nodes[low].dead = True
    net.begin(high, 0.0)
    net.run()
    concluded = net.nodes[high].concluded
    assert concluded is not None
    assert isinstance(concluded.outcome, TooFew)
    assert "lost" in concluded.outcome.reason
    assert net.nodes[high].concluded_at < 2.0


def test_other_schemas_are_told_apart_with_both_hashes() -> None:
    net = Net(2, 0)
    low, high = net.nodes
    net.begin(low, 0.0)
    net.begin(high, 0.0, schema_hash=b"t" * 32)
    net.run()
    for peer, ours, theirs in ((low, SCHEMA, b"t" * 32), (high, b"t" * 32, SCHEMA)):
        concluded = net.nodes[peer].concluded
        assert concluded is not None
        assert isinstance(concluded.outcome, Mismatch)
        assert (concluded.outcome.ours, concluded.outcome.theirs) == (ours.hex(), theirs.hex())


def test_absent_members_delay_only_one_round() -> None:
    net = Net(3, 1)
    first, second, third = net.nodes
    net.begin(first, 0.0)
    net.begin(second, 0.0)
    net.run()
    waited = net.nodes[first].concluded_at
    assert waited >= TIMING.window_s
    assert sorted(map(len, net.groups().values())) == [2]
    for peer in (first, second):
        net.nodes[peer].concluded = None
        net.begin(peer, net.now + 0.1)
    restarted = net.now
    net.run()
    assert net.nodes[first].concluded_at - restarted < 1.5
    assert third not in next(iter(net.groups().values()))


# One matchmaker, step by step ---------------------------------------------------------------------------------------


@pytest.fixture
def trio() -> list[PeerId]:
    return peer_ids(3)


def maker(peer: PeerId) -> Matchmaker:
    return Matchmaker(
        KEY, Member(peer, (), 1.0), TIMING, random.Random(0), new_nonce=lambda: b"n" * 16
    )


TERMS = Terms(SCHEMA, 1.0, 1000)


def seal_of(*members: PeerId, nonce: bytes = b"n" * 16, schema: bytes = SCHEMA, numel: int = 1000) -> Seal:
    parts = equal_parts(numel, len(members))
    return Seal(nonce, schema, tuple(Member(p, (), 1.0, n) for p, n in zip(members, parts, strict=True)))


def following(me: PeerId, leader: PeerId) -> Matchmaker:
    machine = maker(me)
    machine.handle(Begin(TERMS), 0.0)
    assert machine.handle(Hinted((leader, me)), 0.0) == [AskJoin(leader)]
    assert machine.handle(JoinAnswered(leader, Verdict.ACCEPTED, 3.0), 0.1) == []
    assert machine.phase is Phase.FOLLOWING
    return machine


def test_an_accept_towards_a_higher_number_is_impossible(trio: list[PeerId]) -> None:
    low, me, _ = trio
    machine = maker(me)
    machine.handle(Begin(TERMS), 0.0)
    assert machine.handle(JoinAsked(Member(low, (), 1.0), SCHEMA), 0.0)[0] == AnswerJoin(Verdict.WRONG_WAY)


def test_a_follower_redirects_to_its_leader_and_releases_its_own_followers(trio: list[PeerId]) -> None:
    low, me, high = trio
    machine = maker(me)
    machine.handle(Begin(TERMS), 0.0)
    machine.handle(Hinted((low, high)), 0.0)
    answer, *_ = machine.handle(JoinAsked(Member(high, (), 1.0), SCHEMA), 0.0)
    assert isinstance(answer, AnswerJoin)
    assert answer.verdict is Verdict.ACCEPTED
    assert machine.handle(JoinAnswered(low, Verdict.ACCEPTED, 3.0), 0.1) == [SendRelease(high, low)]
    assert machine.handle(JoinAsked(Member(high, (), 1.0), SCHEMA), 0.2)[0] == AnswerJoin(Verdict.REDIRECT, leader=low)


def test_a_seal_is_taken_from_the_leader_only_and_only_if_it_is_right(trio: list[PeerId]) -> None:
    low, other, me = trio
    cases: list[tuple[PeerId, Seal, str]] = [
        (other, seal_of(other, me), "follow"),
        (low, seal_of(low, other), "neither"),
        (low, seal_of(low, me, schema=b"t" * 32), "schema"),
        (low, seal_of(low, me, numel=999), "cover"),
        (low, seal_of(low, me, nonce=b"short"), "malformed"),
        (low, seal_of(low, me, me), "malformed"),
    ]
    for leader, seal, reason in cases:
        (answer,) = following(me, low).handle(SealOffered(leader, seal), 0.2)
        assert isinstance(answer, AnswerSeal)
        assert not answer.accepted
        assert reason in answer.reason
    forged = Seal(b"n" * 16, SCHEMA, (Member(low, (), 1.0, 500), Member(me, (), 2.0, 500)))
    (answer,) = following(me, low).handle(SealOffered(low, forged), 0.2)
    assert isinstance(answer, AnswerSeal)
    assert "weights" in answer.reason


def test_a_group_exists_only_after_the_commit_of_the_seal_last_accepted(trio: list[PeerId]) -> None:
    low, _, me = trio
    machine = following(me, low)
    assert machine.handle(SealOffered(low, seal_of(low, me)), 0.2) == [AnswerSeal(True)]
    later = seal_of(low, me, nonce=b"m" * 16)
    assert machine.handle(SealOffered(low, later), 0.3) == [AnswerSeal(True)]
    assert machine.handle(Committed(b"n" * 16), 0.4) == []
    assert machine.handle(Committed(b"m" * 16), 0.4) == [Concluded(Group(later.nonce.hex()), later)]
    assert machine.handle(Committed(b"m" * 16), 0.5) == []


def test_a_seal_that_overtakes_the_accept_is_taken(trio: list[PeerId]) -> None:
    low, _, me = trio
    machine = maker(me)
    machine.handle(Begin(TERMS), 0.0)
    machine.handle(Hinted((low,)), 0.0)
    assert machine.handle(SealOffered(low, seal_of(low, me)), 0.1) == [AnswerSeal(True)]
    assert machine.handle(JoinAnswered(low, Verdict.ACCEPTED, 3.0), 0.1) == []
    assert isinstance(machine.handle(Committed(b"n" * 16), 0.2)[0], Concluded)


def test_a_late_accept_is_released(trio: list[PeerId]) -> None:
    low, me, _ = trio
    machine = maker(me)
    machine.handle(Begin(TERMS), 0.0)
    machine.handle(Hinted((low,)), 0.0)
    machine.handle(Tick(), 1.1)
    assert SendRelease(low) in machine.handle(JoinAnswered(low, Verdict.ACCEPTED, 3.0), 1.2)


def test_a_member_that_refuses_the_seal_is_left_out_of_the_next(trio: list[PeerId]) -> None:
    me, good, bad = trio
    machine = maker(me)
    machine.handle(Begin(TERMS), 0.0)
    machine.handle(Hinted((good, bad)), 0.0)
    machine.handle(JoinAsked(Member(good, (), 1.0), SCHEMA), 0.1)
    _, offer = machine.handle(JoinAsked(Member(bad, (), 1.0), SCHEMA), 0.1)
    assert isinstance(offer, OfferSeal)
    assert [m.peer_id for m in offer.seal.members] == [me, good, bad]
    assert machine.handle(SealAnswered(good, offer.seal.nonce, True), 0.2) == []
    told, again = machine.handle(SealAnswered(bad, offer.seal.nonce, False, "busy"), 0.2)
    assert told == SendRelease(bad)
    assert isinstance(again, OfferSeal)
    assert [m.peer_id for m in again.seal.members] == [me, good]
    done = machine.handle(SealAnswered(good, again.seal.nonce, True), 0.3)
    assert done == [SendCommit(again.seal), Concluded(Group(again.seal.nonce.hex()), again.seal)]


def test_a_silent_leader_is_left_and_another_found(trio: list[PeerId]) -> None:
    low, other, me = trio
    machine = following(me, low)
    assert machine.handle(Tick(), machine.wake_at) == [AskJoin(low)]
    machine.handle(JoinAnswered(low, Verdict.ACCEPTED, 3.0), 1.2)
    assert machine.phase is Phase.FOLLOWING
    assert machine.handle(Tick(), machine.wake_at) == [AskJoin(low)]
    assert machine.handle(AskFailed(low, "connection refused"), 2.3) == []
    assert machine.handle(Tick(), machine.wake_at) == [AskJoin(low)]
    instructions = machine.handle(AskFailed(low, "connection refused"), 2.4)
    assert instructions[0] == SendRelease(low)
    assert isinstance(instructions[1], Concluded), "there is nobody else"
    machine = following(me, low)
    machine.handle(Hinted((low, other)), 0.2)
    assert machine.handle(Released(low, other), 0.3) == [AskJoin(other)]


def test_giving_up_releases_everybody(trio: list[PeerId]) -> None:
    me, one, two = trio
    machine = maker(me)
    machine.handle(Begin(TERMS), 0.0)
    machine.handle(Hinted((one, two)), 0.0)
    machine.handle(JoinAsked(Member(one, (), 1.0), SCHEMA), 0.1)
    released, concluded = machine.handle(GiveUp("closing"), 0.2)
    assert released == SendRelease(one)
    assert isinstance(concluded, Concluded)
    assert isinstance(concluded.outcome, TooFew)
    assert machine.handle(GiveUp("closing"), 0.3) == []
