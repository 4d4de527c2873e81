"""Five hundred peers in virtual time: they join, publish, find each other's records, and leave. The same seed gives the
same messages at the same times.

Buckets of 8 instead of 20 and 3 replicas instead of 5: fewer hellos, which are most of the work, and more hops, which
is what a large run is about. The repetition of the large run ends when 200 peers have joined; small runs are repeated
whole.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from swarm.config import PeerConfig
from swarm.dht.events import RecordRefused
from swarm.endpoint import Endpoint
from swarm.runtime import TaskFailed
from tests.support import MemoryWorld

CONFIG = PeerConfig.preset("wan", dht={"bucket_size": 8, "replication": 3})
CHECKPOINT = 200


@dataclass(frozen=True)
class Outcome:
    checkpoint: str
    """Digest of all messages when `CHECKPOINT` peers had joined."""
    digest: str
    messages: int
    found: int
    found_after: int
    virtual_s: float


def live(count: int, seed: int, *, until_checkpoint: bool = False) -> Outcome:
    """The life of one run with this many peers."""
    world = MemoryWorld(seed)
    rng = random.Random(seed)

    async def join(peers: list[Endpoint]) -> list[Endpoint]:
        known = [p.contact for p in rng.sample(peers, min(2, len(peers)))]
        batch = min(len(peers), 25, count - len(peers))
        return list(await asyncio.gather(*(world.endpoint(config=CONFIG, bootstrap=known) for _ in range(batch))))

    async def look(readers: list[Endpoint]) -> int:
        """How many of the readers find what the reader after them had published."""
        others = [*readers[1:], readers[0]]
        entries = await asyncio.gather(
            *(p.dht.get(f"address/{q.peer_id.short}") for p, q in zip(readers, others, strict=True))
        )
        return sum([e.author for e in es] == [q.peer_id] for es, q in zip(entries, others, strict=True))

    async def main() -> Outcome:
        peers = [await world.endpoint(config=CONFIG)]
        checkpoint = ""
        while len(peers) < count:
            peers += await join(peers)
            if len(peers) >= CHECKPOINT and not checkpoint:
                checkpoint = world.network.digest()
                if until_checkpoint:
                    return Outcome(checkpoint, "", 0, 0, 0, 0.0)
        assert all(await asyncio.gather(*(p.dht.put(f"address/{p.peer_id.short}", p.name, ttl_s=600) for p in peers)))
        found = await look(peers)
        leaving, staying = peers[::4], [p for i, p in enumerate(peers) if i % 4]
        for peer in leaving:
            await peer.dht.close()
            await peer.transport.close(grace_s=0)
        found_after = await look(staying[::3])
        for kind in (TaskFailed, RecordRefused):
            assert sum(p.runtime.events.count(kind) for p in peers) == 0
        now_s = asyncio.get_running_loop().time()
        return Outcome(checkpoint, world.network.digest(), world.network.messages, found, found_after, now_s)

    try:
        return world.run(main, timeout_s=200)
    finally:
        world.close()


@pytest.mark.timeout(240)
def test_five_hundred_peers_join_find_records_and_leave_the_same_way_again() -> None:
    once = live(500, seed=3)
    assert once.found == 500
    assert once.found_after >= 0.96 * 125
    assert once.virtual_s < 120
    assert live(500, seed=3, until_checkpoint=True).checkpoint == once.checkpoint


def test_another_seed_is_another_run() -> None:
    outcome = live(50, seed=1)
    assert outcome.found == 50
    assert outcome == live(50, seed=1)
    assert outcome.digest != live(50, seed=2).digest
