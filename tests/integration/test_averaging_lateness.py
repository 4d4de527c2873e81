"""Senders that are late again and again, and a round that its own user interrupts."""

from __future__ import annotations

import _thread
import asyncio
import itertools
import threading
from typing import Any

import pytest
import torch

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.averager import Averager
from swarm.averaging.reducing import PartServer
from swarm.averaging.rounds import Round
from swarm.averaging.sending import PartClient
from swarm.averaging.service import AveragingService
from swarm.config import PeerConfig
from swarm.identity import PeerId
from swarm.simulation.virtual import run_virtual
from tests.exchanges import CHUNK_TIMEOUT_S, Fault, Group, check, vectors_of
from tests.support import GrpcWorld

NUMEL = 40_000


def test_patience_for_a_sender_that_is_late_again_and_again_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    in_time = [0]
    original, leave_behind = PartClient._encoded, PartServer._leave_behind

    async def encoded(self: PartClient, index: int) -> bytes:
        mine = next(p.number for p in self._shared.parts if p.member.peer_id == self._shared.me)
        in_time[0] += mine == 1 and index >= self._received
        if mine == 1 and in_time[0] == 40:
            in_time[0] = 0
            await asyncio.sleep(1.7)
        if mine == 2:
            await asyncio.sleep(0.01)  # sets the pace
        return await original(self, index)

    def noted(self: PartServer, peer: PeerId, nbytes: int, waited_s: float) -> None:
        waits.append(waited_s)
        leave_behind(self, peer, nbytes, waited_s)

    monkeypatch.setattr(PartClient, "_encoded", encoded)
    monkeypatch.setattr(PartServer, "_leave_behind", noted)

    async def main() -> None:
        group = Group([1.0, 1.0, 1.0], [NUMEL, 0, 0])
        await group.start()
        played = await group.exchange(vectors_of([[torch.randn(NUMEL)] for _ in range(3)]))
        await group.close()
        assert check(played, (Fault(1, "pauses", 0),))["local"] == 0

    run_virtual(main)
    assert len(waits) >= 3, "it is left behind more than once"
    assert all(after <= 0.6 * before for before, after in itertools.pairwise(waits)), waits
    assert sum(waits) <= 2.2 * CHUNK_TIMEOUT_S


def test_a_sender_that_is_late_skips_what_was_averaged_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original, naps = PartClient._encoded, [100]

    async def encoded(self: PartClient, index: int) -> bytes:
        mine = next(p.number for p in self._shared.parts if p.member.peer_id == self._shared.me)
        if mine == 1 and naps and index == naps[0]:
            naps.pop()
            await asyncio.sleep(1.7)
        return await original(self, index)

    monkeypatch.setattr(PartClient, "_encoded", encoded)

    async def main() -> None:
        group = Group([1.0, 1.0, 1.0], [NUMEL, 0, 0], upload_bytes_s=64 * 1024)
        await group.start()
        played = await group.exchange(vectors_of([[torch.randn(NUMEL)] for _ in range(3)]))
        await group.close()
        counts = check(played, (Fault(1, "pauses", 0),))
        assert counts["local"] == 0
        assert counts["all"] > 0 < counts["some"]
        assert played.reports[2].bytes_sent >= 4 * NUMEL
        assert played.reports[1].bytes_sent < 0.9 * 4 * NUMEL, "what comes too late only delays what could be in time"

    run_virtual(main)


def test_a_reducer_whose_uplink_is_slow_goes_on_as_long_as_its_averages_leave() -> None:
    async def main() -> None:
        group = Group([1.0] * 5, [NUMEL, 0, 0, 0, 0], upload_bytes_s=64 * 1024)
        await group.start()
        played = await group.exchange(vectors_of([[torch.randn(NUMEL)] for _ in range(5)]))
        await group.close()
        assert played.seconds[0] > 2 * CHUNK_TIMEOUT_S + 4 * NUMEL / (64 * 1024), (
            "the uplink is not slow enough to tell"
        )
        assert check(played, ())["local"] == 0
        assert all(report.problems == [] for report in played.reports.values())

    run_virtual(main)


def test_an_interrupted_round_leaves_each_chunk_averaged_or_local_and_the_averager_usable(
    grpc_world: GrpcWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a round that works in the tensors' own memory; only real transports have a thread that waits for it."""
    chunk_bytes, numel = 4096, 60_000
    averaging = {"matchmaking_s": 2.0, "chunk_timeout_s": 0.5, "round_timeout_s": 4.0, "chunk_bytes": chunk_bytes}
    config = PeerConfig.preset("local", averaging=averaging)

    class Member:
        def __init__(self, endpoint: Any, value: float) -> None:
            self.endpoint = endpoint
            self.averaging = AveragingService(endpoint)
            self.tensor = torch.full((numel,), value)

    async def start() -> list[Member]:
        found: list[Member] = []
        for value in (1.0, 2.0):
            known = [found[0].endpoint.contact] if found else []
            member = Member(await grpc_world.endpoint(bootstrap=known, config=config), value)
            grpc_world.at_close(member.averaging.close)
            found.append(member)
        return found

    me, other = grpc_world.run(start)
    averagers = [Averager(m, [m.tensor], "trunk", AllReduce()) for m in (me, other)]
    results: list[Round] = []
    original, pressed = PartClient._apply, []

    def apply(self: PartClient, *args: Any) -> bool:
        done = original(self, *args)
        if self._shared.me == me.endpoint.peer_id and self._received == 3 and not pressed:
            pressed.append(True)
            _thread.interrupt_main()
        return done

    monkeypatch.setattr(PartClient, "_apply", apply)
    thread = threading.Thread(target=lambda: results.append(averagers[1].step()))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        averagers[0].step()
    after = me.tensor.clone()
    for chunk in after.split(chunk_bytes // 4):
        assert chunk[0] in (1.0, 1.5)
    edges = (after[1:] != after[:-1]).nonzero().flatten() + 1
    part = numel // 2
    assert all((int(edge) % part) % (chunk_bytes // 4) == 0 for edge in edges), "a chunk is a mix"
    thread.join(20)
    assert len(results) == 1
    assert torch.equal(me.tensor, after), "nothing writes once the call has returned"
    thread = threading.Thread(target=lambda: results.append(averagers[1].step()))
    thread.start()
    assert averagers[0].step().averaged
    thread.join(20)
    assert torch.equal(me.tensor, other.tensor)
    for averager in averagers:
        averager.close()
