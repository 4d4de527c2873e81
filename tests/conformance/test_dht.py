"""The DHT over both transports: publishing, reading, upkeep, and records that must be refused."""

from __future__ import annotations

import asyncio

import pytest

from swarm.config import PeerConfig
from swarm.dht import Put, bootstrap_addresses
from swarm.dht.bodies import encode_body
from swarm.dht.events import ContactDropped, RecordRefused, Rejoined
from swarm.dht.messages import FIND, STORE
from swarm.dht.records import Copy, Record, sign_record, to_wire
from swarm.dht.refusals import Refusal
from swarm.endpoint import Endpoint
from swarm.errors import (
    BootstrapError,
    ClosedError,
    MalformedFrameError,
    NotAuthorizedError,
    RecordRefusedError,
)
from swarm.pb import dht_pb2 as pb
from swarm.roles import Role
from tests.dht_networks import nearest, network
from tests.support import RUN_ID, MemoryWorld, World, deterministic_identity

CONFIG = PeerConfig.preset("wan", transport={"listen_host": "127.0.0.1"})
"""Patient, so that a busy machine is not taken for slow peers."""
REPLICATION = CONFIG.dht.replication


async def stored(by: Endpoint, at: Endpoint, records: list[pb.DhtRecord]) -> list[pb.DhtStored]:
    answer = await by.transport.call(at.contact, STORE, pb.DhtStoreRequest(records=records), timeout_s=5.0)
    return list(answer.results)


async def held_by(peer: Endpoint, key: str, asker: Endpoint) -> list[pb.DhtRecord]:
    """What one peer itself holds under a key."""
    request = pb.DhtFindRequest(targets=[pb.DhtTarget(key=key)])
    answer = await asker.transport.call(peer.contact, FIND, request, timeout_s=5.0)
    return list(answer.found[0].records)


def test_what_one_peer_puts_every_peer_gets(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 8, CONFIG)
        body = {"addresses": ["10.1.2.3:4"], "queue_s": 0.25}
        assert await peers[3].dht.put("experts/ffn", body, subkey="0", ttl_s=60) == REPLICATION
        for peer in peers:
            (entry,) = await peer.dht.get("experts/ffn")
            assert entry.body == body
            assert (entry.author, entry.subkey) == (peers[3].peer_id, "0")
            assert 0 < entry.ttl_s <= 60
        assert await peers[0].dht.get("nothing/here") == []
        holders = [
            bool(await held_by(p, "experts/ffn", peers[0])) for p in nearest(peers, "experts/ffn") if p is not peers[0]
        ]
        assert all(holders[: REPLICATION - 1])
        assert not any(holders[REPLICATION:])

    world.run(main)


def test_a_newer_put_replaces_and_authors_do_not_touch_each_other(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 6, CONFIG)
        await asyncio.gather(*(p.dht.put("k", i, ttl_s=60) for i, p in enumerate(peers[:3])))
        await peers[0].dht.put("k", "again", ttl_s=60)
        await peers[0].dht.put("k", "other", subkey="x", ttl_s=60)
        entries = await peers[5].dht.get("k", fresh=True)
        assert {(e.author, e.subkey): e.body for e in entries} == {
            (peers[0].peer_id, ""): "again",
            (peers[0].peer_id, "x"): "other",
            (peers[1].peer_id, ""): 1,
            (peers[2].peer_id, ""): 2,
        }
        assert entries == sorted(entries, key=lambda e: (e.author, e.subkey))

    world.run(main)


def test_a_deleted_entry_is_gone_everywhere_and_stays_gone(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 7, CONFIG)
        await peers[1].dht.put("k", 1, ttl_s=60)
        await peers[2].dht.put("k", 2, ttl_s=60)
        old = next(c for c in await held_by(nearest(peers[3:], "k")[0], "k", peers[1]) if c.body == b"\x01")
        await peers[1].dht.delete("k")
        await peers[1].dht.delete("never written")
        for peer in peers:
            assert [e.body for e in await peer.dht.get("k", fresh=True)] == [2]
        results = [await stored(peers[6], p, [old]) for p in nearest(peers[:6], "k")[:3]]
        assert all(result[0].status == Refusal.OUTDATED for result in results)
        await peers[1].dht.put("k", "back", ttl_s=60)
        assert len(await peers[5].dht.get("k", fresh=True)) == 2

    world.run(main)


def test_bulk_put_and_get_share_their_requests(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 8, CONFIG)
        before = peers[2].transport.stats.calls_made
        counts = await peers[2].dht.put_many([Put(f"k{i}", i, 60) for i in range(100)])
        assert counts == [REPLICATION] * 100
        assert peers[2].transport.stats.calls_made - before < 40  # one at a time they take 400 or more
        before = peers[5].transport.stats.calls_made
        found = await peers[5].dht.get_many([f"k{i}" for i in range(120)])
        assert [[e.body for e in found[f"k{i}"]] for i in range(120)] == [[i] for i in range(100)] + [[]] * 20
        assert peers[5].transport.stats.calls_made - before < 60

    world.run(main)


def test_reads_of_one_key_at_the_same_time_share_one_answer(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 4, CONFIG)
        await peers[0].dht.put("k", 1, ttl_s=60)
        before = peers[3].transport.stats.calls_made
        first = asyncio.create_task(peers[3].dht.get("k"))
        answers = [asyncio.create_task(peers[3].dht.get("k")) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()  # whoever began the read may go away
        for answer in await asyncio.gather(*answers):
            assert [e.body for e in answer] == [1]
        assert peers[3].transport.stats.calls_made - before <= 6

    world.run(main)


def test_a_key_with_more_entries_than_fit_into_one_message_is_read_whole(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 3, CONFIG)
        big = bytes(4000)
        for author in peers[:2]:
            await author.dht.put_many([Put("big", big, 60, subkey=f"{i:03d}") for i in range(200)])
        assert peers[0].transport.config.transport.max_control_bytes < 400 * 4000
        entries = await peers[2].dht.get("big")
        assert len(entries) == 400
        assert all(e.body == big for e in entries)

    world.run(main)


def test_records_that_must_not_be_held_are_refused_and_counted(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 2, CONFIG)
        author = deterministic_identity("attacker")

        def signed(body: bytes = b"\x01", run_id: bytes = RUN_ID, version: int = 5, limit: int = 4096) -> pb.DhtRecord:
            record = sign_record(author, run_id, "k", "", body, version, 60_000, max_body_bytes=limit)
            return to_wire(Copy(record, 60.0), 0.0)

        forged, unsigned, malformed = signed(), signed(), signed(b"\xc1")
        forged.body = b"\x02"
        unsigned.signature = b""
        oversized, foreign, good = signed(bytes(5000), limit=9000), signed(run_id=bytes(32)), signed()
        results = await stored(
            peers[0], peers[1], [forged, unsigned, malformed, oversized, foreign, good, good, signed(version=4)]
        )
        assert [Refusal(r.status).reason for r in results] == [
            "bad_signature", "unsigned", "malformed", "too_large", "foreign", "none", "none", "outdated",
        ]  # fmt: skip
        assert results[-1].record_version == 5
        assert peers[1].runtime.events.count(RecordRefused) == 6
        assert [e.author for e in await peers[1].dht.get("k")] == [author.peer_id]
        with pytest.raises(MalformedFrameError):
            await stored(peers[0], peers[1], [good] * 300)
        for target in (pb.DhtTarget(), pb.DhtTarget(position=b"short"), pb.DhtTarget(key="k" * 300)):
            with pytest.raises(MalformedFrameError):
                await peers[0].transport.call(
                    peers[1].contact, FIND, pb.DhtFindRequest(targets=[target]), timeout_s=5.0
                )
        assert await peers[0].dht.put("alive", 1, ttl_s=60) == 2

    world.run(main)


def test_a_lying_holder_spoils_nothing_but_its_own_answer(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 6, CONFIG)
        await peers[0].dht.put("k", "true", ttl_s=60)
        liar = next(p for p in nearest(peers[:5], "k") if p is not peers[0])
        record = sign_record(liar.identity, RUN_ID, "other", "", b"\x01", 9, 60_000)
        forged = Record(peers[0].identity.public_key, "k", "", b"\x07", 2**61, 60_000, False, bytes(64))

        async def lie(_context: object, request: pb.DhtFindRequest) -> pb.DhtFindResponse:
            found = pb.DhtFound(nearest=[0, 5, 99])
            found.records.extend(to_wire(Copy(r, 60.0), 0.0) for r in (record, forged))
            contacts = [pb.DhtContact(peer_id=b"short"), pb.DhtContact(peer_id=bytes(32), addresses=["nowhere:1"] * 99)]
            return pb.DhtFindResponse(contacts=contacts, found=[found] * len(request.targets))

        liar.transport.serve(FIND, lie)
        entries = await peers[5].dht.get("k", fresh=True)
        assert [e.body for e in entries] == ["true"]
        assert peers[5].runtime.events.count(RecordRefused) == 1  # the rest of a liar's answer is not looked at
        assert peers[5].runtime.events.count(ContactDropped) == 1

        async def nonsense(_context: object, _request: pb.DhtFindRequest) -> pb.DhtFindResponse:
            return pb.DhtFindResponse()

        liar.transport.serve(FIND, nonsense)
        assert [e.body for e in await peers[5].dht.get("k", fresh=True)] == ["true"]

    world.run(main)


def test_what_cannot_be_published_is_refused_at_once(world: World) -> None:
    async def main() -> None:
        peer = await world.endpoint(config=PeerConfig.preset("local", dht={"max_entries_per_author": 2}))
        for bad in (
            Put("k", bytes(5000), 60),
            Put("", 1, 60),
            Put("k" * 300, 1, 60),
            Put("k", object(), 60),
            Put("k", 1, 0),
        ):
            with pytest.raises(RecordRefusedError):
                await peer.dht.put_many([Put("good", 1, 60), bad])
        assert await peer.dht.get("good") == []  # all or nothing
        await peer.dht.put("a", 1, ttl_s=60)
        await peer.dht.put("b", 1, ttl_s=60)
        with pytest.raises(RecordRefusedError, match="at most 2"):
            await peer.dht.put("c", 1, ttl_s=60)

    world.run(main)


def test_a_lone_peer_keeps_its_own_records(world: World) -> None:
    async def main() -> None:
        peer = await world.endpoint()
        assert await peer.dht.put("k", 1, ttl_s=60) == 1
        assert [e.body for e in await peer.dht.get("k")] == [1]
        assert peer.dht.peers() == []
        await peer.dht.bootstrap([peer.contact])

    world.run(main)


def test_an_author_that_lost_its_memory_writes_above_what_is_held(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 5, CONFIG)
        identity = peers[4].identity
        ahead = int(peers[4].runtime.clock.wall() * 1000) + 3_600_000  # its former clock was an hour ahead
        old = to_wire(Copy(sign_record(identity, RUN_ID, "k", "", encode_body("old"), ahead, 60_000), 60.0), 0.0)
        for peer in peers[:4]:
            assert (await stored(peers[4], peer, [old]))[0].status == Refusal.NONE
        assert await peers[4].dht.put("k", "new", ttl_s=60) == 5
        (entry,) = await peers[0].dht.get("k")
        assert (entry.body, entry.record_version) == ("new", ahead + 1)

    world.run(main)


def test_peers_are_found_by_id_and_unknown_ids_are_not(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 5, CONFIG)
        late = await world.endpoint(bootstrap=[peers[1].contact], config=CONFIG)
        for peer in peers:
            found = await peer.dht.find_peer(late.peer_id)
            assert found is not None
            assert found.peer_id == late.peer_id
            assert found.addresses[0] in late.contact.addresses
        assert await peers[0].dht.find_peer(deterministic_identity("nobody").peer_id) is None
        assert await late.dht.find_peer(late.peer_id) == late.contact

    world.run(main)


def test_a_monitor_reads_but_does_not_store(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 3, CONFIG)
        monitor = await world.endpoint(roles=[Role.MONITOR], bootstrap=[peers[0].contact], config=CONFIG)
        await peers[0].dht.put("k", 1, ttl_s=60)
        assert [e.body for e in await monitor.dht.get("k")] == [1]
        with pytest.raises(NotAuthorizedError):
            await stored(monitor, peers[0], [])

    world.run(main)


def test_bootstrap_goes_on_with_whoever_answers_and_names_every_failure(world: World) -> None:
    async def main() -> None:
        first, joiner = await world.endpoint(), await world.transport()
        stranger = await world.transport(run_id=bytes(32))
        good = first.contact.addresses[0]
        wrong = stranger.contact.addresses[0]
        dead = "127.0.0.1:9"
        contacts = await bootstrap_addresses(joiner, [(dead, None), (wrong, None), (good, first.peer_id), (good, None)])
        assert [c.peer_id for c in contacts] == [first.peer_id]
        with pytest.raises(BootstrapError) as caught:
            await bootstrap_addresses(joiner, [(dead, None), (wrong, None), (good, stranger.peer_id)])
        assert list(caught.value.reasons) == [dead, wrong, good] or set(caught.value.reasons) == {dead, wrong, good}
        assert "E3002" in caught.value.reasons[wrong]
        assert "E3001" in caught.value.reasons[good]
        assert caught.value.fix

    world.run(main)


@pytest.mark.parametrize("known", [True, False])
def test_bootstrap_does_not_wait_for_silent_addresses_once_others_have_answered(
    memory_world: MemoryWorld, known: bool
) -> None:
    async def main() -> None:
        first, second, silent = [await memory_world.transport() for _ in range(3)]
        joiner = await memory_world.transport()
        memory_world.network.freeze(silent.peer_id)
        good, other = first.contact.addresses[0], second.contact.addresses[0]
        dead = silent.contact.addresses[0]
        begun = asyncio.get_running_loop().time()
        peers = (first.peer_id, second.peer_id) if known else (None, None)
        contacts = await bootstrap_addresses(joiner, [(dead, peers[0]), (other, peers[1]), (good, peers[0])])
        took_s = asyncio.get_running_loop().time() - begun
        assert {c.peer_id for c in contacts} == {first.peer_id, second.peer_id}
        assert took_s < 0.2 if known else took_s < 1.5
        begun = asyncio.get_running_loop().time()
        with pytest.raises(BootstrapError):
            await bootstrap_addresses(joiner, [(dead, None)])
        assert asyncio.get_running_loop().time() - begun > 1.5

    memory_world.run(main)


def test_bootstrap_with_contacts_that_are_gone_is_an_error_with_reasons(world: World) -> None:
    async def main() -> None:
        gone = await world.transport()
        contact = gone.contact
        await gone.close(grace_s=0)
        joiner = await world.endpoint()
        with pytest.raises(BootstrapError) as caught:
            await joiner.dht.bootstrap([contact])
        assert list(caught.value.reasons) == list(contact.addresses)

    world.run(main)


def test_closing_is_idempotent_and_ends_use(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 4, CONFIG)
        await peers[1].dht.put("k", 1, ttl_s=60)
        reading = asyncio.create_task(peers[1].dht.get("k", fresh=True))
        await asyncio.sleep(0)
        await peers[1].dht.close(withdraw=True)
        await peers[1].dht.close()
        with pytest.raises(ClosedError):
            await peers[1].dht.put("k", 2, ttl_s=60)
        assert [e.body for e in await reading] in ([1], []) if not reading.exception() else True
        assert await peers[2].dht.get("k", fresh=True) == []

    world.run(main)


# Upkeep in virtual time: real transports would have to wait for minutes.

WAN = PeerConfig.preset("wan")


def test_records_expire_unless_they_are_renewed(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 8, WAN)
        await peers[0].dht.put("once", 1, ttl_s=50, renew=False)
        await peers[0].dht.put("kept", 1, ttl_s=50)
        (first,) = await peers[7].dht.get("kept")
        for _ in range(4):
            await asyncio.sleep(9)
            assert len(await peers[7].dht.get("once")) == 1
        await asyncio.sleep(600)
        assert await peers[7].dht.get("once", fresh=True) == []
        (kept,) = await peers[7].dht.get("kept", fresh=True)
        assert kept.record_version > first.record_version
        assert 0 < kept.ttl_s <= 50
        await peers[0].dht.close()
        await asyncio.sleep(51)
        assert await peers[7].dht.get("kept", fresh=True) == []
        assert sum(p.dht.held for p in peers[1:]) == 0

    memory_world.run(main)


def test_a_renewal_never_brings_an_older_body_back(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 6, WAN)
        for i in range(60):  # puts at all distances from renewals, which come every 0.8 s or so
            await asyncio.gather(*(peers[0].dht.put("k", [i, j], subkey=str(j), ttl_s=2) for j in range(3)))
            await asyncio.sleep(0.37)
            found = {e.subkey: e.body for e in await peers[5].dht.get("k", fresh=True)}
            assert found == {str(j): [i, j] for j in range(3)}

    memory_world.run(main)


def test_a_tombstone_outlasts_every_earlier_version(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 8, WAN)
        await peers[0].dht.put("k", "long", ttl_s=900, renew=False)
        missed = nearest(peers[1:7], "k")[0]
        memory_world.network.partition([[missed.peer_id]])  # it keeps the first version
        await peers[0].dht.put("k", "short", ttl_s=10, renew=False)
        await peers[0].dht.delete("k")
        await asyncio.sleep(60)
        memory_world.network.partition(None)
        await asyncio.sleep(120)
        assert await peers[7].dht.get("k", fresh=True) == []

    memory_world.run(main)


def test_records_survive_their_holders_one_generation_after_the_other(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 24, WAN)
        author, reader = peers[0], peers[1]
        await author.dht.put("k", "alive", ttl_s=86_400, renew=False)
        memory_world.network.kill(author.peer_id)
        alive = peers[1:]
        for _ in range(4):
            for victim in [p for p in nearest(alive, "k") if p is not reader][: REPLICATION - 2]:
                memory_world.network.kill(victim.peer_id)
                alive.remove(victim)
            await asyncio.sleep(6 * WAN.dht.maintenance_s)
        assert [e.body for e in await reader.dht.get("k", fresh=True)] == ["alive"]
        now = [p for p in nearest(alive, "k") if p is not reader][: REPLICATION - 1]
        assert all([await held_by(p, "k", reader) for p in now])

    memory_world.run(main)


def test_newcomers_near_a_key_receive_its_records(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 6, WAN)
        await peers[0].dht.put("k", 1, ttl_s=3600, renew=False)
        for _ in range(18):
            peers.append(await memory_world.endpoint(bootstrap=[peers[0].contact], config=WAN))
        await asyncio.sleep(4 * WAN.dht.maintenance_s)
        asker = nearest(peers, "k")[-1]
        for holder in nearest(peers, "k")[:REPLICATION]:
            (record,) = await held_by(holder, "k", asker)
            assert record.remaining_ms < 3_600_000 - 60_000  # handed over with what was left

    memory_world.run(main)


def test_a_stale_replica_is_repaired_by_a_reader(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 8, WAN)
        await peers[0].dht.put("k", "old", ttl_s=600, renew=False)
        stale = nearest(peers[1:7], "k")[:1]
        memory_world.network.partition([[p.peer_id for p in stale]])
        await peers[0].dht.put("k", "new", ttl_s=600, renew=False)
        memory_world.network.partition(None)
        await asyncio.sleep(WAN.dht.maintenance_s * 1.3)  # until the peer that was cut off is asked again
        assert [e.body for e in await peers[7].dht.get("k", fresh=True)] == ["new"]
        await asyncio.sleep(1)
        for holder in nearest(peers[:7], "k")[: REPLICATION - 1]:
            if holder is not peers[7]:
                assert [r.body for r in await held_by(holder, "k", peers[7])] == [encode_body("new")]

    memory_world.run(main)


def test_closing_ends_a_bootstrap_that_waits_for_a_frozen_peer(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 2, WAN)
        memory_world.network.freeze(peers[0].peer_id)
        joiner = await memory_world.endpoint(config=WAN)
        joining = asyncio.create_task(joiner.dht.bootstrap([peers[0].contact]))
        await asyncio.sleep(0.5)
        await joiner.dht.close()
        with pytest.raises(BootstrapError):
            await asyncio.wait_for(joining, 1.0)

    memory_world.run(main)


def test_a_frozen_bootstrap_does_not_keep_anybody_from_joining(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 5, WAN)
        memory_world.network.freeze(peers[0].peer_id)
        begun_s = asyncio.get_running_loop().time()
        joiner = await memory_world.endpoint(bootstrap=[p.contact for p in peers[:2]], config=WAN)
        assert len(joiner.dht.peers()) >= 3
        assert asyncio.get_running_loop().time() - begun_s < WAN.dht.call_timeout_s

    memory_world.run(main)


def test_a_frozen_holder_delays_nobody_for_long(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 10, WAN)
        await peers[0].dht.put("k", 1, ttl_s=600)
        for frozen in [p for p in nearest(peers, "k") if p is not peers[0]][:2]:
            memory_world.network.freeze(frozen.peer_id)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        assert len(await peers[0].dht.get("k")) == 1
        assert loop.time() - begin < WAN.dht.call_timeout_s / 2
        begin = loop.time()
        assert await peers[0].dht.put("k", 2, ttl_s=600) >= REPLICATION - 1
        assert loop.time() - begin < WAN.dht.call_timeout_s

    memory_world.run(main)


def test_islands_merge_when_the_network_heals(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 10, WAN)
        halves = peers[:5], peers[5:]
        memory_world.network.partition([[p.peer_id for p in half] for half in halves])
        await asyncio.sleep(20 * WAN.dht.maintenance_s)
        for half in halves:
            ids = {p.peer_id for p in half}
            assert all({c.peer_id for c in p.dht.peers()} <= ids for p in half)
        await halves[1][0].dht.put("k", "from the other side", ttl_s=86_400)
        memory_world.network.partition(None)
        await asyncio.sleep(20 * WAN.dht.maintenance_s)
        assert all(len(p.dht.peers()) == 9 for p in peers)
        assert [e.body for e in await halves[0][4].dht.get("k", fresh=True)] == ["from the other side"]

    memory_world.run(main)


def test_a_peer_that_lost_everybody_rejoins_by_itself(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        fixed = PeerConfig.preset("wan", transport={"listen_host": "127.0.0.1", "port": 7777})
        first = await memory_world.endpoint(config=fixed)
        lonely = await memory_world.endpoint(bootstrap=[first.contact], config=WAN)
        await first.dht.close()
        memory_world.network.kill(first.peer_id)
        await asyncio.sleep(8 * WAN.dht.maintenance_s)
        assert lonely.dht.peers() == []
        again = await memory_world.endpoint(identity=first.identity, config=fixed)  # remembers nobody
        await asyncio.sleep(3 * WAN.dht.maintenance_s)
        assert [c.peer_id for c in lonely.dht.peers()] == [first.peer_id]
        assert [c.peer_id for c in again.dht.peers()] == [lonely.peer_id]
        assert lonely.runtime.events.count(Rejoined) == 1

    memory_world.run(main)
