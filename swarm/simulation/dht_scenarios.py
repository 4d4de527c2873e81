"""What the DHT does in large networks: lost calls, growth, churn, clocks that disagree. Virtual time.

Every function runs one seeded scenario on the current `VirtualLoop` and returns its figures; the bars that they must
reach are asserted by tests and printed by `benchmarks.dht_virtual`.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.runtime import TaskFailed
from swarm.simulation.virtual_dht import VirtualDht

SETTLE_S = 60.0
"""Virtual time between the last join and the first operation."""
AT_ONCE = 64
"""Operations under way together, or one for every eighth peer if that is more."""
TTL_S = 3600.0
"""Lifetime of records that outlive the scenario."""
LATENESS = 0.1
"""A dead author's record must be gone after its lifetime and this part of it."""
DEAD_READERS = 3
"""Peers that read each dead author's record; so many authors' records are read by everybody in the end."""


@dataclass(frozen=True)
class OperationFigures:
    """Puts by random peers, then gets of what was put by other random peers.

    Attributes:
        put_success: Puts that were accepted by at least one peer.
        get_success: Gets that returned the one entry that had been put.
        mean_depth: Requests in a row until the nearest peers had answered, over the lookups of both.
        messages_per_put: Requests sent and answers received by the peer that puts, for its lookups and stores (and
            those of its upkeep meanwhile).
        messages_per_get: The same of the peer that reads.
        all_messages_per_operation: Everything that the network carried meanwhile, everybody's upkeep and hellos
            included, per operation.
        put_s: Median virtual time of a put; `put_p99_s` of the slowest in a hundred.
        get_s: The same of a get.
    """

    operations: int
    put_success: float
    get_success: float
    mean_depth: float
    messages_per_put: float
    messages_per_get: float
    all_messages_per_operation: float
    put_s: float
    put_p99_s: float
    get_s: float
    get_p99_s: float


@dataclass(frozen=True)
class NetworkFigures:
    """A network of one size.

    Attributes:
        loss: Part of all calls that time out.
        clock_skew_s: Greatest difference of two wall clocks.
        messages_per_join: Messages until everybody had joined, upkeep meanwhile and hellos included, per peer.
        failed_tasks: Background tasks that ended with an error; there must be none.
        digest: Of every message that was sent and when, but not of its contents.
        virtual_s: Virtual time that all took.
        join_real_s: Real time until everybody had joined.
        real_s: Real time that all took.
    """

    peers: int
    seed: int
    loss: float
    clock_skew_s: float
    messages_per_join: float
    did: OperationFigures
    failed_tasks: int
    messages: int
    digest: str
    virtual_s: float
    join_real_s: float
    real_s: float


class _Costs:
    """Sums what single operations cost."""

    def __init__(self) -> None:
        self.depths = 0
        self.lookups = 0
        self.messages: list[int] = []
        self.durations_s: list[float] = []
        self.succeeded: list[bool] = []

    @property
    def success(self) -> float:
        return sum(self.succeeded) / len(self.succeeded)

    @property
    def p99_s(self) -> float:
        return sorted(self.durations_s)[math.ceil(0.99 * len(self.durations_s)) - 1]


async def _operate(swarm: VirtualDht, count: int) -> OperationFigures:
    """Put `count` records and read them, each by a peer chosen at random."""
    loop, rng = asyncio.get_running_loop(), swarm.rng
    authors = [rng.choice(swarm.peers) for _ in range(count)]
    readers = [rng.choice(swarm.peers) for _ in range(count)]
    puts, gets = _Costs(), _Costs()

    busy = {peer: asyncio.Lock() for peer in swarm.peers}

    async def act(costs: _Costs, peer: Endpoint, number: int) -> None:
        async with busy[peer]:  # so that its counters tell what one operation cost
            await act_alone(costs, peer, number)

    async def act_alone(costs: _Costs, peer: Endpoint, number: int) -> None:
        stats = peer.dht.stats
        before = (stats.depth_total, stats.lookups, stats.messages)
        begun_s = loop.time()
        key = f"thing/{number}"
        if costs is puts:
            done = bool(await swarm.does(peer, peer.dht.put(key, number, ttl_s=TTL_S)))
        else:
            entries = await swarm.does(peer, peer.dht.get(key))
            done = [(e.author, e.body) for e in entries or []] == [(authors[number].peer_id, number)]
        costs.succeeded.append(done)
        costs.durations_s.append(loop.time() - begun_s)
        costs.depths += stats.depth_total - before[0]
        costs.lookups += stats.lookups - before[1]
        costs.messages.append(stats.messages - before[2])

    async def all_of(costs: _Costs, peers: Sequence[Endpoint]) -> None:
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                await act(costs, peers[number], number)

        async with asyncio.TaskGroup() as group:
            for _ in range(max(AT_ONCE, len(swarm.peers) // 8)):
                group.create_task(worker())

    before = swarm.messages
    await all_of(puts, authors)
    await all_of(gets, readers)
    return OperationFigures(
        operations=2 * count,
        put_success=puts.success,
        get_success=gets.success,
        mean_depth=(puts.depths + gets.depths) / max(1, puts.lookups + gets.lookups),
        messages_per_put=statistics.fmean(puts.messages),
        messages_per_get=statistics.fmean(gets.messages),
        all_messages_per_operation=(swarm.messages - before) / (2 * count),
        put_s=statistics.median(puts.durations_s),
        put_p99_s=puts.p99_s,
        get_s=statistics.median(gets.durations_s),
        get_p99_s=gets.p99_s,
    )


async def lossy(
    peers: int = 1000,
    *,
    seed: int = 0,
    loss: float = 0.05,
    latency_s: tuple[float, float] = (0.02, 0.2),
    clock_skew_s: float = 0.0,
    operations: int = 2000,
    config: PeerConfig | None = None,
) -> NetworkFigures:
    """Peers join, put and get over a network that loses a part of all calls.

    Args:
        latency_s: Bounds of the one-way delay of a message.
        operations: So many puts, then as many gets.
    """
    begun = time.monotonic()
    async with VirtualDht(
        peers, seed=seed, config=config, latency_s=latency_s, loss=loss, clock_skew_s=clock_skew_s
    ) as swarm:
        joined, join_messages = time.monotonic(), swarm.messages
        await asyncio.sleep(SETTLE_S)
        did = await _operate(swarm, operations)
        return NetworkFigures(
            peers=peers,
            seed=seed,
            loss=loss,
            clock_skew_s=clock_skew_s,
            messages_per_join=join_messages / peers,
            did=did,
            failed_tasks=sum(peer.runtime.events.count(TaskFailed) for peer in swarm.peers),
            messages=swarm.messages,
            digest=swarm.network.digest(),
            virtual_s=asyncio.get_running_loop().time(),
            join_real_s=joined - begun,
            real_s=time.monotonic() - begun,
        )


async def scale(
    peers: int = 1000, *, seed: int = 0, operations: int = 1000, config: PeerConfig | None = None
) -> NetworkFigures:
    """`lossy` without losses: what an operation costs in a network of this size."""
    return await lossy(peers, seed=seed, loss=0.0, operations=operations, config=config)


@dataclass(frozen=True)
class Growth:
    """How a cost grows with the number of peers: `at_1 + per_doubling * log2(peers)`, by least squares.

    Attributes:
        worst_error: Largest deviation of a measured cost from the line, as a part of it.
        per_peer_growth: Exponent b of the best fit `a * peers ** b`: far below 1 where the growth is logarithmic.
    """

    at_1: float
    per_doubling: float
    worst_error: float
    exponent: float


def growth(costs: dict[int, float]) -> Growth:
    """Fit costs by number of peers; at least two sizes."""
    logs, values = [math.log2(n) for n in costs], list(costs.values())
    slope, start = statistics.linear_regression(logs, values)
    errors = [abs(start + slope * x - y) / y for x, y in zip(logs, values, strict=True)]
    exponent, _ = statistics.linear_regression(logs, [math.log2(v) for v in values])
    return Growth(start, slope, max(errors), exponent)


@dataclass(frozen=True)
class ChurnFigures:
    """Peers die and are replaced while others read.

    Attributes:
        deaths: Peers that died, those who had joined later included.
        originals_left: Part of the first peers that is alive at the end of the churn.
        reads: Reads of records whose author was alive before and after.
        found: Part of them that returned the record.
        ghosts: Reads of a dead author's record that returned it although its lifetime, and a tenth of it, had passed.
        ghost_reads: How many such reads were made.
        ghosts_everywhere: The same over all peers, for some dead authors.
        unjoined: Peers that could not join.
    """

    peers: int
    seed: int
    clock_skew_s: float
    median_lifetime_s: float
    ttl_s: float
    deaths: int
    originals_left: float
    reads: int
    found: float
    ghost_reads: int
    ghosts: int
    ghost_reads_everywhere: int
    ghosts_everywhere: int
    failed_tasks: int
    messages: int
    messages_per_peer_s: float
    digest: str
    virtual_s: float
    real_s: float


class _Churn:
    """One run of `churn`."""

    def __init__(self, swarm: VirtualDht, seed: int, median_lifetime_s: float, ttl_s: float) -> None:
        self.swarm = swarm
        self.ttl_s = ttl_s
        self.mean_lifetime_s = median_lifetime_s / math.log(2)
        self.rng = random.Random(f"churn {seed}")
        self.published: dict[Endpoint, None] = {}
        """Who is alive and has a record."""
        self.dead: dict[Endpoint, asyncio.Task[None]] = {}
        """Who died and had a record, and the reads of it that follow."""
        self.deaths = self.failed_tasks = self.reads = self.found = self.ghost_reads = self.ghosts = 0

    def key(self, author: Endpoint) -> str:
        return f"alive/{author.peer_id}"

    async def publish(self, author: Endpoint) -> None:
        if await self.swarm.does(author, author.dht.put(self.key(author), author.peer_id.short, ttl_s=self.ttl_s)):
            self.published[author] = None

    async def life(self, peer: Endpoint) -> None:
        """A peer dies some time, and another takes its place, again and again."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.mean_lifetime_s))
            if peer in self.published:
                del self.published[peer]
                self.dead[peer] = asyncio.create_task(self.read_the_dead(peer))
            self.deaths += 1
            self.failed_tasks += peer.runtime.events.count(TaskFailed)
            self.swarm.kill(peer, silent=self.rng.random() < 0.5)
            (peer,) = await self.swarm.grow(1)
            await self.publish(peer)

    async def read_the_living(self, interval_s: float, at_once: int) -> None:
        while True:
            authors = self.rng.sample(list(self.published), min(at_once, len(self.published)))
            await asyncio.gather(
                *(self._read_the_living(author, self.rng.choice(self.swarm.peers)) for author in authors)
            )
            await asyncio.sleep(interval_s)

    async def _read_the_living(self, author: Endpoint, reader: Endpoint) -> None:
        entries = await self.swarm.does(reader, reader.dht.get(self.key(author)))
        if author in self.published and reader in self.swarm.peers:
            self.reads += 1
            self.found += [e.author for e in entries or []] == [author.peer_id]

    async def read_the_dead(self, author: Endpoint) -> None:
        """Have a few peers read a dead author's record as soon as it must be gone."""
        await asyncio.sleep((1 + LATENESS) * self.ttl_s)
        readers = self.rng.sample(self.swarm.peers, DEAD_READERS)
        seen = await asyncio.gather(*(self.sees(reader, author) for reader in readers))
        self.ghost_reads += len(seen)
        self.ghosts += sum(seen)

    async def sees(self, reader: Endpoint, author: Endpoint) -> bool:
        return bool(await self.swarm.does(reader, reader.dht.get(self.key(author))))


async def churn(
    peers: int = 1000,
    *,
    seed: int = 0,
    median_lifetime_s: float = 600.0,
    ttl_s: float = 300.0,
    loss: float = 0.0,
    clock_skew_s: float = 0.0,
    replaced: float = 0.5,
    reads_at_once: int = 20,
    config: PeerConfig | None = None,
) -> ChurnFigures:
    """Peers die without a word, half of them with their machine, and new ones take their place, until a part of the
    first ones is gone; everybody keeps a record of its own alive. Then the dead authors' records run out.

    Args:
        median_lifetime_s: Lifetimes are exponential.
        ttl_s: Lifetime of the records.
        replaced: The part of the first peers after which the churn ends.
    """
    begun = time.monotonic()
    loop = asyncio.get_running_loop()
    async with VirtualDht(peers, seed=seed, config=config, loss=loss, clock_skew_s=clock_skew_s) as swarm:
        first = list(swarm.peers)
        run = _Churn(swarm, seed, median_lifetime_s, ttl_s)
        await asyncio.gather(*(run.publish(peer) for peer in first))
        await asyncio.sleep(SETTLE_S)
        began_s, before = loop.time(), swarm.messages
        lives = [asyncio.create_task(run.life(peer)) for peer in first]
        watcher = asyncio.create_task(run.read_the_living(10.0, reads_at_once))

        def left() -> float:
            return sum(peer in alive for peer in first) / peers

        while True:
            await asyncio.sleep(5.0)
            alive = dict.fromkeys(swarm.peers)
            if left() <= 1 - replaced:
                break
            for task in [*lives, watcher]:
                if task.done():
                    task.result()  # a mistake in the scenario ends it
        for task in lives:
            task.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        originals_left, churn_s, messages = left(), loop.time() - began_s, swarm.messages - before
        await asyncio.gather(*run.dead.values())
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        dead = run.rng.sample(list(run.dead), min(DEAD_READERS, len(run.dead)))
        everywhere = [
            seen
            for author in dead
            for seen in await asyncio.gather(*(run.sees(reader, author) for reader in swarm.peers))
        ]
        return ChurnFigures(
            peers=peers,
            seed=seed,
            clock_skew_s=clock_skew_s,
            median_lifetime_s=median_lifetime_s,
            ttl_s=ttl_s,
            deaths=run.deaths,
            originals_left=originals_left,
            reads=run.reads,
            found=run.found / max(1, run.reads),
            ghost_reads=run.ghost_reads,
            ghosts=run.ghosts,
            ghost_reads_everywhere=len(everywhere),
            ghosts_everywhere=sum(everywhere),
            failed_tasks=run.failed_tasks + sum(peer.runtime.events.count(TaskFailed) for peer in swarm.peers),
            messages=swarm.messages,
            messages_per_peer_s=messages / peers / churn_s,
            digest=swarm.network.digest(),
            virtual_s=loop.time(),
            real_s=time.monotonic() - begun,
        )
