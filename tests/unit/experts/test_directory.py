from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from swarm.dht.records import Entry
from swarm.errors import ExpertsNotReadyError, NotStoredError, UnknownExpertError
from swarm.experts.calls import CallOptions
from swarm.experts.directory import DirectoryRefreshFailed, ExpertRecordIgnored, PeerAvoided, PeerTrusted
from swarm.experts.records import rendezvous_order
from tests.support import MemoryWorld
from tests.unit.experts.fakes import DIM, GRID, FakeDht, FakeHost, set_stage

UIDS = GRID.uids()


def test_replicas_come_primary_first_and_live_experts_are_those_with_a_holder(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS[:3], UIDS[1:3]])
        directory = stage.experts.directory
        assert directory.live_uids("tanh") == UIDS[:3]
        assert directory.live("tanh").tolist() == [True, True, True, False]
        ids = [h.transport.peer_id for h in stage.hosts]
        for uid in UIDS[1:3]:
            assert [r.contact.peer_id for r in directory.replicas(uid)] == rendezvous_order(uid, ids)
        assert directory.replicas(UIDS[3]) == ()
        stage.dht.hosts[0] = replace(stage.dht.hosts[0], leaving=True)
        await directory.refresh()
        assert [r.contact.peer_id for r in directory.replicas(UIDS[1])] == [ids[1], ids[0]]

    memory_world.run(main)


def test_unknown_grids_and_experts_are_named(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        for uid, message in [
            ("gated.0.0", "no grid 'gated'"),
            ("tanh.9.9", "no expert 'tanh.9.9'"),
            ("tanh", "no expert"),
            ("!", "not an expert's uid"),
        ]:
            with pytest.raises(UnknownExpertError, match=message):
                stage.experts.directory.replicas(uid)
        with pytest.raises(UnknownExpertError, match="no grid"):
            stage.experts.directory.live("gated")

    memory_world.run(main)


def test_refreshes_in_the_background(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS[:2]])
        stage.dht.hosts[0] = replace(stage.dht.hosts[0], experts=dict.fromkeys(UIDS, 3))
        stage.dht.version += 1
        await asyncio.sleep(1.5)
        assert stage.experts.directory.live_uids("tanh") == UIDS
        assert stage.experts.directory.replicas(UIDS[0])[0].weight_version == 3

    memory_world.run(main)


def test_a_record_missing_once_is_kept_twice_is_gone(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS], directory_refresh_s=1000.0)
        stage.dht.hosts = []
        await stage.experts.directory.refresh()
        assert stage.experts.directory.live_uids("tanh") == UIDS
        await stage.experts.directory.refresh()
        assert stage.experts.directory.live_uids("tanh") == []

    memory_world.run(main)


def test_failed_reads_keep_what_is_known_until_it_expires(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS], directory_refresh_s=1000.0)
        stage.dht.fails = NotStoredError("nobody is there")
        for _ in range(3):
            await stage.experts.directory.refresh()
        assert stage.experts.directory.live_uids("tanh") == UIDS
        assert stage.events.count(DirectoryRefreshFailed) == 3
        await asyncio.sleep(31.0)
        await stage.experts.directory.refresh()
        assert stage.experts.directory.live_uids("tanh") == []

    memory_world.run(main)


def test_senseless_records_are_ignored_and_told(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS], directory_refresh_s=1000.0)
        author = stage.hosts[0].transport.peer_id

        async def get(key: str, *, fresh: bool = False) -> list[Entry]:
            good = await FakeDht.get(stage.dht, key, fresh=fresh)
            return [
                Entry(author, "9", {"addresses": "x", "experts": 7}, 1, 9.0),
                Entry(author, "8", None, 1, 9.0),
                *good,
            ]

        stage.dht.get = get  # type: ignore[method-assign]
        await stage.experts.directory.refresh()
        assert stage.experts.directory.live_uids("tanh") == UIDS
        assert stage.events.count(ExpertRecordIgnored) == 2

    memory_world.run(main)


def test_a_failed_peer_is_avoided_until_a_trial_call_succeeds(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS[:1]])
        directory = stage.experts.directory
        host = stage.hosts[0]
        host.always["probe"] = "hang"
        directory.mark_failed(host.transport.peer_id, "it timed out")
        assert directory.live_uids("tanh") == UIDS[:1]
        assert directory.replicas(UIDS[0])[-1].contact.peer_id == host.transport.peer_id
        assert directory.next_host(UIDS[1], []) == host.transport.contact, "better a doubtful one than none"
        await asyncio.sleep(8.0)  # a trial call fails
        assert directory.live_uids("tanh") == UIDS[:1]
        assert stage.events.count(PeerAvoided) >= 2
        host.always["probe"] = "ok"
        await asyncio.sleep(12.0)
        assert directory.live_uids("tanh") == UIDS
        assert stage.events.count(PeerTrusted) == 1

    memory_world.run(main)


def test_an_answer_ends_avoidance_and_a_denied_expert_is_forgotten(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS], directory_refresh_s=1000.0)
        directory, peer_id = stage.experts.directory, stage.hosts[0].transport.peer_id
        directory.mark_failed(peer_id, "it timed out")
        directory.mark_answered(peer_id)
        assert directory.live_uids("tanh") == UIDS
        directory.mark_gone(UIDS[2], peer_id)
        assert directory.live_uids("tanh") == [UIDS[0], UIDS[1], UIDS[3]]
        await directory.refresh()
        assert directory.live_uids("tanh") == UIDS

    memory_world.run(main)


def test_wait_for_returns_when_enough_are_online_and_names_the_missing(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS[:3]])
        directory, clock = stage.experts.directory, stage.endpoint.runtime.clock
        await directory.wait_for("tanh", UIDS[:3], 1.0, 5.0)
        await directory.wait_for("tanh", None, 0.75, 5.0)
        started_s = clock.time()
        with pytest.raises(ExpertsNotReadyError, match=r"3 of 4 experts of 'tanh' are online; missing: tanh\.1\.1"):
            await directory.wait_for("tanh", None, 1.0, 5.0)
        assert clock.time() - started_s == pytest.approx(5.0, abs=0.5)
        waiting = asyncio.ensure_future(directory.wait_for("tanh", None, 1.0, 50.0))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        stage.dht.hosts = [replace(stage.dht.hosts[0], experts=dict.fromkeys(UIDS, 0))]
        await waiting
        with pytest.raises(UnknownExpertError):
            await directory.wait_for("gated", None, 1.0, 5.0)

    memory_world.run(main)


def test_closing_ends_the_refreshing(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS])
        await stage.experts.close()
        await stage.experts.close()
        reads = stage.dht.reads
        await asyncio.sleep(10.0)
        assert stage.dht.reads == reads

    memory_world.run(main)


def test_a_suspect_comes_last_until_a_small_call_of_its_own_has_an_answer(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS], directory_refresh_s=1000.0)
        directory = stage.experts.directory
        first, second = (c for c in directory.candidates(UIDS[0], []))
        host = stage.primary(UIDS[0])
        host.always["probe"] = "hang"
        directory.mark_stalled(first)
        assert directory.candidates(UIDS[0], []) == [second]
        assert directory.candidates(UIDS[0], [second.peer_id]) == [first]
        assert directory.candidates(UIDS[0], [second.peer_id], healthy=True) == []
        assert directory.live_uids("tanh") == UIDS
        assert stage.events.count(PeerAvoided) == 0
        await asyncio.sleep(20.0)
        assert stage.events.count(PeerAvoided) == 1, "it does not answer small calls either"

        directory.mark_answered(first.peer_id)
        host.always["probe"] = "ok"
        directory.mark_stalled(first)
        await asyncio.sleep(1.0)
        assert directory.candidates(UIDS[0], []) == [first, second]

    memory_world.run(main)


def test_a_slow_host_that_nobody_asks_any_more_is_measured_again(memory_world: MemoryWorld) -> None:
    """And neither that nor any other trial call is waited for by a pass."""

    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS, UIDS], directory_refresh_s=1.0)
        slow, fast = stage.primary(UIDS[0]), stage.other(stage.primary(UIDS[0]))
        clock, how = stage.endpoint.runtime.clock, CallOptions("the layer")

        async def step() -> float:
            begun = clock.time()
            await stage.experts.forward([stage.experts.new_call(UIDS[0], 1, [torch.zeros(1, DIM)])], how)
            return clock.time() - begun

        for _ in range(3):
            await step()
        stage.experts.loads.waited(slow.transport.peer_id, 0.5, clock.time())
        slow.always["probe"] = "hang"

        def asked(host: FakeHost) -> int:
            return sum(uid == UIDS[0] for _, uid, *_ in host.log)

        before = asked(slow)
        await asyncio.sleep(1.5)  # the trial call hangs
        assert await step() < 0.1
        assert (asked(slow), asked(fast)) == (before, 1)
        slow.always["probe"] = "ok"
        await asyncio.sleep(60.0)
        await step()
        assert asked(slow) == before + 1, "it is as fast as the other one again, and first in order"

    memory_world.run(main)


def test_a_host_too_slow_for_its_deadline_is_tried_ever_more_rarely_until_the_deadline_has_grown(
    memory_world: MemoryWorld,
) -> None:
    """The only holder answers small calls, but takes longer than the deadline for real ones."""

    async def main() -> None:
        stage = await set_stage(memory_world, [UIDS], deadline={"initial_s": 0.3, "floor_s": 0.1, "cap_s": 10.0})
        stage.hosts[0].always["forward"] = "slow"
        how = CallOptions("the layer")
        outcomes = []
        for _ in range(8):
            call = stage.experts.new_call(UIDS[0], 1, [torch.zeros(1, DIM)])
            await stage.experts.forward([call], how)
            outcomes.append(call.answered)
            await asyncio.sleep(12.0)
        assert not outcomes[0]
        assert outcomes[-3:] == [True] * 3
        assert stage.events.count(PeerTrusted) >= 1

    memory_world.run(main)
