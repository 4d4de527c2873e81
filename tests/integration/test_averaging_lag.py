"""A pause of the own event loop in the middle of a round costs nobody its values. Over gRPC: pauses take real time."""

from __future__ import annotations

import time

import pytest

from swarm.averaging.rounds import Group
from swarm.averaging.sending import PartClient
from tests.conformance.test_averaging import CONFIG, mates, random_values, step_all
from tests.support import GrpcWorld

PAUSE_S = 2 * CONFIG.averaging.chunk_timeout_s


def test_members_whose_loop_stood_still_leave_nobody_out(
    grpc_world: GrpcWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, pauses = PartClient._send_values, [PAUSE_S]

    async def late(self: PartClient, *args: object) -> None:
        if pauses:
            time.sleep(pauses.pop())
        await real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PartClient, "_send_values", late)

    async def main() -> None:
        group = await mates(grpc_world, random_values(3))
        rounds = await step_all(group)
        assert [r.outcome.contributors for r in rounds if isinstance(r.outcome, Group)] == [3, 3, 3]
        assert [r.degraded for r in rounds] == [()] * 3

    grpc_world.run(main)
    assert not pauses
