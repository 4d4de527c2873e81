"""What all hosts announce, parsed once: who holds what, what is missing and who should take it. Without I/O.

Everything here follows from the records alone, so that hosts with equal records come to equal conclusions, and what is
costly is computed once however many decisions use it. An overview does not change; the parts are computed when needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from swarm.experts.records import HostRecord, rendezvous_order, replica_order
from swarm.identity import PeerId

_FAR_BELOW = 0.75
"""Part of its quota below which a host comes before others: it has joined lately."""

_MAX_USE = 3.0


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


def keepers_of(uid: str, hosts: Sequence[HostRecord]) -> tuple[HostRecord, ...]:
    """Hosts that announce a checkpoint of an expert, the newest first."""
    return tuple(sorted((h for h in hosts if uid in h.kept), key=lambda h: (-h.kept[uid], h.peer_id.digest)))


@dataclass(frozen=True, slots=True)
class Vacancy:
    """A missing replica or more of one expert.

    Attributes:
        slots: Replicas that are missing.
        candidates: Who could take one, best first.
    """

    uid: str
    slots: int
    candidates: tuple[PeerId, ...]


class Overview:
    """See the module's docstring.

    Args:
        records: One for each host.
        replicas: How many hosts should hold each expert of the manifest.
    """

    def __init__(self, records: Sequence[HostRecord], replicas: Mapping[str, int]) -> None:
        self.records = records
        self.replicas = replicas
        self.hosts = {h.peer_id: h for h in records if not h.leaving}
        self.holders: dict[str, list[PeerId]] = {uid: [] for uid in sorted(replicas)}
        self.takers: dict[str, list[PeerId]] = {}
        self.load: dict[PeerId, int] = {}
        for peer, host in self.hosts.items():
            count = 0
            for uid in host.experts:
                holders = self.holders.get(uid)
                if holders is not None:
                    holders.append(peer)
                    count += 1
            for uid in host.taking:
                if uid in self.holders and uid not in host.experts:
                    self.takers.setdefault(uid, []).append(peer)
                    count += 1
            self.load[peer] = count
        self._able = sum(h.capacity > 0 for h in self.hosts.values())
        self._vacancies: list[Vacancy] | None = None

    def lacking(self, uid: str) -> int:
        """Replicas that neither are there nor on the way."""
        return self.target(uid) - len(self.holders[uid]) - len(self.takers.get(uid, ()))

    def target(self, uid: str) -> int:
        """How many hosts should hold an expert, as many as there are."""
        return min(self.replicas[uid], self._able)

    @cached_property
    def quota(self) -> dict[PeerId, int]:
        """How many replicas each host should hold; one that holds more than it says it can promises no more."""
        demand = sum(self.target(uid) for uid in self.holders)
        return quotas({p: h.capacity for p, h in self.hosts.items()}, demand)

    @cached_property
    def rates(self) -> dict[str, float]:
        """Tokens per second that are asked of each expert, all its replicas together."""
        rates: dict[str, float] = {}
        for host in self.records:
            for uid, rate in host.busy.items():
                rates[uid] = rates.get(uid, 0.0) + rate
        return rates

    @cached_property
    def weights(self) -> dict[str, float]:
        """What one replica of each expert costs its host: 1 for being held, and 1 on average for being used.

        The second part has an end, so that a little work in an idle swarm does not weigh like a lot.
        """
        shares = {uid: self.rates.get(uid, 0.0) / max(1, len(h)) for uid, h in self.holders.items()}
        mean = sum(shares.values()) / max(1, len(shares))
        return {uid: 1.0 + (min(share / mean, _MAX_USE) if mean > 0 else 0.0) for uid, share in shares.items()}

    @cached_property
    def work(self) -> dict[PeerId, float]:
        """What each host's replicas cost it together."""
        weights = self.weights
        return {p: sum(weights.get(uid, 0.0) for uid in h.experts) for p, h in self.hosts.items()}

    @cached_property
    def fair_work(self) -> float:
        """What each host would have if all had the same."""
        return sum(self.work.values()) / max(1, len(self.work))

    @cached_property
    def by_work(self) -> list[PeerId]:
        """Hosts, the busiest first."""
        return sorted(self.hosts, key=lambda p: (-self.work[p], p.digest))

    @cached_property
    def missing(self) -> list[str]:
        """Experts with too few holders and takers: those with the fewest holders first, then the busiest."""
        short = [uid for uid in self.holders if self.lacking(uid) > 0]
        return sorted(short, key=lambda uid: (len(self.holders[uid]), -self.rates.get(uid, 0.0), uid))

    @cached_property
    def kept(self) -> dict[str, int]:
        """The newest version of each expert that some host has a checkpoint of."""
        found: dict[str, int] = {}
        for host in self.records:
            for uid, version in host.kept.items():
                found[uid] = max(version, found.get(uid, -1))
        return found

    @cached_property
    def newest_kept(self) -> dict[str, tuple[int, frozenset[PeerId]]]:
        """Of experts that nobody holds: the newest checkpoint's version, and who has it."""
        found: dict[str, tuple[int, frozenset[PeerId]]] = {}
        orphans = {uid for uid in self.missing if not self.holders[uid]}
        for peer, host in self.hosts.items():
            for uid, version in host.kept.items():
                if uid in orphans:
                    best, peers = found.get(uid, (-1, frozenset[PeerId]()))
                    if version >= best:
                        found[uid] = (version, peers | {peer} if version == best else frozenset({peer}))
        return found

    def vacancies(self) -> list[Vacancy]:
        """Who should take what is missing, everybody's part played through in one order."""
        if self._vacancies is None:
            load = dict(self.load)
            self._vacancies = []
            for uid in self.missing:
                slots = self.lacking(uid)
                candidates = self.candidates(uid, load)
                for peer in candidates[:slots]:
                    load[peer] += 1
                self._vacancies.append(Vacancy(uid, slots, tuple(candidates)))
        return self._vacancies

    def candidates(self, uid: str, load: Mapping[PeerId, int]) -> list[PeerId]:
        """Who could take one more replica, best first.

        Who has the newest checkpoint of what nobody holds comes first; then those far below their quota, those below
        it, and the others; among equals, rendezvous order.
        """
        holders = [*self.holders[uid], *self.takers.get(uid, ())]
        free = [p for p, h in self.hosts.items() if p not in holders and load[p] < h.capacity]
        order = rendezvous_order(uid, free)
        quota = self.quota
        tiers: tuple[list[PeerId], ...] = ([], [], [])
        for p in order:
            tiers[0 if load[p] < _FAR_BELOW * quota[p] else 1 if load[p] < quota[p] else 2].append(p)
        order = [p for tier in tiers for p in tier]
        _, keepers = self.newest_kept.get(uid, (0, frozenset[PeerId]()))
        return [p for p in order if p in keepers] + [p for p in order if p not in keepers] if keepers else order
