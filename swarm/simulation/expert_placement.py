"""Placement of experts in large swarms under churn: the real decisions and records of every host, all else modelled.

A simulation of discrete events without an event loop. Every host runs `swarm.experts.placement.Placement` on the
records of `swarm.experts.records` as they would be announced; what is modelled is the time that things take: records
spread late, views are stale now and then, dead hosts' records run out, copies take seconds, hosts leave with a
hand-over or die, and those that died come back with their disks. An expert's state is its version.

Losses of last replicas are compared with what a birth-death chain predicts from the rate of deaths and the measured
time of repairs: with `n` live replicas of `r`, one goes at the rate `n / lifetime` and one is repaired at the rate
`(r - n) / repair time`. A host that leaves hands over what nobody else holds, and does not wait for more: while others
live it takes a replica along like one that dies, but the last replica goes with deaths alone.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swarm.experts.keeping import PROVISIONAL_TTLS
from swarm.experts.overview import Overview
from swarm.experts.placement import Drop, Placement, Take
from swarm.experts.records import HostRecord
from swarm.experts.spec import ExpertGrid
from swarm.identity import PeerId

FLAP_S = 600.0
"""An expert that comes back to a host so soon after it was given up was moved in vain."""
_ANNOUNCEMENTS_PER_TTL = 3


@dataclass(frozen=True)
class PlacementModel:
    """What is simulated.

    Attributes:
        churn: Part of the hosts that leave or die within a minute; others take their places.
        graceful: Part of those that hand over.
        settle_s: Time without churn at first, which is not measured.
        placement_s, announce_ttl_s, drain_timeout_s, checkpoint_s: As in `HostConfig`.
        sync_s: Interval at which replicas agree; an expert's version rises by one.
        spread_s: A record takes up to so long until readers see it.
        view_s: Views are so old on average.
        stale: Part of all reads that return a view up to `stale_s` old.
        transfer_s: Shortest and longest time of a copy; a host makes one after the other.
        dead_call_s: Time that asking a dead holder costs.
        absence_s: Mean time until a host that died comes back, or another one joins in place of one that left.
    """

    hosts: int = 500
    experts: int = 2000
    replicas: int = 3
    minutes: float = 60.0
    churn: float = 0.01
    graceful: float = 0.8
    settle_s: float = 300.0
    placement_s: float = 3.0
    announce_ttl_s: float = 30.0
    drain_timeout_s: float = 10.0
    checkpoint_s: float = 300.0
    sync_s: float = 10.0
    spread_s: float = 1.0
    view_s: float = 2.0
    stale: float = 0.1
    stale_s: float = 10.0
    transfer_s: tuple[float, float] = (1.0, 4.0)
    dead_call_s: float = 2.0
    absence_s: float = 60.0
    capacity_factor: float = 3.0
    """Room of a host, as a multiple of its equal share."""


@dataclass(frozen=True)
class PlacementFigures:
    """What happened after the settling.

    Attributes:
        deaths, leaves: Hosts that died, and that left with a hand-over.
        incomplete: Experts that a leaving host held alone and could not hand over in time; they are losses, too.
        losses: Experts whose last replica went.
        predicted_losses: What the chain predicts; `ratio` is their quotient (0 without losses).
        restored: Losses after which the expert went on from a checkpoint, at once or when its host had returned.
        anew: Losses that nobody had a checkpoint of, also after everybody had returned.
        lost_versions: Mean number of agreements that a restored expert fell back.
        repair_s, repair_p99_s: From a replica's death until another one was there.
        under_replicated: Part of the time that an expert had too few replicas, averaged over experts.
        moves_per_host_hour: Experts taken over without one being missing; `most_moves` by one host in all.
        flaps: Experts that a host took again within ten minutes of giving them up.
        brief_stays: Experts that a host gave up within ten minutes of taking them (surplus replicas, mostly).
        least_load, most_load: Experts of a host at the end.
    """

    model: PlacementModel
    seed: int
    deaths: int
    leaves: int
    incomplete: int
    losses: int
    predicted_losses: float
    ratio: float
    restored: int
    anew: int
    lost_versions: float
    repair_s: float
    repair_p99_s: float
    under_replicated: float
    moves_per_host_hour: float
    most_moves: int
    flaps: int
    brief_stays: int
    least_load: int
    most_load: int


def predicted_losses(
    replicas: int, go_rate: float, death_rate: float, repair_s: float, experts: int, seconds: float
) -> float:
    """Deaths of last replicas by the birth-death chain of the module's docstring.

    Args:
        go_rate: Per second, of one replica among others; its host dies or leaves.
        death_rate: The same of deaths alone.
        repair_s: Mean time of the repair of one.
    """
    weights = [1.0]  # of the states with r, r - 1, ..., 1 and 0 live replicas
    for n in range(replicas, 0, -1):
        rate = go_rate if n > 1 else death_rate
        weights.append(weights[-1] * n * rate * repair_s / (replicas - n + 1))
    return weights[replicas - 1] / sum(weights) * death_rate * experts * seconds


class _Expert:
    __slots__ = ("base", "base_s", "deficits", "holders", "losses", "lost_version", "uid")

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.holders: dict[PeerId, None] = {}
        self.base = 0
        self.base_s = 0.0
        self.deficits: list[float] = []
        self.losses = 0
        self.lost_version = 0


@dataclass(eq=False)
class _Host:
    peer_id: PeerId
    placement: Placement
    held: dict[str, float] = field(default_factory=dict)
    """Experts, and since when."""
    disk: dict[str, int] = field(default_factory=dict)
    given_up: dict[str, float] = field(default_factory=dict)
    provisional: dict[str, float] = field(default_factory=dict)
    taking: dict[str, int] = field(default_factory=dict)
    moves: int = 0
    alive: bool = True
    leaving: bool = False
    until_s: float = 0.0


class PlacementSimulation:
    """See the module's docstring. `run` once."""

    def __init__(self, model: PlacementModel, seed: int = 0) -> None:
        self._model = model
        self._seed = seed
        self._rng = random.Random(seed)
        self._now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        grid = ExpertGrid(f"ffn.[0:{model.experts}]", "ffn", replicas=model.replicas)
        self._experts = {uid: _Expert(uid) for uid in grid.uids()}
        self._replicas = dict.fromkeys(self._experts, model.replicas)
        self._rates = {uid: max(1, round(self._rng.lognormvariate(5.0, 0.7))) for uid in self._experts}
        share = model.experts * model.replicas / model.hosts
        self._capacity = max(1, math.ceil(share * model.capacity_factor))
        self._hosts: dict[PeerId, _Host] = {}
        self._published: dict[PeerId, tuple[float, HostRecord]] = {}
        self._views: list[tuple[float, Overview]] = []
        self._count: Counter[str] = Counter()
        self._repairs_s: list[float] = []
        self._fallen: list[int] = []
        self._gone_moves: list[int] = []
        self._deficit_s = 0.0
        self._measuring = False

    # ---- events

    def _at(self, delay_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self._now + delay_s, self._number, act))

    def _run_until(self, end_s: float) -> None:
        while self._queue and self._queue[0][0] <= end_s:
            self._now, _, act = heapq.heappop(self._queue)
            act()
        self._now = end_s

    def run(self) -> PlacementFigures:
        """Simulate it all."""
        model = self._model
        for _ in range(model.hosts):
            self._join(None, {})
        self._run_until(model.settle_s)
        self._measuring = True
        self._at(self._rng.expovariate(self._churn_rate), self._churn)
        self._run_until(model.settle_s + 60.0 * model.minutes)
        figures = self._figures()
        self._measuring = False
        # nobody goes any more and everybody comes back: what is not restored then was lost
        self._run_until(self._now + 10 * model.absence_s)
        anew = sum(e.losses for e in self._experts.values())
        return replace(
            figures,
            anew=anew,
            restored=figures.losses - anew,
            lost_versions=statistics.fmean(self._fallen) if self._fallen else 0.0,
        )

    @property
    def _churn_rate(self) -> float:
        return self._model.churn * self._model.hosts / 60.0

    def _note(self, what: str) -> None:
        if self._measuring:
            self._count[what] += 1

    # ---- coming and going

    def _join(self, peer_id: PeerId | None, disk: dict[str, int]) -> None:
        peer_id = peer_id or PeerId(self._rng.randbytes(32))
        host = _Host(peer_id, Placement(peer_id, self._replicas, self._capacity), disk=disk)
        self._hosts[peer_id] = host
        self._announcements(host)
        self._at(self._rng.random() * self._model.placement_s, lambda: self._tick(host))
        self._at(self._rng.random() * self._model.checkpoint_s, lambda: self._save(host))

    def _churn(self) -> None:
        if not self._measuring:
            return
        self._at(self._rng.expovariate(self._churn_rate), self._churn)
        staying = [h for h in self._hosts.values() if not h.leaving]
        if not staying:
            return
        host = self._rng.choice(staying)
        if self._rng.random() < self._model.graceful:
            host.leaving, host.until_s = True, self._now + self._model.drain_timeout_s
            self._save_now(host)
            self._announce(host)
            self._at(self._model.placement_s / 2, lambda: self._hand_over(host))
        else:
            self._note("deaths")
            self._end(host)
            absence_s = self._rng.expovariate(1 / self._model.absence_s)
            self._at(absence_s, lambda: self._join(host.peer_id, host.disk))

    def _hand_over(self, host: _Host) -> None:
        view = self._look()
        waiting = [uid for uid in host.held if not any(p != host.peer_id for p in view.holders[uid] if p in view.hosts)]
        if waiting and self._now < host.until_s:
            self._at(self._model.placement_s / 2, lambda: self._hand_over(host))
            return
        self._note("leaves")
        for uid in host.held:
            if len(self._experts[uid].holders) == 1:
                self._note("incomplete")
        self._published.pop(host.peer_id, None)
        self._end(host)
        self._at(self._rng.expovariate(1 / self._model.absence_s), lambda: self._join(None, {}))

    def _end(self, host: _Host) -> None:
        host.alive = False
        del self._hosts[host.peer_id]
        self._gone_moves.append(host.moves)
        for uid in host.held:
            self._remove(self._experts[uid], host)

    def _remove(self, expert: _Expert, host: _Host) -> None:
        version = self._version(expert)
        del expert.holders[host.peer_id]
        if len(expert.holders) < self._model.replicas:
            expert.deficits.append(self._now)
        if not expert.holders:
            self._note("losses")
            expert.losses += self._measuring
            expert.lost_version = max(version, expert.lost_version)

    # ---- an expert's state

    def _version(self, expert: _Expert) -> int:
        return expert.base + int((self._now - expert.base_s) / self._model.sync_s)

    def _begin(self, expert: _Expert, version: int) -> None:
        expert.base, expert.base_s = version, self._now

    def _save(self, host: _Host) -> None:
        if host.alive:
            self._save_now(host)
            self._at(self._model.checkpoint_s, lambda: self._save(host))

    def _save_now(self, host: _Host) -> None:
        for uid in host.held:
            host.disk[uid] = max(host.disk.get(uid, 0), self._version(self._experts[uid]))

    # ---- announcements

    def _announcements(self, host: _Host) -> None:
        if host.alive:
            self._announce(host)
            self._at(self._model.announce_ttl_s / _ANNOUNCEMENTS_PER_TTL, lambda: self._announcements(host))

    def _announce(self, host: _Host) -> None:
        versions = {uid: self._version(self._experts[uid]) for uid in host.held}
        record = HostRecord(
            host.peer_id,
            (),
            versions,
            capacity=self._capacity,
            load=len(versions),
            leaving=host.leaving,
            busy={uid: self._rates[uid] // max(1, len(self._experts[uid].holders)) for uid in versions},
            kept={uid: v for uid, v in host.disk.items() if v > versions.get(uid, -1)},
            taking=dict(host.taking),
        )

        def seen() -> None:
            if host.alive:
                self._published[host.peer_id] = (self._now + self._model.announce_ttl_s, record)

        self._at(self._rng.random() * self._model.spread_s, seen)

    def _look(self) -> Overview:
        """A view as old as views are; hosts that look at about the same time see the same."""
        if not self._views or self._now - self._views[-1][0] >= self._model.view_s:
            for peer, (expires_s, _) in list(self._published.items()):
                if expires_s <= self._now:
                    del self._published[peer]
            records = [record for _, record in self._published.values()]
            self._views.append((self._now, Overview(records, self._replicas)))
            while self._now - self._views[0][0] > self._model.stale_s:
                del self._views[0]
        return self._rng.choice(self._views)[1] if self._rng.random() < self._model.stale else self._views[-1][1]

    # ---- placement

    def _tick(self, host: _Host) -> None:
        if not host.alive or host.leaving:
            return
        view = self._look()
        if host.provisional:
            self._catch_up(host, view)
        held = {uid: self._version(self._experts[uid]) for uid in host.held}
        actions = host.placement.decide_on(view, held)
        for action in actions:
            if isinstance(action, Drop):
                self._drop(host, action)
        takes = [action for action in actions if isinstance(action, Take)]
        missing = frozenset(view.missing) if takes else frozenset[str]()
        host.taking = {take.uid: 1 for take in takes}
        if takes:
            self._announce(host)
        self._take_all(host, takes, missing)

    def _take_all(self, host: _Host, takes: list[Take], missing: frozenset[str]) -> None:
        """One after the other; the next tick comes after the last."""
        if not host.alive:
            return
        if not takes or host.leaving:
            host.taking = {}
            jitter = 1 + 0.2 * (2 * self._rng.random() - 1)
            self._at(self._model.placement_s * jitter, lambda: self._tick(host))
            return
        take, rest = takes[0], takes[1:]
        expert = self._experts[take.uid]
        needed_s, donor = 0.0, None
        for record in take.donors:
            if record.peer_id in expert.holders:
                donor = record.peer_id
                break
            needed_s += self._model.dead_call_s
        needed_s += self._rng.uniform(*self._model.transfer_s)

        def done() -> None:
            if host.alive:
                host.taking.pop(take.uid, None)
                if donor is None and take.donors:
                    pass  # none of the announced holders lives; tried again
                elif donor is None or donor in expert.holders:
                    self._hold(host, take, take.uid in missing)
                self._take_all(host, rest, missing)

        self._at(needed_s, done)

    def _hold(self, host: _Host, take: Take, was_missing: bool) -> None:
        expert = self._experts[take.uid]
        if not expert.holders:
            self._create(host, expert, take)
        expert.holders[host.peer_id] = None
        host.held[take.uid] = self._now
        host.provisional[take.uid] = self._now + PROVISIONAL_TTLS * self._model.announce_ttl_s
        host.disk[take.uid] = max(host.disk.get(take.uid, 0), self._version(expert))
        if expert.deficits:
            opened_s = expert.deficits.pop(0)
            if self._measuring:
                self._repairs_s.append(self._now - opened_s)
                self._deficit_s += self._now - opened_s
        if not was_missing:
            self._note("moves")
            host.moves += self._measuring
        if self._now - host.given_up.get(take.uid, -math.inf) < FLAP_S:
            self._note("flaps")
        self._announce(host)

    def _create(self, host: _Host, expert: _Expert, take: Take) -> None:
        """Restore an expert without live holders from the newest checkpoint in reach, or begin anew."""
        best = host.disk.get(expert.uid, -1)
        for record in take.keepers:
            keeper = self._hosts.get(record.peer_id)
            if keeper is not None:
                best = max(best, keeper.disk.get(expert.uid, -1))
        if best >= 0:
            self._restored(expert, best)
        self._begin(expert, max(0, best))

    def _restored(self, expert: _Expert, version: int) -> None:
        if expert.losses:
            self._fallen.append(max(0, expert.lost_version - version))
        expert.losses = expert.lost_version = 0

    def _catch_up(self, host: _Host, view: Overview) -> None:
        for uid, until_s in list(host.provisional.items()):
            expert = self._experts[uid]
            if uid not in host.held or self._now > until_s:
                del host.provisional[uid]
                continue
            if max(host.disk.get(uid, -1), view.kept.get(uid, -1)) <= self._version(expert):
                continue
            kept = [r.kept[uid] for r in view.records if uid in r.kept and r.peer_id in self._hosts]
            best = max([host.disk.get(uid, -1), *kept])
            if best > self._version(expert):
                self._restored(expert, best)
                self._begin(expert, best)

    def _drop(self, host: _Host, drop: Drop) -> None:
        expert = self._experts[drop.uid]
        if drop.uid not in host.held or any(o.peer_id not in expert.holders for o in drop.others):
            return  # as when a holder does not confirm
        if self._now - host.held.pop(drop.uid) < FLAP_S:
            self._note("brief_stays")
        host.given_up[drop.uid] = self._now
        self._remove(expert, host)
        self._announce(host)

    # ---- result

    def _figures(self) -> PlacementFigures:
        model, count = self._model, self._count
        seconds = 60.0 * model.minutes
        repair_s = statistics.fmean(self._repairs_s) if self._repairs_s else 0.0
        predicted = predicted_losses(
            model.replicas,
            (count["deaths"] + count["leaves"]) / (model.hosts * seconds),
            count["deaths"] / (model.hosts * seconds),
            repair_s,
            model.experts,
            seconds,
        )
        loads = [len(h.held) for h in self._hosts.values() if not h.leaving]
        moves = [*self._gone_moves, *(h.moves for h in self._hosts.values())]
        waiting_s = sum(self._now - max(s, model.settle_s) for e in self._experts.values() for s in e.deficits)
        return PlacementFigures(
            model=model,
            seed=self._seed,
            deaths=count["deaths"],
            leaves=count["leaves"],
            incomplete=count["incomplete"],
            losses=count["losses"],
            predicted_losses=predicted,
            ratio=count["losses"] / predicted if predicted > 0 else 0.0,
            restored=0,
            anew=0,
            lost_versions=0.0,
            repair_s=repair_s,
            repair_p99_s=sorted(self._repairs_s)[int(0.99 * len(self._repairs_s))] if self._repairs_s else 0.0,
            under_replicated=(self._deficit_s + waiting_s) / (seconds * model.experts),
            moves_per_host_hour=sum(moves) / (model.hosts * seconds / 3600),
            most_moves=max(moves, default=0),
            flaps=count["flaps"],
            brief_stays=count["brief_stays"],
            least_load=min(loads, default=0),
            most_load=max(loads, default=0),
        )
