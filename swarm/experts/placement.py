"""Which experts a host should take or give up: a state machine without I/O.

Every host runs it on its own view of the announcements, at intervals, and views may differ for some seconds. It is
built so that equal views lead to disjoint actions (rendezvous hashing instead of locks), and that differing views cost
at most a surplus replica for a while, never a missing one:

- *Missing* replicas are assigned to hosts within equal quotas, by rendezvous order, the least replicated experts first,
  then the busiest. A host announces what is on its way to it. One that does not do its part is stood in for by the next
  in that order after some ticks, as is one that has given the expert up lately.
- *Imbalance*: while little is missing, a host takes experts over from a busier one, the busiest first, if the busier
  of the two is relieved by more than a quarter once they have shared alike, and if it comes before the other in the
  expert's rendezvous order. It does so about once a minute at most. Making room is similar: it relieves a full host so
  that it can take what is missing, when those with room hold it already.
- *Surplus*: the last holder in rendezvous order, and only that one, gives a surplus replica up. The order depends on
  nothing that changes, so two holders never both believe that they are last, and an expert that has moved does not move
  back while its holders live.

Imbalance and surplus have to last for some ticks before anybody acts (hysteresis).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.experts.overview import Overview, donors_of, keepers_of
from swarm.experts.records import HostRecord, rendezvous_order, rendezvous_score
from swarm.identity import PeerId

PATIENCE_TICKS = 4
"""Ticks that a missing replica waits for each host that should take it first."""
SETTLE_TICKS = 3
"""Ticks that imbalance or surplus must last."""
MOVE_TICKS = 20
"""Ticks, more or less, between two moves of one host: a minute at the default interval."""
MIN_RELIEF = 1.25
"""The busier host must have so many times the work that it would have after both share alike."""
CALM = 0.05
"""Part of all experts that may miss a replica while hosts go on sharing the work: in a large swarm some always do."""
TAKING_TICKS = 60
"""Ticks for which a host is believed that an expert is on its way to it."""
RETURN_TICKS = 200
"""Ticks, ten minutes at the default interval, for which others come first to take what a host has given up."""
_MOVE_JITTER = 0.25


@dataclass(frozen=True, slots=True)
class Take:
    """Hold this expert from now on.

    Attributes:
        donors: Holders to copy it from, the most advanced first.
        keepers: Hosts with a checkpoint of it, the newest first; of use if there are no donors.
    """

    uid: str
    donors: tuple[HostRecord, ...]
    keepers: tuple[HostRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """Give this expert up, once each of `others` has confirmed that it holds it."""

    uid: str
    others: tuple[HostRecord, ...]


class Placement:
    """See the module's docstring.

    Args:
        peer_id: This host.
        replicas: How many hosts should hold each expert of the manifest.
        capacity: How many experts this host can hold.
    """

    def __init__(self, peer_id: PeerId, replicas: Mapping[str, int], capacity: int) -> None:
        self.peer_id = peer_id
        self.capacity = capacity
        self.replicas = dict(replicas)
        self._missing_ticks: dict[str, int] = {}
        self._surplus_ticks: dict[str, int] = {}
        self._imbalance_ticks = 0
        self._moves = 0
        self._rest_ticks = 0
        self._tick = 0
        self._held: frozenset[str] = frozenset()
        self._given_up: dict[str, int] = {}
        self._taking_since: dict[tuple[PeerId, str], int] = {}

    def overview(
        self,
        held: Mapping[str, int],
        others: Sequence[HostRecord],
        kept: Mapping[str, int] | None = None,
        busy: Mapping[str, int] | None = None,
    ) -> Overview:
        """This host and the others as `decide_on` needs them. Some milliseconds for hundreds of hosts; thread-safe."""
        own = HostRecord(
            self.peer_id, (), dict(held), capacity=self.capacity, load=len(held), kept=kept or {}, busy=busy or {}
        )
        believed = [self._believed(h) for h in others if h.peer_id != self.peer_id]
        announced = {(h.peer_id, uid) for h in others for uid in h.taking}
        self._taking_since = {pair: tick for pair, tick in self._taking_since.items() if pair in announced}
        return Overview([own, *believed], self.replicas)

    def _believed(self, host: HostRecord) -> HostRecord:
        """A record without what has been on its way for too long."""
        if not host.taking:
            return host
        since = {uid: self._taking_since.setdefault((host.peer_id, uid), self._tick) for uid in host.taking}
        return replace(host, taking={u: 1 for u, tick in since.items() if self._tick - tick < TAKING_TICKS})

    def decide(
        self, held: Mapping[str, int], others: Sequence[HostRecord], kept: Mapping[str, int] | None = None
    ) -> list[Take | Drop]:
        """One tick.

        Args:
            held: This host's experts and their weight versions.
            others: The other hosts' records, all grids joined.
            kept: Versions of this host's checkpoints.
        """
        return self.decide_on(self.overview(held, others, kept), held)

    def decide_on(self, view: Overview, held: Mapping[str, int]) -> list[Take | Drop]:
        """One tick on an overview that several hosts may share, in which this one's record may be outdated."""
        self._tick += 1
        self._given_up |= dict.fromkeys(sorted(self._held.difference(held)), self._tick)
        self._given_up = {u: t for u, t in self._given_up.items() if self._tick - t < RETURN_TICKS}
        self._held = frozenset(held)
        takes = self._missing(view, held)
        self._rest_ticks = max(0, self._rest_ticks - 1)
        if view.missing:
            takes = takes or self._making_room(view)
        if not takes and len(view.missing) <= CALM * len(view.holders):
            takes = self._moving(view, held)
        else:
            self._imbalance_ticks = 0
        takes = [uid for uid in takes if uid not in held][: max(0, self.capacity - len(held))]
        others = [h for h in view.records if h.peer_id != self.peer_id] if takes else []
        actions: list[Take | Drop] = [Take(uid, donors_of(uid, others), keepers_of(uid, others)) for uid in takes]
        return actions + self._surplus(view, held)

    def _missing(self, view: Overview, held: Mapping[str, int]) -> list[str]:
        self._missing_ticks = {uid: self._missing_ticks.get(uid, 0) + 1 for uid in view.missing}
        takes: list[str] = []
        for vacancy in view.vacancies():
            uid = vacancy.uid
            late = self._missing_ticks[uid] // PATIENCE_TICKS
            # whoever is not among so many first has nothing to do
            first = vacancy.candidates[: vacancy.slots + late]
            if uid in held or self.peer_id not in first:
                continue
            if uid in self._given_up and late < 2 and view.holders[uid] and len(vacancy.candidates) > vacancy.slots:
                continue
            if first.index(self.peer_id) < vacancy.slots or len(held) + len(takes) < self.capacity:
                takes.append(uid)
        return takes

    def _making_room(self, view: Overview) -> list[str]:
        """One expert to take over from a full host, so that it can take a missing one that we hold already."""
        stuck = [v.uid for v in view.vacancies() if self._missing_ticks[v.uid] >= PATIENCE_TICKS and not v.candidates]
        for missing in stuck:
            for uid in view.holders:
                holders = rendezvous_order(uid, view.holders[uid])
                if len(holders) != view.target(uid) or holders[-1] in view.holders[missing]:
                    continue
                heirs = [p for p in view.candidates(uid, view.load) if p in view.holders[missing]]
                last = rendezvous_score(uid, holders[-1])
                heirs = [p for p in heirs if rendezvous_score(uid, p) > last]
                if heirs:
                    return [uid] if heirs[0] == self.peer_id else []
        return []

    def _moving(self, view: Overview, held: Mapping[str, int]) -> list[str]:
        """Experts to take over from busier hosts."""
        takes = self._worth_moving(view, held)
        self._imbalance_ticks = self._imbalance_ticks + 1 if takes else 0
        if self._imbalance_ticks < SETTLE_TICKS or self._rest_ticks:
            return []
        self._moves += 1
        jitter = rendezvous_score(f"move {self._moves}", self.peer_id) / 2**63 - 1
        self._rest_ticks = round(MOVE_TICKS * (1 + _MOVE_JITTER * jitter))
        return takes

    def _worth_moving(self, view: Overview, held: Mapping[str, int]) -> list[str]:
        mine = sum(view.weights.get(uid, 0.0) for uid in held)
        fair = view.fair_work
        takes: list[str] = []
        for donor in view.by_work:
            theirs = view.work[donor]
            if theirs <= MIN_RELIEF * (theirs + mine) / 2 or len(held) + len(takes) >= self.capacity:
                break
            if donor == self.peer_id:
                continue
            for uid in self._transferable(view, donor, held):
                weight = view.weights[uid]
                # both stay on their side of the middle, so that nobody has a reason to move something back
                if uid not in takes and theirs - weight >= mine + weight and mine + weight <= fair + weight / 2:
                    takes.append(uid)
                    theirs, mine = theirs - weight, mine + weight
                if theirs <= MIN_RELIEF * (theirs + mine) / 2 or len(held) + len(takes) >= self.capacity:
                    break
        return takes

    def _transferable(self, view: Overview, donor: PeerId, held: Mapping[str, int]) -> list[str]:
        """What another host would give up once we hold it, the busiest first, then by our place in rendezvous order."""
        found: list[tuple[float, int, str]] = []
        for uid in view.hosts[donor].experts:
            if uid in held or uid in self._given_up or uid not in view.replicas:
                continue
            if len(view.holders[uid]) != view.target(uid) or uid in view.takers:
                continue
            last, mine = rendezvous_score(uid, donor), rendezvous_score(uid, self.peer_id)
            if mine <= last or any(rendezvous_score(uid, p) < last for p in view.holders[uid]):
                continue
            found.append((-view.weights[uid], -mine, uid))
        return [uid for _, _, uid in sorted(found)]

    def _surplus(self, view: Overview, held: Mapping[str, int]) -> list[Drop]:
        last_of = []
        for uid in held:
            holders = view.holders.get(uid, [])
            if self.peer_id in holders and len(holders) > view.target(uid):
                own = rendezvous_score(uid, self.peer_id)
                if all(p == self.peer_id or rendezvous_score(uid, p) > own for p in holders):
                    last_of.append(uid)
        self._surplus_ticks = {uid: self._surplus_ticks.get(uid, 0) + 1 for uid in last_of}
        drops = []
        for uid in last_of:
            others = [view.hosts[p] for p in view.holders[uid] if p != self.peer_id]
            newest = max(h.experts[uid] for h in others)
            if self._surplus_ticks[uid] >= SETTLE_TICKS and newest >= held[uid]:
                drops.append(Drop(uid, tuple(others)))
        return drops
