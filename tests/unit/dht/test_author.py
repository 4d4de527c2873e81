"""A peer as author: versions, renewals spread over time, a second process under one identity, a lost disk, tombstones.

All in virtual time: real transports would have to wait for minutes.
"""

from __future__ import annotations

import asyncio
import copy as copying
from collections.abc import Sequence

import pytest

from swarm.config import PeerConfig
from swarm.dht.author import Author, Draft
from swarm.dht.events import DuplicateIdentity
from swarm.dht.incarnations import COOLDOWN_S, Claimed, Incarnations
from swarm.dht.protocol import STORE
from swarm.dht.records import Copy, encode_body, position_of, sign_record, to_wire
from swarm.endpoint import Endpoint
from swarm.pb import dht_pb2 as pb
from swarm.simulation.virtual import VirtualRuntime
from tests.support import RUN_ID, MemoryWorld, deterministic_identity

WAN = PeerConfig.preset("wan")
TTL_S = 60.0


async def network(world: MemoryWorld, count: int, config: PeerConfig = WAN) -> list[Endpoint]:
    peers = [await world.endpoint(config=config)]
    while len(peers) < count:
        peers.append(await world.endpoint(bootstrap=[peers[0].contact], config=config))
    return peers


def nearest(peers: Sequence[Endpoint], key: str) -> list[Endpoint]:
    target = int.from_bytes(position_of(key), "big")
    return sorted(peers, key=lambda p: p.peer_id.node_id ^ target)


def second_process(world: MemoryWorld, peer: Endpoint, wall_offset_s: float) -> tuple[Author, VirtualRuntime]:
    """Another author under a peer's identity, with a wall clock of its own."""
    operations = copying.copy(peer.dht._do)
    operations.runtime = runtime = VirtualRuntime(world.loop, 1, "second", wall_offset_s=wall_offset_s)
    return Author(operations, peer.identity, RUN_ID), runtime


def draft(key: str, body: object, ttl_s: float = TTL_S, *, renew: bool = True) -> Draft:
    return Draft(key, "", encode_body(body), int(ttl_s * 1000), renew)


@pytest.mark.parametrize("ahead_s", [0.0, 600.0, -600.0])
def test_two_processes_of_one_identity_are_told_and_do_not_race(memory_world: MemoryWorld, ahead_s: float) -> None:
    async def main() -> None:
        peers = await network(memory_world, 6)
        one, reader = peers[1], peers[5]
        two, runtime = second_process(memory_world, one, ahead_s)
        await one.dht.put("k", "one", ttl_s=TTL_S)
        await two.publish([draft("k", "two")])
        renewing = asyncio.create_task(two.run())
        minutes = 10
        for _ in range(minutes):
            await asyncio.sleep(60)
            bodies = [e.body for e in await reader.dht.get("k", fresh=True)]
            assert bodies in (["one"], ["two"])
        (entry,) = await reader.dht.get("k", fresh=True)
        renewing.cancel()
        told = [r.events.recent(DuplicateIdentity) for r in (one.runtime, runtime)]
        assert 1 <= max(map(len, told)) <= minutes * 60 / COOLDOWN_S + 1
        assert all("data directory" in stamped.event.fix for events in told for stamped in events)
        walls_ms = [r.clock.wall() * 1000 for r in (one.runtime, runtime)]
        assert entry.record_version < max(walls_ms) + 100  # no faster than a clock, whoever overrides whom

    memory_world.run(main)


@pytest.mark.parametrize("ahead_s", [0.0, 600.0, -600.0])
def test_a_start_after_a_lost_disk_is_no_second_process(memory_world: MemoryWorld, ahead_s: float) -> None:
    """Our former self's clock may have been ahead, and some of what it wrote may turn up late."""

    async def main() -> None:
        peers = await network(memory_world, 7)
        author, late = peers[1], nearest([p for p in peers if p is not peers[1]], "k")[0]
        former, _ = second_process(memory_world, author, ahead_s)
        await former.publish([draft("k", "former", 900, renew=False)])
        memory_world.network.partition([[late.peer_id]])
        assert await author.dht.put("k", "now", ttl_s=TTL_S) >= 3
        await asyncio.sleep(120)
        memory_world.network.partition(None)
        for _ in range(8):
            await asyncio.sleep(60)
            assert [e.body for e in await author.dht.get("k", fresh=True)] == ["now"]
        assert author.runtime.events.count(DuplicateIdentity) == 0

    memory_world.run(main)


def test_what_our_former_self_has_left_is_written_over_at_once(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 6)
        former, _ = second_process(memory_world, peers[1], 3600.0)
        await former.publish([draft("k", "former", 900, renew=False)])
        (left,) = await peers[1].dht.get("k")
        before = peers[1].transport.stats.calls_made
        assert await peers[1].dht.put("k", "now", ttl_s=TTL_S) == WAN.dht.replication
        assert peers[1].transport.stats.calls_made - before <= WAN.dht.replication + 1  # nobody had to refuse it first
        (entry,) = await peers[3].dht.get("k", fresh=True)
        assert (entry.body, entry.record_version) == ("now", left.record_version + 1)

    memory_world.run(main)


def foreign(version: int, ttl_s: float, left_s: float, now_s: float) -> Copy:
    record = sign_record(
        deterministic_identity("a"), RUN_ID, "k", "", b"\x01", version, int(ttl_s * 1000), incarnation=b"another."
    )
    return Copy(record, now_s + left_s)


@pytest.mark.parametrize(
    ("version", "left_s", "rival"),
    [
        (11, 55.0, True),  # signed five seconds ago, at most
        (11, 20.0, True),
        (11, 5.0, False),  # perhaps 55 s ago, and 10 s on its way: before our start
        (10, 55.0, False),  # not above what we wrote
        (9, 55.0, False),
    ],
)
def test_only_what_was_signed_after_our_first_statement_is_a_rival(version: int, left_s: float, rival: bool) -> None:
    ours = Incarnations(b"ours....", transit_s=10.0)
    now_s = 160.0
    assert ours.is_rival(foreign(version, 60.0, left_s, now_s), Claimed(10, 100.0), now_s) is rival
    assert not ours.is_rival(foreign(version, 60.0, left_s, now_s), None, now_s)
    assert not Incarnations(b"another.", 10.0).is_rival(foreign(11, 60.0, left_s, now_s), Claimed(10, 0.0), now_s)


def test_a_rival_is_told_once_in_a_while() -> None:
    ours = Incarnations(b"ours....", transit_s=10.0)
    assert [ours.may_tell(t) for t in (0.0, 1.0, COOLDOWN_S - 1, COOLDOWN_S, COOLDOWN_S + 1)] == [
        True, False, False, True, False,
    ]  # fmt: skip


async def offer(by: Endpoint, at: Endpoint, records: list[pb.DhtRecord]) -> pb.DhtStoreResponse:
    answer: pb.DhtStoreResponse = await by.transport.call(
        at.contact, STORE, pb.DhtStoreRequest(records=records), timeout_s=5.0
    )
    return answer


def test_only_the_author_is_told_what_another_process_of_it_wrote(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        author, holder, other = await network(memory_world, 3)

        def signed(version: int, incarnation: bytes) -> pb.DhtRecord:
            record = sign_record(
                author.identity, RUN_ID, "k", "", encode_body(version), version, 60_000, incarnation=incarnation
            )
            return to_wire(Copy(record, 60.0), 0.0)

        assert not (await offer(author, holder, [signed(1, b"1" * 8)])).results[0].HasField("other")
        assert not (await offer(other, holder, [signed(2, b"2" * 8)])).results[0].HasField("other")
        (told,) = (await offer(author, holder, [signed(3, b"3" * 8)])).results
        assert (told.status, told.other.record_version, told.other.incarnation) == (0, 2, b"2" * 8)
        assert not (await offer(author, holder, [signed(4, b"3" * 8)])).results[0].HasField("other")

    memory_world.run(main)
