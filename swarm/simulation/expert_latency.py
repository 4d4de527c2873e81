"""What deadlines and hedging make of hosts whose answer times are modelled: one client, real calls, virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.experts.announcing import Announcer
from swarm.experts.calls import CallOptions
from swarm.experts.client import ExpertClient
from swarm.experts.hedging import FRACTION, Hedging
from swarm.experts.protocol import CALL, CallRequest, CallResponse, PartResponse
from swarm.experts.records import rendezvous_order
from swarm.experts.spec import ExpertGrid
from swarm.net.transport import CallContext
from swarm.simulation.virtual_dht import VirtualDht
from swarm.tensors.wire import from_frame, to_frame

ServiceTime = Callable[[random.Random, int], float]
"""How long a host computes on a request, in seconds: of its randomness and of how many it has computed before."""

NETWORK_S = 0.001
RECORD_TTL_S = 1e5
GRID = "nop"
EXPERTS_PER_HOST = 8


def steady(seconds: float, spread: float = 0.1) -> ServiceTime:
    """Uniform within this part of the mean."""
    return lambda rng, _: seconds * rng.uniform(1 - spread, 1 + spread)


def load_step(before_s: float, after_s: float, at: int) -> ServiceTime:
    """From the given request on, another mean."""
    return lambda rng, n: (before_s if n < at else after_s) * rng.uniform(0.9, 1.1)


def two_modes(fast_s: float, slow_s: float, slow_part: float = 0.5) -> ServiceTime:
    """One of two times."""
    return lambda rng, _: (slow_s if rng.random() < slow_part else fast_s) * rng.uniform(0.9, 1.1)


def heavy_tail(mean_s: float, stall_s: float, stalls: float) -> ServiceTime:
    """Exponential, and with the given probability a stall."""
    return lambda rng, _: stall_s if rng.random() < stalls else rng.expovariate(1.0 / mean_s)


class ModelledHost:
    """Answers every call with its inputs, one after the other, after the time that the model says."""

    def __init__(self, endpoint: Endpoint, service: ServiceTime, seed: int) -> None:
        self.computed = 0
        self.dropped = 0
        self._service = service
        self._rng = random.Random(f"host {seed}")
        self._device = asyncio.Lock()
        self._clock = endpoint.runtime.clock
        endpoint.transport.serve(CALL, self._call)

    async def _call(self, _: CallContext, data: bytes) -> bytes:
        meta, tensors = from_frame(data)
        request = CallRequest.from_meta(meta)
        arrived_s = self._clock.time()
        try:
            await self._device.acquire()
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        # what has begun is finished, whether somebody still waits for it or not
        begun_s = self._clock.time()
        seconds = self._service(self._rng, self.computed)
        self.computed += 1
        asyncio.get_running_loop().call_later(seconds, self._device.release)
        await asyncio.sleep(seconds)
        parts = tuple(PartResponse(p.uid, p.request_id, n=p.n) for p in request.parts)
        return to_frame(CallResponse(parts, begun_s - arrived_s, seconds).to_meta(), tensors)


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """What a client saw.

    Attributes:
        calls: Forward passes of one expert.
        p50_s, p95_s, p99_s: Percentiles of their times.
        requests, hedges, hedge_wins: As the client counted them.
        timeouts: Requests given up at a deadline; all of them wrongly, since every host answers in the end.
        dropped: Requests that hosts dropped before their turn, because nobody waited any more.
        masked: Calls that nobody answered.
    """

    calls: int
    p50_s: float
    p95_s: float
    p99_s: float
    requests: int
    hedges: int
    hedge_wins: int
    timeouts: int
    dropped: int
    masked: int

    @property
    def false_timeouts(self) -> float:
        """Part of the requests that were given up wrongly."""
        return self.timeouts / max(1, self.requests + self.hedges)


def _percentile(times: list[float], part: float) -> float:
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]


async def play(
    service: ServiceTime,
    *,
    hosts: int = 2,
    replicas: int = 2,
    calls: int = 1000,
    gap_s: float | None = None,
    fraction: float = FRACTION,
    floor_s: float = 0.01,
    seed: int = 0,
) -> LatencyFigures:
    """Call experts on modelled hosts.

    Args:
        service: How long each host computes on a request.
        hosts: How many; each expert is on `replicas` of them.
        gap_s: Mean time between calls, which then come at random (a Poisson process) whatever became of earlier ones;
            None makes one after the other.
        fraction: Budget of hedges per request; 0 turns hedging off.
        floor_s: The shortest deadline.
    """
    deadline = {"initial_s": 60.0, "floor_s": floor_s, "cap_s": 120.0}
    config = PeerConfig.preset("wan", client={"deadline": deadline, "directory_refresh_s": 1e4})
    async with VirtualDht(hosts + 1, seed=seed, config=config, latency_s=(NETWORK_S, NETWORK_S)) as swarm:
        caller, *others = swarm.peers
        modelled = [ModelledHost(e, service, 1000 * seed + i) for i, e in enumerate(others)]
        grid = ExpertGrid(f"{GRID}.[0:{EXPERTS_PER_HOST * hosts}]", GRID, config={"hid": 4}, replicas=replicas)
        by_id = {e.peer_id: e for e in others}
        held: dict[Any, dict[str, int]] = {p: {} for p in by_id}
        for uid in grid.uids():
            for p in rendezvous_order(uid, by_id)[:replicas]:
                held[p][uid] = 0
        for p, endpoint in by_id.items():
            await Announcer(endpoint, [GRID], len(held[p]), RECORD_TTL_S).announce(held[p], 0.0, leaving=False)
        client = ExpertClient(caller, {GRID: grid}, hedging=Hedging(fraction))
        await client.start()
        rng, clock, how = random.Random(f"calls {seed}"), caller.runtime.clock, CallOptions("the layer", train=False)
        times: list[float] = []
        x = torch.zeros(1, 4)

        async def one(uid: str) -> None:
            begun_s = clock.time()
            await client.forward([client.new_call(uid, 1, [x])], how)
            times.append(clock.time() - begun_s)

        tasks: list[asyncio.Task[None]] = []
        for _ in range(calls):
            uid = rng.choice(grid.uids())
            if gap_s is None:
                await one(uid)
            else:
                await asyncio.sleep(rng.expovariate(1.0 / gap_s))
                tasks.append(asyncio.get_running_loop().create_task(one(uid)))
        await asyncio.gather(*tasks)
        await client.close()
        stats = how.stats.snapshot()
        return LatencyFigures(
            calls=len(times),
            p50_s=_percentile(times, 0.5),
            p95_s=_percentile(times, 0.95),
            p99_s=_percentile(times, 0.99),
            requests=stats.requests,
            hedges=stats.hedges,
            hedge_wins=stats.hedge_wins,
            timeouts=client.attempts.timeouts,
            dropped=sum(h.dropped for h in modelled),
            masked=stats.masked_tokens,
        )
