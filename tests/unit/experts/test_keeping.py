"""Experts beyond the death of all their hosts. On the memory transport: hosts end abruptly and intervals are long."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.config import PeerConfig
from swarm.errors import HostBusyError, MalformedFrameError, UnknownExpertError
from swarm.experts.happenings import ExpertTaken
from swarm.experts.host import ExpertHost
from swarm.experts.keeping import (
    OFFER_KEPT,
    ExpertLost,
    ExpertNotSaved,
    ExpertRestored,
    ExpertSaved,
)
from swarm.experts.spec import ExpertGrid, OptimizerSpec
from swarm.roles import Role
from swarm.state.checkpoint import CheckpointCorrupt
from swarm.state.transfer import SnapshotStore
from swarm.tensors.wire import to_frame
from tests.support import MemoryWorld, eventually

GRID = ExpertGrid("ffn.[0:2]", "ffn", config={"hid": 8}, replicas=2, optimizer=OptimizerSpec("adam", lr=0.1))
UID = "ffn.0"


class Stage:
    """A bootstrap peer that stays, and hosts that come and go with their directories."""

    def __init__(self, world: MemoryWorld, path: Path) -> None:
        self.world, self.path = world, path

    async def begin(self) -> None:
        self.first = await self.world.endpoint(config=PeerConfig.preset("local"), roles={Role.TRAINER})

    async def host(self, directory: str | None, grid: ExpertGrid = GRID, **host: Any) -> ExpertHost:
        settings = {"device": "cpu", "placement_s": 0.5, "announce_ttl_s": 3.0, "checkpoint_s": 2.0, **host}
        config = PeerConfig.preset("local", host=settings, data_dir=self.path / directory if directory else None)
        endpoint = await self.world.endpoint(config=config, roles={Role.HOST}, bootstrap=[self.first.contact])
        made = ExpertHost(endpoint, {"ffn": grid}, SnapshotStore(endpoint))
        await made.start()
        self.world.at_close(lambda: made.close(drain=False))
        return made

    async def kill(self, host: ExpertHost) -> None:
        """It answers nobody any more, and its records run out."""
        for task in host._tasks:
            task.cancel()
        host._closed = True
        await host._endpoint.transport.close(0.0)


def seen(host: ExpertHost, kind: type[Any]) -> list[Any]:
    return [s.event for s in host._endpoint.runtime.events.recent(kind)]


def train(host: ExpertHost, steps: int, uid: str = UID) -> None:
    backend = host.backend(uid)
    with torch.no_grad():
        for parameter in backend.parameters:
            parameter.add_(steps)
    backend.weight_version += steps
    backend.stepper.made += steps
    backend.stepper.samples += steps


def weights(host: ExpertHost, uid: str = UID) -> list[float]:
    return [float(p.detach().sum()) for p in host.backend(uid).parameters]


async def saved(host: ExpertHost, version: int, uid: str = UID) -> None:
    await eventually(lambda: any((e.uid, e.weight_version) == (uid, version) for e in seen(host, ExpertSaved)))


def test_a_lone_host_that_returns_goes_on_where_it_was(memory_world: MemoryWorld, tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(memory_world, tmp_path)
        await stage.begin()
        host = await stage.host("a")
        await eventually(lambda: len(host.held) == 2)
        train(host, 3)
        await saved(host, 3)
        await asyncio.sleep(10.0)
        assert [(e.uid, e.weight_version) for e in seen(host, ExpertSaved)] == [(UID, 3)], "what changes, and only once"
        before = weights(host)
        train(host, 4)
        await stage.kill(host)
        again = await stage.host("a")
        await eventually(lambda: again.held == {UID: 3, "ffn.1": 0})
        assert weights(again) == before
        assert [(e.uid, e.weight_version, e.source) for e in seen(again, ExpertRestored)] == [(UID, 3, "disk")]
        assert {(e.uid, e.donor) for e in seen(again, ExpertTaken)} == {(UID, "disk"), ("ffn.1", "")}
        train(again, 9)
        await again.close()
        assert seen(again, ExpertSaved)[-1].weight_version == 12, "saved on leaving"

    memory_world.run(body)


def test_a_copy_is_saved_at_once(memory_world: MemoryWorld, tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(memory_world, tmp_path)
        await stage.begin()
        one = await stage.host(None)
        await eventually(lambda: len(one.held) == 2)
        train(one, 3)
        await asyncio.sleep(3.0)
        two = await stage.host("b", checkpoint_s=1e6)
        await saved(two, 3)
        assert [(e.uid, e.weight_version) for e in seen(two, ExpertSaved)] == [(UID, 3)]

    memory_world.run(body)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("first", ["older", "newer"])
def test_the_newest_checkpoint_wins_whoever_returns_first(
    memory_world: MemoryWorld, tmp_path: Path, replicas: int, first: str
) -> None:
    grid = ExpertGrid("ffn.[0:1]", "ffn", config={"hid": 8}, replicas=replicas)

    async def body() -> None:
        stage = Stage(memory_world, tmp_path)
        await stage.begin()
        for directory, version in (("older", 2), ("newer", 5)):
            host = await stage.host(directory, grid)
            await eventually(lambda host=host: UID in host.held)
            train(host, version)
            await saved(host, version)
            await stage.kill(host)
            await asyncio.sleep(5.0)
        one = await stage.host(first, grid)
        await eventually(lambda: one.held == {UID: 2 if first == "older" else 5})
        two = await stage.host("newer" if first == "older" else "older", grid)
        await eventually(lambda: one.held == {UID: 5}, timeout_s=30.0)
        if replicas == 2:
            await eventually(lambda: two.held == {UID: 5}, timeout_s=30.0)
            assert weights(one) == weights(two)

    memory_world.run(body)


def test_who_takes_an_expert_fetches_the_checkpoint_of_a_host_without_room(
    memory_world: MemoryWorld, tmp_path: Path
) -> None:
    async def body() -> None:
        stage = Stage(memory_world, tmp_path)
        await stage.begin()
        host = await stage.host("a")
        await eventually(lambda: len(host.held) == 2)
        train(host, 7)
        await saved(host, 7)
        before = weights(host)
        await stage.kill(host)
        await asyncio.sleep(5.0)
        keeper = await stage.host("a", max_experts=0)
        await asyncio.sleep(1.0)
        taker = await stage.host(None)
        await eventually(lambda: taker.held == {UID: 7, "ffn.1": 0})
        assert weights(taker) == before
        assert seen(taker, ExpertRestored)[0].source == str(keeper._endpoint.peer_id)
        assert not seen(taker, ExpertSaved), "without a data directory nothing is saved"
        contact = keeper._endpoint.contact
        with pytest.raises(UnknownExpertError):
            await stage.first.transport.call(contact, OFFER_KEPT, to_frame({"uid": "ffn.1"}, []))
        for bad in (to_frame({"uid": "../x"}, []), to_frame({"uid": 7}, []), to_frame({}, []), b"nonsense"):
            with pytest.raises(MalformedFrameError):
                await stage.first.transport.call(contact, OFFER_KEPT, bad)

    memory_world.run(body)


def test_an_expert_that_nobody_has_starts_anew_and_that_is_told(memory_world: MemoryWorld, tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(memory_world, tmp_path)
        await stage.begin()
        holder = await stage.host(None)
        await eventually(lambda: len(holder.held) == 2)
        train(holder, 7)
        witness = await stage.host(None, max_experts=0)
        await asyncio.sleep(5.0)
        heir = await stage.host(None, max_experts=1)
        await eventually(lambda: heir.held == {UID: 7})
        await stage.kill(holder)
        await stage.kill(heir)
        late = await stage.host(None)
        await eventually(lambda: late.held == {UID: 0, "ffn.1": 0}, timeout_s=30.0)
        assert [(e.uid, e.known_version) for e in seen(late, ExpertLost)] == [(UID, 7)]
        assert not seen(witness, ExpertLost)

    memory_world.run(body)


def test_a_damaged_checkpoint_costs_one_interval(memory_world: MemoryWorld, tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(memory_world, tmp_path)
        await stage.begin()
        host = await stage.host("a")
        await eventually(lambda: len(host.held) == 2)
        for version in (2, 4):
            train(host, 2)
            await saved(host, version)
        await stage.kill(host)
        newest = sorted((tmp_path / "a").rglob("*.safetensors"))[-1]
        newest.write_bytes(newest.read_bytes()[:-1])
        again = await stage.host("a")
        await eventually(lambda: again.held == {UID: 2, "ffn.1": 0})
        assert len(seen(again, CheckpointCorrupt)) == 1

    memory_world.run(body)


def test_a_disk_without_room_is_told_and_the_host_goes_on(memory_world: MemoryWorld, tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(memory_world, tmp_path)
        await stage.begin()
        host = await stage.host("a", max_checkpoint_bytes=100)
        await eventually(lambda: len(host.held) == 2)
        train(host, 1)
        await eventually(lambda: len(seen(host, ExpertNotSaved)) > 1)
        assert "100 bytes are allowed" in seen(host, ExpertNotSaved)[0].reason
        assert host.held[UID] == 1
        assert not list((tmp_path / "a").rglob("*.safetensors"))

    memory_world.run(body)


def test_few_checkpoints_are_in_memory_for_others_at_once(memory_world: MemoryWorld, tmp_path: Path) -> None:
    grid = ExpertGrid("ffn.[0:6]", "ffn", config={"hid": 8}, replicas=1)

    async def body() -> None:
        stage = Stage(memory_world, tmp_path)
        await stage.begin()
        host = await stage.host("a", grid)
        await eventually(lambda: len(host.held) == 6)
        for uid in grid.uids():
            train(host, 1, uid)
            await saved(host, 1, uid)

        async def ask(uid: str) -> None:
            await stage.first.transport.call(host._endpoint.contact, OFFER_KEPT, to_frame({"uid": uid}, []))

        for uid in grid.uids()[:4]:
            await ask(uid)
        with pytest.raises(HostBusyError):
            await ask("ffn.4")
        await ask("ffn.0")
        assert len(host._store.keys()) == 4
        await asyncio.sleep(15.0)
        await ask("ffn.4")
        assert len(host._store.keys()) == 4
        await asyncio.sleep(90.0)
        assert host._store.keys() == []

    memory_world.run(body)
