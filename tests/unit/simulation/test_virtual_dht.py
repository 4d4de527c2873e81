"""A virtual network of DHT peers: who joins, who leaves, who is cut off."""

from __future__ import annotations

import asyncio

from swarm.config import DhtConfig, PeerConfig
from swarm.dht.node import Dht
from swarm.net.transport import Transport
from swarm.runtime import Runtime, TaskFailed
from swarm.simulation.virtual import run_virtual
from swarm.simulation.virtual_dht import Builder, VirtualDht

CONFIG = PeerConfig.preset("wan", dht={"bucket_size": 8, "replication": 3})


def test_peers_join_leave_and_die() -> None:
    async def main() -> None:
        async with VirtualDht(10, seed=1, config=CONFIG) as swarm:
            assert len({p.peer_id for p in swarm.peers}) == 10
            (late,) = await swarm.grow(1)
            assert swarm.peers[-1] is late
            await late.dht.put("note", "from the last", ttl_s=600)
            await swarm.peers[0].dht.put("lasting", 1, ttl_s=600)
            reader = swarm.peers[3]
            assert [e.author for e in await reader.dht.get("note")] == [late.peer_id]
            await swarm.leave(late)
            assert late not in swarm.peers
            assert await reader.dht.get("note", fresh=True) == []  # it has withdrawn its records
            swarm.kill(swarm.peers[0])
            swarm.kill(swarm.peers[0], silent=True)
            assert len(swarm.peers) == 8
            assert [e.body for e in await swarm.peers[-1].dht.get("lasting")] == [1]

    run_virtual(main)


def test_dead_peers_send_nothing_and_do_nothing_wrong() -> None:
    async def main() -> None:
        async with VirtualDht(8, seed=2, config=CONFIG) as swarm:
            peers = list(swarm.peers)
            doing = [asyncio.create_task(swarm.does(p, p.dht.put(p.name, 1, ttl_s=600))) for p in peers]
            await asyncio.sleep(0.1)
            for peer in peers:
                swarm.kill(peer)
            assert await asyncio.gather(*doing) == [None] * 8
            messages = swarm.messages
            await asyncio.sleep(300)
            assert swarm.messages == messages
            assert sum(p.runtime.events.count(TaskFailed) for p in peers) == 0

    run_virtual(main)


def test_partition_and_healing() -> None:
    async def main() -> None:
        async with VirtualDht(8, seed=3, config=CONFIG) as swarm:
            one, other = swarm.peers[:4], swarm.peers[4:]
            swarm.partition(one, other)
            await one[0].dht.put("side", "one", ttl_s=3600)
            assert await other[0].dht.get("side") == []
            assert [e.body for e in await one[1].dht.get("side")] == ["one"]
            swarm.heal()
            await asyncio.sleep(120)
            assert [e.body for e in await other[0].dht.get("side")] == ["one"]

    run_virtual(main)


def test_some_peers_are_built_otherwise_and_clocks_differ() -> None:
    class Odd(Dht):
        pass

    def build(transport: Transport, config: DhtConfig, runtime: Runtime) -> Dht:
        return Odd(transport, config, runtime)

    def make(number: int) -> Builder | None:
        return build if number % 2 else None

    async def main() -> None:
        async with VirtualDht(6, config=CONFIG, clock_skew_s=600, make=make) as swarm:
            assert [isinstance(p.dht, Odd) for p in swarm.peers].count(True) == 3
            assert len(swarm.honest) == 3
            assert all(type(p.dht) is Dht for p in swarm.honest)
            walls = [p.runtime.clock.wall() for p in swarm.peers]
            assert 60 < max(walls) - min(walls) <= 600
            assert len({p.runtime.clock.time() for p in swarm.peers}) == 1

    run_virtual(main)
