"""Replicas between hosts: offering, copying, agreeing. What a snapshot must hold is tested with the backend.

In memory only: hosts without the rest of a host, in virtual time; both transports carry the same in test_experts_host.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.endpoint import Endpoint
from swarm.errors import MalformedFrameError, NoDonorError, SchemaMismatchError, UnknownExpertError
from swarm.experts.backend import BackwardJob, ExpertBackend
from swarm.experts.batching import Batcher
from swarm.experts.protocol import CAPTURE, OFFER
from swarm.experts.records import HostRecord, rendezvous_order, snapshot_key
from swarm.experts.serving import compute
from swarm.experts.spec import ExpertGrid, OptimizerSpec
from swarm.experts.syncing import NEVER, ReplicaExchange, ReplicasAgreed, ReplicaSynced, ReplicaSyncFailed
from swarm.experts.workers import InlineWorker
from swarm.identity import PeerId
from swarm.state.transfer import Snapshot, SnapshotStore, StateServed
from swarm.tensors.wire import to_frame
from tests.support import MemoryWorld

GRID = ExpertGrid("a.[0:2]", "ffn", config={"hid": 4}, optimizer=OptimizerSpec("sgd", lr=0.1))
RUN = bytes(32)


class Peer:
    """A host's exchange without the rest of the host."""

    def __init__(self, endpoint: Endpoint, refresh_s: float = 5.0, grid: ExpertGrid = GRID) -> None:
        self.endpoint, self.grid = endpoint, grid
        self.store = SnapshotStore(endpoint)
        self.experts: dict[str, ExpertBackend] = {}
        worker = InlineWorker(Batcher(100, 100), compute, endpoint.runtime)
        self.exchange = ReplicaExchange(endpoint, self.store, worker, self.experts, refresh_s)

    def hold(self, uid: str = "a.0", steps: int = 0) -> ExpertBackend:
        backend = ExpertBackend(self.grid, uid, RUN)
        for _ in range(steps):
            train(backend)
        self.experts[uid] = backend
        return backend

    def record(self, leaving: bool = False) -> HostRecord:
        held = {uid: backend.weight_version for uid, backend in self.experts.items()}
        return HostRecord(self.endpoint.peer_id, self.endpoint.contact.addresses, held, leaving=leaving)

    async def join(self, donors: list[HostRecord]) -> ExpertBackend:
        backend = ExpertBackend(self.grid, "a.0", RUN)
        assert await self.exchange.copy(backend, donors, NEVER) is not None
        self.experts["a.0"] = backend
        return backend

    def seen(self, kind: type[Any]) -> list[Any]:
        return [s.event for s in self.endpoint.runtime.events.recent(kind)]


_count = iter(range(1, 1 << 20))


def train(backend: ExpertBackend, tokens: int = 2) -> None:
    x = torch.randn(tokens, 4)
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
        await two.exchange.version_at(one.record(), "a.0", have=NEVER)
        assert one.store.get(snapshot_key("a.0")) is first, "young enough"
        await asyncio.sleep(6.0)
        await two.exchange.version_at(one.record(), "a.0", have=NEVER)
        second = one.store.get(snapshot_key("a.0"))
        assert second is not None
        assert second.metadata["weight_version"] == 2
        assert await two.exchange.version_at(one.record(), "a.0", have=0) == 2
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


# Agreeing


ADAM = ExpertGrid("a.[0:2]", "ffn", config={"hid": 4}, optimizer=OptimizerSpec("adam", lr=0.01))


async def three(world: MemoryWorld, grid: ExpertGrid = ADAM) -> list[Peer]:
    """Holders of one expert from its start, in the order in which they coordinate."""
    peers = [Peer(await world.endpoint(), grid=grid) for _ in range(3)]
    order = rendezvous_order("a.0", [p.endpoint.peer_id for p in peers])
    peers.sort(key=lambda p: order.index(p.endpoint.peer_id))
    for peer in peers:
        await peer.exchange.track(peer.hold())
    return peers


async def tick(peers: list[Peer], of: list[Peer] | None = None, leaving: Peer | None = None) -> None:
    """Everybody (or some) reads everybody's records, then synchronises."""
    records = {id(p): p.record(leaving=p is leaving) for p in peers}
    for peer in of or peers:
        peer.exchange.observe([records[id(p)] for p in peers if p is not peer])
        await peer.exchange.synchronise(leaving=peer is leaving)


def flat(backend: ExpertBackend) -> Tensor:
    return torch.cat([p.detach().flatten() for p in backend.parameters])


def moments(backend: ExpertBackend, name: str = "exp_avg") -> list[Tensor]:
    assert backend.optimizer is not None
    return [backend.optimizer.state[p][name].clone() for p in backend.parameters]


def test_what_all_replicas_learn_is_merged_by_samples(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        peers = await three(memory_world)
        a, b, c = (p.experts["a.0"] for p in peers)
        start = flat(a).clone()
        for backend, tokens, steps in ((a, 2, 3), (b, 4, 1)):
            for _ in range(steps):
                train(backend, tokens)
        wanted = start + (6 * (flat(a) - start) + 4 * (flat(b) - start)) / 10
        wanted_moments = [(6 * m + 4 * n) / 10 for m, n in zip(moments(a), moments(b), strict=True)]
        await tick(peers)
        assert [x.weight_version for x in (a, b, c)] == [4, 4, 4]
        torch.testing.assert_close(flat(a), wanted)
        for backend in (b, c):
            assert torch.equal(flat(backend), flat(a))
            for mine, want in zip(moments(backend), wanted_moments, strict=True):
                torch.testing.assert_close(mine, want)
            assert {float(s) for s in moments(backend, "step")} == {3.0}
        assert [(e.contributors, e.steps, e.weight_version) for e in peers[0].seen(ReplicasAgreed)] == [(2, 4, 4)]
        assert [e.lost_steps for p in peers[1:] for e in p.seen(ReplicaSynced)] == [0, 0]
        await asyncio.sleep(1.0)  # until it is told what was served
        served = sum(p.endpoint.runtime.events.count(StateServed) for p in peers)
        await tick(peers)
        assert sum(p.endpoint.runtime.events.count(StateServed) for p in peers) == served, "nothing has changed"

    memory_world.run(body)


def test_a_lone_learner_goes_on_as_if_it_were_alone(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        peers = await three(memory_world)
        sequential = ExpertBackend(ADAM, "a.0", RUN)
        owner = peers[1].experts["a.0"]  # it follows: another one coordinates
        for _ in range(5):
            for backend in (owner, sequential):
                torch.manual_seed(backend.weight_version)
                train(backend)
            await tick(peers)
        await tick(peers)
        for peer in peers:
            assert torch.equal(flat(peer.experts["a.0"]), flat(sequential))
            assert all(map(torch.equal, moments(peer.experts["a.0"]), moments(sequential)))

    memory_world.run(body)


def test_steps_made_while_captures_travel_are_kept(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        peers = await three(memory_world)
        first, second = peers[0].experts["a.0"], peers[1].experts["a.0"]
        train(first)
        train(second)
        usual = peers[0].exchange._collect

        async def collect(*how: Any) -> Any:
            found = await usual(*how)
            train(second)
            return found

        peers[0].exchange._collect = collect  # type: ignore[method-assign]
        await tick(peers)
        assert second.weight_version == 3
        assert not torch.equal(flat(first), flat(second)), "its third step is not agreed upon yet"
        peers[0].exchange._collect = usual  # type: ignore[method-assign]
        for _ in range(2):
            await tick(peers)
        assert [p.experts["a.0"].weight_version for p in peers] == [3, 3, 3]
        assert equal(first, second)

    memory_world.run(body)


def test_another_coordinates_when_the_first_dies_with_its_result(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        peers = await three(memory_world)
        one, two, three_ = peers
        for peer in peers:
            train(peer.experts["a.0"])
        await tick(peers, of=[one])  # it merges, and dies before anybody else has the result
        await one.endpoint.transport.close(0.0)
        await tick([two, three_])
        left = [p.experts["a.0"] for p in (two, three_)]
        assert [b.weight_version for b in left] == [2, 2], "the survivors' steps, each once"
        assert equal(*left)
        assert [(e.contributors, e.steps) for e in two.seen(ReplicasAgreed)] == [(2, 2)]

    memory_world.run(body)


def test_a_newcomer_starts_from_what_is_agreed_and_no_step_counts_twice(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        peers = await three(memory_world)
        for peer in peers:
            train(peer.experts["a.0"])
        await tick(peers)
        train(peers[1].experts["a.0"])
        late = Peer(await memory_world.endpoint(), grid=ADAM)
        peers[1].exchange.observe([p.record() for p in peers if p is not peers[1]])
        joined = await late.join([peers[1].record()])
        assert joined.weight_version == 3, "without the step that is not agreed upon"
        train(joined)
        everybody = [*peers, late]
        for _ in range(2):  # whoever coordinates now may be the newcomer
            await tick(everybody)
        backends = [p.experts["a.0"] for p in everybody]
        assert {b.weight_version for b in backends} == {5}
        assert all(equal(backends[0], b) for b in backends)

    memory_world.run(body)


def test_a_lone_holder_gives_a_newcomer_all_that_it_has(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        one, two = [Peer(await memory_world.endpoint(), grid=ADAM) for _ in range(2)]
        backend = one.hold()
        await one.exchange.track(backend)
        for _ in range(3):
            train(backend)
        joined = await two.join([one.record()])
        assert joined.weight_version == 3
        assert equal(joined, backend)
        train(joined)
        train(backend)
        for _ in range(2):
            await tick([one, two])
        assert joined.weight_version == backend.weight_version == 5
        assert equal(joined, backend)

    memory_world.run(body)


def test_a_leaving_hosts_steps_are_merged_before_it_goes(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        peers = await three(memory_world)
        leaver = peers[0]  # it would coordinate
        backend = leaver.experts["a.0"]
        train(backend)
        assert await leaver.exchange.unsynced(backend) == 1
        for _ in range(2):
            await tick(peers, leaving=leaver)
        assert await leaver.exchange.unsynced(backend) == 0
        assert [p.experts["a.0"].weight_version for p in peers] == [1, 1, 1]
        assert equal(peers[1].experts["a.0"], backend)
        assert len(peers[1].seen(ReplicasAgreed)) == 1

    memory_world.run(body)


@pytest.mark.parametrize("lie", ["nan", "other_shape", "negative_steps", "other_base", "number_again"])
def test_captures_that_cannot_be_are_left_out(lie: str, memory_world: MemoryWorld) -> None:
    async def body() -> None:
        peers = await three(memory_world)
        for peer in peers:
            train(peer.experts["a.0"])
        liar = peers[2]
        usual = liar.store.publish

        def publish(key: str, snapshot: Snapshot) -> None:
            tensors, metadata = dict(snapshot.tensors), dict(snapshot.metadata)
            name = next(iter(tensors))
            match lie:
                case "nan":
                    tensors[name] = torch.full_like(tensors[name], torch.nan)
                case "other_shape":
                    tensors[name] = torch.zeros(7)
                case "negative_steps":
                    metadata["steps"] = -1
                case "other_base":
                    metadata["agreement"] = [3, "00"]
                case "number_again":
                    metadata["number"] = 0
            usual(key, Snapshot.build(tensors, metadata))

        liar.store.publish = publish  # type: ignore[method-assign]
        await tick(peers)
        assert [(e.contributors, e.steps) for e in peers[0].seen(ReplicasAgreed)] == [(2, 2)]
        assert [e.donor for e in peers[0].seen(ReplicaSyncFailed)] == [str(liar.endpoint.peer_id)]
        assert equal(peers[0].experts["a.0"], peers[1].experts["a.0"])
        assert torch.isfinite(flat(peers[0].experts["a.0"])).all()

    memory_world.run(body)


def test_requests_for_captures_are_checked(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        one, two = Peer(await memory_world.endpoint()), await memory_world.endpoint()
        one.hold(steps=1)
        for id_ in (None, 7, [], [1], [1, 2], [-1, ""], [1, "zz"], [1, "0" * 66], [1 << 63, ""], [True, ""]):
            with pytest.raises(SchemaMismatchError):
                await two.transport.call(one.endpoint.contact, CAPTURE, to_frame({"uid": "a.0", "agreement": id_}, []))
        with pytest.raises(MalformedFrameError):
            await two.transport.call(one.endpoint.contact, CAPTURE, to_frame({"agreement": [0, ""]}, []))
        assert one.store.keys() == []

    memory_world.run(body)
