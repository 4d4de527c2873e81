"""Offering and copying an expert's state between hosts. What a snapshot must hold is tested with the backend."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm.endpoint import Endpoint
from swarm.errors import MalformedFrameError, NoDonorError, UnknownExpertError
from swarm.experts.backend import BackwardJob, ExpertBackend
from swarm.experts.batching import Batcher
from swarm.experts.protocol import OFFER
from swarm.experts.records import HostRecord, snapshot_key
from swarm.experts.syncing import NEVER, ReplicaExchange, ReplicaSyncFailed
from swarm.experts.serving import compute
from swarm.experts.spec import ExpertGrid, OptimizerSpec
from swarm.experts.workers import InlineWorker
from swarm.identity import PeerId
from swarm.state.transfer import Snapshot, SnapshotStore, StateServed
from swarm.tensors.wire import to_frame
from tests.support import MemoryWorld

GRID = ExpertGrid("a.[0:2]", "ffn", config={"hid": 4}, optimizer=OptimizerSpec("sgd", lr=0.1))
RUN = bytes(32)


class Peer:
    """A host's exchange without the rest of the host."""

    def __init__(self, endpoint: Endpoint, refresh_s: float = 5.0) -> None:
        self.endpoint = endpoint
        self.store = SnapshotStore(endpoint)
        self.experts: dict[str, ExpertBackend] = {}
        worker = InlineWorker(Batcher(100, 100), compute, endpoint.runtime)
        self.exchange = ReplicaExchange(endpoint, self.store, worker, self.experts, refresh_s)

    def hold(self, uid: str = "a.0", steps: int = 0) -> ExpertBackend:
        backend = ExpertBackend(GRID, uid, RUN)
        for _ in range(steps):
            train(backend)
        self.experts[uid] = backend
        return backend

    def record(self, **experts: int) -> HostRecord:
        return HostRecord(self.endpoint.peer_id, self.endpoint.contact.addresses, dict.fromkeys(self.experts, 0))


_count = iter(range(1, 1 << 20))


def train(backend: ExpertBackend) -> None:
    x = torch.randn(2, 4)
    backend.backward([BackwardJob(PeerId(bytes(32)), b"12345678" + next(_count).to_bytes(8, "big"), [x], [x], True)])


def equal(a: ExpertBackend, b: ExpertBackend) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters, b.parameters, strict=True))


def test_the_state_of_a_donor_that_is_ahead_is_copied(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        one, two = Peer(await memory_world.endpoint()), Peer(await memory_world.endpoint())
        source, target = one.hold(steps=2), ExpertBackend(GRID, "a.0", RUN)
        assert not equal(source, target)
        donor = await two.exchange.copy(target, [one.record()], NEVER)
        assert donor == one.record()
        assert equal(source, target)
        assert target.weight_version == 2
        assert await two.exchange.copy(target, [one.record()], 2) is None
        assert one.store.keys() == [snapshot_key("a.0")]

    memory_world.run(body)


def test_a_snapshot_is_made_on_request_and_reused_while_it_is_fresh(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        one, two = Peer(await memory_world.endpoint(), refresh_s=5.0), Peer(await memory_world.endpoint())
        source = one.hold(steps=1)
        assert one.store.keys() == []
        assert await two.exchange.version_at(one.record(), "a.0", have=1) == 1
        assert one.store.keys() == [], "nothing newer was asked for"
        await two.exchange.version_at(one.record(), "a.0", have=0)
        first = one.store.get(snapshot_key("a.0"))
        train(source)
        await two.exchange.version_at(one.record(), "a.0", have=0)
        assert one.store.get(snapshot_key("a.0")) is first, "young enough"
        await two.exchange.version_at(one.record(), "a.0", have=1)
        second = one.store.get(snapshot_key("a.0"))
        assert second is not None
        assert second.metadata["weight_version"] == 2, "the young one is not newer than what the other has"
        await two.exchange.version_at(one.record(), "a.0", have=NEVER)
        assert one.store.get(snapshot_key("a.0")) is second
        await asyncio.sleep(100.0)
        one.exchange.sweep()
        assert one.store.keys() == []

    memory_world.run(body)


def test_donors_that_fail_are_reported_and_the_next_is_asked(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        liar, honest, me = [Peer(await memory_world.endpoint()) for _ in range(3)]
        liar.hold(steps=3)
        source, target = honest.hold(steps=1), ExpertBackend(GRID, "a.0", RUN)
        bad = Snapshot.build({"model.nothing": torch.zeros(1)}, {"uid": "a.0", "weight_version": 9, "scalars": {}})
        liar.store.publish = lambda key, snapshot: SnapshotStore.publish(liar.store, key, bad)  # type: ignore[method-assign]
        gone = HostRecord(PeerId(b"\7" * 32), ("127.0.0.1:9",), {"a.0": 5})
        empty = Peer(await memory_world.endpoint())
        donors = [gone, empty.record(), liar.record(), honest.record()]
        assert await me.exchange.copy(target, donors, NEVER) == honest.record()
        assert equal(source, target)
        failed = [s.event.donor for s in me.endpoint.runtime.events.recent(ReplicaSyncFailed)]
        assert failed == [str(d.peer_id) for d in donors[:3]]
        with pytest.raises(NoDonorError):
            await me.exchange.copy(target, donors[:3], NEVER)
        assert equal(source, target)

    memory_world.run(body)


def test_requests_for_offers_are_checked(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        one, two = Peer(await memory_world.endpoint()), await memory_world.endpoint()
        one.hold()
        for meta in (
            {},
            {"uid": "a.0"},
            {"uid": "a.0", "have": "1"},
            {"uid": 7, "have": 1},
            {"uid": "../a", "have": 1},
        ):
            with pytest.raises(MalformedFrameError):
                await two.transport.call(one.endpoint.contact, OFFER, to_frame(meta, []))
        with pytest.raises(UnknownExpertError):
            await two.transport.call(one.endpoint.contact, OFFER, to_frame({"uid": "a.1", "have": 1}, []))
        assert one.endpoint.runtime.events.count(StateServed) == 0

    memory_world.run(body)
