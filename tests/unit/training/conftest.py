"""Trainers on real loopback connections: `attach` is synchronous, so its tests need a loop thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.averaging.service import AveragingService
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.state.transfer import SnapshotStore
from tests.support import GrpcWorld

CONFIG = PeerConfig.preset("local", averaging={"matchmaking_s": 2.0, "chunk_timeout_s": 1.0, "round_timeout_s": 5.0})


class Trainer:
    """A peer with what training needs."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.averaging = AveragingService(endpoint)
        self.state = SnapshotStore(endpoint)
        self.run_id = endpoint.run_id
        self.events = endpoint.runtime.events


@pytest.fixture
def trainers(grpc_world: GrpcWorld) -> Callable[[int], list[Trainer]]:
    """Makes trainers that know each other."""
    made: list[Trainer] = []

    def make(count: int) -> list[Trainer]:
        async def start() -> None:
            for _ in range(count):
                known = [made[0].endpoint.contact] if made else []
                endpoint = await grpc_world.endpoint(bootstrap=known, config=CONFIG)
                made.append(Trainer(endpoint))
                grpc_world.at_close(made[-1].averaging.close)

        grpc_world.run(start)
        return made[-count:]

    return make
