"""A network cut in half and healed: one network again, in which both halves' work is visible. Virtual time."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.runtime import TaskFailed
from swarm.simulation.adversaries import Cabal
from swarm.simulation.dht_attacks import LONG_S, SETTLE_S, infiltrated, rate, together
from swarm.simulation.virtual_dht import VirtualDht


@dataclass(frozen=True)
class SplitFigures:
    """A network cut in two halves that both go on, and healed.

    Attributes:
        within: Part of the operations inside a half that succeeded during the cut.
        peers_found: Part of the sampled peers that found a peer of the other half in time after the healing.
        records_found: Part of the sampled reads that returned what the other half had written.
        merged: Part of the keys that both halves wrote which show both halves' entries to a reader.
        converged: Part of the keys replaced or deleted in one half that show so in the other.
        one_s: Virtual time from the healing until every sampled check succeeded, in steps; infinite if it never did.
    """

    peers: int
    split_s: float
    within: float
    peers_found: float
    records_found: float
    merged: float
    converged: float
    one_s: float
    failures: int


SPLIT_S = 600.0
HEALED_S = 120.0
"""One network again within this time."""
CHECK_EVERY_S = 15.0


async def put(author: Endpoint, key: str, body: str) -> None:
    await author.dht.put(key, body, ttl_s=LONG_S)


async def delete(author: Endpoint, key: str) -> None:
    await author.dht.delete(key)


async def get(reader: Endpoint, key: str) -> list[str]:
    """The bodies of a key, sorted."""
    return sorted(entry.body for entry in await reader.dht.get(key))


async def meets(one: Endpoint, other: Endpoint) -> bool:
    """Whether one peer finds another."""
    contact = await one.dht.find_peer(other.peer_id)
    return contact is not None and contact.peer_id == other.peer_id


async def split(
    peers: int,
    *,
    records: int = 40,
    samples: int = 40,
    seed: int = 0,
    clock_skew_s: float = 0.0,
    config: PeerConfig | None = None,
) -> SplitFigures:
    """Cut a network in half for ten minutes in which both halves write, replace, delete and read; heal it; look.

    Args:
        records: Keys of each sort, half of them written in each half.
        samples: Readers for each check after the healing.
        clock_skew_s: How far apart wall clocks are; if at all, one more is a day wrong.
    """
    make = infiltrated(Cabal(seed), (), 0.0, peers, seed, wrong_day=clock_skew_s > 0)
    async with VirtualDht(peers, seed=seed, config=config, clock_skew_s=clock_skew_s, make=make) as swarm:
        loop, rng = asyncio.get_running_loop(), swarm.rng
        await asyncio.sleep(SETTLE_S)
        everybody = rng.sample(swarm.peers, len(swarm.peers))
        halves = everybody[: peers // 2], everybody[peers // 2 :]
        before = {f"before/{i}": halves[i % 2][rng.randrange(peers // 2)] for i in range(2 * records)}
        await together(put, [(author, key, "old") for key, author in before.items()])

        swarm.partition(*halves)
        cut_s = loop.time()
        replaced, deleted = list(before)[:records], list(before)[records:]
        written = {f"written/{i}": halves[i % 2][rng.randrange(peers // 2)] for i in range(records)}
        shared = {f"shared/{i}": (rng.choice(halves[0]), rng.choice(halves[1])) for i in range(records)}
        within: list[bool] = []
        for part in range(4):  # spread over the time of the cut, so that the halves have time to settle in between
            keys = slice(part, None, 4)
            await together(put, [(before[key], key, "new") for key in replaced[keys]])
            await together(delete, [(before[key], key) for key in deleted[keys]])
            some = list(written.items())[keys]
            await together(put, [(author, key, "new") for key, author in some])
            await together(put, [(a, key, a.name) for key, both in list(shared.items())[keys] for a in both])
            found = await together(get, [(rng.choice(halves[a not in halves[0]]), key) for key, a in some])
            within += [bodies == ["new"] for bodies in found]
            await asyncio.sleep(max(0.0, cut_s + SPLIT_S * (part + 1) / 4 - loop.time()))

        swarm.heal()
        healed_s = loop.time()

        def other_half(author: Endpoint) -> Endpoint:
            return rng.choice(halves[author in halves[0]])

        async def met() -> float:
            pairs = [(rng.choice(halves[i % 2]), rng.choice(halves[1 - i % 2])) for i in range(samples)]
            return rate(await together(meets, pairs))

        async def look() -> tuple[float, float, float, float]:
            records_found = await together(get, [(other_half(a), key) for key, a in written.items()])
            both = await together(get, [(rng.choice(everybody), key) for key in shared])
            new = await together(get, [(other_half(before[key]), key) for key in replaced])
            gone = await together(get, [(other_half(before[key]), key) for key in deleted])
            merged = zip(both, shared.values(), strict=True)
            return (
                await met(),
                rate(b == ["new"] for b in records_found),
                rate(b == sorted(peer.name for peer in pair) for b, pair in merged),
                rate([*(b == ["new"] for b in new), *(not b for b in gone)]),
            )

        one_s, figures = math.inf, (0.0, 0.0, 0.0, 0.0)
        while loop.time() - healed_s < HEALED_S and math.isinf(one_s):
            await asyncio.sleep(max(0.0, CHECK_EVERY_S - (loop.time() - healed_s) % CHECK_EVERY_S))
            begun_s = loop.time() - healed_s
            figures = await look()
            if min(figures) == 1.0:
                one_s = begun_s
        failures = sum(peer.runtime.events.count(TaskFailed) for peer in swarm.peers)
        return SplitFigures(peers, SPLIT_S, rate(within), *figures, one_s=one_s, failures=failures)
