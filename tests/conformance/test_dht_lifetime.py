"""Leaving, coming back and meeting again: hand-over, remembered peers, islands.

Most of it in virtual time: real transports would have to wait for minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarm.config import PeerConfig
from swarm.dht import Dht, bootstrap_addresses
from swarm.dht.events import IslandMet, PeerThrottled, Rejoined
from swarm.dht.handover import Handover
from swarm.dht.known import FILE_NAME, KnownPeersUnusable, read_known
from swarm.dht.messages import FIND
from swarm.dht.node import Put
from swarm.endpoint import Endpoint
from swarm.errors import BootstrapError
from swarm.net.transport import Contact
from swarm.pb import dht_pb2 as pb
from tests.dht_networks import nearest, network
from tests.support import RUN_ID, MemoryWorld, World

WAN = PeerConfig.preset("wan")
LOOPBACK = PeerConfig.preset("wan", transport={"listen_host": "127.0.0.1"})
BAR_S = 120.0
"""Within this time after a network has healed it is one."""


async def hands_nothing_over(self: Handover) -> None:
    """Stands for `Handover.to_newcomers` where the author alone must see to its records."""


async def holds(peer: Endpoint, key: str, asker: Endpoint) -> bool:
    request = pb.DhtFindRequest(targets=[pb.DhtTarget(key=key)])
    answer = await asker.transport.call(peer.contact, FIND, request, timeout_s=5.0)
    return bool(answer.found[0].records)


async def remembering(world: World, path: Path, bootstrap: Sequence[Contact] = (), config: PeerConfig = WAN) -> Dht:
    """A peer that keeps its acquaintances in a file; started, and joined where contacts are given."""
    transport = await world.transport(config=config)
    dht = Dht(transport, config.dht, transport.runtime, known_file=path)
    await dht.start()
    world.at_close(dht.close)
    if bootstrap:
        await dht.bootstrap(bootstrap)
    return dht


# Meeting


def test_a_newcomer_that_takes_little_at_a_time_receives_everything_in_the_end(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, WAN.dht.replication - 1, WAN)
        count, per_s = 2000, 20.0
        puts = [Put(f"k{i}", i, 3600.0, renew=False) for i in range(count)]
        assert min(await peers[0].dht.put_many(puts)) == len(peers)
        slow = PeerConfig.preset("wan", dht={"max_work_per_s": per_s})
        newcomer = await memory_world.endpoint(bootstrap=[peers[1].contact], config=slow)
        throttled = newcomer.runtime.events
        await asyncio.sleep(1.3 * WAN.dht.maintenance_s)
        assert 0 < newcomer.dht.held < count
        await asyncio.sleep(6 * WAN.dht.maintenance_s)
        assert throttled.count(PeerThrottled) > 0
        assert newcomer.dht.held == count

    memory_world.run(main)


# Leaving


def test_a_record_outlives_all_its_holders_when_they_leave_one_after_the_other(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 16, WAN)
        author = nearest(peers, "k")[-1]
        await author.dht.put("k", "alive", ttl_s=86_400, renew=False)
        holders = nearest(peers, "k")[: WAN.dht.replication]
        memory_world.network.kill(author.peer_id)  # it renews nothing
        alive = [p for p in peers if p is not author]
        for holder in holders:  # no round of upkeep comes in between
            await holder.dht.close(handover=True)
            await holder.transport.close(grace_s=0)
            alive.remove(holder)
        asker = nearest(alive, "k")[-1]
        assert sum([await holds(p, "k", asker) for p in alive if p is not asker]) >= WAN.dht.replication - 1
        assert [e.body for e in await asker.dht.get("k")] == ["alive"]

    memory_world.run(main)


def test_what_a_leaving_author_withdraws_is_not_handed_over(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 8, LOOPBACK)
        others = await asyncio.gather(*(peers[1].dht.put(f"other {i}", i, ttl_s=600) for i in range(10)))
        assert min(others) == LOOPBACK.dht.replication
        await peers[0].dht.put("own", 1, ttl_s=600)
        await peers[0].dht.close(withdraw=True, handover=True)
        await peers[0].transport.close(grace_s=0)
        assert await peers[2].dht.get("own", fresh=True) == []
        found = await peers[2].dht.get_many([f"other {i}" for i in range(10)])
        assert [[e.body for e in entries] for entries in found.values()] == [[i] for i in range(10)]

    world.run(main)


def test_leaving_is_bounded_in_time_when_nobody_takes_anything(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 12, WAN)
        await peers[0].dht.put_many([])
        await asyncio.gather(*(peers[1].dht.put(f"k{i}", i, ttl_s=600) for i in range(30)))
        for peer in peers[1:]:
            memory_world.network.freeze(peer.peer_id)
        begun_s = asyncio.get_running_loop().time()
        await peers[0].dht.close(withdraw=True, handover=True)
        assert asyncio.get_running_loop().time() - begun_s <= 2 * WAN.dht.call_timeout_s + 0.1

    memory_world.run(main)


# Coming back


def test_a_restart_works_when_all_peers_of_the_invite_are_gone(world: World, tmp_path: Path) -> None:
    async def main() -> None:
        peers = await network(world, 4, LOOPBACK)
        invite = [(a, peers[0].peer_id) for a in peers[0].contact.addresses]
        first = await remembering(world, tmp_path / FILE_NAME, [peers[0].contact], LOOPBACK)
        await first.close()
        saved = read_known(tmp_path / FILE_NAME, RUN_ID)
        assert {p.peer_id for p in peers} <= {c.peer_id for c in saved}
        await peers[0].dht.close()
        await peers[0].transport.close(grace_s=0)
        again = await remembering(world, tmp_path / FILE_NAME, (), LOOPBACK)
        assert again.remembered == saved  # in the order in which they were best
        transport = await world.transport(config=LOOPBACK)
        contacts = await bootstrap_addresses(transport, invite, again.remembered)
        assert {c.peer_id for c in contacts} & {p.peer_id for p in peers[1:]}
        await again.bootstrap(contacts, seeds=invite)
        assert {p.peer_id for p in peers[1:]} <= {c.peer_id for c in again.peers()}

    world.run(main)


def test_addresses_of_the_invite_and_remembered_ones_are_told_apart(world: World) -> None:
    async def main() -> None:
        gone = [await world.transport(config=LOOPBACK) for _ in range(3)]
        contacts = [t.contact for t in gone]
        for transport in gone:
            await transport.close(grace_s=0)
        joiner = await world.transport(config=LOOPBACK)
        invite = [(a, contacts[0].peer_id) for a in contacts[0].addresses]
        with pytest.raises(BootstrapError) as caught:
            await bootstrap_addresses(joiner, invite, contacts)
        every = [a for c in contacts for a in c.addresses]
        assert sorted(caught.value.reasons) == sorted(every)
        assert caught.value.remembered == tuple(a for c in contacts[1:] for a in c.addresses)
        given, _, remembered = caught.value.message.partition("remembered")
        assert contacts[0].addresses[0] in given
        assert contacts[1].addresses[0] in remembered

    world.run(main)


@pytest.mark.parametrize("content", [b"\x00\x01", b'{"format": 1, "run_id": "00", "peers": []}'])
def test_a_damaged_file_of_remembered_peers_is_told_and_written_anew(
    memory_world: MemoryWorld, tmp_path: Path, content: bytes
) -> None:
    async def main() -> None:
        path = tmp_path / FILE_NAME
        path.write_bytes(content)
        peers = await network(memory_world, 3, WAN)
        dht = await remembering(memory_world, path, [peers[0].contact])
        assert dht._do.runtime.events.count(KnownPeersUnusable) == 1
        assert dht.remembered == []
        await dht.close()
        assert len(read_known(path, RUN_ID)) == 4

    memory_world.run(main)


def test_a_file_that_cannot_be_written_does_not_stop_a_peer(memory_world: MemoryWorld, tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "file").write_text("in the way of a folder")
        peers = await network(memory_world, 3, WAN)
        dht = await remembering(memory_world, tmp_path / "file" / FILE_NAME, [peers[0].contact])
        assert await dht.put("k", 1, ttl_s=60) == 4
        await dht.close()
        assert dht._do.runtime.events.count(KnownPeersUnusable) >= 1

    memory_world.run(main)


def test_a_peer_that_slept_is_back_with_its_records_soon(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 14, WAN)
        sleeper = peers[7]
        await sleeper.dht.put("short", "s", ttl_s=90)
        await sleeper.dht.put("long", "l", ttl_s=7200)
        memory_world.network.freeze(sleeper.peer_id)
        await asyncio.sleep(600)
        assert await peers[3].dht.get("short") == []
        assert all(sleeper.peer_id not in {c.peer_id for c in p.dht.peers()} for p in peers if p is not sleeper)
        memory_world.network.thaw(sleeper.peer_id)
        await asyncio.sleep(BAR_S)
        others = [p for p in peers if p is not sleeper]
        assert sum(sleeper.peer_id in {c.peer_id for c in p.dht.peers()} for p in others) >= 10
        assert len(sleeper.dht.peers()) >= 10
        assert sleeper.runtime.events.count(Rejoined) == 1
        for key in ("short", "long"):
            (entry,) = await peers[3].dht.get(key, fresh=True)
            assert entry.ttl_s > {"short": 30, "long": 7200 - BAR_S - 1}[key]  # signed anew since

    memory_world.run(main)


def test_a_wall_clock_that_jumps_ahead_as_after_sleep_renews_everything(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 6, WAN)
        await peers[2].dht.put("k", 1, ttl_s=7200)
        (before,) = await peers[4].dht.get("k")
        clock = peers[2].runtime.clock
        clock._wall_epoch += 3600.0  # type: ignore[attr-defined]
        await asyncio.sleep(2 * WAN.dht.maintenance_s)
        (after,) = await peers[4].dht.get("k", fresh=True)
        assert after.record_version > before.record_version
        assert after.ttl_s > 7200 - 2 * WAN.dht.maintenance_s

    memory_world.run(main)


# Islands


def test_an_address_of_the_invite_that_was_dead_is_tried_again(memory_world: MemoryWorld) -> None:
    """Two first peers, each unreachable for half of those who join: one network soon after they can be reached."""

    async def main() -> None:
        first, second = await memory_world.endpoint(config=WAN), await memory_world.endpoint(config=WAN)
        sides: list[list[Endpoint]] = [[first], [second]]
        seeds = [(a, p.peer_id) for p in (first, second) for a in p.contact.addresses]
        for side in sides:
            for _ in range(9):
                joiner = await memory_world.endpoint(config=WAN)
                await joiner.dht.bootstrap([side[0].contact], seeds=seeds)
                side.append(joiner)
        every = [*sides[0], *sides[1]]
        await sides[1][3].dht.put("k", "from the other side", ttl_s=3600)
        await asyncio.sleep(BAR_S)
        assert all(len(p.dht.peers()) == len(every) - 1 for p in every)
        assert [e.body for e in await sides[0][5].dht.get("k")] == ["from the other side"]

    memory_world.run(main)


def test_islands_that_share_one_peer_become_one(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        one, other = await network(memory_world, 14, WAN), await network(memory_world, 14, WAN)
        bridge = one[7]
        await bridge.dht.bootstrap([other[0].contact])
        await asyncio.sleep(2 * BAR_S)
        every = [*one, *other]
        for peer in every:
            near = sorted((p for p in every if p is not peer), key=lambda p: p.peer_id.node_id ^ peer.peer_id.node_id)
            known = {c.peer_id for c in peer.dht.peers()}
            assert {p.peer_id for p in near[: WAN.dht.replication]} <= known
        await asyncio.gather(*(p.dht.put(f"k{i}", i, ttl_s=600) for i, p in enumerate(one)))
        found = await other[9].dht.get_many([f"k{i}" for i in range(14)])
        assert [[e.body for e in found[f"k{i}"]] for i in range(14)] == [[i] for i in range(14)]

    memory_world.run(main)


def test_a_record_with_a_foreign_view_leads_to_its_authors_island(world: World) -> None:
    async def main() -> None:
        one, other = await network(world, 4, LOOPBACK), await network(world, 4, LOOPBACK)
        author, reader = other[2], one[1]
        assert not await reader.dht.compare_view(author.contact, author.dht.view())
        assert reader.runtime.events.count(IslandMet) == 1
        assert {p.peer_id for p in other} <= {c.peer_id for c in reader.dht.peers()}
        assert await reader.dht.compare_view(author.contact, author.dht.view())
        assert await reader.dht.compare_view(one[0].contact, one[0].dht.view())
        await author.dht.put("k", "over there", ttl_s=60)
        assert [e.body for e in await reader.dht.get("k", fresh=True)] == ["over there"]
        for nonsense in (b"", b"odd", bytes(400)):
            assert await reader.dht.compare_view(author.contact, nonsense)

    world.run(main)


def test_peers_of_one_large_network_see_no_islands(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 36, WAN)
        compared = [(peers[i], peers[-1 - i]) for i in range(0, 15, 3)]
        assert all([await reader.dht.compare_view(p.contact, p.dht.view()) for reader, p in compared])

    memory_world.run(main)


def test_a_partition_of_ten_minutes_heals_within_two(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peers = await network(memory_world, 20, WAN)
        halves = peers[::2], peers[1::2]
        await asyncio.sleep(WAN.dht.maintenance_s)
        memory_world.network.partition([[p.peer_id for p in half] for half in halves])
        await asyncio.sleep(300)
        for n, half in enumerate(halves):
            await asyncio.gather(*(p.dht.put(f"{n}/{i}", i, ttl_s=3600) for i, p in enumerate(half)))
        await asyncio.sleep(300)
        memory_world.network.partition(None)
        await asyncio.sleep(BAR_S)
        for n, half in enumerate(halves):
            reader = halves[1 - n][4]
            found = await reader.dht.get_many([f"{n}/{i}" for i in range(len(half))])
            assert [[e.body for e in entries] for entries in found.values()] == [[i] for i in range(len(half))]
        for peer in peers:
            near = sorted((p for p in peers if p is not peer), key=lambda p: p.peer_id.node_id ^ peer.peer_id.node_id)
            known = {c.peer_id for c in peer.dht.peers()}
            assert {p.peer_id for p in near[: WAN.dht.replication]} <= known
        assert sum(p.runtime.events.count(Rejoined) for p in peers) == 0  # nobody was ever alone

    memory_world.run(main)


def test_recalls_are_few_while_the_network_is_well(memory_world: MemoryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        peers = await network(memory_world, 12, WAN)
        await asyncio.sleep(2 * WAN.dht.maintenance_s)
        for peer in peers[9:]:
            memory_world.network.kill(peer.peer_id)
        await asyncio.sleep(600)
        tried: list[Contact] = []
        known = peers[0].dht._known
        due = known.due

        def counting(*args: object, **kwargs: bool) -> list[Contact]:
            chosen = due(*args, **kwargs)  # type: ignore[arg-type]
            tried.extend(chosen)
            return chosen

        monkeypatch.setattr(known, "due", counting)
        await asyncio.sleep(1200)
        assert 3 * 1200 / 130 * 0.5 <= len(tried) <= 3 * 1200 / 60 * 1.2  # each of the three dead every 60 to 120 s

    memory_world.run(main)


def test_what_is_deleted_while_cut_off_is_gone_everywhere_soon_after(
    memory_world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handover, "to_newcomers", hands_nothing_over)

    async def main() -> None:
        peers = await network(memory_world, 40, WAN)
        author, others = peers[20], peers[:20] + peers[21:]
        assert await author.dht.put("k", "old", ttl_s=3600) == 5
        memory_world.network.partition([[author.peer_id], [p.peer_id for p in others]])
        await author.dht.delete("k")
        await asyncio.sleep(20)
        memory_world.network.partition(None)
        await asyncio.sleep(BAR_S)
        assert [await p.dht.get("k") for p in others[::5]] == [[]] * len(others[::5])

    memory_world.run(main)


def test_what_is_published_while_cut_off_is_read_everywhere_soon_after(
    memory_world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handover, "to_newcomers", hands_nothing_over)

    async def main() -> None:
        peers = await network(memory_world, 40, WAN)
        author, others = peers[20], peers[:20] + peers[21:]
        memory_world.network.partition([[author.peer_id], [p.peer_id for p in others]])
        await author.dht.put("k", "new", ttl_s=3600)
        await asyncio.sleep(20)
        memory_world.network.partition(None)
        await asyncio.sleep(BAR_S)
        for reader in others[::5]:
            assert [entry.body for entry in await reader.dht.get("k")] == ["new"]

    memory_world.run(main)


def test_entries_that_ended_make_room_for_others_of_their_author(memory_world: MemoryWorld) -> None:
    config = PeerConfig.preset("wan", dht={"max_entries_per_key_and_author": 4})

    async def main() -> None:
        peers = await network(memory_world, 3, config)
        for i in range(4):
            await peers[0].dht.put("k", i, subkey=str(i), ttl_s=1, renew=False)
        await asyncio.sleep(2)
        assert await peers[0].dht.put("k", "later", subkey="later", ttl_s=60)

    memory_world.run(main)
