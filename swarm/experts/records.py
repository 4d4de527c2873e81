"""What hosts announce about their experts in the DHT, and the order of an expert's replicas, for hosts and clients.

Key `experts/<grid>`, author = host, subkeys "0", "1", ... as many as the size limit of a record body needs. A host that
holds nothing yet announces itself with an empty table, so that hosts that start together share the experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swarm.dht.schemas import MAX_ADDRESSES, Schema, addresses, flag, integer, number, table
from swarm.errors import MalformedFrameError
from swarm.experts.spec import parse_uid
from swarm.identity import PeerId

EXPERTS = "experts"
"""The namespace of hosts' records."""
MAX_WEIGHT_VERSION = 1 << 62
MAX_EXPERTS = 1 << 40
MAX_TOKENS_S = (1 << 32) - 1
_FIXED_BODY_BYTES = 192
_VERSION_BYTES = 9
_RATE_BYTES = 5
_MARK_BYTES = 1


def _uid(value: Any) -> str | None:
    try:
        parse_uid(value)
    except MalformedFrameError:
        return "is no expert's uid"
    return None


def _place(_author: PeerId, _key: str, subkey: str) -> str | None:
    return None if subkey.isascii() and subkey.isdecimal() and len(subkey) <= 4 else "its subkey is no small number"


HOST_SCHEMA = Schema(
    required={
        "addresses": addresses(),
        "experts": table(_uid, integer(0, MAX_WEIGHT_VERSION), 4096),
    },
    optional={
        "queue_s": number(0, 1e6),
        "capacity": integer(0, MAX_EXPERTS),
        "load": integer(0, MAX_EXPERTS),
        "leaving": flag(),
        "throughput": number(0, 1e12),
        "busy": table(_uid, integer(0, MAX_TOKENS_S), 4096),
        "kept": table(_uid, integer(0, MAX_WEIGHT_VERSION), 4096),
        "taking": table(_uid, integer(0, 1), 4096),
    },
    place=_place,
)
"""What is kept under `record_key`."""


def record_key(grid: str) -> str:
    """The DHT key under which hosts of a grid announce themselves."""
    return f"{EXPERTS}/{grid}"


def snapshot_key(uid: str) -> str:
    """The key under which a holder publishes an expert's state to other hosts."""
    return f"expert/{uid}"


def rendezvous_score(uid: str, peer_id: PeerId) -> int:
    """A pseudo-random weight of (expert, peer) that everybody computes alike (rendezvous hashing)."""
    return int.from_bytes(hashlib.sha256(uid.encode() + b"\0" + peer_id.digest).digest()[:8], "big")


def rendezvous_order(uid: str, peers: Iterable[PeerId]) -> list[PeerId]:
    """Peers by falling score; the first holder of an expert in this order is its primary replica."""
    return sorted(peers, key=lambda p: (-rendezvous_score(uid, p), p.digest))


@dataclass(frozen=True, slots=True)
class HostRecord:
    """What one host says about itself for one grid.

    Attributes:
        peer_id: The host (the record's author).
        addresses: Where it can be reached.
        experts: Held experts of the grid with their weight versions.
        queue_s: Expected wait of a new request.
        capacity: Experts (of all grids together) that it is willing to hold.
        load: Experts (of all grids together) that it holds.
        leaving: It hands its experts over and will be gone soon; it comes last among replicas.
        throughput: Tokens per second that it computes while it has work; 0 is unknown.
        busy: Tokens per second that it was asked for lately, by expert; coarse, idle experts left out.
        kept: Checkpoints of experts, held or not, that it has on disk, with their weight versions.
        taking: Experts that it is about to hold: their states are on the way. All values are 1.
    """

    peer_id: PeerId
    addresses: tuple[str, ...]
    experts: Mapping[str, int] = field(default_factory=dict)
    queue_s: float = 0.0
    capacity: int = 0
    load: int = 0
    leaving: bool = False
    throughput: float = 0.0
    busy: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    taking: Mapping[str, int] = field(default_factory=dict)

    def to_bodies(self, max_body_bytes: int) -> dict[str, dict[str, Any]]:
        """Record bodies by subkey, each at most `max_body_bytes` when packed."""
        base = {
            "addresses": list(self.addresses[:MAX_ADDRESSES]),
            "queue_s": round(self.queue_s, 4),
            "capacity": self.capacity,
            "load": self.load,
            "leaving": self.leaving,
            "throughput": float(round(self.throughput)),
        }
        room = max_body_bytes - _FIXED_BODY_BYTES - sum(len(a.encode()) + 5 for a in self.addresses[:MAX_ADDRESSES])
        tables = (
            ("experts", self.experts, _VERSION_BYTES),
            ("busy", self.busy, _RATE_BYTES),
            ("kept", self.kept, _VERSION_BYTES),
            ("taking", self.taking, _MARK_BYTES),
        )
        chunks: list[dict[str, dict[str, int]]] = [{"experts": {}}]
        used = 0
        for uid in sorted({**self.experts, **self.busy, **self.kept, **self.taking}):
            given = [(name, values[uid], nbytes) for name, values, nbytes in tables if uid in values]
            size = sum(len(uid.encode()) + 2 + nbytes for _, _, nbytes in given)
            if used + size > room and used:
                chunks.append({"experts": {}})
                used = 0
            for name, value, _ in given:
                chunks[-1].setdefault(name, {})[uid] = value
            used += size
        return {str(i): {**base, **chunk} for i, chunk in enumerate(chunks)}

    @classmethod
    def from_body(cls, author: PeerId, body: Any) -> HostRecord:
        """Read one body. Raises `MalformedFrameError`."""
        complaint = HOST_SCHEMA.complaint(body)
        if complaint is not None:
            raise MalformedFrameError(f"This is no expert record: {complaint}.")
        return cls(
            peer_id=author,
            addresses=tuple(body["addresses"]),
            experts=body["experts"],
            queue_s=float(body.get("queue_s", 0.0)),
            capacity=body.get("capacity", 0),
            load=body.get("load", 0),
            leaving=body.get("leaving", False),
            throughput=float(body.get("throughput", 0.0)),
            busy=body.get("busy", {}),
            kept=body.get("kept", {}),
            taking=body.get("taking", {}),
        )


def merge_records(records: Iterable[HostRecord]) -> list[HostRecord]:
    """One record per host: the subkeys of each joined, ordered by peer id."""
    joined: dict[PeerId, HostRecord] = {}
    for r in records:
        known = joined.get(r.peer_id)
        if known is not None:
            r = replace(
                r,
                experts={**known.experts, **r.experts},
                leaving=known.leaving or r.leaving,
                busy={**known.busy, **r.busy},
                kept={**known.kept, **r.kept},
                taking={**known.taking, **r.taking},
            )
        joined[r.peer_id] = r
    return [joined[p] for p in sorted(joined)]


def replica_order(uid: str, hosts: Sequence[HostRecord]) -> list[HostRecord]:
    """The holders of an expert, primary first: rendezvous order, leaving hosts last."""
    by_id = {h.peer_id: h for h in hosts if uid in h.experts}
    order = [by_id[p] for p in rendezvous_order(uid, by_id)]
    return [h for h in order if not h.leaving] + [h for h in order if h.leaving]
