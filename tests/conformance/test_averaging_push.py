"""Push-sum on both transports: shares travel, come back when they must, and count once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.averaging.averager import Averager
from swarm.averaging.delivery import FATE, PUSH
from swarm.averaging.gossip import PushSum
from swarm.averaging.probation import PeerOnProbation
from swarm.averaging.pushing import PushSeat
from swarm.averaging.pushsum import MAX_WAITING
from swarm.averaging.rounds import Alone, MassHandedOver, MassLost, Pushed, Round, ShareReclaimed, TooFew
from swarm.averaging.service import AveragingService
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.errors import CallTimeoutError, ConnectionLostError
from swarm.net.transport import ByteStream
from swarm.pb import averaging_pb2 as pb
from tests.support import World, eventually

CONFIG = PeerConfig.preset(
    "local",
    averaging={"chunk_timeout_s": 0.5, "round_timeout_s": 3.0, "chunk_bytes": 256 * 1024, "share_reclaim_s": 0.9},
)


class Mate:
    """A peer with one averager."""

    def __init__(self, endpoint: Endpoint, tensors: Sequence[Tensor], strategy: PushSum, key: str) -> None:
        self.endpoint = endpoint
        self.averaging = AveragingService(endpoint)
        self.tensors = list(tensors)
        self.averager = Averager(self, self.tensors, key, strategy)

    @property
    def seat(self) -> PushSeat:
        assert isinstance(self.averager._seat, PushSeat)
        return self.averager._seat

    def flat(self) -> Tensor:
        return torch.cat([t.detach().double().reshape(-1) for t in self.tensors])

    def mass(self) -> tuple[float, Tensor]:
        """(w, x) that this peer holds; only while none of its shares is under way."""
        assert not self.seat.ledger.open
        x = self.seat.ledger.weight * self.flat()
        sums = self.seat._mass._sums
        return self.seat.held, x if sums is None else x + torch.cat([s.double() for s in sums])


async def mates(
    world: World,
    values: Sequence[Sequence[Tensor]],
    strategy: PushSum | None = None,
    config: PeerConfig = CONFIG,
    key: str = "trunk",
) -> list[Mate]:
    found: list[Mate] = []
    for tensors in values:
        known = [found[0].endpoint.contact] if found else []
        endpoint = await world.endpoint(bootstrap=known, config=config)
        mate = Mate(endpoint, [t.clone() for t in tensors], strategy or PushSum(), key)
        await mate.averager.open()
        world.at_close(mate.averager.aclose)
        found.append(mate)
    return found


def random_values(count: int, dtype: torch.dtype = torch.float32, numel: int = 2500) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(s, generator=generator).to(dtype) for s in ((31, 67), (), (numel,))] for _ in range(count)]


async def settled(group: Sequence[Mate]) -> None:
    await eventually(lambda: not any(mate.seat.ledger.open for mate in group))


def total(group: Sequence[Mate]) -> tuple[float, Tensor]:
    masses = [mate.mass() for mate in group]
    return sum(w for w, _ in masses), torch.stack([x for _, x in masses]).sum(0)


@pytest.mark.parametrize("partners", ["random", "hops"])
def test_all_reach_the_mean_and_mass_is_conserved(world: World, partners: Any) -> None:
    async def main() -> None:
        values = random_values(4, torch.float64)
        group = await mates(world, values, PushSum(partners=partners))
        weight, sums = total(group)
        for step in range(24):
            ends = [await mate.averager.step_async() for mate in group]
            assert all(isinstance(end.outcome, Pushed) and end.degraded == () for end in ends)
            await settled(group)
            if step == 3:
                assert sum(end.bytes_received for end in ends) > 0 < sum(end.bytes_sent for end in ends)
                assert all(end.members[0] == str(m.endpoint.peer_id) for end, m in zip(ends, group, strict=True))
        w, x = total(group)
        assert w == pytest.approx(weight, abs=1e-9) == 4.0
        torch.testing.assert_close(x, sums, rtol=0, atol=1e-9)
        mean = sums / 4
        apart = max(float((mate.flat() - mean).abs().max()) for mate in group)
        assert apart < (1e-2 if partners == "random" else 1e-4)

    world.run(main)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_what_a_codec_leaves_out_stays_with_the_sender(world: World, codec: str) -> None:
    async def main() -> None:
        group = await mates(world, random_values(3, torch.float64), PushSum(codec=codec, peers=2))
        weight, sums = total(group)
        for _ in range(10):
            for mate in group:
                await mate.averager.step_async()
            await settled(group)
        w, x = total(group)
        assert w == pytest.approx(weight, abs=1e-9)
        # int8 computes in fp32; one rounding to bf16 alone is a thousand times larger.
        torch.testing.assert_close(x, sums, rtol=0, atol=1e-9 if codec == "bf16" else 1e-5)
        for mate in group:
            torch.testing.assert_close(mate.flat(), sums / 3, rtol=0, atol=0.1)

    world.run(main)


def test_shares_of_several_messages_and_dtypes_arrive(world: World) -> None:
    async def main() -> None:
        values = [[*row, row[0].to(torch.bfloat16)] for row in random_values(2, numel=400_000)]
        group = await mates(world, values)
        await group[0].averager.step_async()
        await settled(group[:1])
        await group[1].averager.step_async()
        assert group[1].seat.ledger.weight == 0.75
        expected = (torch.cat([t.double().reshape(-1) for t in values[1]]) + 0.5 * group[0].flat()) / 1.5
        torch.testing.assert_close(group[1].flat(), expected, rtol=1e-2, atol=1e-2)
        assert torch.equal(group[0].tensors[0], values[0][0]), "giving away changes nothing here"

    world.run(main)


def test_a_lone_peer_is_alone_and_an_unreachable_one_keeps_its_mass(world: World) -> None:
    async def main() -> None:
        (alone,) = await mates(world, random_values(1))
        assert (await alone.averager.step_async()).outcome == Alone()
        quiet = CONFIG.model_copy(update={"averaging": CONFIG.averaging.model_copy(update={"sends_only": True})})
        pair = await mates(world, random_values(2), config=quiet, key="other")
        outcome = (await pair[0].averager.step_async()).outcome
        assert isinstance(outcome, TooFew)
        assert "reach" in outcome.reason
        assert pair[0].seat.ledger.weight == 1.0

    world.run(main)


def test_a_refused_share_comes_back(world: World) -> None:
    async def main() -> None:
        one, other = await mates(world, random_values(2))
        before = one.flat()
        for _ in range(MAX_WAITING):
            other.seat.ledger.arrived(0.0)
        await one.averager.step_async()
        await settled([one])
        end = await one.averager.step_async()
        assert any("came back: too many shares wait" in problem for problem in end.degraded)
        assert end.outcome == Pushed(0, 0, 1.0), "who did not take a share is left alone for a moment"
        assert isinstance((await one.averager.step_async()).outcome, TooFew)
        assert one.seat.ledger.weight == 1.0
        torch.testing.assert_close(one.flat(), before)

    world.run(main)


def test_other_tensors_are_refused_with_both_hashes(world: World) -> None:
    async def main() -> None:
        one, other = await mates(world, [[torch.ones(3)], [torch.ones(4)]])
        await one.averager.step_async()
        await settled([one])
        end = await one.averager.step_async()
        (problem,) = end.degraded
        assert one.averager.schema_hash.hex()[:16] in problem
        assert other.averager.schema_hash.hex()[:16] in problem
        assert one.seat.held == 1.0

    world.run(main)


@pytest.mark.parametrize("counted", [True, False])
def test_without_an_answer_the_receiver_is_asked(world: World, monkeypatch: pytest.MonkeyPatch, counted: bool) -> None:
    async def main() -> None:
        one, other = await mates(world, random_values(2, torch.float64))
        weight, sums = total([one, other])
        receive, original = PushSeat.serve, PushSeat._take

        async def mute(self: PushSeat, sender: Any, hello: pb.ShareHello, stream: ByteStream) -> None:
            class Broken:
                receive = stream.receive

                async def send(self, _: bytes) -> None:
                    raise ConnectionLostError("the answer is lost")

            await receive(self, sender, hello, Broken())  # type: ignore[arg-type]

        async def late(self: PushSeat, *args: Any) -> bool:
            return await original(self, *args) if counted else False

        monkeypatch.setattr(PushSeat, "serve", mute)
        monkeypatch.setattr(PushSeat, "_take", late)
        await one.averager.step_async()
        await settled([one])
        w, x = total([one, other])
        assert w == weight
        torch.testing.assert_close(x, sums, rtol=0, atol=1e-12)
        assert other.seat.held == (1.5 if counted else 1.0)
        assert one.seat.held == (0.5 if counted else 1.0)
        end = await one.averager.step_async()
        assert bool(end.degraded) is not counted

    world.run(main)


def test_a_share_for_a_peer_that_is_silent_for_good_is_reclaimed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        one, other = await mates(world, random_values(2))
        before = one.flat()

        async def stall(*_: Any) -> None:
            await asyncio.sleep(30)

        async def no_answer(*_: Any) -> None:
            raise CallTimeoutError("nothing")

        other.endpoint.transport.serve_stream(PUSH, stall)
        other.endpoint.transport.serve(FATE, no_answer)
        begun = one.endpoint.runtime.clock.time()
        await one.averager.step_async()
        assert one.seat.ledger.weight == 0.5
        await settled([one])
        assert one.endpoint.runtime.clock.time() - begun < CONFIG.averaging.share_reclaim_s + 1.5
        assert one.endpoint.runtime.events.count(ShareReclaimed) == 1
        await one.averager.step_async()
        assert one.seat.ledger.weight == 1.0
        torch.testing.assert_close(one.flat(), before)

    world.run(main)


@pytest.mark.parametrize(
    ("weight", "value"), [(math.nan, 1.0), (0.0, 1.0), (-1.0, 1.0), (1e6, 1.0), (math.inf, 1.0), (0.5, math.nan)]
)
def test_absurd_shares_are_refused_and_their_sender_put_on_probation(world: World, weight: float, value: float) -> None:
    async def main() -> None:
        one, other = await mates(world, [[torch.full((5,), value)], [torch.ones(5)]])
        one.seat.ledger.weight = 2 * weight
        one.seat.ledger.can_send = lambda count: count  # type: ignore[method-assign]
        await one.averager.step_async()
        await settled([one])
        assert other.endpoint.runtime.events.count(PeerOnProbation) == 1
        end = await other.averager.step_async()
        assert any("was refused" in problem for problem in end.degraded)
        assert isinstance(end.outcome, TooFew), "nothing goes to a peer on probation"
        assert other.seat.held == 1.0
        assert torch.equal(other.tensors[0], torch.ones(5))
        one.averager._closed = True  # what it holds is nothing to hand over

    world.run(main)


def test_a_leaving_peer_hands_over_what_it_holds(world: World) -> None:
    async def main() -> None:
        group = await mates(world, random_values(3, torch.float64))
        weight, sums = total(group)
        for mate in group:
            await mate.averager.step_async()
        await settled(group)
        leaver, *rest = group
        await leaver.averager.aclose()
        assert leaver.endpoint.runtime.events.count(MassHandedOver) == 1
        assert leaver.endpoint.runtime.events.count(MassLost) == 0
        w, x = total(rest)
        assert w == pytest.approx(weight, abs=1e-12)
        torch.testing.assert_close(x, sums, rtol=0, atol=1e-9)

    world.run(main)


def test_the_last_peer_to_leave_says_that_nobody_took_over(world: World) -> None:
    async def main() -> None:
        (one,) = await mates(world, random_values(1))
        await one.averager.aclose()
        assert one.endpoint.runtime.events.count(MassLost) == 1

    world.run(main)


def test_a_late_joiner_brings_its_own_values(world: World) -> None:
    async def main() -> None:
        values = random_values(3, torch.float64)
        group = await mates(world, values[:2])
        for mate in group:
            await mate.averager.step_async()
        endpoint = await world.endpoint(bootstrap=[group[0].endpoint.contact], config=CONFIG)
        late = Mate(endpoint, [t.clone() for t in values[2]], PushSum(), "trunk")
        await late.averager.open()
        world.at_close(late.averager.aclose)
        await settled(group)
        w, x = total([*group, late])
        assert w == pytest.approx(3.0, abs=1e-12)
        expected = sum(torch.cat([t.reshape(-1) for t in row]) for row in values)
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-9)  # type: ignore[arg-type]
        end: Round = await late.averager.step_async()
        assert isinstance(end.outcome, Pushed)

    world.run(main)


def test_what_comes_back_reaches_tensors_that_a_round_works_on_a_copy_of(world: World) -> None:
    async def main() -> None:
        one, other = await mates(world, [[torch.ones(6)[::2]], [torch.ones(3)]])
        one.tensors[0] = torch.ones(6)[::2]  # not contiguous: averaged in a copy
        await one.averager.aclose()
        one.averager = Averager(one, one.tensors, "trunk", PushSum())
        await one.averager.open()
        world.at_close(one.averager.aclose)
        for _ in range(MAX_WAITING):
            other.seat.ledger.arrived(0.0)
        await one.averager.step_async()
        await settled([one])
        one.tensors[0].fill_(3.0)
        one.seat._stepped_at = -1e9  # it was here for no time compared with that: nothing moves along
        await one.averager.step_async()
        torch.testing.assert_close(one.tensors[0], torch.full((3,), 2.0), rtol=1e-3, atol=1e-3)

    world.run(main)


def test_receipts_of_keys_that_are_used_no_more_are_forgotten_in_time(memory_world: World) -> None:
    # In virtual time: what must be remembered is, for a while.
    async def main() -> None:
        one, other = await mates(memory_world, random_values(2), key="first")
        await one.averager.step_async()
        await settled([one, other])
        await other.averager.aclose()
        keep_s = 2 * (CONFIG.averaging.share_reclaim_s + CONFIG.averaging.round_timeout_s)
        for later_s, remembered in ((0.5 * keep_s, ["first", "0"]), (keep_s, ["1"])):
            await asyncio.sleep(later_s)
            key = remembered[-1]
            averager = Averager(other, other.tensors, key, PushSum())
            await averager.open()
            assert list(other.averaging._receipts) == remembered
            await averager.aclose()

    memory_world.run(main)
