"""Hundreds of peers in virtual time: they join, publish, find each other's records, leave and die, through lost calls
and with clocks that disagree. The same seed gives the same messages at the same times.

Buckets of 8 instead of 20 and 3 replicas instead of 5: fewer hellos and more hops, which is what a large run is about.
The scenarios at full size are in tests/long/test_dht_scale.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from swarm.config import PeerConfig
from swarm.dht.events import RecordRefused
from swarm.endpoint import Endpoint
from swarm.runtime import TaskFailed
from swarm.simulation.dht_scenarios import NetworkFigures, churn, growth, lossy
from swarm.simulation.virtual import run_virtual
from swarm.simulation.virtual_dht import VirtualDht

CONFIG = PeerConfig.preset("wan", dht={"bucket_size": 8, "replication": 3})


@dataclass(frozen=True)
class Outcome:
    digest: str
    messages: int
    found: int
    found_after: int
    virtual_s: float


def live(count: int, seed: int) -> Outcome:
    """The life of one run with this many peers."""

    async def look(readers: list[Endpoint]) -> int:
        """How many of the readers find what the reader after them had published."""
        others = [*readers[1:], readers[0]]
        entries = await asyncio.gather(
            *(p.dht.get(f"address/{q.peer_id.short}") for p, q in zip(readers, others, strict=True))
        )
        return sum([e.author for e in es] == [q.peer_id] for es, q in zip(entries, others, strict=True))

    async def main() -> Outcome:
        async with VirtualDht(count, seed=seed, config=CONFIG) as swarm:
            peers = list(swarm.peers)
            puts = [p.dht.put(f"address/{p.peer_id.short}", p.name, ttl_s=600) for p in peers]
            assert all(await asyncio.gather(*puts))
            found = await look(peers)
            assert sum(p.runtime.events.count(RecordRefused) for p in peers) == 0
            leaving, staying = peers[::4], [p for i, p in enumerate(peers) if i % 4]
            for peer in leaving:
                await swarm.leave(peer)
            found_after = await look(staying[::3])
            assert sum(p.runtime.events.count(TaskFailed) for p in peers) == 0
            now_s = asyncio.get_running_loop().time()
            return Outcome(swarm.network.digest(), swarm.messages, found, found_after, now_s)

    return run_virtual(main, seed)


def test_peers_join_find_records_and_leave() -> None:
    outcome = live(140, seed=3)
    assert outcome.found == 140
    assert outcome.found_after >= 34
    assert outcome.virtual_s < 300


def test_the_same_seed_is_the_same_run_and_another_seed_another() -> None:
    outcome = live(40, seed=1)
    assert outcome.found == 40
    assert outcome == live(40, seed=1)
    assert outcome.digest != live(40, seed=2).digest


def through_losses(count: int, operations: int, clock_skew_s: float = 0.0) -> NetworkFigures:
    return run_virtual(lambda: lossy(count, operations=operations, clock_skew_s=clock_skew_s, config=CONFIG))


def test_puts_and_gets_succeed_while_one_call_in_twenty_is_lost() -> None:
    figures = through_losses(100, 200)
    assert figures.did.put_success == 1.0
    assert figures.did.get_success == 1.0
    assert figures.did.mean_depth <= 3.5
    assert figures.did.messages_per_put <= 60
    assert figures.did.messages_per_get <= 60
    assert figures.failed_tasks == 0


def test_clocks_ten_minutes_apart_change_nothing() -> None:
    agree, apart = through_losses(40, 40), through_losses(40, 40, clock_skew_s=600.0)
    assert agree.did.get_success == 1.0
    assert replace(apart, clock_skew_s=0.0, real_s=0.0, join_real_s=0.0) == replace(agree, real_s=0.0, join_real_s=0.0)


def test_records_outlive_the_peers_that_hold_them_and_not_their_authors() -> None:
    figures = run_virtual(lambda: churn(40, median_lifetime_s=150.0, ttl_s=60.0, replaced=0.4, config=CONFIG))
    assert figures.deaths >= 16
    assert figures.reads > 100
    assert figures.found >= 0.985  # they live a quarter as long as at full size, and three hold what five do there
    assert figures.ghost_reads >= 3 * 15
    assert figures.ghost_reads_everywhere >= 100
    assert figures.ghosts == figures.ghosts_everywhere == 0
    assert figures.failed_tasks == 0


def test_growth_tells_the_logarithm_from_the_power() -> None:
    logarithmic = growth({n: 5 + 3 * k for k, n in ((8, 256), (10, 1024), (12, 4096))})
    assert abs(logarithmic.at_1 - 5) < 1e-9
    assert abs(logarithmic.per_doubling - 3) < 1e-9
    assert logarithmic.worst_error < 1e-9
    assert logarithmic.exponent < 0.2
    linear = growth({256: 256, 1024: 1024, 4096: 4096})
    assert abs(linear.exponent - 1) < 1e-9
    assert linear.worst_error > 0.3
