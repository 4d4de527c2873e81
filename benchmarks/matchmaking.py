"""How long peers that know each other take to become a group: at once, staggered, and prepared ahead of the round.

    python -m benchmarks.matchmaking --json --peers 4

All peers live in this process, on gRPC over loopback, and average 1000 elements. `*_met_s` is the time from the last
peer's `step` until every group was sealed; `*_search_s` the part of a peer's own `step` before the exchange.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.averaging.averager import Averager
    from swarm.averaging.rounds import Round


async def start(count: int) -> list[Averager]:
    import torch

    from benchmarks.averaging_peer import BenchmarkPeer, start_endpoint
    from swarm.averaging.allreduce import AllReduce
    from swarm.averaging.averager import Averager
    from swarm.config import PeerConfig

    torch.set_num_threads(1)
    config = PeerConfig.preset("local")
    averagers: list[Averager] = []
    first = None
    for _ in range(count):
        endpoint = await start_endpoint(config)
        if first is not None:
            await endpoint.dht.bootstrap([first])
        first = first or endpoint.contact
        mate = BenchmarkPeer(endpoint)
        averagers.append(Averager(mate, [torch.randn(1000)], "trunk", AllReduce(max_group=max(16, count))))
        await averagers[-1].open()
    return averagers


async def rounds(averagers: list[Averager], times: int, spread_s: float, prepare: bool) -> dict[str, float]:
    """Medians over rounds, without the first."""
    rng, met, searched, whole = random.Random(0), [], [], []

    async def step(averager: Averager) -> tuple[float, float, Round]:
        await asyncio.sleep(spread_s * rng.random())
        began = time.perf_counter()
        result = await averager.step_async()
        return began, time.perf_counter() - result.exchange_s, result

    for _ in range(times + 1):
        if prepare:
            for averager in averagers:
                await averager.prepare_async(at_s=0.5)
            await asyncio.sleep(0.25)
        ends = await asyncio.gather(*(step(averager) for averager in averagers))
        if any(len(result.members) != len(averagers) for _, _, result in ends):
            raise SystemExit("not everybody was in one group")
        met.append(max(sealed for _, sealed, _ in ends) - max(began for began, _, _ in ends))
        searched.append(statistics.median(result.seconds - result.exchange_s for _, _, result in ends))
        whole.append(max(result.seconds for _, _, result in ends))
    return {
        "met_s": statistics.median(met[1:]),
        "met_worst_s": max(met[1:]),
        "search_s": statistics.median(searched[1:]),
        "round_s": statistics.median(whole[1:]),
    }


async def measure(count: int, times: int) -> dict[str, float]:
    averagers = await start(count)
    found: dict[str, float] = {}
    for name, spread_s, prepare in (("at_once", 0.0, False), ("staggered", 1.0, False), ("prepared", 0.0, True)):
        figures = await rounds(averagers, times, spread_s, prepare)
        found |= {f"{name}_{figure}": round(value, 5) for figure, value in figures.items()}
    for averager in averagers:
        await averager.aclose()
    return found


def main() -> None:
    from swarm.net.loop import disable_grpc_fork_handlers, loop_thread

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    disable_grpc_fork_handlers()
    found = loop_thread().run(measure(options.peers, options.rounds))
    print(json.dumps(found) if options.json else "\n".join(f"{name:24} {value:.5f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
