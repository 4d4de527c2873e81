"""What an averager refuses before anybody else is involved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.averager import Averager
from swarm.averaging.gossip import PushSum
from swarm.averaging.rounds import Alone, checked_weight
from swarm.averaging.service import AveragingService
from swarm.errors import UsageError
from tests.support import MemoryWorld

SHARED = torch.zeros(12)


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


class Mate:
    def __init__(self, averaging: AveragingService) -> None:
        self.averaging = averaging


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.zeros(3, 1).expand(3, 4)],
        lambda: [torch.zeros(5).as_strided((3, 3), (1, 1))],
        lambda: [SHARED, torch.ones(2), SHARED],
        lambda: [SHARED[:4], SHARED[3:]],
        lambda: [SHARED.view(3, 4)[:, 1:], SHARED.view(3, 4)[:, :2]],
        lambda: [torch.zeros(3).to_sparse()],
        lambda: [torch.zeros(3, device="meta")],
        lambda: [inference()],
    ],
)
def test_tensors_that_cannot_each_have_an_average_are_refused(
    make: Callable[[], list[Tensor]], memory_world: MemoryWorld
) -> None:
    async def body() -> None:
        mate = Mate(AveragingService(await memory_world.endpoint()))
        with pytest.raises(UsageError, match=r"shares? memory|in place"):
            Averager(mate, make(), "k", AllReduce())

    memory_world.run(body)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [SHARED[:4], SHARED[4:]],
        lambda: [SHARED.view(3, 4)[:, 2:], SHARED.view(3, 4)[:, :2]],
        lambda: [SHARED[::2], SHARED[1::2]],
        lambda: [SHARED.view(3, 4).t()],
        lambda: [torch.zeros(1).expand(1), torch.zeros(0, 3), torch.zeros(0, 3), torch.tensor(1.0)],
        lambda: [nn.Conv2d(2, 3, 3).weight.contiguous(memory_format=torch.channels_last)],
    ],
)
def test_any_layout_without_shared_elements_is_fine(
    make: Callable[[], list[Tensor]], memory_world: MemoryWorld
) -> None:
    async def body() -> None:
        Averager(Mate(AveragingService(await memory_world.endpoint())), make(), "k", AllReduce())

    memory_world.run(body)


@pytest.mark.parametrize(
    "weight", [-1.0, math.nan, math.inf, 10**400, "1", None, 1j, [1.0], torch.ones(2), np.float64("inf"), b"1"]
)
def test_weights_that_are_no_finite_numbers_are_refused(weight: Any, memory_world: MemoryWorld) -> None:
    async def body() -> None:
        averager = Averager(Mate(AveragingService(await memory_world.endpoint())), [torch.ones(2)], "k", AllReduce())
        with pytest.raises(UsageError):
            await averager.step_async(weight)
        with pytest.raises(UsageError):
            await averager.average(averager.vector, weight)

    memory_world.run(body)


def test_push_sum_takes_no_other_weight_than_one(memory_world: MemoryWorld) -> None:
    async def body() -> None:
        averager = Averager(Mate(AveragingService(await memory_world.endpoint())), [torch.ones(2)], "k", PushSum())
        for weight in (0.0, 2.0):
            with pytest.raises(UsageError, match="weighs all peers alike"):
                await averager.step_async(weight)
        assert isinstance((await averager.step_async(1)).outcome, Alone)
        await averager.aclose()

    memory_world.run(body)


@pytest.mark.parametrize("weight", [0, 2, 2.5, True, np.float32(1.5), torch.tensor(3.0), 10**9])
def test_numbers_of_any_kind_are_weights(weight: Any) -> None:
    assert checked_weight(weight) == float(weight)
    assert type(checked_weight(weight)) is float
