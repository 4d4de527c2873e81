"""Host records and the order of replicas."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
import pytest

from swarm.errors import MalformedFrameError
from swarm.experts.records import HostRecord, merge_records, rendezvous_order, replica_order
from swarm.experts.spec import ExpertGrid
from swarm.identity import PeerId


def peer(i: int) -> PeerId:
    return PeerId(hashlib.sha256(bytes([i])).digest())


def test_a_record_is_cut_to_the_size_limit_and_joined_again() -> None:
    experts = {uid: (1 << 40) + i for i, uid in enumerate(ExpertGrid("ffn.[0:32].[0:32]", "ffn").uids())}
    record = HostRecord(
        peer(1), tuple(f"host-{i}.example.org:12345" for i in range(8)), experts, 0.25, 2000, 1024, True
    )
    bodies = record.to_bodies(4096)
    assert len(bodies) > 3
    assert sorted(bodies, key=int) == [str(i) for i in range(len(bodies))]
    assert all(len(msgpack.packb(b)) <= 4096 for b in bodies.values())
    [joined] = merge_records(HostRecord.from_body(peer(1), b) for b in bodies.values())
    assert joined == record


def test_loads_and_checkpoints_of_experts_travel_in_the_records_too() -> None:
    uids = ExpertGrid("ffn.[0:32].[0:32]", "ffn").uids()
    record = HostRecord(
        peer(1),
        tuple(f"host-{i}.example.org:12345" for i in range(8)),
        dict.fromkeys(uids[:700], 1 << 60),
        throughput=123457.0,
        busy=dict.fromkeys(uids[:700:2], (1 << 32) - 1),
        kept=dict.fromkeys(uids[500:], 1 << 61),
        taking=dict.fromkeys(uids[900:], 1),
    )
    bodies = record.to_bodies(4096)
    assert all(len(msgpack.packb(b)) <= 4096 for b in bodies.values())
    [joined] = merge_records(HostRecord.from_body(peer(1), b) for b in bodies.values())
    assert joined == record


def test_a_host_without_experts_announces_itself() -> None:
    record = HostRecord(peer(1), ("a:1",), capacity=4)
    assert [HostRecord.from_body(peer(1), b) for b in record.to_bodies(4096).values()] == [record]


def test_records_of_several_hosts_are_joined_in_a_fixed_order() -> None:
    a, b = HostRecord(peer(1), (), {"x.0": 1}), HostRecord(peer(2), (), {"x.0": 2})
    more = HostRecord(peer(1), (), {"y.0": 3}, leaving=True)
    assert merge_records([a, b, more]) == merge_records([b, a, more])
    joined = {h.peer_id: h for h in merge_records([a, b, more])}
    assert joined[peer(1)].experts == {"x.0": 1, "y.0": 3}
    assert joined[peer(1)].leaving


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": "a:1"},
        {"addresses": ["a"] * 9},
        {"addresses": ["a" * 300]},
        {"experts": []},
        {"experts": {"ffn.0": -1}},
        {"experts": {"ffn.0": True}},
        {"experts": {"../x": 1}},
        {"experts": {7: 1}},
        {"queue_s": float("nan")},
        {"queue_s": -1.0},
        {"throughput": -1.0},
        {"busy": {"ffn.0": -1}},
        {"busy": {"../x": 1}},
        {"kept": {"ffn.0": 1 << 63}},
        {"kept": ["ffn.0"]},
        {"taking": {"ffn.0": 2}},
        {"queue_s": "0"},
        {"capacity": 1.5},
        {"load": None},
    ],
)
def test_a_record_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    body = HostRecord(peer(1), ("a:1",), {"ffn.0": 1}).to_bodies(4096)["0"]
    assert HostRecord.from_body(peer(1), body).experts == {"ffn.0": 1}
    with pytest.raises(MalformedFrameError):
        HostRecord.from_body(peer(1), {**body, **change})
    with pytest.raises(MalformedFrameError):
        HostRecord.from_body(peer(1), [body])


def test_rendezvous_order_is_the_same_for_everybody_and_spreads_first_places() -> None:
    peers = [peer(i) for i in range(4)]
    uids = ExpertGrid("ffn.[0:16].[0:16]", "ffn").uids()
    first = [rendezvous_order(uid, peers)[0] for uid in uids]
    assert first == [rendezvous_order(uid, reversed(peers))[0] for uid in uids]
    assert all(40 <= first.count(p) <= 90 for p in peers)
    # a peer that goes changes only what it was first for
    for uid, was in zip(uids, first, strict=True):
        left = [p for p in peers if p != peers[0]]
        assert was == peers[0] or rendezvous_order(uid, left)[0] == was


def test_the_primary_is_a_holder_that_stays() -> None:
    hosts = [HostRecord(peer(i), (), {"ffn.0": i} if i < 3 else {}) for i in range(4)]
    order = replica_order("ffn.0", hosts)
    assert [h.peer_id for h in order] == rendezvous_order("ffn.0", [peer(i) for i in range(3)])
    leaving = [HostRecord(h.peer_id, (), h.experts, leaving=h == order[0]) for h in hosts]
    assert [h.peer_id for h in replica_order("ffn.0", leaving)] == [h.peer_id for h in (*order[1:], order[0])]
