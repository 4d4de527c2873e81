"""What the DHT's calls carry and believe: digests, callers' addresses, floods, roles, lifetimes."""

from __future__ import annotations

import asyncio

import pytest

from swarm.config import PeerConfig
from swarm.dht import Put
from swarm.dht.bodies import encode_body
from swarm.dht.claims import MAX_CLAIMS
from swarm.dht.digests import digest_of
from swarm.dht.events import ContactDropped, PeerThrottled
from swarm.dht.messages import FIND, PING, STORE
from swarm.dht.records import Copy, sign_record, to_wire
from swarm.endpoint import Endpoint
from swarm.errors import MalformedFrameError, NotAuthorizedError, RateLimitedError
from swarm.net.transport import Contact
from swarm.pb import dht_pb2 as pb
from swarm.roles import Role
from tests.dht_networks import nearest, network
from tests.support import RUN_ID, MemoryWorld, World, eventually

CONFIG = PeerConfig.preset("wan", transport={"listen_host": "127.0.0.1"})
NOWHERE = "127.0.0.1:9"


async def find(by: Endpoint, at: Endpoint, target: pb.DhtTarget, **fields: object) -> pb.DhtFindResponse:
    request = pb.DhtFindRequest(targets=[target], **fields)  # type: ignore[arg-type]
    return await by.transport.call(at.contact, FIND, request, timeout_s=5.0)


def addresses_of(peer: Endpoint, known_by: Endpoint) -> tuple[str, ...] | None:
    return next((c.addresses for c in known_by.dht.peers() if c.peer_id == peer.peer_id), None)


# Digests


def test_a_holder_answers_in_a_few_bytes_whoever_knows_its_entries_or_wants_few(world: World) -> None:
    async def main() -> None:
        holder, asker = await network(world, 2, CONFIG)
        await holder.dht.put_many([Put("k", bytes(900), 60, subkey=str(i)) for i in range(9)])
        (everything,) = (await find(asker, holder, pb.DhtTarget(key="k"))).found
        assert len(everything.records) == 9
        copies = [holder.dht._do.protocol.checker.check(record, 0.0) for record in everything.records]
        digest = digest_of(copies)
        (same,) = (await find(asker, holder, pb.DhtTarget(key="k", digest=digest))).found
        (large,) = (await find(asker, holder, pb.DhtTarget(key="k", inline_bytes=5000))).found
        for part in (same, large):
            assert part.digest == digest
            assert len(part.records) == 0
            assert len(part.remaining_ms) == 9
            assert all(50_000 < left_ms <= 60_000 for left_ms in part.remaining_ms)
        for target in (
            pb.DhtTarget(key="k", digest=bytes(16)),
            pb.DhtTarget(key="k", digest=digest_of(copies[1:]), inline_bytes=50_000),
        ):
            (other,) = (await find(asker, holder, target)).found
            assert (len(other.records), other.digest) == (9, b"")
        (nothing,) = (await find(asker, holder, pb.DhtTarget(key="nobody's", digest=digest, inline_bytes=1))).found
        assert (len(nothing.records), nothing.digest) == (0, b"")
        with pytest.raises(MalformedFrameError):
            await find(asker, holder, pb.DhtTarget(key="k", digest=b"short"))

    world.run(main)


def test_a_large_key_travels_once_in_a_read_and_hardly_at_all_when_it_is_read_again(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 8, CONFIG)
        await peers[0].dht.put_many([Put("k", bytes(3500), 60, subkey=str(i)) for i in range(60)])
        reader = nearest(peers, "k")[-1]

        async def received(**known: object) -> int:
            before = reader.transport.stats.received_bytes
            merged = (await reader.dht._do.read({"k": ()}, full=True, **known))["k"]  # type: ignore[arg-type]
            assert len(merged) == 60
            self_known["k"] = list(merged.values())
            return reader.transport.stats.received_bytes - before

        self_known: dict[str, list[Copy]] = {}
        size = 60 * 3500
        assert size < await received() < 1.4 * size  # five replicas answered
        assert await received(known=self_known) < 0.03 * size
        await peers[0].dht.put("k", bytes(3500), subkey="more", ttl_s=60)
        merged = (await reader.dht._do.read({"k": ()}, full=True, known=self_known))["k"]
        assert len(merged) == 61

    world.run(main)


def test_a_repeated_get_moves_digests_and_returns_what_holders_confirm(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 8, CONFIG)
        await peers[0].dht.put_many([Put("k", bytes(3500), 60, subkey=f"{i:02}") for i in range(40)])
        reader = nearest(peers, "k")[-1]

        async def received() -> int:
            before = reader.transport.stats.received_bytes
            for fresh in (False, True):
                assert len(await reader.dht.get("k", fresh=fresh)) == 40
            return reader.transport.stats.received_bytes - before

        assert await received() > 40 * 3500
        assert await received() < 0.05 * 40 * 3500
        await peers[0].dht.delete("k", "07")
        await peers[0].dht.put("k", "new", subkey="08", ttl_s=60)
        entries = {entry.subkey: entry.body for entry in await reader.dht.get("k", fresh=True)}
        assert len(entries) == 39
        assert entries["08"] == "new"

        async def lost(_context: object, request: pb.DhtFindRequest) -> pb.DhtFindResponse:
            return pb.DhtFindResponse(found=[pb.DhtFound()] * len(request.targets))

        for peer in peers:
            peer.transport.serve(FIND, lost)
        assert await reader.dht.get("k", fresh=True) == []  # nobody confirms what it has seen

    world.run(main)


def test_answers_by_digest_that_make_no_sense_cost_their_sender_its_vote(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 7, CONFIG)
        await peers[0].dht.put("k", "true", ttl_s=60)
        liar = nearest(peers[:6], "k")[1]

        async def lie(_context: object, request: pb.DhtFindRequest) -> pb.DhtFindResponse:
            part = pb.DhtFound(digest=next(lies), remaining_ms=[5, 6, 7])
            return pb.DhtFindResponse(found=[part] * len(request.targets))

        lies = iter([b"short", *[b"nobody has these" for _ in range(20)]])
        liar.transport.serve(FIND, lie)
        for _ in range(3):
            assert [e.body for e in await peers[6].dht.get("k", fresh=True)] == ["true"]

    world.run(main)


# Callers' addresses


def test_a_caller_enters_the_table_once_it_was_reached_where_it_says_it_is(world: World) -> None:
    async def main() -> None:
        (host,) = await network(world, 1, CONFIG)
        liar, honest = await world.endpoint(config=CONFIG), await world.endpoint(config=CONFIG)
        await find(liar, host, pb.DhtTarget(key="k"), sender=[NOWHERE])
        await find(honest, host, pb.DhtTarget(key="k"), sender=honest.contact.addresses)
        await eventually(lambda: addresses_of(honest, host) is not None)
        assert addresses_of(honest, host) == honest.contact.addresses
        assert [c.peer_id for c in host.dht.peers()] == [honest.peer_id]
        answer = await find(honest, host, pb.DhtTarget(key="k"), count=20)
        assert len(answer.contacts) == 0  # nobody else has been reached

    world.run(main)


def test_a_known_peer_cannot_be_moved_to_where_it_is_not(world: World) -> None:
    async def main() -> None:
        host, peer, other = await network(world, 3, CONFIG)
        assert addresses_of(peer, host) == peer.contact.addresses
        for sender in ([NOWHERE], list(other.contact.addresses)):
            await peer.transport.call(host.contact, PING, pb.DhtPingRequest(sender=sender), timeout_s=5.0)
            await asyncio.sleep(0.1)
            assert addresses_of(peer, host) == peer.contact.addresses
        assert host.runtime.events.count(ContactDropped) == 0

    world.run(main)


def test_what_others_say_of_a_peers_address_does_not_count_where_we_talk_to_it(world: World) -> None:
    async def main() -> None:
        host, peer = await network(world, 2, CONFIG)
        node = host.dht._do.book.table.get(peer.peer_id)
        assert node is not None
        host.dht._do.book.table.remove_contact(node)
        (told,) = host.dht._do.book.hints([Contact(peer.peer_id, (NOWHERE,))])
        assert await host.dht._do.protocol.ping(told)  # over the session that there is
        assert addresses_of(peer, host) == peer.contact.addresses

    world.run(main)


def test_whoever_claims_ever_new_addresses_does_not_make_us_dial_them_all(memory_world: MemoryWorld) -> None:
    """In virtual time, where connections that nobody wanted can be counted."""

    async def main() -> None:
        host, victim = await network(memory_world, 2, CONFIG)
        liar = await memory_world.endpoint(config=CONFIG)
        network_, dialled = memory_world.network, 0
        listener = network_.listener

        def counted(address: str) -> object:
            nonlocal dialled
            dialled += address in victim.contact.addresses
            return listener(address)

        network_.listener = counted  # type: ignore[method-assign,assignment]
        for _ in range(200):
            sender = [*victim.contact.addresses, f"10.0.0.{liar.runtime.rng.randrange(250)}:1"]
            await liar.transport.call(host.contact, PING, pb.DhtPingRequest(sender=sender), timeout_s=5.0)
        assert dialled <= 4
        assert [c.peer_id for c in host.dht.peers()] == [victim.peer_id]
        assert len(host.dht._do.protocol.callers.claims) <= MAX_CLAIMS

    memory_world.run(main)


def test_joining_costs_little_more_than_the_joiners_own_messages(memory_world: MemoryWorld) -> None:
    """In virtual time, where all messages are counted: neighbours dial a new peer, others do not."""

    async def main() -> None:
        peers = await network(memory_world, 60, CONFIG)
        before = [p.transport.stats.hellos for p in peers]
        joiner = await memory_world.endpoint(bootstrap=[peers[0].contact], config=CONFIG)
        await asyncio.sleep(5)
        dialled = sum(p.transport.stats.hellos for p in peers) - sum(before)
        assert 5 <= dialled <= joiner.transport.stats.hellos
        neighbours = sorted(peers, key=lambda p: p.peer_id.node_id ^ joiner.peer_id.node_id)[:3]
        assert all(addresses_of(joiner, p) == joiner.contact.addresses for p in neighbours)

    memory_world.run(main)


# Floods


def test_a_flooding_peer_is_limited_and_counted_and_nobody_else_is(world: World) -> None:
    async def main() -> None:
        tight = PeerConfig.preset("wan", transport={"listen_host": "127.0.0.1"}, dht={"max_work_per_s": 2.0})
        host = await world.endpoint(config=tight)
        flooder, other = await world.endpoint(config=CONFIG), await world.endpoint(config=CONFIG)
        record = sign_record(flooder.identity, RUN_ID, "k", "", encode_body(1), 5, 60_000)
        request = pb.DhtStoreRequest(records=[to_wire(Copy(record, 60.0), 0.0)] * 10)
        for _ in range(3):  # a burst of 40 units, 11 a call
            await flooder.transport.call(host.contact, STORE, request, timeout_s=5.0)
        for _ in range(2):
            with pytest.raises(RateLimitedError):
                await flooder.transport.call(host.contact, STORE, request, timeout_s=5.0)
        assert host.dht._do.protocol.callers.flood.refused == 2
        assert host.runtime.events.count(PeerThrottled) == 1
        await other.transport.call(host.contact, STORE, request, timeout_s=5.0)
        await flooder.transport.call(host.contact, PING, pb.DhtPingRequest(), timeout_s=5.0)  # what it may still do

    world.run(main)


def test_a_bulk_of_records_as_large_as_an_author_may_have_passes(memory_world: MemoryWorld) -> None:
    """In virtual time: signing and checking so many takes a while."""

    async def main() -> None:
        peers = await network(memory_world, 3, CONFIG)
        items = [Put(f"k{i % 32}", i, 600, subkey=str(i)) for i in range(1500)]
        assert await peers[0].dht.put_many(items) == [3] * len(items)

    memory_world.run(main)


# Roles


def test_a_monitors_put_fails_and_names_the_role(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 3, CONFIG)
        monitor = await world.endpoint(roles=[Role.MONITOR], bootstrap=[peers[0].contact], config=CONFIG)
        with pytest.raises(NotAuthorizedError, match="monitor") as caught:
            await monitor.dht.put("k", 1, ttl_s=60)
        assert "trainer" in (caught.value.fix or "")
        assert monitor.dht.held == 0
        await peers[1].dht.put("k", 2, ttl_s=60)
        assert [e.body for e in await monitor.dht.get("k")] == [2]
        await monitor.dht.close(withdraw=True)

    world.run(main)


# Lifetimes


def test_nobody_keeps_alive_what_most_replicas_have_seen_end(memory_world: MemoryWorld) -> None:
    """In virtual time: the record has to end."""

    async def main() -> None:
        peers = await network(memory_world, 9, CONFIG)
        await peers[0].dht.put("k", "ended", ttl_s=40, renew=False)
        await peers[0].dht.put("k", "lives", subkey="x", ttl_s=4000, renew=False)
        reader, liar = peers[8], nearest(peers[1:8], "k")[0]
        old = (await find(reader, liar, pb.DhtTarget(key="k"))).found[0].records

        async def lie(_context: object, request: pb.DhtFindRequest) -> pb.DhtFindResponse:
            return pb.DhtFindResponse(found=[pb.DhtFound(records=old)] * len(request.targets))

        liar.transport.serve(FIND, lie)
        assert len(old) == 2
        for _ in range(4):
            (entry, *_) = await reader.dht.get("k", fresh=True)
            assert entry.ttl_s <= 40
            await asyncio.sleep(9)
        await asyncio.sleep(60)
        for fresh in (True, False, True):
            assert [e.body for e in await reader.dht.get("k", fresh=fresh)] == ["lives"]

    memory_world.run(main)


def test_lookups_and_what_they_cost_are_counted(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 6, CONFIG)
        stats = peers[2].dht._do.stats
        before = (stats.lookups, stats.depth_total, stats.messages)
        await peers[2].dht.put("k", 1, ttl_s=60)
        await peers[2].dht.get("k", fresh=True)
        assert stats.lookups - before[0] == 2
        assert 1 <= stats.depth_total - before[1] <= 4
        assert 8 <= stats.messages - before[2] <= 24

    world.run(main)


def test_one_request_cannot_ask_for_a_key_many_times(world: World) -> None:
    async def main() -> None:
        holder, asker = await network(world, 2, CONFIG)
        request = pb.DhtFindRequest(targets=[pb.DhtTarget(key="k", inline_bytes=1)] * 64)
        with pytest.raises(MalformedFrameError, match="one key twice"):
            await asker.transport.call(holder.contact, FIND, request, timeout_s=5.0)

    world.run(main)


def test_digests_of_large_keys_cost_their_asker(world: World) -> None:
    config = PeerConfig.preset("wan", transport={"listen_host": "127.0.0.1"}, dht={"max_work_per_s": 20})

    async def main() -> None:
        holder, asker = await network(world, 2, config)
        await holder.dht.put_many([Put("k", i, 600, subkey=str(i)) for i in range(1000)])

        async def ask_often() -> None:
            for _ in range(100):  # 125 units of the 400 that may come at once, were it not for the digests
                await find(asker, holder, pb.DhtTarget(key="k", inline_bytes=1))

        with pytest.raises(RateLimitedError):
            await ask_often()

    world.run(main)
