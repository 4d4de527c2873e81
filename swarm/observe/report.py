"""What a run looks like from one peer: a snapshot of the peers and experts that the DHT lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.roles import Role


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer as its own record describes it. `state` is what it says of itself (`ONLINE`, `SYNCING`, ...)."""

    peer_id: str
    name: str
    roles: frozenset[Role]
    state: str
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SwarmView:
    """Peers and expert replicas of a run at one moment.

    Attributes:
        peers: Every peer with a living record, by id.
        holders: For each grid's name, every uid of the grid with the ids of the peers that announce it (none: `()`).
    """

    peers: tuple[PeerView, ...]
    holders: Mapping[str, Mapping[str, tuple[str, ...]]]

    def replicas(self, grid: str) -> dict[str, int]:
        """How many hosts announce each expert of a grid. Raises `KeyError` for a grid the run does not have."""
        return {uid: len(hosts) for uid, hosts in self.holders[grid].items()}

    def min_replicas(self, grid: str) -> int:
        """Replicas of the least-held expert of a grid."""
        return min(self.replicas(grid).values(), default=0)

    def live_fraction(self, grid: str) -> float:
        """Share of the grid's experts that at least one host announces."""
        counts = self.replicas(grid).values()
        return sum(1 for count in counts if count) / len(counts) if counts else 0.0

    def by_role(self, role: Role | str) -> tuple[PeerView, ...]:
        return tuple(peer for peer in self.peers if Role(role) in peer.roles)

    def by_state(self, state: str) -> tuple[PeerView, ...]:
        return tuple(peer for peer in self.peers if peer.state == state)

    def peer(self, name: str) -> PeerView | None:
        """The peer that goes by `name`, if it is listed."""
        return next((peer for peer in self.peers if peer.name == name), None)

    def without(self, peer_ids: Iterable[str]) -> SwarmView:
        """The view as it will be once the records of these peers have expired (they are known to be dead)."""
        gone = frozenset(peer_ids)
        return SwarmView(
            peers=tuple(peer for peer in self.peers if peer.peer_id not in gone),
            holders={
                grid: {uid: tuple(h for h in hosts if h not in gone) for uid, hosts in experts.items()}
                for grid, experts in self.holders.items()
            },
        )
