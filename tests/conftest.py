"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from swarm.net.loop import disable_grpc_fork_handlers
from tests.support import GrpcWorld, MemoryWorld, World

disable_grpc_fork_handlers()
torch.set_num_threads(1)
# The same examples on every run, and no speed limit: machines are shared. Fuzzing with new examples is in tests/long.
settings.register_profile("swarm", deadline=None, derandomize=True, database=None)
settings.load_profile("swarm")


@pytest.fixture
def memory_world() -> Iterator[MemoryWorld]:
    """An in-memory network in virtual time."""
    world = MemoryWorld()
    yield world
    world.close()


@pytest.fixture
def grpc_world() -> Iterator[GrpcWorld]:
    """Real gRPC on loopback."""
    world = GrpcWorld()
    yield world
    world.close()


@pytest.fixture(params=["memory", "grpc"])
def world(request: pytest.FixtureRequest) -> World:
    """Each of the two worlds in turn."""
    made: World = request.getfixturevalue(f"{request.param}_world")
    return made
