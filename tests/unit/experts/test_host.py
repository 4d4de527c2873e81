"""Devices and capacities of a host, and grids it cannot hold; its behaviour in a swarm is under tests/conformance."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm.config import PeerConfig
from swarm.errors import ConfigError, UnknownExpertClassError
from swarm.events import Event
from swarm.experts.announcing import AnnouncementFailed, HostRecordIgnored
from swarm.experts.devices import memory_capacity, resolve_device
from swarm.experts.happenings import GridSkipped
from swarm.experts.host import ExpertHost
from swarm.experts.records import record_key
from swarm.experts.spec import ExpertGrid
from swarm.runtime import TaskFailed
from swarm.state.transfer import SnapshotStore
from tests.support import MemoryWorld, eventually


def test_devices_are_resolved_or_refused() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")
    for bad in ("warp9", "cuda:77"):
        with pytest.raises(ConfigError):
            resolve_device(bad)


def test_capacity_follows_the_size_of_an_expert() -> None:
    cpu = torch.device("cpu")
    small, large = memory_capacity(1 << 20, cpu), memory_capacity(1 << 26, cpu)
    assert small > 10 * large > 0
    assert memory_capacity(1 << 50, cpu) == 0
    assert memory_capacity(0, cpu) > 0


def _config(**host: object) -> PeerConfig:
    return PeerConfig.preset("local", host={"device": "cpu", "placement_s": 0.2, **host})


def test_grids_of_unknown_classes_are_skipped_unless_nothing_is_left(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        endpoint = await memory_world.endpoint(config=_config(max_experts=3))
        known, unknown = ExpertGrid("a.[0:2]", "nop"), ExpertGrid("b.[0:2]", "exotic")
        host = ExpertHost(endpoint, {"a": known, "b": unknown}, SnapshotStore(endpoint))
        await host.start()
        await eventually(lambda: host.held == {"a.0": 0, "a.1": 0})
        assert host.stats.capacity == 3
        [skipped] = [s.event for s in endpoint.runtime.events.recent(GridSkipped)]
        assert skipped.grid == "b"
        await host.close()
        with pytest.raises(UnknownExpertClassError):
            await ExpertHost(endpoint, {"b": unknown}, SnapshotStore(endpoint)).start()

    memory_world.run(body)


def test_a_host_withdraws_its_records_when_it_leaves(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        config = _config(max_experts=400)
        endpoint = await memory_world.endpoint(config=config)
        reader = await memory_world.endpoint(config=config, bootstrap=[endpoint.contact])
        host = ExpertHost(endpoint, {"a": ExpertGrid("a.[0:400]", "nop", replicas=1)}, SnapshotStore(endpoint))
        await host.start()
        assert [e.body["experts"] for e in await reader.dht.get(record_key("a"), fresh=True)] == [{}]
        await eventually(lambda: len(host.held) == 400)
        await asyncio.sleep(3.0)
        entries = await reader.dht.get(record_key("a"), fresh=True)
        assert len(entries) > 1
        assert sum(len(e.body["experts"]) for e in entries) == 400
        await host.close()
        assert await reader.dht.get(record_key("a"), fresh=True) == []
        assert host.held == {}

    memory_world.run(body)


def test_nonsense_and_failures_of_the_dht_are_events_and_the_host_goes_on(
    memory_world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        endpoint = await memory_world.endpoint(config=_config())
        other = await memory_world.endpoint(config=_config(), bootstrap=[endpoint.contact])
        await other.dht.put(record_key("a"), {"experts": "all"}, subkey="0", ttl_s=30.0)
        host = ExpertHost(endpoint, {"a": ExpertGrid("a.[0:2]", "nop")}, SnapshotStore(endpoint))
        await host.start()
        await eventually(lambda: len(host.held) == 2)

        def seen(kind: type[Event]) -> bool:
            return endpoint.runtime.events.count(kind) > 0

        assert seen(HostRecordIgnored)
        assert not seen(AnnouncementFailed)

        async def broken(*args: object, **kwargs: object) -> None:
            raise ConfigError("broken on purpose")

        async def bug(*args: object, **kwargs: object) -> None:
            raise KeyError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(endpoint.dht, "put_many", broken)
            patch.setattr(endpoint.dht, "get_many", broken)
            await eventually(lambda: endpoint.runtime.events.count(AnnouncementFailed) > 5)
            patch.setattr(endpoint.dht, "get_many", bug)
            await eventually(lambda: seen(TaskFailed))
        before = endpoint.runtime.events.count(AnnouncementFailed)
        await asyncio.sleep(5.0)
        assert endpoint.runtime.events.count(AnnouncementFailed) == before
        assert [e.author for e in await other.dht.get(record_key("a"), fresh=True) if e.body["experts"] != "all"]
        await host.close()

    memory_world.run(body)
