"""One member that floods another, and many of one owner that settle around one peer. Virtual time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count

from swarm.config import PeerConfig
from swarm.dht.records import position_of
from swarm.endpoint import Endpoint
from swarm.identity import KeyPair
from swarm.runtime import TaskFailed
from swarm.simulation.adversaries import MIXES, Cabal, flood_finds, flood_oversized, flood_stores
from swarm.simulation.dht_attacks import LONG_S, SETTLE_S, rate, together
from swarm.simulation.virtual_dht import VirtualDht


@dataclass(frozen=True)
class FloodFigures:
    """One peer floods another while all others work.

    Attributes:
        requests, refused: What the flooder sent, and what was refused, by error.
        throttled: Calls that the victim refused for want of the flooder's allowance.
        held, bound: Records that the victim keeps in the end, and the most that it may.
        honest_rate: Part of the other peers' operations that succeeded meanwhile.
        victim_rate: Part of the victim's own operations that succeeded.
        slowest_s: The longest of those operations.
    """

    peers: int
    requests: int
    refused: dict[str, int]
    throttled: int
    held: int
    bound: int
    honest_rate: float
    victim_rate: float
    slowest_s: float
    failures: int


async def flood(
    peers: int,
    *,
    requests: int = 300,
    bound: int = 2000,
    work_per_s: float = 500.0,
    records: int = 60,
    seed: int = 0,
) -> FloodFigures:
    """A member stores made-up records, asks and sends oversized requests without a pause, at one victim.

    Args:
        requests: Of each of the three kinds.
        bound: Records that a peer may hold.
        work_per_s: Work that a peer accepts from another.
        records: Operations of the others, and as many of the victim.
    """
    config = PeerConfig.preset("wan", dht={"max_entries": bound, "max_work_per_s": work_per_s})
    async with VirtualDht(peers, seed=seed, config=config) as swarm:
        loop, rng, cabal = asyncio.get_running_loop(), swarm.rng, Cabal(seed)
        await asyncio.sleep(SETTLE_S)
        flooder, victim, others = swarm.peers[1], swarm.peers[2], swarm.peers[3:]
        refused: dict[str, int] = {}
        sent = 0

        async def pour(stream: AsyncIterator[str]) -> None:
            nonlocal sent
            async for error in stream:
                sent += 1
                if error:
                    refused[error] = refused.get(error, 0) + 1

        to = victim.contact
        streams = [
            flood_stores(flooder.transport, cabal, to, requests, authors=64),
            flood_finds(flooder.transport, cabal, to, requests),
            flood_oversized(flooder.transport, cabal, to, requests),
        ]
        pouring = [loop.create_task(pour(stream), name=f"flood {i}") for i, stream in enumerate(streams)]
        slowest_s = 0.0

        async def operate(author: Endpoint, reader: Endpoint, key: str) -> bool:
            nonlocal slowest_s
            begun_s = loop.time()
            await author.dht.put(key, key, ttl_s=LONG_S)
            found = [entry.body for entry in await reader.dht.get(key) if entry.author == author.peer_id] == [key]
            slowest_s = max(slowest_s, loop.time() - begun_s)
            return found

        honest: list[bool] = []
        of_victim: list[bool] = []
        while not all(task.done() for task in pouring) or not honest:
            number = len(honest)
            keys = [f"{number}/{i}" for i in range(records)]
            jobs = [(rng.choice(others), rng.choice(others), f"honest/{key}") for key in keys]
            jobs += [(victim, rng.choice(others), f"victim/{key}") for key in keys]
            done = await together(operate, jobs)
            honest += done[:records]
            of_victim += done[records:]
        await asyncio.gather(*pouring)
        return FloodFigures(
            peers=peers,
            requests=sent,
            refused=dict(sorted(refused.items())),
            throttled=sum(count for error, count in refused.items() if error == "RateLimitedError"),
            held=victim.dht.held,
            bound=bound,
            honest_rate=rate(honest),
            victim_rate=rate(of_victim),
            slowest_s=slowest_s,
            failures=sum(peer.runtime.events.count(TaskFailed) for peer in swarm.peers),
        )


@dataclass(frozen=True)
class EclipseFigures:
    """Many peers of one subnet settle around a victim.

    Attributes:
        sybils: How many there are, with ids next to the victim's.
        in_table: How many of them are in the victim's table, in how many buckets.
        fullest: The most that one bucket took.
        neighbours_kept: Part of the victim's nearest honest peers that are in its table.
        get_rate: Part of the records near the victim that honest peers and the victim find.
    """

    peers: int
    sybils: int
    in_table: int
    fullest: int
    neighbours_kept: float
    get_rate: float


async def eclipse(
    peers: int, *, sybils: int = 40, records: int = 40, spoof: bool = False, seed: int = 0
) -> EclipseFigures:
    """Colluding peers of one /24 choose ids around a victim's and fill its neighbourhood.

    Args:
        sybils: Malicious peers; honest ones have subnets of their own.
        records: Keys around the victim that are written and read.
        spoof: The sybils announce a made-up address in another subnet before their own.
    """
    async with VirtualDht(peers, seed=seed) as swarm:
        rng, cabal = swarm.rng, Cabal(seed)
        await asyncio.sleep(SETTLE_S)
        honest = list(swarm.peers)
        victim = rng.choice(honest)
        own = victim.peer_id.node_id
        bits = max(1, (peers - 1).bit_length())
        for i in range(sybils):
            identity = _near_identity(own, bits, f"sybil {seed}/{i}")
            host = f"8.8.8.{i + 1}"
            announced = (f"9.9.{i}.1:7", f"{host}:7000") if spoof else ()
            transport = {"listen_host": host, "port": 7000, "announce": announced}
            await swarm.admit(
                identity,
                f"sybil {i}",
                config=PeerConfig.preset("wan", transport=transport),
                builder=cabal.builder(MIXES["collude"]),
                through=[victim.contact],
            )
        await asyncio.sleep(SETTLE_S)
        buckets: dict[int, int] = {}
        known = {contact.peer_id: None for contact in victim.dht.peers()}
        for peer_id in known:
            if peer_id in cabal.members:
                distance = (peer_id.node_id ^ own).bit_length()
                buckets[distance] = buckets.get(distance, 0) + 1
        nearest = sorted((p for p in honest if p is not victim), key=lambda p: p.peer_id.node_id ^ own)
        nearest = nearest[: swarm.config.dht.bucket_size]
        keys: list[str] = []
        while len(keys) < records:
            key = f"near/{rng.getrandbits(64):x}"
            if (int.from_bytes(position_of(key), "big") ^ own).bit_length() <= 160 - bits + 3:
                keys.append(key)
        await together(_put, [(rng.choice(honest), key) for key in keys])
        readers = [victim if i % 2 else rng.choice(honest) for i in range(records)]
        found = await together(_finds, zip(readers, keys, strict=True))
        return EclipseFigures(
            peers=peers,
            sybils=sybils,
            in_table=sum(buckets.values()),
            fullest=max(buckets.values(), default=0),
            neighbours_kept=rate(p.peer_id in known for p in nearest),
            get_rate=rate(found),
        )


def _near_identity(position: int, bits: int, name: str) -> KeyPair:
    """A key pair whose id shares so many first bits with a position: found by trying."""
    for attempt in count():
        identity = KeyPair.from_private_bytes(hashlib.sha256(f"{name}/{attempt}".encode()).digest())
        if (identity.peer_id.node_id ^ position).bit_length() <= 160 - bits:
            return identity
    raise AssertionError("unreachable")


async def _put(author: Endpoint, key: str) -> None:
    await author.dht.put(key, key, ttl_s=LONG_S)


async def _finds(reader: Endpoint, key: str) -> bool:
    return [entry.body for entry in await reader.dht.get(key)] == [key]
