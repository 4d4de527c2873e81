"""Placement: decisions on single views, and whole swarms of hosts whose views lag."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.experts.overview import donors_of, quotas
from swarm.experts.placement import MOVE_TICKS, PATIENCE_TICKS, SETTLE_TICKS, TAKING_TICKS, Drop, Placement, Take
from swarm.experts.records import HostRecord, rendezvous_order
from swarm.experts.spec import ExpertGrid
from swarm.identity import PeerId

UIDS = ExpertGrid("ffn.[0:4].[0:4]", "ffn").uids()


def peers(n: int, seed: int = 0) -> list[PeerId]:
    rng = random.Random(seed)
    return [PeerId(rng.randbytes(32)) for _ in range(n)]


def host(peer_id: PeerId, experts: Mapping[str, int], capacity: int = 99, leaving: bool = False) -> HostRecord:
    return HostRecord(peer_id, (), experts, capacity=capacity, load=len(experts), leaving=leaving)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 60))
def test_quotas_are_equal_as_far_as_capacities_allow(capacities: list[int], demand: int) -> None:
    ids = peers(len(capacities))
    found = quotas(dict(zip(ids, capacities, strict=True)), demand)
    assert all(found[p] <= c for p, c in zip(ids, capacities, strict=True))
    assert sum(found.values()) >= min(demand, sum(capacities))
    level = max(found.values())
    assert all(found[p] in (level, c) for p, c in zip(ids, capacities, strict=True))
    assert sum(min(c, level - 1) for c in capacities) < demand or level == 0, "no higher than needed"


def test_a_lone_host_takes_everything_it_can() -> None:
    [me] = peers(1)
    assert [a.uid for a in Placement(me, dict.fromkeys(UIDS, 2), 99).decide({}, [])] == UIDS
    assert len(Placement(me, dict.fromkeys(UIDS, 2), 5).decide({}, [])) == 5
    assert Placement(me, dict.fromkeys(UIDS, 2), 0).decide({}, []) == []


def test_equal_views_lead_to_disjoint_complete_equal_shares() -> None:
    ids = peers(4)
    taken: Counter[str] = Counter()
    loads = []
    for me in ids:
        others = [host(p, {}) for p in ids if p != me]
        takes = Placement(me, dict.fromkeys(UIDS, 2), 99).decide({}, others)
        taken.update(a.uid for a in takes)
        loads.append(len(takes))
    assert set(taken.values()) == {2}
    assert set(taken) == set(UIDS)
    assert max(loads) - min(loads) <= 3


def test_donors_are_the_most_advanced_first_and_leaving_hosts_count() -> None:
    a, b, c = peers(3)
    hosts = [host(a, {"ffn.0.0": 3}), host(b, {"ffn.0.0": 9}, leaving=True), host(c, {})]
    assert [h.peer_id for h in donors_of("ffn.0.0", hosts)] == [b, a]
    placement = Placement(c, {"ffn.0.0": 1}, 99)
    assert placement.decide({}, hosts) == []
    [take] = placement.decide({}, hosts[1:])
    assert isinstance(take, Take)
    assert [h.peer_id for h in take.donors] == [b]


def test_a_host_that_does_not_do_its_part_is_stood_in_for() -> None:
    uid = "ffn.0.0"
    first, second, third = rendezvous_order(uid, peers(3))
    for me, waits in ((second, PATIENCE_TICKS), (third, 2 * PATIENCE_TICKS)):
        placement = Placement(me, {uid: 1}, 99)
        others = [host(p, {}) for p in (first, second, third) if p != me]
        decided = [placement.decide({}, others) for _ in range(waits)]
        assert decided[:-1] == [[]] * (waits - 1)
        assert [a.uid for a in decided[-1]] == [uid]


def test_only_the_last_holder_gives_a_surplus_up_and_not_before_it_lasts() -> None:
    uid = "ffn.0.0"
    order = rendezvous_order(uid, peers(3))
    for me in order:
        placement = Placement(me, {uid: 2}, 99)
        others = [host(p, {uid: 4}) for p in order if p != me]
        decided = [placement.decide({uid: 4}, others) for _ in range(SETTLE_TICKS)]
        assert decided[:-1] == [[]] * (SETTLE_TICKS - 1)
        if me == order[-1]:
            [drop] = decided[-1]
            assert isinstance(drop, Drop)
            assert [h.peer_id for h in drop.others] == order[:-1] or {h.peer_id for h in drop.others} == set(order[:-1])
        else:
            assert decided[-1] == []


def test_a_surplus_replica_that_is_ahead_stays() -> None:
    uid = "ffn.0.0"
    order = rendezvous_order(uid, peers(3))
    placement = Placement(order[-1], {uid: 2}, 99)
    others = [host(p, {uid: 4}) for p in order[:-1]]
    assert all(placement.decide({uid: 5}, others) == [] for _ in range(3 * SETTLE_TICKS))


class Simulation:
    """Hosts that act on views up to `lag` ticks old."""

    def __init__(self, joins: Sequence[int], replicas: int, capacity: int, seed: int, lag: int) -> None:
        self.rng = random.Random(seed)
        self.ids = peers(len(joins), seed)
        self.joins, self.capacity, self.lag = joins, capacity, lag
        self.placements = [Placement(p, dict.fromkeys(UIDS, replicas), capacity) for p in self.ids]
        self.held: list[dict[str, int]] = [{} for _ in joins]
        self.history: list[list[dict[str, int] | None]] = []
        self.died: dict[int, int] = {}
        self.fewest = 99
        self.actions = 0

    def tick(self) -> None:
        now = len(self.history)
        self.actions = 0
        for i in self.rng.sample(range(len(self.ids)), len(self.ids)):
            if now <= self.joins[i] or i in self.died:
                continue
            for action in self.placements[i].decide(self.held[i], self.view(i, now)):
                self.actions += 1
                if isinstance(action, Take):
                    self.held[i][action.uid] = 0
                elif all(action.uid in self.held[self.ids.index(o.peer_id)] for o in action.others):
                    del self.held[i][action.uid]
        self.history.append([dict(h) if now >= self.joins[j] else None for j, h in enumerate(self.held)])

    def view(self, i: int, now: int) -> list[HostRecord]:
        records = []
        for j, peer_id in enumerate(self.ids):
            if j == i or (j in self.died and now - self.died[j] > 6):
                continue
            age = 1 + self.rng.randrange(self.lag + 1)
            experts = self.history[max(0, now - age)][j] if self.history else None
            if experts is not None:
                records.append(host(peer_id, experts, self.capacity))
        return records

    def copies(self) -> list[int]:
        alive = [h for i, h in enumerate(self.held) if i not in self.died]
        return [sum(uid in h for h in alive) for uid in UIDS]

    def loads(self) -> list[int]:
        return [len(h) for i, h in enumerate(self.held) if i not in self.died]


@pytest.mark.parametrize("joins", [[0, 0, 0, 0], [0, 0, 1, 5], [0, 10, 20], [0, 0, 0, 0, 0, 0, 30], [0]])
@pytest.mark.parametrize("lag", [0, 2])
def test_swarms_settle_with_every_expert_replicated_and_loads_alike(joins: list[int], lag: int) -> None:
    for seed in range(2):
        swarm = Simulation(joins, replicas=2, capacity=99, seed=seed, lag=lag)
        for _ in range(60):
            swarm.tick()
        assert set(swarm.copies()) == {min(2, len(joins))}
        assert max(swarm.loads()) - min(swarm.loads()) <= 6
        last = 0
        for _ in range(10):
            swarm.tick()
            last += swarm.actions
        assert last == 0, "it flaps"


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(0, 3))
def test_whatever_the_lag_no_expert_loses_replicas_while_hosts_live(seed: int, replicas: int, lag: int) -> None:
    rng = random.Random(seed)
    joins = [0] * replicas + [rng.randrange(20) for _ in range(3)]
    swarm = Simulation(joins, replicas=replicas, capacity=99, seed=seed, lag=lag)
    best = [0] * len(UIDS)
    for _ in range(50):
        swarm.tick()
        now = swarm.copies()
        assert all(n >= min(b, replicas) for n, b in zip(now, best, strict=True))
        best = [max(b, n) for b, n in zip(best, now, strict=True)]
    assert set(swarm.copies()) == {replicas}


def test_survivors_fill_the_gaps_of_the_dead_within_capacity() -> None:
    swarm = Simulation([0] * 5, replicas=2, capacity=10, seed=3, lag=1)
    for _ in range(30):
        swarm.tick()
    assert set(swarm.copies()) == {2}
    swarm.died[2] = len(swarm.history)
    for _ in range(40):
        swarm.tick()
    assert set(swarm.copies()) == {2}
    assert all(load <= 10 for load in swarm.loads())


def record(peer_id: PeerId, experts: Mapping[str, int], **more: Any) -> HostRecord:
    return HostRecord(peer_id, (), experts, capacity=99, load=len(experts), **more)


def test_missing_replicas_are_taken_least_replicated_first_then_the_busiest() -> None:
    me, a, b = peers(3)
    others = [
        record(a, dict.fromkeys(UIDS[:4], 0), busy={UIDS[1]: 10, UIDS[2]: 500}),
        record(b, dict.fromkeys(UIDS[3:4], 0), busy={UIDS[3]: 900}),
    ]
    takes = [a.uid for a in Placement(me, dict.fromkeys(UIDS[:5], 3), 99).decide({}, others)]
    assert takes == [UIDS[4], UIDS[2], UIDS[1], UIDS[0], UIDS[3]]


def test_who_has_the_newest_checkpoint_takes_what_nobody_holds() -> None:
    ids = peers(5)
    kept = {ids[1]: 4, ids[3]: 9, ids[4]: 9}
    for uid in UIDS[:4]:
        first = next(p for p in rendezvous_order(uid, ids) if kept.get(p) == 9)
        for me in ids:
            others = [record(p, {}, kept={uid: kept[p]} if p in kept else {}) for p in ids if p != me]
            own = {uid: kept[me]} if me in kept else {}
            takes = [a for a in Placement(me, {uid: 1}, 99).decide({}, others, own) if isinstance(a, Take)]
            assert [a.uid for a in takes] == ([uid] if me == first else [])
            assert all([h.kept[uid] for h in a.keepers] == sorted(h.kept[uid] for h in a.keepers)[::-1] for a in takes)


def test_what_is_on_its_way_is_waited_for_but_not_for_ever() -> None:
    uid = UIDS[0]
    holder, taker, me = peers(3)
    others = [record(holder, {uid: 1}), record(taker, {}, taking={uid: 1})]
    placement = Placement(me, {uid: 2}, 99)
    decided = [placement.decide({}, others) for _ in range(TAKING_TICKS + 3)]
    assert decided[: TAKING_TICKS - 1] == [[]] * (TAKING_TICKS - 1)
    assert any(decided[TAKING_TICKS - 1 :])


def shared(me: PeerId, other: PeerId, mine: int, theirs: int) -> list[list[Take | Drop]]:
    """Decisions of a minute, with so many experts of one replica each here and there, all of which could come here."""
    uids = [u for u in ExpertGrid("x.[0:200]", "ffn").uids() if rendezvous_order(u, [me, other])[0] == me]
    held = dict.fromkeys(uids[:mine], 0)
    others = [record(other, dict.fromkeys(uids[mine : mine + theirs], 0))]
    placement = Placement(me, dict.fromkeys(uids[: mine + theirs], 1), 99)
    return [placement.decide(held, others) for _ in range(MOVE_TICKS)]


def test_experts_move_only_if_the_busier_host_is_relieved_by_a_quarter() -> None:
    me, other = peers(2)
    assert not any(shared(me, other, 10, 16)), "16 to 13 is less than a quarter"
    decided = shared(me, other, 10, 18)
    assert decided[: SETTLE_TICKS - 1] == [[]] * (SETTLE_TICKS - 1)
    assert 1 <= len(decided[SETTLE_TICKS - 1]) <= 4
    assert sum(map(bool, decided)) <= 2, "about once a minute"


def test_the_busiest_experts_move_first_and_a_little_work_does_not_weigh_much() -> None:
    me, other = peers(2)
    uids = [u for u in ExpertGrid("x.[0:200]", "ffn").uids() if rendezvous_order(u, [me, other])[0] == me][:20]
    held, theirs = dict.fromkeys(uids[:10], 0), dict.fromkeys(uids[10:], 0)
    busy = dict.fromkeys(theirs, 400) | {uids[12]: 600, uids[15]: 550}
    placement = Placement(me, dict.fromkeys(uids, 1), 99)
    decided = [placement.decide(held, [record(other, theirs, busy=busy)]) for _ in range(SETTLE_TICKS)]
    assert [a.uid for a in decided[-1]][:2] == [uids[12], uids[15]]
    placement = Placement(me, dict.fromkeys(uids, 1), 99)
    idle = record(other, theirs, busy={uids[12]: 1})
    assert not any(placement.decide(held, [idle]) for _ in range(MOVE_TICKS))


def test_what_was_given_up_is_taken_again_only_if_others_do_not() -> None:
    uid = UIDS[0]
    ids = rendezvous_order(uid, peers(4))
    me, holder, *rest = ids
    placement = Placement(me, {uid: 2}, 99)
    placement.decide({uid: 3}, [record(p, {uid: 3}) for p in (holder, rest[0])])
    others = [record(holder, {uid: 3}), *(record(p, {}) for p in rest)]
    decided = [placement.decide({}, others) for _ in range(3 * PATIENCE_TICKS)]
    assert not any(decided[: 2 * PATIENCE_TICKS - 1]), "the next in order has had its time"
    assert any(decided[2 * PATIENCE_TICKS - 1 :])
