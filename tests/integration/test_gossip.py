"""How fast gossip brings peers to their mean: measured against predicted, with failures, and under loss of messages.

The models know only who meets whom, so that many rounds of many peers are cheap. Other runs drive the whole protocol in
virtual time, where threads and latencies of a real network would hide what is measured.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from swarm.averaging.averager import Averager
from swarm.averaging.gossip import Gossip, Pairing, Partners, PushSum, Strategy, partner_of, push_targets
from swarm.averaging.pushing import PushSeat
from swarm.averaging.pushsum import Ledger
from swarm.averaging.rounds import Pushed, Round
from swarm.averaging.service import AveragingService, Seat
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.identity import PeerId
from tests.support import MemoryWorld


def peers_of(count: int) -> list[PeerId]:
    rng = random.Random(count)
    return [PeerId(rng.randbytes(32)) for _ in range(count)]


# Pairs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 63, 64])
def test_pairs_are_disjoint_and_both_sides_agree(count: int) -> None:
    peers = peers_of(count)
    seen: list[tuple[PeerId | None, ...]] = []
    for turn in range(3):
        partners = {p: partner_of(p, [q for q in peers if q != p], "trunk", turn) for p in peers}
        left_over = [p for p, q in partners.items() if q is None]
        assert len(left_over) == count % 2
        assert all(partners[q] == p for p, q in partners.items() if q is not None)
        seen.append(tuple(partners.values()))
    assert count == 2 or len(dict.fromkeys(seen)) == 3


def pair_rate(count: int, failures: float) -> float:
    """By how much a round shrinks the variance: a pair with a member that fails keeps its values."""
    intact = (1 - failures) ** 2
    return 1 - intact * (1 - (count / 2 - 1) / (count - 1))


@pytest.mark.parametrize("failures", [0.0, 0.1])
def test_pairs_halve_the_variance(failures: float) -> None:
    count, rounds, rates = 64, 8, []
    peers = peers_of(count)
    for seed in range(8):
        rng = random.Random(seed)
        values = {peer: rng.gauss(0, 1) for peer in peers}
        before = statistics.pvariance(values.values())
        for turn in range(rounds):
            absent = {peer: rng.random() < failures for peer in peers}
            for peer in peers:
                mate = partner_of(peer, peers, str(seed), turn)
                if mate is not None and peer < mate and not absent[peer] and not absent[mate]:
                    values[peer] = values[mate] = (values[peer] + values[mate]) / 2
        rates.append((statistics.pvariance(values.values()) / before) ** (1 / rounds))
    measured, expected = statistics.geometric_mean(rates), pair_rate(count, failures)
    print(f"variance per round of pairs with {failures:.0%} failures: {measured:.4f}, predicted {expected:.4f}")
    assert measured == pytest.approx(expected, rel=0.06)


def test_turns_follow_the_one_who_is_ahead_and_believe_no_nonsense() -> None:
    me, *others = peers_of(4)
    pairing = Pairing("trunk", me)
    pairing.saw(7)
    assert pairing.turn == 7
    pairing.saw(3)
    pairing.saw(1 << 60)
    pairing.advance()
    assert pairing.turn == 8
    assert pairing.partner(others) == partner_of(me, others, "trunk", 8)


# Push-sum ------------------------------------------------------------------------------------------------------------


@dataclass
class Node:
    z: float
    ledger: Ledger[float] = field(default_factory=lambda: Ledger(b"incarnat"))
    waits: float = 0.0


def push_errors(count: int, steps: int, partners: Partners, failures: float, seed: int) -> tuple[list[float], float]:
    """The largest distance from the mean after each step, and the sum of weights in the end.

    A peer that fails makes no step; shares for it come back.
    """
    rng = random.Random(seed)
    peers = peers_of(count)
    nodes = {peer: Node(rng.gauss(0, 1)) for peer in peers}
    mean = sum(node.z for node in nodes.values()) / count
    errors: list[float] = []
    for step in range(steps):
        absent = {peer: rng.random() < failures for peer in peers}
        shares = []
        for peer, node in nodes.items():
            if absent[peer]:
                continue
            ledger = node.ledger
            node.z = (ledger.weight * node.z + node.waits) / (ledger.weight + ledger.waiting)
            node.waits = 0.0
            ledger.absorb()
            others = [p for p in peers if p != peer]
            targets = push_targets(partners, peer, others, step, ledger.can_send(1), rng)
            shares += [(node, share) for share in ledger.split(targets, node.z)]
        for node, share in shares:
            receiver = node if absent[share.to] else nodes[share.to]
            receiver.waits += share.weight * share.content
            if absent[share.to]:
                node.ledger.came_back(share)
            else:
                node.ledger.delivered(share)
                receiver.ledger.arrived(share.weight)
        errors.append(max(abs(node.z - mean) for node in nodes.values()))
    return errors, sum(node.ledger.weight + node.ledger.waiting for node in nodes.values())


@pytest.mark.parametrize(("partners", "failures"), [("random", 0.0), ("random", 0.1), ("hops", 0.0), ("hops", 0.1)])
def test_the_error_of_push_sum_falls_geometrically(partners: Partners, failures: float) -> None:
    count, steps = 64, 60
    for seed in range(2):
        errors, weight = push_errors(count, steps, partners, failures, seed)
        assert weight == pytest.approx(count, abs=1e-9)
        if partners == "hops" and not failures:
            assert errors[6] < 1e-12, "after log2(N) steps a hypercube holds the exact mean"
            continue
        first, second = (errors[29] / errors[9]) ** (1 / 20), (errors[59] / errors[29]) ** (1 / 30)
        print(f"{partners}, {failures:.0%} failures: error times {first:.3f}, then {second:.3f} per step")
        assert max(first, second) < 0.85
        assert second == pytest.approx(first, rel=0.25)


# The whole protocol --------------------------------------------------------------------------------------------------


class Trainer:
    """A peer that averages one tensor."""

    def __init__(self, endpoint: Endpoint, value: Tensor, strategy: Strategy) -> None:
        self.endpoint = endpoint
        self.averaging = AveragingService(endpoint)
        self.value = value
        self.averager = Averager(self, [value], "trunk", strategy)

    @property
    def seat(self) -> PushSeat:
        assert isinstance(self.averager._seat, PushSeat)
        return self.averager._seat

    @property
    def turn(self) -> int:
        assert isinstance(self.averager._seat, Seat)
        return self.averager._seat._pairing.turn

    def mass(self) -> tuple[float, Tensor]:
        """(w, x) that this peer holds, while none of its shares is under way."""
        assert not self.seat.ledger.open
        sums = self.seat._mass._sums
        x = self.seat.ledger.weight * self.value
        return self.seat.held, x if sums is None else x + sums[0]


CONFIG = PeerConfig.preset(
    "wan",
    dht={"bucket_size": 8, "replication": 3, "call_timeout_s": 1.0},
    averaging={"matchmaking_s": 4.0, "chunk_timeout_s": 2.0, "round_timeout_s": 10.0, "share_reclaim_s": 1e4},
)


async def start(world: MemoryWorld, values: Sequence[Tensor], strategy: Strategy) -> list[Trainer]:
    rng = random.Random(world.seed)
    trainers: list[Trainer] = []
    for value in values:
        known = [t.endpoint.contact for t in rng.sample(trainers, min(2, len(trainers)))]
        endpoint = await world.endpoint(config=CONFIG, bootstrap=known)
        trainers.append(Trainer(endpoint, value, strategy))
        world.at_close(trainers[-1].averaging.close)
    await asyncio.gather(*(t.averager.open() for t in trainers))
    return trainers


def gaussians(count: int, seed: int, numel: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(count)]


def spread(values: Sequence[Tensor]) -> float:
    return float(torch.stack(list(values)).var(0, unbiased=False).mean())


@pytest.mark.parametrize("failures", [0.0, 0.1])
def test_pairs_of_the_whole_protocol_mix_as_predicted(memory_world: MemoryWorld, failures: float) -> None:
    count, rounds = 16, 6
    values, rng = gaussians(count, 1), random.Random(1)

    async def main() -> list[Round]:
        trainers = await start(memory_world, values, Gossip())
        ends: list[Round] = []
        agreed = 0
        for _ in range(rounds):
            present = [t for t in trainers if rng.random() >= failures]
            turn = max(t.turn for t in trainers)
            found = await asyncio.gather(*(t.averager.step_async() for t in present))
            for trainer, end in zip(present, found, strict=True):
                me = trainer.endpoint.peer_id
                agreed += str(partner_of(me, [t.endpoint.peer_id for t in trainers], "trunk", turn)) in end.members
            ends += found
            print("TURN", turn, [t.turn for t in trainers], agreed)
        print(f"{agreed} of {len(ends)} steps with the partner of that turn")
        assert agreed >= (0.9 if not failures else 0.6) * len(ends)
        for trainer in trainers:
            await trainer.averager.aclose()
        return ends

    before, mean = spread(values), torch.stack(values).mean(0)
    ends = memory_world.run(main)
    rate, averaged = (spread(values) / before) ** (1 / rounds), sum(end.averaged for end in ends)
    print(f"{failures:.0%} failures: variance times {rate:.3f}, {averaged} of {len(ends)} steps in a pair")
    torch.testing.assert_close(torch.stack(values).mean(0), mean, rtol=0, atol=1e-12)
    assert averaged >= (0.9 if not failures else 0.8) * len(ends)
    assert rate <= 1.25 * pair_rate(count, failures)


def test_mass_survives_the_loss_of_a_fifth_of_all_messages(memory_world: MemoryWorld) -> None:
    count, steps = 10, 20
    values = gaussians(count, 2)
    before = torch.stack(values).sum(0)

    async def main() -> tuple[list[Round], int]:
        trainers = await start(memory_world, values, PushSum())
        memory_world.network.drop_probability = 0.2
        ends: list[Round] = []
        for _ in range(steps):
            ends += await asyncio.gather(*(t.averager.step_async() for t in trainers))
            await asyncio.sleep(5)
        doubtful = sum(len(t.seat.ledger.open) for t in trainers)
        memory_world.network.drop_probability = 0.0
        while any(t.seat.ledger.open for t in trainers):
            await asyncio.sleep(1)
        masses = [t.mass() for t in trainers]
        assert sum(w for w, _ in masses) == pytest.approx(count, abs=1e-9)
        torch.testing.assert_close(torch.stack([x for _, x in masses]).sum(0), before, rtol=0, atol=1e-9)
        return ends, doubtful

    start_spread = spread(values)
    ends, doubtful = memory_world.run(main)
    pushed = [end.outcome for end in ends if isinstance(end.outcome, Pushed)]
    sent, received = sum(o.sent for o in pushed), sum(o.received for o in pushed)
    print(
        f"{sent} shares set out, {received} arrived, {doubtful} were doubtful in the end; spread {spread(values):.2g}"
    )
    assert 0.2 * sent < received < 0.95 * sent
    assert spread(values) < 0.01 * start_spread


def test_all_reach_the_mean_optimum_though_some_train_slower(memory_world: MemoryWorld) -> None:
    """Each peer minimises |z - its optimum|^2; one of four makes a third of the others' steps."""
    count = 8
    optima = gaussians(count, 3)
    values = [torch.zeros(4, dtype=torch.float64) for _ in optima]
    mean = torch.stack(optima).mean(0)

    async def train(trainer: Trainer, optimum: Tensor, pause_s: float, end_s: float) -> None:
        clock = trainer.endpoint.runtime.clock
        parameter = torch.nn.Parameter(trainer.value)  # the same memory
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        while (now := clock.time()) < end_s:
            optimizer.param_groups[0]["lr"] = 1.0 / (10.0 + now)
            optimizer.zero_grad()
            (0.5 * (parameter - optimum).square().sum()).backward()
            optimizer.step()
            await trainer.averager.step_async()
            await asyncio.sleep(pause_s * trainer.endpoint.runtime.rng.uniform(0.8, 1.2))

    async def main() -> None:
        trainers = await start(memory_world, values, PushSum())
        begin = trainers[0].endpoint.runtime.clock.time()
        speeds = [3.0 if index % 4 == 0 else 1.0 for index in range(count)]
        await asyncio.gather(*(train(t, o, s, begin + 300) for t, o, s in zip(trainers, optima, speeds, strict=True)))

    memory_world.run(main)
    errors = [float((value - mean).norm()) for value in values]
    plain = float((torch.stack(optima) - mean).norm(dim=1).mean())
    fast = torch.stack([o for i, o in enumerate(optima) if i % 4]).mean(0)
    print(
        f"errors {min(errors):.3f} to {max(errors):.3f}; optima are {plain:.2f} apart, the fast ones' mean is "
        f"{float((fast - mean).norm()):.2f} away"
    )
    assert max(errors) < 0.1 * plain
