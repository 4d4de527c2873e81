"""How fast a grid of groups brings peers to their mean: measured against predicted, with and without failures.

The model knows only who meets whom, so that many seeds of 256 peers are cheap. One run drives the whole protocol (DHT,
matchmaking, exchange) in virtual time, where threads and latencies of a real network would hide what is measured.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from dataclasses import dataclass

import pytest
import torch

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.averager import Averager
from swarm.averaging.grid import Grid, cell_count
from swarm.averaging.rounds import Group, Round
from swarm.averaging.service import AveragingService
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from tests.support import MemoryWorld


def predicted(population: int, max_group: int, failures: float) -> float:
    """By how much a round shrinks the variance if groups are random: who fails keeps its value, m others share theirs.

    Without failures this is about (r - 1) / N + r / N^2 for r groups [Ryabinin 2021]. A grid does better, for it never
    brings together peers that have just met.
    """
    groups = cell_count(population, max_group)
    taking_part = (1 - failures) * population
    return failures + (1 - failures) * ((groups - 1) / taking_part + groups / taking_part**2)


class Model:
    """Peers with one number each, who meet as the grid has it."""

    def __init__(self, count: int, max_group: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.max_group = max_group
        self.grids = [Grid(max_group, random.Random(f"{seed} {index}")) for index in range(count)]
        self.values = [self.rng.gauss(0, 1) for _ in range(count)]

    def round(self, failures: float, population: int | None = None) -> None:
        met: dict[str, list[int]] = {}
        for index, grid in enumerate(self.grids):
            cell = grid.cell(population or len(self.grids))
            if self.rng.random() >= failures:
                met.setdefault(cell, []).append(index)
        for members in met.values():
            self.rng.shuffle(members)
            for start in range(0, len(members), self.max_group):
                self._meet(members[start : start + self.max_group])

    def _meet(self, members: list[int]) -> None:
        if len(members) < 2:
            self.grids[members[0]].scatter()
            return
        mean, nonce = math.fsum(self.values[i] for i in members) / len(members), self.rng.randbytes(16)
        for rank, index in enumerate(members):
            self.values[index] = mean
            self.grids[index].advance(rank, nonce)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def variance(self) -> float:
        return statistics.pvariance(self.values)


@pytest.mark.parametrize("failures", [0.0, 0.1])
def test_256_peers_in_groups_of_16_mix_as_fast_as_predicted(failures: float) -> None:
    expected, rounds, rates = predicted(256, 16, failures), 6, []
    for seed in range(60):
        model = Model(256, 16, seed)
        mean, variance = model.mean, model.variance
        for _ in range(rounds):
            model.round(failures)
        assert model.mean == pytest.approx(mean, abs=1e-12)
        rates.append((model.variance / variance) ** (1 / rounds))
    measured = statistics.geometric_mean(rates)
    print(f"variance per round with {failures:.0%} failures: {measured:.4f}, predicted {expected:.4f}")
    assert measured <= 1.1 * expected
    assert max(rates) <= 2 * expected


def test_peers_that_come_go_and_count_late_mix_too() -> None:
    model = Model(200, 16, 0)
    rng, counted = random.Random(0), [200, 200]
    for _ in range(12):
        for _ in range(10):
            gone = rng.randrange(len(model.values))
            del model.values[gone], model.grids[gone]
        for _ in range(rng.randint(8, 14)):  # a joiner downloads the state of somebody
            model.values.append(rng.choice(model.values))
            model.grids.append(Grid(16, random.Random(rng.random())))
        model.round(0.05, population=counted[-2])
        counted.append(len(model.values))
    assert model.variance < 1e-6


@dataclass
class Trainer:
    endpoint: Endpoint
    averaging: AveragingService
    averager: Averager | None = None


@pytest.mark.parametrize("failures", [0.0, 0.1])
def test_the_whole_protocol_mixes_as_the_model_does(failures: float) -> None:
    count, max_group, rounds = 20, 4, 5
    result = mix(count, max_group, rounds, failures, seed=1)
    print(result, f"predicted {predicted(count, max_group, failures):.4f}")
    assert result.mean_drift < 1e-6
    assert result.rate <= 1.5 * predicted(count, max_group, failures)
    assert result.averaged >= (0.8 - failures) * count * rounds
    assert result.largest == max_group


@dataclass(frozen=True)
class Mixed:
    """Figures of one run of the whole protocol."""

    rate: float
    """By how much a round shrank the variance, on (geometric) average."""
    mean_drift: float
    averaged: int
    """Peers that were in a group, summed over rounds."""
    largest: int


def mix(count: int, max_group: int, rounds: int, failures: float, seed: int) -> Mixed:
    """Peers average on the memory network in virtual time; in each round some take no part."""
    world = MemoryWorld(seed)
    config = PeerConfig.preset("wan", dht={"bucket_size": 8, "replication": 3}, averaging={"matchmaking_s": 4.0})
    rng = random.Random(seed)

    async def main() -> Mixed:
        trainers: list[Trainer] = []
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(count)]
        for index in range(count):
            known = [t.endpoint.contact for t in rng.sample(trainers, min(2, index))]
            endpoint = await world.endpoint(config=config, bootstrap=known)
            trainers.append(Trainer(endpoint, AveragingService(endpoint)))
        for trainer, value in zip(trainers, values, strict=True):
            trainer.averager = Averager(trainer, [value], "trunk", AllReduce(max_group=max_group))
        await asyncio.gather(*(t.averager.open() for t in trainers if t.averager is not None))
        before, mean = spread(values), torch.stack(values).mean(0)
        ends: list[Round] = []
        for _ in range(rounds):
            present = [t.averager for t in trainers if t.averager is not None and rng.random() >= failures]
            ends += await asyncio.gather(*(averager.step_async() for averager in present))
        for trainer in trainers:
            assert trainer.averager is not None
            await trainer.averager.aclose()
        drift = float((torch.stack(values).mean(0) - mean).abs().max())
        met = [end for end in ends if isinstance(end.outcome, Group)]
        rate = (spread(values) / before) ** (1 / rounds)
        return Mixed(rate, drift, len(met), max(len(end.members) for end in met))

    try:
        return world.run(main, timeout_s=800)
    finally:
        world.close()


def spread(values: list[torch.Tensor]) -> float:
    return float(torch.stack(values).var(0, unbiased=False).mean())
