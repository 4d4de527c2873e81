"""Which experts a host should take or give up: a state machine without I/O.

Every host runs it on its own view of the announcements, at intervals, and views may differ for some seconds. It is
built so that equal views lead to disjoint actions (rendezvous hashing instead of locks), and that differing views cost
at most a surplus replica for a while, never a missing one:

- *Missing* replicas are assigned to hosts within equal quotas, by rendezvous order. A host that does not do its part is
  stood in for by the next in that order after some ticks.
- *Imbalance*: while nothing is missing, a host below its quota takes an expert over from one above, if it comes before
  that one in the expert's rendezvous order. The same relieves a full host so that it can take what is missing, when
  those with room hold it already.
- *Surplus*: the last holder in rendezvous order, and only that one, gives a surplus replica up. The order depends on
  nothing that changes, so two holders never both believe that they are last.

Imbalance and surplus have to last for some ticks before anybody acts (hysteresis).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.experts.records import HostRecord, rendezvous_order, rendezvous_score, replica_order
from swarm.identity import PeerId

PATIENCE_TICKS = 4
"""Ticks that a missing replica waits for each host that should take it first."""
SETTLE_TICKS = 3
"""Ticks that imbalance or surplus must last."""


@dataclass(frozen=True, slots=True)
class Take:
    """Hold this expert from now on; copy it from `donors` (the most advanced first), or create it if there are none."""

    uid: str
    donors: tuple[HostRecord, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Give this expert up, once each of `others` has confirmed that it holds it."""

    uid: str
    others: tuple[HostRecord, ...]


def quotas(capacities: Mapping[PeerId, int], demand: int) -> dict[PeerId, int]:
    """How many replicas each host should hold: as equal as capacities allow, enough for `demand` if they allow that."""
    level, left, rest = 0, demand, sorted(capacities.values())
    for i, capacity in enumerate(rest):
        sharing = len(rest) - i
        if (capacity - level) * sharing >= left:
            level += -(-left // sharing)
            break
        left -= (capacity - level) * sharing
        level = capacity
    return {peer: min(capacity, level) for peer, capacity in capacities.items()}


def donors_of(uid: str, hosts: Sequence[HostRecord]) -> tuple[HostRecord, ...]:
    """Holders of an expert, the most advanced first, primary before secondary among equals."""
    return tuple(sorted(replica_order(uid, hosts), key=lambda h: -h.experts[uid]))


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
        self._replicas = dict(replicas)
        self._missing_ticks: dict[str, int] = {}
        self._surplus_ticks: dict[str, int] = {}
        self._imbalance_ticks = 0

    def decide(self, held: Mapping[str, int], others: Sequence[HostRecord]) -> list[Take | Drop]:
        """One tick.

        Args:
            held: This host's experts and their weight versions.
            others: The other hosts' records, all grids joined.
        """
        own = HostRecord(self.peer_id, (), dict(held), capacity=self.capacity, load=len(held))
        everybody = [own, *(h for h in others if h.peer_id != self.peer_id)]
        view = _View([h for h in everybody if not h.leaving], self._replicas)
        takes = self._missing(view)
        if view.missing:
            self._imbalance_ticks = 0
            takes = takes or self._making_room(view)
        else:
            takes = self._rebalancing(view)
        known = [h for h in everybody if h.peer_id != self.peer_id]
        return [*(Take(uid, donors_of(uid, known)) for uid in takes), *self._surplus(view)]

    def _missing(self, view: _View) -> list[str]:
        self._missing_ticks = {uid: self._missing_ticks.get(uid, 0) + 1 for uid in view.missing}
        takes = []
        for uid in view.missing:
            order = view.candidates(uid)
            slots = view.target(uid) - len(view.holders[uid])
            for peer in order[:slots]:
                view.assign(peer)
            if self.peer_id not in order:
                continue
            late = self._missing_ticks[uid] // PATIENCE_TICKS
            place = order.index(self.peer_id)
            if place < slots:
                takes.append(uid)
            elif place < slots + late and view.load[self.peer_id] < self.capacity:
                view.assign(self.peer_id)
                takes.append(uid)
        return takes

    def _making_room(self, view: _View) -> list[str]:
        """One expert to take over from a full host, so that it can take a missing one that we hold already."""
        stuck = [u for u in view.missing if self._missing_ticks[u] >= PATIENCE_TICKS and not view.candidates(u)]
        for missing in stuck:
            for uid in view.uids:
                holders = rendezvous_order(uid, view.holders[uid])
                if len(holders) != view.target(uid) or holders[-1] in view.holders[missing]:
                    continue
                heirs = [p for p in view.candidates(uid) if p in view.holders[missing]]
                last = rendezvous_score(uid, holders[-1])
                heirs = [p for p in heirs if rendezvous_score(uid, p) > last]
                if heirs:
                    return [uid] if heirs[0] == self.peer_id else []
        return []

    def _rebalancing(self, view: _View) -> list[str]:
        """Experts to take over from hosts above their quota."""
        takes: list[str] = []
        spare = {p: view.quota[p] - view.load[p] for p in view.load}
        for uid in view.uids:
            holders = rendezvous_order(uid, view.holders[uid])
            if not holders or spare[holders[-1]] >= 0:
                continue
            last = rendezvous_score(uid, holders[-1])
            heirs = [p for p in view.candidates(uid) if spare[p] > 0 and rendezvous_score(uid, p) > last]
            # moving one expert must leave the two closer together than before
            heirs = [p for p in heirs if view.load[holders[-1]] - view.load[p] >= 2]
            if heirs:
                spare[holders[-1]] += 1
                spare[heirs[0]] -= 1
                if heirs[0] == self.peer_id:
                    takes.append(uid)
        self._imbalance_ticks = self._imbalance_ticks + 1 if takes else 0
        return takes if self._imbalance_ticks >= SETTLE_TICKS else []

    def _surplus(self, view: _View) -> list[Drop]:
        last_of = []
        for uid in view.uids:
            holders = rendezvous_order(uid, view.holders[uid])
            if len(holders) > view.target(uid) and holders[-1] == self.peer_id:
                last_of.append(uid)
        self._surplus_ticks = {uid: self._surplus_ticks.get(uid, 0) + 1 for uid in last_of}
        drops = []
        for uid in last_of:
            others = [view.hosts[p] for p in view.holders[uid] if p != self.peer_id]
            newest = max(h.experts[uid] for h in others)
            if self._surplus_ticks[uid] >= SETTLE_TICKS and newest >= view.hosts[self.peer_id].experts[uid]:
                drops.append(Drop(uid, tuple(others)))
        return drops


class _View:
    """One moment's announcements, and what follows from them; `assign` plays missing replicas through."""

    def __init__(self, hosts: Sequence[HostRecord], replicas: Mapping[str, int]) -> None:
        self.uids = sorted(replicas)
        self._replicas = replicas
        self.hosts = {
            h.peer_id: replace(h, experts={u: v for u, v in h.experts.items() if u in replicas}) for h in hosts
        }
        self.holders: dict[str, list[PeerId]] = {uid: [] for uid in self.uids}
        for host in self.hosts.values():
            for uid in host.experts:
                self.holders[uid].append(host.peer_id)
        self._able = sum(h.capacity > 0 for h in self.hosts.values())
        self.load = {p: len(h.experts) for p, h in self.hosts.items()}
        demand = sum(self.target(uid) for uid in self.uids)
        # a host that holds more than it says it can does not promise more
        self.quota = quotas({p: h.capacity for p, h in self.hosts.items()}, demand)
        self.missing = sorted(
            (uid for uid in self.uids if len(self.holders[uid]) < self.target(uid)),
            key=lambda uid: (len(self.holders[uid]), uid),
        )

    def target(self, uid: str) -> int:
        return min(self._replicas[uid], self._able)

    def candidates(self, uid: str) -> list[PeerId]:
        """Who could take one more replica, best first: below quota before above it, then by rendezvous."""
        holders = self.holders[uid]
        free = [p for p in self.hosts if p not in holders and self.load[p] < self.hosts[p].capacity]
        order = rendezvous_order(uid, free)
        return [p for p in order if self.load[p] < self.quota[p]] + [p for p in order if self.load[p] >= self.quota[p]]

    def assign(self, peer: PeerId) -> None:
        self.load[peer] += 1
