"""Averaging on both transports: groups, pairs, faults in the middle of a round."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.averager import Averager
from swarm.averaging.exchange import EXCHANGE
from swarm.averaging.gossip import Gossip, Strategy
from swarm.averaging.reducing import PartServer
from swarm.averaging.rounds import Alone, Group, Mismatch, Round, RoundDegraded, RoundFinished, TooFew
from swarm.averaging.sending import PartClient
from swarm.averaging.service import COMMIT, JOIN, SEAL, AveragingService
from swarm.averaging.view import priority
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.errors import ClosedError, MalformedFrameError, NoGroupError, UsageError
from swarm.identity import PeerId
from swarm.pb import averaging_pb2 as pb
from tests.support import World

CONFIG = PeerConfig.preset(
    "local",
    averaging={"matchmaking_s": 2.0, "chunk_timeout_s": 0.5, "round_timeout_s": 4.0, "chunk_bytes": 4096},
)


@dataclass
class Mate:
    """A peer with one averager."""

    endpoint: Endpoint
    averaging: AveragingService
    averager: Averager
    tensors: list[Tensor]


async def mates(
    world: World,
    values: Sequence[Sequence[Tensor]],
    strategy: Strategy | None = None,
    config: PeerConfig = CONFIG,
) -> list[Mate]:
    found: list[Mate] = []
    for tensors in values:
        contacts = [found[0].endpoint.contact] if found else []
        endpoint = await world.endpoint(bootstrap=contacts, config=config)
        mate = Mate(endpoint, AveragingService(endpoint), None, list(tensors))  # type: ignore[arg-type]
        mate.averager = Averager(mate, mate.tensors, "trunk", strategy or AllReduce())
        await mate.averager.open()
        world.at_close(mate.averager.aclose)
        found.append(mate)
    return found


async def step_all(group: Sequence[Mate], weights: Sequence[float] | None = None, **options: Any) -> list[Round]:
    weights = weights or [1.0] * len(group)
    return list(
        await asyncio.gather(*(m.averager.step_async(w, **options) for m, w in zip(group, weights, strict=True)))
    )


def random_values(count: int, seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(31, 67), (1,), (), (2500,)]
    return [[torch.randn(s, generator=generator) for s in shapes] for _ in range(count)]


def mean_of(values: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    return [
        sum(w * t.double() for w, t in zip(weights, column, strict=True)).float() / sum(weights)  # type: ignore[union-attr]
        for column in zip(*values, strict=True)
    ]


def copies(values: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[t.clone() for t in row] for row in values]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_everybody_gets_the_weighted_mean_in_the_same_bits(world: World, count: int) -> None:
    async def main() -> None:
        values = random_values(count)
        weights = [float(1 + i % 3) for i in range(count)]
        group = await mates(world, copies(values))
        rounds = await step_all(group, weights)
        expected = mean_of(values, weights)
        for mate, outcome in zip(group, rounds, strict=True):
            assert outcome.outcome == Group(rounds[0].outcome.nonce, count)  # type: ignore[union-attr]
            assert outcome.members == rounds[0].members
            assert sorted(outcome.members) == sorted(str(m.endpoint.peer_id) for m in group)
            assert outcome.degraded == ()
            assert outcome.bytes_sent > 0 < outcome.bytes_received
            for mine, first, exact in zip(mate.tensors, group[0].tensors, expected, strict=True):
                assert torch.equal(mine, first)
                torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-6)
        assert group[0].endpoint.runtime.events.count(RoundFinished) == 1

    world.run(main)


def test_rounds_follow_each_other_and_late_peers_join_in(world: World) -> None:
    async def main() -> None:
        values = random_values(3)
        group = await mates(world, copies(values))
        first = await step_all(group[:2], timeout_s=1.0)
        assert [type(r.outcome) for r in first] == [Group, Group]
        assert [len(r.members) for r in first] == [2, 2]
        second = await step_all(group)
        assert [len(r.members) for r in second] == [3, 3, 3]
        pair = mean_of(values[:2], [1, 1])
        torch.testing.assert_close(group[2].tensors[0], (2 * pair[0] + values[2][0]) / 3)
        assert all(torch.equal(m.tensors[3], group[0].tensors[3]) for m in group)

    world.run(main)


def test_mixed_dtypes_and_codecs_stay_identical(world: World) -> None:
    async def main() -> None:
        values = [
            [torch.randn(3000), torch.randn(700).to(torch.bfloat16), torch.randn(40, dtype=torch.float64)]
            for _ in range(3)
        ]
        group = await mates(world, copies(values), AllReduce(codec="bf16"))
        rounds = await step_all(group)
        assert all(r.averaged and r.degraded == () for r in rounds)
        for index in range(3):
            assert all(torch.equal(m.tensors[index], group[0].tensors[index]) for m in group)
            exact = sum(v[index].double() for v in values) / 3
            torch.testing.assert_close(group[0].tensors[index].double(), exact, rtol=2e-2, atol=2e-2)
            assert group[0].tensors[index].dtype == values[0][index].dtype
        assert rounds[0].bytes_sent < 2 * 4 * 3740

    world.run(main)


def test_pairs_hold_their_mean(world: World) -> None:
    async def main() -> None:
        values = random_values(4)
        group = await mates(world, copies(values), Gossip())
        rounds = await step_all(group)
        index_of = {str(m.endpoint.peer_id): i for i, m in enumerate(group)}
        paired = [i for i, r in enumerate(rounds) if r.averaged]
        assert len(paired) >= 2
        for i in paired:
            a, b = (index_of[peer] for peer in rounds[i].members)
            assert rounds[a].members == rounds[b].members
            for mine, other, exact in zip(
                group[a].tensors, group[b].tensors, mean_of([values[a], values[b]], [1, 1]), strict=True
            ):
                assert torch.equal(mine, other)
                torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-6)
        for i, outcome in enumerate(rounds):
            if not outcome.averaged:
                assert isinstance(outcome.outcome, TooFew)
                assert torch.equal(group[i].tensors[0], values[i][0])

    world.run(main)


def test_a_lone_peer_is_alone_and_keeps_its_values(world: World) -> None:
    async def main() -> None:
        (mate,) = await mates(world, [[torch.ones(5)]])
        result = await mate.averager.step_async()
        assert result.outcome == Alone()
        assert result.members == ()
        assert torch.equal(mate.tensors[0], torch.ones(5))

    world.run(main)


def test_other_shapes_are_refused_with_both_hashes(world: World) -> None:
    async def main() -> None:
        group = await mates(world, [[torch.ones(5)], [torch.ones(6)]])
        rounds = await step_all(group)
        hashes = [m.averager.schema_hash.hex() for m in group]
        for i, result in enumerate(rounds):
            assert isinstance(result.outcome, Mismatch)
            assert (result.outcome.ours, result.outcome.theirs) == (hashes[i], hashes[1 - i])
            assert result.outcome.peer == str(group[1 - i].endpoint.peer_id)
        assert [m.tensors[0].sum().item() for m in group] == [5.0, 6.0]

    world.run(main)


def test_another_codec_is_another_schema(world: World) -> None:
    async def main() -> None:
        values = [[torch.ones(5)], [torch.zeros(5)]]
        one, two = (await mates(world, values[:1]))[0], None
        endpoint = await world.endpoint(bootstrap=[one.endpoint.contact], config=CONFIG)
        two = Mate(endpoint, AveragingService(endpoint), None, values[1])  # type: ignore[arg-type]
        two.averager = Averager(two, two.tensors, "trunk", AllReduce(codec="fp16"))
        world.at_close(two.averager.aclose)
        rounds = await step_all([one, two])
        assert [type(r.outcome) for r in rounds] == [Mismatch, Mismatch]

    world.run(main)


@pytest.mark.parametrize("weights", [(1.0, 0.0, 3.0), (0.0, 0.0, 2.0)])
def test_weight_zero_only_receives(world: World, weights: tuple[float, ...]) -> None:
    async def main() -> None:
        values = random_values(3)
        group = await mates(world, copies(values))
        rounds = await step_all(group, weights)
        assert all(r.averaged and r.degraded == () for r in rounds)
        for mate in group:
            for mine, exact in zip(mate.tensors, mean_of(values, weights), strict=True):
                torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-6)

    world.run(main)


def test_all_weights_zero_keep_local_values(world: World) -> None:
    async def main() -> None:
        values = random_values(2)
        group = await mates(world, copies(values))
        rounds = await step_all(group, [0.0, 0.0])
        assert all(r.averaged for r in rounds)
        for mate, row in zip(group, values, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mate.tensors, row, strict=True))

    world.run(main)


def test_values_that_are_not_finite_are_left_out_and_named(world: World) -> None:
    async def main() -> None:
        values = random_values(3)
        group = await mates(world, copies(values))
        for tensor in group[1].tensors:
            tensor.fill_(math.nan)
        rounds = await step_all(group)
        expected = mean_of([values[0], values[2]], [1, 1])
        for mate in group:
            for mine, exact in zip(mate.tensors, expected, strict=True):
                torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-6)
        bad = group[1].endpoint.peer_id.short
        for index in (0, 2):
            assert any(bad in problem and "not finite" in problem for problem in rounds[index].degraded)
            assert group[index].endpoint.runtime.events.count(RoundDegraded) > 0

    world.run(main)


def check_chunks(
    mate: Mate, values: Sequence[Sequence[Tensor]], me: int, subsets: Sequence[Sequence[int]]
) -> list[int]:
    """Every chunk of the result is local or the mean of one of the subsets, never a mix. Counts chunks by kind."""
    rows = [torch.cat([t.reshape(-1) for t in row]) for row in values]
    mine = torch.cat([t.reshape(-1) for t in mate.tensors])
    candidates = [rows[me], *(torch.stack([rows[i] for i in subset]).mean(0) for subset in subsets)]
    counts = [0] * len(candidates)
    vector = mate.averager.vector
    parts = [len(p) for p in torch.arange(vector.numel).tensor_split(len(values))]
    start = 0
    for part in parts:
        for chunk in vector.chunks(start, start + part, 4096):
            piece = slice(chunk.start, chunk.stop)
            kinds = [k for k, c in enumerate(candidates) if torch.allclose(mine[piece], c[piece], rtol=1e-6, atol=1e-6)]
            assert len(kinds) == 1, f"chunk {chunk} is a mix"
            counts[kinds[0]] += 1
        start += part
    return counts


def large_values(count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(30_000, generator=generator)] for _ in range(count)]


def test_a_member_that_dies_in_the_exchange_costs_its_part_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        values = large_values(3)
        group = await mates(world, copies(values))
        victim = group[2]
        original = PartServer._write_averages

        async def die(self: PartServer, peer: PeerId, stream: Any) -> None:
            if self._shared.me != victim.endpoint.peer_id:
                await original(self, peer, stream)
                return
            while not self._averages:
                await self._averaged.wait()
            await stream.send(self._averages[0])
            await victim.endpoint.transport.close(grace_s=0.0)

        monkeypatch.setattr(PartServer, "_write_averages", die)
        tasks = [asyncio.create_task(m.averager.step_async()) for m in group]
        rounds = [await tasks[0], await tasks[1]]
        tasks[2].cancel()
        await asyncio.wait([tasks[2]])
        for index, result in enumerate(rounds):
            assert isinstance(result.outcome, Group)
            assert any(victim.endpoint.peer_id.short in problem for problem in result.degraded)
            local, everybody, survivors = check_chunks(group[index], values, index, [(0, 1, 2), (0, 1)])
            assert local > 0
            assert everybody + survivors > 0

    world.run(main)


def test_a_stalled_sender_is_dropped_for_what_it_did_not_send(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        values = large_values(3)
        group = await mates(world, copies(values))
        slow = group[1].endpoint.peer_id
        original = PartClient._send_values

        async def stall(self: PartClient, count: int, stream: Any) -> None:
            if self._shared.me != slow:
                await original(self, count, stream)
                return
            for index in range(2):
                await stream.send(await self._encoded(index))
            await asyncio.sleep(20)

        monkeypatch.setattr(PartClient, "_send_values", stall)
        rounds = await step_all(group)
        for index in (0, 2):
            result = rounds[index]
            assert isinstance(result.outcome, Group)
            assert result.seconds < 6
            assert any(slow.short in p and "sent nothing" in p for p in result.degraded)
            local, everybody, survivors = check_chunks(group[index], values, index, [(0, 1, 2), (0, 2)])
            assert local == 0
            assert everybody > 0 < survivors
        assert torch.equal(group[0].tensors[0], group[2].tensors[0])

    world.run(main)


def test_a_peer_that_is_gone_before_the_exchange_delays_but_does_not_fail_the_round(world: World) -> None:
    async def main() -> None:
        values = random_values(3)
        group = await mates(world, copies(values))
        await group[2].endpoint.transport.close(grace_s=0.0)
        rounds = await step_all(group[:2])
        assert [len(r.members) for r in rounds] == [2, 2]
        for mine, exact in zip(group[0].tensors, mean_of(values[:2], [1, 1]), strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-6)

    world.run(main)


def test_strangers_to_a_group_and_malformed_requests_are_refused(world: World) -> None:
    async def main() -> None:
        one, two = await mates(world, [[torch.ones(5)], [torch.ones(5)]])
        call, to = one.endpoint.transport.call, two.endpoint.contact
        with pytest.raises(NoGroupError):
            await call(to, JOIN, pb.JoinGroupRequest(key="other"))
        with pytest.raises(MalformedFrameError):
            await call(to, JOIN, pb.JoinGroupRequest(key="trunk"))
        answer = await call(to, SEAL, pb.SealGroupRequest(key="trunk", nonce=b"n" * 16))
        assert not answer.accepted
        await call(to, COMMIT, pb.CommitGroupRequest(key="trunk", nonce=b"n" * 16))
        for first, expected in ((b"\xff\xff", MalformedFrameError), (b"", NoGroupError)):
            async with one.endpoint.transport.stream(to, EXCHANGE, timeout_s=5.0) as stream:
                await stream.send(first)
                with pytest.raises(expected):
                    await stream.receive()
        assert all(r.averaged for r in await step_all([one, two]))

    world.run(main)


def test_use_errors_are_typed(world: World) -> None:
    async def main() -> None:
        (mate,) = await mates(world, [[torch.ones(5)]])
        with pytest.raises(UsageError):
            Averager(mate, [], "k", AllReduce())
        for weight in (-1.0, math.inf, math.nan):
            with pytest.raises(UsageError):
                await mate.averager.step_async(weight)
        with pytest.raises(UsageError):
            await Averager(mate, mate.tensors, "trunk", AllReduce()).open()
        running = asyncio.create_task(mate.averager.step_async())
        await asyncio.sleep(0)
        with pytest.raises(UsageError):
            await mate.averager.step_async()
        await running
        await mate.averager.aclose()
        await mate.averager.aclose()
        with pytest.raises(ClosedError):
            await mate.averager.step_async()

    world.run(main)


@pytest.mark.parametrize("looks_first", [0, 1])
def test_a_peer_that_looks_is_noticed_by_one_that_does_not(world: World, looks_first: int) -> None:
    async def main() -> None:
        one, two = await mates(world, random_values(2))
        assert not two.averager.others_waiting
        first, second = sorted((one, two), key=lambda m: priority("trunk", m.endpoint.peer_id))
        if looks_first == 0:
            first, second = second, first
        looking = asyncio.create_task(second.averager.step_async())
        while not first.averager.others_waiting:
            await asyncio.sleep(0.02)
        assert (await first.averager.step_async()).averaged
        assert (await looking).averaged

    world.run(main)
