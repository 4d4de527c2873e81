"""What an averager refuses before anybody else is involved."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.arguments import checked_key, checked_tensors, checked_weight
from swarm.averaging.averager import Averager
from swarm.averaging.gossip import PushSum
from swarm.averaging.rounds import Alone, Group
from swarm.averaging.service import AveragingService
from swarm.errors import SchemaMismatchError, UnsupportedDtypeError, UsageError
from swarm.net.loop import loop_thread
from tests.support import GrpcWorld, MemoryWorld

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


@pytest.mark.parametrize("key", ["", "k" * 256, "\ud800", None, 5, b"k"])
def test_keys_that_cannot_travel_are_refused(key: Any) -> None:
    with pytest.raises(UsageError, match="key"):
        checked_key(key)


@pytest.mark.parametrize("key", ["a/b", "ключ 🙂", "a\0b", " ", "\n", "../..", "k" * 255])
def test_any_other_text_is_a_key(key: str, memory_world: MemoryWorld) -> None:
    async def body() -> None:
        averager = Averager(Mate(AveragingService(await memory_world.endpoint())), [torch.ones(2)], key, AllReduce())
        assert isinstance((await averager.step_async()).outcome, Alone)
        await averager.aclose()

    memory_world.run(body)


@pytest.mark.parametrize(
    "tensors", [None, [], torch.ones(3, 2), [None], [np.ones(3)], "abc", {"a": torch.ones(3)}, [torch.ones(2), 1.0]]
)
def test_whatever_is_no_list_of_tensors_is_refused(tensors: Any) -> None:
    with pytest.raises(UsageError):
        checked_tensors(tensors)


def test_tensors_may_come_from_an_iterator() -> None:
    model = nn.Linear(2, 3)
    assert [t.shape for t in checked_tensors(model.parameters())] == [(3, 2), (3,)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_without_averages_are_refused(dtype: torch.dtype, memory_world: MemoryWorld) -> None:
    async def body() -> None:
        with pytest.raises(UnsupportedDtypeError):
            Averager(Mate(AveragingService(await memory_world.endpoint())), [torch.ones(3).to(dtype)], "k", AllReduce())

    memory_world.run(body)


@pytest.mark.parametrize("strategy", ["allreduce", None, AllReduce, 5])
def test_whatever_is_no_strategy_is_refused(strategy: Any, memory_world: MemoryWorld) -> None:
    async def body() -> None:
        with pytest.raises(UsageError, match="strategy"):
            Averager(Mate(AveragingService(await memory_world.endpoint())), [torch.ones(3)], "k", strategy)

    memory_world.run(body)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, "x", 1j, [1.0]])
def test_times_that_cannot_be_are_refused(seconds: Any, memory_world: MemoryWorld) -> None:
    async def body() -> None:
        averager = Averager(Mate(AveragingService(await memory_world.endpoint())), [torch.ones(2)], "k", AllReduce())
        with pytest.raises(UsageError):
            await averager.step_async(timeout_s=seconds)
        with pytest.raises(UsageError):
            await averager.prepare_async(at_s=seconds)
        assert isinstance((await averager.step_async(timeout_s=math.inf)).outcome, Alone), "it can still be used"

    memory_world.run(body)


def test_tensors_that_changed_shape_during_a_background_round_are_left_as_they_are(grpc_world: GrpcWorld) -> None:
    async def endpoint() -> AveragingService:
        made = await grpc_world.endpoint()
        made.loop = loop_thread()
        return AveragingService(made)

    service = loop_thread().run(endpoint(), 10)
    first, second = torch.ones(3), torch.ones(4)
    averager = Averager(Mate(service), [first, second], "k", AllReduce())
    handle = averager.step(wait=False)
    second.resize_(6)
    outcome = handle.result()
    handle._future = Future()
    handle._future.set_result(replace(outcome, outcome=Group("00", 2)))
    with pytest.raises(SchemaMismatchError, match="shape") as caught:
        handle.apply()
    assert caught.value.fix
    assert torch.equal(first, torch.ones(3)), "all or nothing"
    with pytest.raises(SchemaMismatchError):
        averager.step()
    second.resize_(4)
    given_up = averager.step(wait=False)
    given_up.cancel()
    with pytest.raises(UsageError, match="cancelled"):
        given_up.apply()
    assert isinstance(averager.step().outcome, Alone)
    averager.close()
