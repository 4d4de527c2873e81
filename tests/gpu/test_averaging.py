"""Averaging of CUDA tensors over real gRPC: in place, in the background, through pinned memory on side streams.

`SWARM_TEST_DEVICE=cpu` runs the same bodies without a card, to see that they hold on any device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.averager import Averager
from swarm.averaging.rounds import Round
from swarm.averaging.service import AveragingService
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.tensors.staging import add_all, copy_all
from tests.support import GrpcWorld

DEVICE = torch.device(os.environ.get("SWARM_TEST_DEVICE", "cuda"))
MEMBERS = 3
SHAPES = [(257, 130), (), (70_001,)]
BOUNDS = {"none": 1e-6, "bf16": 2e-2, "int8": 6e-2, "auto": 6e-2}


class Mate:
    def __init__(self, averaging: AveragingService) -> None:
        self.averaging = averaging


class Group:
    """Members of this process, each with tensors of its own and an averager for them."""

    def __init__(self, world: GrpcWorld, codec: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = [
            [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES] for _ in range(MEMBERS)
        ]
        self.mean = [torch.stack(column).double().mean(0).float() for column in zip(*self.tensors, strict=True)]
        strategy = AllReduce(min_group=MEMBERS, max_group=MEMBERS, codec=codec)
        endpoints = world.run(lambda: self._endpoints(world))
        self.averagers = [
            Averager(Mate(AveragingService(endpoint)), tensors, "k", strategy)
            for endpoint, tensors in zip(endpoints, self.tensors, strict=True)
        ]

    @staticmethod
    async def _endpoints(world: GrpcWorld) -> list[Endpoint]:
        config = PeerConfig.preset("local", averaging={"matchmaking_s": 10.0})
        first = await world.endpoint(config=config)
        return [first] + [await world.endpoint(bootstrap=[first.contact], config=config) for _ in range(MEMBERS - 1)]

    def all_do(self, step: Callable[[Averager, list[Tensor]], Round]) -> list[Round]:
        with ThreadPoolExecutor(MEMBERS) as pool:
            return list(pool.map(step, self.averagers, self.tensors))

    def close(self) -> None:
        for averager in self.averagers:
            averager.close()


@pytest.fixture(params=list(BOUNDS))
def group(request: pytest.FixtureRequest, grpc_world: GrpcWorld) -> Iterator[Group]:
    made = Group(grpc_world, request.param)
    yield made
    made.close()


def near(got: Tensor, wanted: Tensor, codec: str) -> bool:
    return bool((got.float() - wanted).abs().max() <= BOUNDS[codec] * max(1.0, float(wanted.abs().max())))


def test_blocking_rounds_write_in_place_and_leave_equal_bits(group: Group) -> None:
    addresses = [[t.data_ptr() for t in tensors] for tensors in group.tensors]
    results = group.all_do(lambda averager, _: averager.step())
    assert all(r.averaged and not r.degraded for r in results), results
    codec = group.averagers[0].strategy.codec
    for tensors in group.tensors:
        assert all(near(t, m, codec) for t, m in zip(tensors, group.mean, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(tensors, group.tensors[0], strict=True))
        assert all(t.device.type == DEVICE.type for t in tensors)
    assert addresses == [[t.data_ptr() for t in tensors] for tensors in group.tensors]


def test_a_background_round_keeps_what_happened_meanwhile(group: Group) -> None:
    def step(averager: Averager, tensors: list[Tensor]) -> Round:
        handle = averager.step(wait=False)
        with torch.no_grad():
            for tensor in tensors:
                tensor.add_(1.0)  # a training step, queued while the round runs
        return handle.apply()

    for _ in range(2):  # the second round uses the same staging memory again
        results = group.all_do(step)
        assert all(r.averaged for r in results), results
    codec = group.averagers[0].strategy.codec
    for tensors in group.tensors:
        assert all(near(t, m + 2.0, codec) for t, m in zip(tensors, group.mean, strict=True))


def test_work_that_is_queued_is_seen_and_work_that_follows_sees_the_copy() -> None:
    side = 2048
    a = torch.randn(side, side, device=DEVICE)
    product = a @ a
    for _ in range(20):
        product = product @ a / side  # still running when the copy is asked for
    pinned = torch.empty(side, side, pin_memory=DEVICE.type == "cuda")
    copy_all([(pinned, product)])
    assert torch.equal(pinned, product.cpu())
    back = torch.zeros_like(a)
    copy_all([(back, pinned)])
    assert torch.equal(back + 0, product)
    add_all([(back, pinned)])
    pinned.zero_()  # add_all has let go of it
    assert torch.equal(back, 2 * product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_copies_convert(dtype: torch.dtype) -> None:
    source = torch.randn(1000, device=DEVICE)
    host = torch.empty(1000, dtype=dtype)
    copy_all([(host, source), (source, host)])
    assert torch.equal(source.cpu(), host.float())
