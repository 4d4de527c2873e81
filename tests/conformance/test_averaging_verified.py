"""Parts that two members reduce, on both transports: what a lying reducer, checker or sender achieves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.averaging.allreduce import AllReduce, Reduced
from swarm.averaging.checking import CheckClient, CheckServer
from swarm.averaging.probation import Offence, PeerOnProbation
from swarm.averaging.reducing import PartServer
from swarm.averaging.robust import CenteredClip
from swarm.averaging.rounds import Round, RoundDegraded
from swarm.averaging.service import AveragingService
from swarm.averaging.shared import Part, Shared
from swarm.averaging.verification import Finding, Input, Statement, Verdict
from swarm.config import PeerConfig
from swarm.identity import PeerId
from tests.conformance.test_averaging import CONFIG, Mate, copies, mates, mean_of, random_values, step_all
from tests.support import World

PATIENT = PeerConfig.preset(
    "local",
    averaging={"matchmaking_s": 20.0, "chunk_timeout_s": 10.0, "round_timeout_s": 30.0, "chunk_bytes": 4096},
)


def verified(members: int, **options: Any) -> AllReduce:
    return AllReduce(members, members, verify_parts=True, **options)


async def group_of(
    world: World, values: list[list[Tensor]], config: PeerConfig = PATIENT, **options: Any
) -> list[Mate]:
    return await mates(world, copies(values), verified(len(values), **options), config)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PeerId, PeerId, Offence]]:
    """Who told on whom, and what for."""
    found: list[tuple[PeerId, PeerId, Offence]] = []
    before = AveragingService.report

    def report(self: AveragingService, peer: PeerId, offence: Offence, detail: str = "") -> None:
        found.append((self.endpoint.peer_id, peer, offence))
        before(self, peer, offence, detail)

    monkeypatch.setattr(AveragingService, "report", report)
    return found


async def all_together(group: list[Mate]) -> list[Round]:
    rounds = await step_all(group)
    assert [len(end.members) for end in rounds] == [len(group)] * len(group)
    return rounds


def outcome(mate: Mate, before: list[Tensor], exact: list[Tensor]) -> tuple[int, int]:
    """How many elements hold the mean and how many their local values; all others would be lies."""
    mine, own, mean = (torch.cat([t.flatten() for t in tensors]) for tensors in (mate.tensors, before, exact))
    right, local = torch.isclose(mine, mean, rtol=1e-5, atol=1e-5), mine == own
    assert bool((right | local).all()), "a lie was applied"
    return int(right.sum()), int((local & ~right).sum())


@pytest.mark.parametrize("options", [{}, {"reducer": CenteredClip(), "codec": "bf16"}], ids=["mean", "clip"])
def test_honest_members_confirm_each_other(world: World, options: dict[str, Any], told: list[Any]) -> None:
    async def main() -> None:
        values = random_values(3)
        group = await group_of(world, values, **options)
        strategy = verified(3, **options)
        rounds = await all_together(group)
        assert all(r.averaged and r.degraded == () and not r.diverged for r in rounds)
        for mate in group:
            assert all(torch.equal(a, b) for a, b in zip(mate.tensors, group[0].tensors, strict=True))
        if strategy.reducer == "mean":
            assert outcome(group[0], values[0], mean_of(values, [1, 1, 1]))[1] == 0
        plain = sum(t.numel() for t in values[0]) * (2 if strategy.codec == "bf16" else 4)
        sent = sum(r.bytes_sent for r in rounds)
        # up to reducers and to checkers, averages down; a checker's or reducer's own values do not travel to itself
        assert 6 * plain <= sent < 1.1 * 6 * plain
        assert told == []

    world.run(main)


def lying(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, who: list[PeerId], lie: Callable[..., Any]) -> None:
    """Have the listed members pass what a method returns through `lie`."""
    before = getattr(owner, name)

    def method(self: Any, *args: Any) -> Any:
        answer = before(self, *args)
        return lie(answer) if self._shared.me in who else answer

    monkeypatch.setattr(owner, name, method)


def a_false_average(answer: tuple[Reduced, Statement]) -> tuple[Reduced, Statement]:
    reduced, statement = answer
    values = torch.frombuffer(bytearray(reduced.encoded or b""), dtype=torch.float32)
    return Reduced(bytes((values + 0.01).numpy().tobytes()), reduced.contributors), statement


def test_the_averages_of_a_lying_reducer_are_not_applied(
    world: World, monkeypatch: pytest.MonkeyPatch, told: list[tuple[PeerId, PeerId, Offence]]
) -> None:
    async def main() -> None:
        values = random_values(4)
        group = await group_of(world, values)
        liar = group[1].endpoint.peer_id
        lying(monkeypatch, PartServer, "_reduce_stated", [liar], a_false_average)
        rounds = await all_together(group)
        exact = mean_of(values, [1] * 4)
        order = [str(m) for m in rounds[0].members]
        checker = PeerId.parse(order[(order.index(str(liar)) + 1) % 4])
        for mate, own, end in zip(group, values, rounds, strict=True):
            right, local = outcome(mate, own, exact)
            assert local > 0
            assert right > 2 * local, "the other parts are averaged"
            assert not end.diverged
            if mate.endpoint.peer_id != liar:
                problem = next(p for p in end.degraded if liar.short in p)
                assert checker.short in problem
                assert "keep local values" in problem
                assert mate.endpoint.runtime.events.count(RoundDegraded) > 0
        assert (checker, liar, Offence.LIED) in told
        honest = [m.endpoint.peer_id for m in group if m.endpoint.peer_id not in (liar, checker)]
        for peer in honest:
            assert {(suspect, o) for me, suspect, o in told if me == peer} == {
                (liar, Offence.DISPUTED),
                (checker, Offence.DISPUTED),
            }
        by_checker = next(m for m in group if m.endpoint.peer_id == checker)
        assert by_checker.endpoint.runtime.events.count(PeerOnProbation) == 1

    world.run(main)


def test_a_reducer_that_tells_its_checker_the_truth_and_others_a_lie_is_found_out(
    world: World, monkeypatch: pytest.MonkeyPatch, told: list[tuple[PeerId, PeerId, Offence]]
) -> None:
    async def main() -> None:
        values = random_values(3)
        group = await group_of(world, values)
        liar = group[0].endpoint.peer_id
        before = PartServer._write_averages

        async def write(self: PartServer, peer: PeerId, stream: Any) -> None:
            members = [m.peer_id for m in self._shared.seal.members]
            checker = members[(members.index(self._shared.me) + 1) % 3]
            if self._shared.me == liar and peer != checker:
                send = stream.send

                async def altered(data: bytes) -> None:
                    if len(data) % 4 == 0 and len(data) > 64:
                        values = torch.frombuffer(bytearray(data), dtype=torch.float32) * 2
                        data = values.numpy().tobytes()
                    await send(data)

                monkeypatch.setattr(stream, "send", altered)
            await before(self, peer, stream)

        monkeypatch.setattr(PartServer, "_write_averages", write)
        rounds = await all_together(group)
        exact = mean_of(values, [1] * 3)
        for mate, own in zip(group, values, strict=True):
            outcome(mate, own, exact)
        assert any("given another average" in p for end in rounds for p in end.degraded)
        assert any(peer == liar for _, peer, _ in told)
        assert any(end.diverged for end in rounds), "the deceived member knows that others hold the average"

    world.run(main)


def test_a_checker_that_refutes_what_is_true_is_known_to_the_reducer(
    world: World, monkeypatch: pytest.MonkeyPatch, told: list[tuple[PeerId, PeerId, Offence]]
) -> None:
    async def main() -> None:
        values = random_values(3)
        group = await group_of(world, values)
        liar = group[2].endpoint.peer_id
        lying(monkeypatch, CheckServer, "_verdict", [liar], lambda v: Verdict(Finding.REFUTED, v.about))
        rounds = await all_together(group)
        order = list(rounds[0].members)
        reducer = PeerId.parse(order[order.index(str(liar)) - 1])
        for mate, own in zip(group, values, strict=True):
            right, local = outcome(mate, own, mean_of(values, [1] * 3))
            assert right > local > 0
        assert (reducer, liar, Offence.LIED) in told
        assert not any(offence is Offence.LIED and suspect != liar for me, suspect, offence in told if me != liar)

    world.run(main)


def test_a_sender_that_tells_reducer_and_checker_different_things_makes_nobody_a_liar(
    world: World, monkeypatch: pytest.MonkeyPatch, told: list[tuple[PeerId, PeerId, Offence]]
) -> None:
    async def main() -> None:
        values = random_values(4)
        group = await group_of(world, values)
        liar = group[3].endpoint.peer_id
        before = CheckClient.talk

        async def talk(self: CheckClient) -> None:
            if self._shared.me == liar:
                encode = Shared.encode

                class Two(Shared):
                    def encode(self, part: Part, index: int) -> bytes:
                        return bytes(len(encode(self, part, index)))

                self._shared = _as(self._shared, Two)
            await before(self)

        monkeypatch.setattr(CheckClient, "talk", talk)
        await all_together(group)
        for mate, own in zip(group, values, strict=True):
            outcome(mate, own, mean_of(values, [1] * 4))
        assert not any(offence is Offence.LIED for me, _, offence in told if me != liar)
        for mate in group[:3]:
            me = mate.endpoint.peer_id
            suspected = [suspect for by, suspect, _ in told if by == me]
            assert suspected.count(liar) == max(suspected.count(s) for s in suspected) >= 3
            assert set(mate.averaging.probation.current(mate.endpoint.runtime.clock.time())) <= {liar}

    world.run(main)


def _as(shared: Shared, kind: type[Shared]) -> Shared:
    """The same exchange with other methods."""
    other = object.__new__(kind)
    for name in Shared.__slots__:  # type: ignore[attr-defined]
        setattr(other, name, getattr(shared, name))
    return other


def test_a_member_whose_values_are_misstated_knows_who_lies(
    world: World, monkeypatch: pytest.MonkeyPatch, told: list[tuple[PeerId, PeerId, Offence]]
) -> None:
    async def main() -> None:
        values = random_values(3)
        group = await group_of(world, values)
        liar = group[1].endpoint.peer_id

        def misstated(answer: tuple[Reduced, Statement]) -> tuple[Reduced, Statement]:
            reduced, statement = answer
            return reduced, Statement(tuple(Input(i.place, i.weight, bytes(16)) for i in statement.inputs))

        lying(monkeypatch, PartServer, "_reduce_stated", [liar], misstated)
        await all_together(group)
        for mate, own in zip(group, values, strict=True):
            outcome(mate, own, mean_of(values, [1] * 3))
            if mate is not group[1]:
                assert (mate.endpoint.peer_id, liar, Offence.LIED) in told

    world.run(main)


def test_a_checker_that_dies_leaves_local_values(memory_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in virtual time: it waits for deadlines."""

    async def main() -> None:
        values = random_values(3)
        group = await group_of(memory_world, values, CONFIG)
        silent = group[0].endpoint.peer_id

        async def serve(self: CheckServer, *args: Any) -> None:
            await asyncio.sleep(20)

        before = CheckServer.serve

        async def maybe(self: CheckServer, *args: Any) -> None:
            await (serve if self._shared.me == silent else before)(self, *args)

        monkeypatch.setattr(CheckServer, "serve", maybe)
        rounds = await all_together(group)
        for mate, own, end in zip(group, values, rounds, strict=True):
            outcome(mate, own, mean_of(values, [1] * 3))
            assert end.seconds < 8
        assert any("did not check" in p for end in rounds for p in end.degraded)

    memory_world.run(main)
