"""Reading the DHT again and again, on both transports: caches, watches, and the blocking facade."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from typing import Any

import pytest

from swarm.config import PeerConfig
from swarm.dht import BlockingDht, Entry, Put, Watch
from swarm.dht.watch import LINGER_S
from swarm.endpoint import Endpoint
from swarm.errors import ClosedError, LoopThreadError, RecordRefusedError, UsageError
from swarm.net.loop import loop_thread
from tests.dht_networks import network
from tests.support import GrpcWorld, MemoryWorld, World

CONFIG = PeerConfig.preset("wan", transport={"listen_host": "127.0.0.1"}, dht={"watch_min_s": 0.05, "watch_max_s": 0.4})
PATIENCE_S = 20.0


async def following(watch: Watch) -> list[Any]:
    """The bodies that the watch yields next."""
    async with asyncio.timeout(PATIENCE_S):
        return [entry.body for entry in await anext(watch)]


def test_an_answer_that_may_be_old_costs_no_request(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 4, CONFIG)
        reader, stats = peers[3], peers[3].transport.stats
        await peers[0].dht.put("k", 1, ttl_s=60)
        await reader.dht.get_many(["k", "absent"], max_age_s=30.0)
        before = stats.calls_made
        found = await reader.dht.get_many(["k", "absent"], max_age_s=30.0)
        assert [e.body for e in found["k"]] == [1]
        assert found["absent"] == []
        assert stats.calls_made == before
        assert (reader.dht.cache_stats.hits, reader.dht.cache_stats.absent_hits) == (1, 1)
        await peers[0].dht.put("k", 2, ttl_s=60)
        assert [e.body for e in await reader.dht.get("k", max_age_s=30.0)] == [1]  # as old as it may be
        assert [e.body for e in await reader.dht.get("k")] == [2]
        assert [e.body for e in await reader.dht.get("k", max_age_s=30.0)] == [2]
        assert [e.body for e in await reader.dht.get("k", fresh=True, max_age_s=30.0)] == [2]
        assert stats.calls_made > before

    world.run(main)


def test_we_read_what_we_wrote_whatever_is_kept_or_under_way(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 4, CONFIG)
        writer = peers[2]
        assert await writer.dht.get("k", max_age_s=60.0) == []
        slow = asyncio.create_task(writer.dht.get("k"))
        await asyncio.sleep(0)
        await writer.dht.put("k", 1, ttl_s=60)
        assert [e.body for e in await writer.dht.get("k", max_age_s=60.0)] == [1]
        await slow
        assert [e.body for e in await writer.dht.get("k", max_age_s=60.0)] == [1]
        await writer.dht.delete("k")
        assert await writer.dht.get("k", max_age_s=60.0) == []

    world.run(main)


def test_a_watch_tells_of_every_kind_of_change(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 5, CONFIG)
        watch = peers[4].dht.watch("k")
        assert await following(watch) == []
        await peers[0].dht.put("k", "a", ttl_s=60)
        assert await following(watch) == ["a"]
        await peers[0].dht.put("k", "b", ttl_s=60)
        assert await following(watch) == ["b"]
        await peers[1].dht.put("k", "short", ttl_s=1.0, renew=False)
        assert sorted(await following(watch)) == ["b", "short"]
        assert await following(watch) == ["b"]  # it ended
        await peers[0].dht.delete("k")
        assert await following(watch) == []
        await peers[4].dht.put("k", "mine", ttl_s=60)
        assert await following(watch) == ["mine"]

    world.run(main)


def test_closing_the_dht_ends_its_watches_with_a_typed_error(world: World) -> None:
    async def main() -> None:
        peers = await network(world, 2, CONFIG)
        watches = [peers[1].dht.watch(key) for key in ("k", "k", "other")]
        for watch in watches:
            await following(watch)
        waiting = [asyncio.create_task(following(watch)) for watch in watches]
        await asyncio.sleep(0.05)
        await peers[1].dht.close()
        for task in waiting:
            with pytest.raises(ClosedError):
                await task
        with pytest.raises(ClosedError):
            await anext(watches[0])
        with pytest.raises(ClosedError):
            peers[1].dht.watch("k")

    world.run(main)


def test_what_cannot_be_watched(world: World) -> None:
    async def main() -> None:
        peer = await world.endpoint()
        with pytest.raises(RecordRefusedError):
            peer.dht.watch("")
        for every_s in (0.0, -1.0, float("nan")):
            with pytest.raises(UsageError):
                peer.dht.watch("k", every_s=every_s)

    world.run(main)


def test_a_renewed_record_is_no_news(memory_world: MemoryWorld) -> None:
    """In virtual time: a real transport would wait for the renewals of minutes."""

    async def main() -> None:
        peers = await network(memory_world, 5, CONFIG)
        await peers[0].dht.put("k", 1, ttl_s=20)
        watch = peers[4].dht.watch("k")
        assert await following(watch) == [1]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(300):
                await anext(watch)

    memory_world.run(main)


def test_an_entry_ends_on_time_even_when_nobody_can_be_asked(memory_world: MemoryWorld) -> None:
    """In virtual time: partitions."""

    async def main() -> None:
        config = PeerConfig.preset("wan")
        peers = await network(memory_world, 6, config)
        await peers[0].dht.put("k", "long", ttl_s=600, renew=False)
        await peers[1].dht.put("k", "short", ttl_s=45, renew=False)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + 45
        watch = peers[5].dht.watch("k")
        assert sorted(await following(watch)) == ["long", "short"]
        memory_world.network.partition([[peers[5].peer_id]])
        async with asyncio.timeout(60):
            assert [e.body for e in await anext(watch)] == ["long"]
        assert ends_s - 1.0 <= loop.time() <= ends_s + 0.01

    memory_world.run(main)


def test_watchers_of_a_key_share_a_reader_that_slows_down_while_nothing_changes(memory_world: MemoryWorld) -> None:
    """In virtual time: minutes of watching."""

    async def main() -> None:
        peers = await network(memory_world, 6, PeerConfig.preset("wan"))
        await peers[0].dht.put("k", bytes(4000), ttl_s=3600, renew=False)
        watches = [peers[5].dht.watch("k") for _ in range(20)]
        for watch in watches:
            await following(watch)
        waiting = [asyncio.create_task(anext(watch)) for watch in watches]
        await asyncio.sleep(60)
        stats = peers[5].transport.stats
        calls, received = stats.calls_made, stats.received_bytes
        await asyncio.sleep(300)
        # 20 to 25 reads of five holders, and upkeep; one watcher alone at the shortest interval would make 1500 calls
        assert stats.calls_made - calls < 300
        assert stats.received_bytes - received < 300 * 400  # what is known already does not travel again
        await peers[0].dht.put("k", "changed", ttl_s=3600, renew=False)
        changed_s = asyncio.get_running_loop().time()
        for task in waiting:
            (entry,) = await task
            assert entry.body == "changed"
        assert asyncio.get_running_loop().time() - changed_s < peers[5].config.dht.watch_max_s + 1
        again = asyncio.create_task(anext(peers[5].dht.watch("k", every_s=1.0)))
        await again
        calls = stats.calls_made
        asking = asyncio.create_task(anext(watches[0]))
        impatient = peers[5].dht.watch("k", every_s=1.0)
        await anext(impatient)
        often = asyncio.create_task(anext(impatient))
        await asyncio.sleep(60)
        assert stats.calls_made - calls > 60 * 3
        often.cancel()
        asking.cancel()

    memory_world.run(main)


def test_a_watch_that_is_dropped_leaves_nothing_behind(memory_world: MemoryWorld) -> None:
    """In virtual time: the reader rests before it ends."""

    async def main() -> None:
        peers = await network(memory_world, 3, PeerConfig.preset("wan"))
        dht = peers[2].dht
        async for entries in dht.watch("k"):
            assert entries == []
            break
        abandoned = dht.watch("k")
        await anext(abandoned)
        waiting = asyncio.create_task(anext(abandoned))
        await asyncio.sleep(1)
        waiting.cancel()
        async with dht.watch("k") as closed:
            await anext(closed)
        with pytest.raises(StopAsyncIteration):
            await anext(closed)
        await asyncio.sleep(2 * LINGER_S)
        gc.collect()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("dht-watch")]
        calls = peers[2].transport.stats.calls_made
        await peers[0].dht.put("k", "later", ttl_s=600)
        assert [e.body for e in await anext(abandoned)] == ["later"]  # taken up again
        assert peers[2].transport.stats.calls_made > calls

    memory_world.run(main)


def test_closing_a_watch_ends_a_wait_for_it(memory_world: MemoryWorld) -> None:
    async def main() -> None:
        peer = await memory_world.endpoint()
        watch = peer.dht.watch("k")
        await anext(watch)
        waiting = asyncio.create_task(anext(watch, None))
        await asyncio.sleep(1)
        await watch.aclose()
        assert await asyncio.wait_for(waiting, 1.0) is None

    memory_world.run(main)


def test_the_blocking_facade(grpc_world: GrpcWorld) -> None:
    """Real threads: there is no other thread in virtual time."""

    async def start() -> list[Endpoint]:
        return await network(grpc_world, 3, CONFIG)

    peers = grpc_world.run(start)
    one, other = (BlockingDht(peer.dht, peer.run_sync) for peer in peers[:2])
    assert one.put("k", 1, ttl_s=60) == 3
    assert one.put_many([Put("a", 1, 60), Put("b", 2, 60)]) == [3, 3]
    assert [e.body for e in other.get("k")] == [1]
    assert {k: [e.body for e in v] for k, v in other.get_many(["a", "b", "c"], max_age_s=5).items()} == {
        "a": [1],
        "b": [2],
        "c": [],
    }
    seen: queue.Queue[list[Any]] = queue.Queue()

    def follow() -> None:
        for entries in other.watch("k", every_s=0.05, timeout_s=PATIENCE_S):
            seen.put([e.body for e in entries])
            if not entries:
                return

    thread = threading.Thread(target=follow)
    thread.start()
    assert seen.get(timeout=PATIENCE_S) == [1]
    one.put("k", 2, ttl_s=60)
    assert seen.get(timeout=PATIENCE_S) == [2]
    one.delete("k")
    assert seen.get(timeout=PATIENCE_S) == []
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert list(other.watch("nothing", timeout_s=0.2)) == [[]]
    with pytest.raises(RecordRefusedError):
        other.watch("")
    with pytest.raises(RecordRefusedError):
        one.put("k", object(), ttl_s=60)

    async def on_the_loop() -> None:
        for call in (lambda: one.get("k"), lambda: one.put("k", 1, ttl_s=1), lambda: one.watch("k")):
            with pytest.raises(LoopThreadError):
                call()

    loop_thread().run(on_the_loop(), PATIENCE_S)
    waiting: Any = iter(other.watch("k"))
    assert next(waiting) == []
    grpc_world.run(peers[1].dht.close)
    with pytest.raises(ClosedError):
        next(waiting)
    entries: list[Entry] = one.get("a")
    assert [e.body for e in entries] == [1]
