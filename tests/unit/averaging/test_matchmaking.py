"""Matchmaking over generated interleavings in virtual time, and one matchmaker step by step."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from swarm.averaging.bandwidth import Rate
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
    Nudge,
    OfferSeal,
    Released,
    SealAnswered,
    SealOffered,
    SealSpoilt,
    SendCommit,
    SendRelease,
    Terms,
    Tick,
    Verdict,
)
from swarm.averaging.matchmaking import Matchmaker
from swarm.averaging.probation import Offence
from swarm.averaging.rounds import Alone, Group, Member, Mismatch, Seal, TooFew
from swarm.averaging.seals import compose, objection, portioned
from swarm.averaging.search import NO_REDUCER, Follower, Phase
from swarm.identity import PeerId
from swarm.tensors.partition import split
from tests.interleavings import KEY, OTHER_SCHEMA, SCHEMA, TIMING, Net, Node, Plan, peer_ids


def equal_parts(numel: int, members: int) -> list[int]:
    return [len(part) for part in split(numel, [1.0] * members)]


def outcome_of(node: Node) -> object:
    assert node.concluded is not None
    return node.concluded.outcome


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_every_interleaving_ends_in_time_in_consistent_groups(first: int) -> None:
    # What is checked while and after a plan is played stands in `Net.conclude` and `Net.check`.
    groups = sum(len(Net(Plan.draw(seed, faults=True)).play().groups()) for seed in range(first, first + 100))
    assert groups > 60, "faults must not keep most plans from having groups, or little was checked"


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_without_faults_whoever_can_find_a_group_does(first: int) -> None:
    for seed in range(first, first + 100):
        net = Net(Plan.draw(seed, faults=False)).play()
        plan = net.plan
        fits = plan.max_group >= plan.count >= plan.min_group and plan.senders < plan.count
        if plan.others == 0 and plan.rounds == 1 and fits:
            assert [len(members) for members in net.groups().values()] == [net.plan.count]
            # As soon as all are there, well before the window ends.
            assert max(node.concluded_at for node in net.nodes.values()) < net.plan.spread_s + 1.5


def test_pairs_are_disjoint_and_all_find_one() -> None:
    for seed in range(60):
        net = Net(Plan(seed, count=(2, 4, 6)[seed % 3], max_group=2, spread_s=0.1, random_order=True)).play()
        pairs = list(net.groups().values())
        assert all(len(pair) == 2 for pair in pairs)
        assert len(pairs) == net.plan.count // 2


def test_a_lone_peer_is_alone_soon() -> None:
    net = Net(Plan(0, count=1)).play()
    node = next(iter(net.nodes.values()))
    assert node.concluded == Concluded(Alone())
    assert node.concluded_at < 1.0


@pytest.mark.parametrize("looking", [0, 1])
def test_others_that_do_not_look_make_too_few_but_learn_of_it(looking: int) -> None:
    net = Net(Plan(0, count=2))
    peers = list(net.nodes)
    high, low = peers[looking], peers[1 - looking]
    net.begin(high, 0.0)
    asleep, told = net.nodes[low], []
    net.at(0.5, lambda: told.append(asleep.maker.others_waiting(net.now)))
    net.run()
    outcome = outcome_of(net.nodes[high])
    assert isinstance(outcome, TooFew)
    assert (outcome.found, outcome.needed) == (1, 2)
    assert told == [True]
    assert not asleep.maker.others_waiting(net.now + 10)


def test_a_peer_that_looks_ahead_of_its_round_hurries_nobody() -> None:
    net = Net(Plan(0, count=2))
    asleep, ahead = net.nodes
    net.begin(ahead, 0.0, enters_in_s=0.6)
    told: list[bool] = []
    for time in (0.3, 0.9):
        net.at(time, lambda: told.append(net.nodes[asleep].maker.others_waiting(net.now)))
    net.run()
    assert told == [False, True]


def test_dead_peers_alone_do_not_use_up_the_window() -> None:
    net = Net(Plan(0, count=2))
    low, high = net.nodes
    net.nodes[low].dead = True
    net.begin(high, 0.0)
    net.run()
    outcome = outcome_of(net.nodes[high])
    assert isinstance(outcome, TooFew)
    assert "lost" in outcome.reason
    assert net.nodes[high].concluded_at < 2.0


@pytest.mark.parametrize("dies_at", [0.3, 1.0, 3.0])
def test_the_death_of_a_leader_costs_seconds_not_the_round(dies_at: float) -> None:
    net = Net(Plan(3, count=5))
    leader, *followers = net.nodes
    for peer in (leader, *followers[:-1]):
        net.begin(peer, 0.0)
    # The last one is missed, so that the others wait for it under the leader until that dies.
    net.at(dies_at, lambda: setattr(net.nodes[leader], "dead", True))
    net.run()
    ((nonce, members),) = net.groups().items()
    assert members == followers[:-1]
    assert net.seals[nonce].members[0].peer_id == followers[0]
    assert max(net.nodes[p].concluded_at for p in members) <= TIMING.window_s + 3 * TIMING.answer_s


def test_other_schemas_are_told_apart_with_both_hashes() -> None:
    net = Net(Plan(0, count=2))
    low, high = net.nodes
    net.begin(low, 0.0)
    net.begin(high, 0.0, schema_hash=OTHER_SCHEMA)
    net.run()
    for peer, ours, theirs in ((low, SCHEMA, OTHER_SCHEMA), (high, OTHER_SCHEMA, SCHEMA)):
        outcome = outcome_of(net.nodes[peer])
        assert isinstance(outcome, Mismatch)
        assert (outcome.ours, outcome.theirs) == (ours.hex(), theirs.hex())


def test_absent_members_delay_only_one_round() -> None:
    net = Net(Plan(1, count=3))
    first, second, third = net.nodes
    net.begin(first, 0.0)
    net.begin(second, 0.0)
    net.run()
    waited = net.nodes[first].concluded_at
    assert waited >= TIMING.window_s
    assert sorted(map(len, net.groups().values())) == [2]
    for peer in (first, second):
        net.begin(peer, net.now + 0.1)
    restarted = net.now
    net.run()
    assert net.nodes[first].concluded_at - restarted < 1.5
    assert all(third not in members for members in net.groups().values())


def test_peers_meet_in_their_cell_only() -> None:
    net = Net(Plan(2, count=6))
    for index, peer in enumerate(net.nodes):
        net.begin(peer, 0.0, cell=f"2.{index % 2}")
    net.run()
    groups = list(net.groups().values())
    assert sorted(groups) == sorted([list(net.nodes)[0::2], list(net.nodes)[1::2]])
    assert sorted(seal.cell for seal in net.seals.values()) == ["2.0", "2.1"]


def test_a_group_of_those_that_only_send_cannot_be() -> None:
    net = Net(Plan(0, count=3))
    for peer in net.nodes:
        net.begin(peer, 0.0, sends_only=True)
    net.run()
    assert all(outcome_of(node) == TooFew(1, 2, NO_REDUCER) for node in net.nodes.values())
    net = Net(Plan(0, count=3))
    for index, peer in enumerate(net.nodes):
        net.begin(peer, 0.0, sends_only=index != 1)
    net.run()
    (seal,) = (net.seals[nonce] for nonce in net.groups())
    assert [member.part for member in seal.members] == [1000, 0, 0]
    assert seal.members[0].peer_id == list(net.nodes)[1]


# One matchmaker, step by step ---------------------------------------------------------------------------------------


@pytest.fixture
def trio() -> list[PeerId]:
    return peer_ids(3)


def maker(peer: PeerId) -> Matchmaker:
    return Matchmaker(KEY, Member(peer, (), 1.0), TIMING, random.Random(0), new_nonce=lambda: b"n" * 16)


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
    right = seal_of(low, other, me)
    leading, second, mine = right.members

    def with_members(*members: Member, wait: float = 0.0) -> Seal:
        return Seal(b"n" * 16, SCHEMA, members, enter_within_s=wait)

    cases: list[tuple[PeerId, Seal, str, Offence | None]] = [
        (other, seal_of(other, me), "follow", None),
        (low, seal_of(low, other), "neither", Offence.MALFORMED),
        (low, seal_of(low, me, schema=b"t" * 32), "schema", Offence.OUTDATED),
        (low, seal_of(low, me, nonce=b"short"), "malformed", Offence.MALFORMED),
        (low, seal_of(low, me, me), "malformed", Offence.MALFORMED),
        (low, seal_of(low, me, other), "order", Offence.MALFORMED),
        (low, seal_of(other, low, me), "order", Offence.MALFORMED),
        (low, with_members(replace(leading, sends_only=True), second, mine), "only sends", Offence.MALFORMED),
        (low, with_members(leading, second, replace(mine, weight=2.0)), "another round", Offence.OUTDATED),
        (low, with_members(leading, second, replace(mine, sends_only=True)), "another round", Offence.OUTDATED),
        (low, with_members(leading, second, replace(mine, addresses=("[::1]:1",))), "another round", Offence.OUTDATED),
        (low, with_members(leading, second, replace(mine, measured=(Rate(low, 9.0),))), "round", Offence.OUTDATED),
        (low, with_members(leading, second, replace(mine, signed=b"earlier")), "another round", Offence.OUTDATED),
        (low, with_members(*right.members, wait=1.0), "waits for longer", Offence.MALFORMED),
        (low, with_members(*right.members, wait=math.nan), "waits for longer", Offence.MALFORMED),
    ]
    for leader, seal, reason, offence in cases:
        machine = following(me, low)
        answer, *then = machine.handle(SealOffered(leader, seal), 0.2)
        assert isinstance(answer, AnswerSeal)
        assert not answer.accepted
        assert reason in answer.reason
        assert answer.offence is offence
        assert (SendRelease(low) in then) is (offence is not None), "a leader that cannot be trusted is left"
    assert following(me, low).handle(SealOffered(low, right), 0.2) == [AnswerSeal(True)]


def test_parts_follow_from_what_members_declared_whatever_the_leader_says(trio: list[PeerId]) -> None:
    low, other, me = trio
    machine = following(me, low)
    greedy = tuple(replace(m, part=n) for m, n in zip(seal_of(low, other, me).members, (1000, 0, 0), strict=True))
    assert machine.handle(SealOffered(low, Seal(b"n" * 16, SCHEMA, greedy)), 0.2) == [AnswerSeal(True)]
    (done,) = machine.handle(Committed(b"n" * 16), 0.3)
    assert isinstance(done, Concluded)
    assert done.seal == seal_of(low, other, me)


def test_whoever_forges_a_seal_is_left_at_once(trio: list[PeerId]) -> None:
    low, other, me = trio
    machine = following(me, low)
    machine.handle(Hinted((low, other)), 0.2)
    assert machine.handle(SealSpoilt(other, "not signed"), 0.3) == []
    assert machine.handle(SealSpoilt(low, "not signed"), 0.3) == [SendRelease(low), AskJoin(other)]
    assert machine.leader is None


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


def test_a_peer_that_could_not_be_reached_is_asked_once_it_says_that_it_looks(trio: list[PeerId]) -> None:
    low, me, other = trio
    machine = maker(me)
    machine.handle(Begin(TERMS), 0.0)
    assert machine.handle(Hinted((low, other)), 0.0) == [AskJoin(low), Nudge(other)]
    machine.handle(AskFailed(low, "it averages under no such key yet"), 0.1)
    assert machine.handle(Tick(), 0.35) == []
    answer, ask = machine.handle(JoinAsked(Member(low, (), 1.0), SCHEMA), 0.36)
    assert answer == AnswerJoin(Verdict.WRONG_WAY)
    assert ask == AskJoin(low)


def test_whoever_asked_while_we_did_not_look_is_known_when_we_do(trio: list[PeerId]) -> None:
    low, me, high = trio
    machine = maker(me)
    for peer in (low, high):
        (answer,) = machine.handle(JoinAsked(Member(peer, (), 1.0), SCHEMA, 3.0), 0.0)
        assert answer == AnswerJoin(Verdict.NOT_LOOKING)
    assert machine.handle(Begin(TERMS), 1.0) == [AskJoin(low), Nudge(high)]


def test_recent_hints_are_used_at_once(trio: list[PeerId]) -> None:
    low, me, high = trio
    machine = maker(me)
    machine.handle(Hinted((low, high)), 0.0)
    assert machine.handle(Begin(TERMS, warm=True), 1.0) == [AskJoin(low), Nudge(high)]
    machine.handle(AskFailed(low, "gone"), 1.1)
    _, offer = machine.handle(JoinAsked(Member(high, (), 1.0), SCHEMA), 1.1)
    assert isinstance(offer, OfferSeal)


def test_a_peer_on_probation_is_neither_asked_nor_admitted_nor_waited_for(trio: list[PeerId]) -> None:
    low, me, high = trio
    machine = maker(me)
    machine._view.barred = lambda peer: "" if peer == high else "sent values that are not finite"
    machine.handle(Begin(TERMS), 0.0)
    assert machine.handle(Hinted((low, high)), 0.0) == [Nudge(high)]
    refused = AnswerJoin(Verdict.PROBATION, reason="sent values that are not finite")
    assert machine.handle(JoinAsked(Member(low, (), 1.0), SCHEMA), 0.1) == [refused]
    _, offer = machine.handle(JoinAsked(Member(high, (), 1.0), SCHEMA), 0.1)
    assert isinstance(offer, OfferSeal)


def test_a_peer_that_is_on_probation_elsewhere_learns_the_reason(trio: list[PeerId]) -> None:
    low, me, _ = trio
    machine = maker(me)
    machine.handle(Begin(TERMS), 0.0)
    machine.handle(Hinted((low,)), 0.0)
    machine.handle(JoinAnswered(low, Verdict.PROBATION, reason="stalled in several rounds"), 0.1)
    (concluded,) = machine.handle(Tick(), 1.0)
    assert isinstance(concluded, Concluded)
    assert isinstance(concluded.outcome, TooFew)
    assert "refuses us: stalled in several rounds" in concluded.outcome.reason


def test_a_nudge_tells_of_another_schema(trio: list[PeerId]) -> None:
    low, me, _ = trio
    machine = maker(me)
    machine.handle(Begin(TERMS), 0.0)
    answer, *_ = machine.handle(JoinAsked(Member(low, (), 1.0), OTHER_SCHEMA), 0.0)
    assert answer == AnswerJoin(Verdict.MISMATCH, schema_hash=SCHEMA)
    (concluded,) = machine.handle(Tick(), TIMING.window_s)
    assert concluded == Concluded(Mismatch(str(low), SCHEMA.hex(), OTHER_SCHEMA.hex()))


def test_a_seal_gives_parts_by_what_others_measured_and_waits_for_the_last_to_enter(trio: list[PeerId]) -> None:
    me, fast, slow = trio
    machine = maker(me)
    rates = (Rate(fast, 8e6, 8e6), Rate(slow, 3e6, 4e6), Rate(me, 1.0, 1.0))
    machine.handle(Begin(Terms(SCHEMA, 1.0, 1000, enters_in_s=1.0, measured=rates)), 0.0)
    machine.handle(Hinted((fast, slow)), 0.0)
    others = (Rate(me, 4e6, 4e6), Rate(fast, 1e12, 1e12))
    asked = JoinAsked(Member(fast, (), 1.0, enters_in_s=3.0, measured=others), SCHEMA)
    machine.handle(asked, 0.5)
    _, offer = machine.handle(JoinAsked(Member(slow, (), 1.0, measured=(Rate(me, 4e6, 4e6),)), SCHEMA), 1.0)
    assert isinstance(offer, OfferSeal)
    parts = [member.part for member in offer.seal.members]
    assert sum(parts) == 1000
    assert parts[1] > parts[0] > parts[2], "8, 4 and 3 MB/s; nobody's word about itself counts"
    assert parts[1] <= 2 / 3 * 1000 + 1
    assert offer.seal.enter_within_s == 2.5


def test_a_seal_for_another_cell_or_role_is_refused(trio: list[PeerId]) -> None:
    low, _, me = trio
    for cell, sends_only, reason in (("2.0", True, "another cell"), ("2.1", False, "another round")):
        machine = maker(me)
        machine.handle(Begin(Terms(SCHEMA, 1.0, 1000, cell="2.1", sends_only=True)), 0.0)
        machine.handle(Hinted((low,)), 0.0)
        machine.handle(JoinAnswered(low, Verdict.ACCEPTED, 3.0), 0.1)
        members = (Member(low, (), 1.0), Member(me, (), 1.0, sends_only=sends_only))
        answer, *_ = machine.handle(SealOffered(low, Seal(b"n" * 16, SCHEMA, members, cell)), 0.2)
        assert isinstance(answer, AnswerSeal)
        assert not answer.accepted
        assert reason in answer.reason


@pytest.mark.parametrize(
    ("senders", "rates", "parts"),
    [
        ([], [0, 0, 0, 0], [250, 250, 250, 250]),
        ([1], [0, 0], [1000, 0]),
        ([1, 2, 3], [0, 0, 0, 0], [1000, 0, 0, 0]),
        ([2], [0, 0, 0], [500, 500, 0]),
        ([3, 4, 5], [9, 1, 1, 0, 0, 0], [334, 333, 333, 0, 0, 0]),
        ([], [1e9, 1, 1, 1, 1], [400, 150, 150, 150, 150]),
    ],
)
def test_nobody_reduces_more_than_follows_from_what_others_measured(
    senders: list[int], rates: list[float], parts: list[int]
) -> None:
    ids = [PeerId(bytes([i + 1]) * 32) for i in range(len(rates))]
    measured = [tuple(Rate(p, r, r) for p, r in zip(ids, rates, strict=True) if p != me) for me in ids]
    members = [Member(p, (), 1.0, sends_only=i in senders, measured=measured[i]) for i, p in enumerate(ids)]
    found = portioned(Seal(b"n" * 16, SCHEMA, tuple(members)), 1000)
    assert [member.part for member in found.members] == parts


def test_seals_that_leaders_compose_are_accepted_by_all_members() -> None:
    rng = random.Random(0)
    for _ in range(400):
        count, numel = rng.randint(2, 9), rng.choice([1, 7, 1000, 12345])
        ids = [PeerId(bytes([i + 1]) * 32) for i in range(count)]
        sends_only = [False, *(rng.random() < 0.4 for _ in ids[1:])]
        rates = {peer: 10.0 ** rng.uniform(5, 9) for peer in ids}
        measured = tuple(Rate(peer, rates[peer], rates[peer]) for peer in ids if rng.random() < 0.9)
        followers = [
            Follower(JoinAsked(Member(p, (), 1.0, sends_only=s, measured=measured), SCHEMA), 0.0)
            for p, s in zip(ids[1:], sends_only[1:], strict=True)
        ]
        leader = Terms(SCHEMA, 1.0, numel, measured=measured)
        seal = compose(b"n" * 16, Member(ids[0], (), 1.0), leader, 0.0, followers, 0.0)
        for peer, sends in zip(ids[1:], sends_only[1:], strict=True):
            terms = Terms(SCHEMA, 1.0, numel, sends_only=sends, measured=measured)
            assert objection(seal, ids[0], Member(peer, (), 1.0), terms, ids.index) is None, seal
            bare = replace(seal, members=tuple(replace(m, part=0) for m in seal.members))
            assert portioned(bare, numel) == seal


@pytest.mark.parametrize(("least", "most", "accepted"), [(2, 16, True), (3, 16, True), (4, 16, False), (2, 2, False)])
def test_a_group_of_another_size_than_wanted_is_refused(least: int, most: int, accepted: bool) -> None:
    ids = [PeerId(bytes([i + 1]) * 32) for i in range(3)]
    seal = seal_of(*ids)
    terms = Terms(SCHEMA, 1.0, 1000, min_group=least, max_group=most)
    found = objection(seal, ids[0], Member(ids[2], (), 1.0), terms, ids.index)
    assert (found is None) is accepted
    assert found is None or ("3 members" in found.reason and found.offence is None)
