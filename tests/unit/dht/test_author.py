"""A peer as author: versions, renewals spread over time, a second process under one identity, a lost disk, tombstones.

All in virtual time: real transports would have to wait for minutes.
"""

from __future__ import annotations

import asyncio
import copy as copying
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from swarm.config import PeerConfig
from swarm.dht import Put
from swarm.dht.author import BATCH, JITTER, TOGETHER, Author, Draft
from swarm.dht.bodies import encode_body
from swarm.dht.events import DuplicateIdentity, RenewalFailed
from swarm.dht.incarnations import COOLDOWN_S, Claimed, Incarnations
from swarm.dht.messages import STORE
from swarm.dht.records import Copy, sign_record, to_wire
from swarm.dht.refusals import Refusal
from swarm.endpoint import Endpoint
from swarm.errors import RecordRefusedError
from swarm.pb import dht_pb2 as pb
from swarm.simulation.virtual import VirtualRuntime
from tests.dht_networks import nearest, network
from tests.support import RUN_ID, MemoryWorld, deterministic_identity

WAN = PeerConfig.preset("wan")
TTL_S = 60.0


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
        peers = await network(memory_world, 6, WAN)
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
        peers = await network(memory_world, 7, WAN)
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
        peers = await network(memory_world, 6, WAN)
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
        author, holder, other = await network(memory_world, 3, WAN)

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


# Lifetimes


async def gone_after(world: MemoryWorld, peers: Sequence[Endpoint], key: str, limit_s: float) -> float:
    """Until no reader finds the key any more, with reads that repair and newcomers that are handed copies meanwhile."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    readers = list(peers)
    while True:
        readers.append(await world.endpoint(bootstrap=[readers[0].contact], config=WAN))
        found = await asyncio.gather(*(reader.dht.get(key, fresh=True) for reader in readers[-4:]))
        if not any(found):
            return loop.time() - begun_s
        assert loop.time() - begun_s < limit_s
        await asyncio.sleep(2.0)


@pytest.mark.parametrize("ahead_s", [0.0, 600.0])
def test_a_dead_authors_record_ends_on_time_however_often_it_is_passed_on(
    memory_world: MemoryWorld, ahead_s: float
) -> None:
    """Slow links, newcomers near the key and readers that repair: copies of copies of copies."""

    async def main() -> None:
        memory_world.network.latency = lambda source, target, rng: rng.uniform(0.05, 0.4)
        peers = await network(memory_world, 8, WAN)
        author = peers[1]
        twin, _ = second_process(memory_world, author, ahead_s)
        await twin.publish([draft("k", 1, TTL_S)])
        memory_world.network.kill(author.peer_id)
        alive = [peer for peer in peers if peer is not author]
        assert TTL_S / 2 < await gone_after(memory_world, alive, "k", 1.1 * TTL_S) <= 1.1 * TTL_S
        for _ in range(10):  # and nobody brings it back
            await asyncio.sleep(TTL_S / 2)
            assert await alive[3].dht.get("k", fresh=True) == []

    memory_world.run(main)


def test_a_deletion_while_the_network_is_split_wins_when_it_heals(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 12, WAN)
        author = peers[0]
        await author.dht.put("k", "first", ttl_s=900)
        halves = peers[:6], peers[6:]
        memory_world.network.partition([[p.peer_id for p in half] for half in halves])
        await author.dht.delete("k")
        await asyncio.sleep(120)
        assert await halves[0][3].dht.get("k", fresh=True) == []
        memory_world.network.partition(None)
        await asyncio.sleep(120)
        for peer in peers:
            assert await peer.dht.get("k", fresh=True) == []
        assert await author.dht.put("k", "again", ttl_s=900) >= 3
        for peer in peers:
            assert [e.body for e in await peer.dht.get("k", fresh=True)] == ["again"]

    memory_world.run(main)


# Renewals


def test_many_records_put_at_once_are_renewed_little_by_little(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 8, WAN)
        author = peers[1]
        count, ttl_s = 300, 600.0
        assert min(await author.dht.put_many([Put(f"k{i}", i, ttl_s) for i in range(count)])) >= 3
        begun_s = asyncio.get_running_loop().time()
        interval_s = WAN.dht.republish_fraction * ttl_s
        renewed: list[tuple[float, int]] = []
        place = author.dht._do.place

        async def counted(copies: Sequence[Copy]) -> Any:
            renewed.append((asyncio.get_running_loop().time() - begun_s, len(copies)))
            return await place(copies)

        author.dht._do.place = counted  # type: ignore[method-assign]
        await asyncio.sleep(interval_s * 1.01)
        assert sum(size for _, size in renewed) >= count
        assert max(size for _, size in renewed) <= BATCH
        assert renewed[0][0] >= (1 - JITTER - TOGETHER) * interval_s
        early = [size for at_s, size in renewed if at_s < interval_s]
        seconds = Counter(int(at_s) for at_s, size in renewed for _ in range(size))
        assert max(seconds.values()) < count / 10  # in none of the seconds more than a tenth of them
        assert len(early) < count / 3  # but several at a time
        assert len({e.record_version for e in (await peers[5].dht.get("k7", fresh=True))}) == 1

    memory_world.run(main)


def test_a_renewal_that_nobody_takes_is_told_and_tried_again_soon(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 8, PeerConfig.preset("wan", dht={"replication": 2}))
        key = next(f"k{i}" for i in range(100) if peers[0] not in nearest(peers, f"k{i}")[:4])
        await peers[0].dht.put(key, 1, ttl_s=TTL_S)
        events = peers[0].runtime.events

        async def refuse(_context: object, request: pb.DhtStoreRequest) -> pb.DhtStoreResponse:
            return pb.DhtStoreResponse(results=[pb.DhtStored(status=Refusal.QUOTA)] * len(request.records))

        for peer in peers[1:]:
            peer.transport.serve(STORE, refuse)
        await asyncio.sleep(WAN.dht.republish_fraction * TTL_S + 1)
        assert {s.event.key for s in events.recent(RenewalFailed)} == {key}
        for peer in peers[1:]:
            peer.dht._protocol.serve()
        told = events.count(RenewalFailed)
        await asyncio.sleep(TTL_S / 2)
        assert events.count(RenewalFailed) <= told + 1
        assert [e.body for e in await peers[5].dht.get(key, fresh=True)] == [1]

    memory_world.run(main)


def test_an_author_knows_its_own_limits(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        config = PeerConfig.preset("wan", dht={"max_entries_per_key_and_author": 2, "max_entries_per_author": 3})
        (peer,) = await network(memory_world, 1, config)
        await peer.dht.put_many([Put("k", 1, 5, subkey, renew=False) for subkey in "ab"])
        await peer.dht.put("k", 2, subkey="a", ttl_s=5, renew=False)
        with pytest.raises(RecordRefusedError, match="under one key"):
            await peer.dht.put("k", 1, subkey="c", ttl_s=5)
        await peer.dht.put("other", 1, ttl_s=50)
        with pytest.raises(RecordRefusedError, match="at most 3"):
            await peer.dht.put("third", 1, ttl_s=5)
        await asyncio.sleep(6)
        await peer.dht.put("third", 1, ttl_s=5)  # what has ended counts no longer
        assert [e.body for e in await peer.dht.get("k")] == []
        assert [e.body for e in await peer.dht.get("other")] == [1]

    memory_world.run(main)
