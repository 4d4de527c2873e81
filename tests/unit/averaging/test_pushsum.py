"""Push-sum's bookkeeping: mass is conserved whatever the network loses, repeats, delays or reorders."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from swarm.averaging.pushsum import (
    FATES_PER_SENDER,
    LEAST_WEIGHT,
    MAX_INCARNATIONS,
    MAX_OPEN,
    MAX_WAITING,
    Ledger,
    Receipts,
    Share,
    Tag,
)
from swarm.identity import PeerId

KEEP_S = 1e9


def peer_of(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


A, B = peer_of(1), peer_of(2)


@dataclass
class Node:
    """A peer of the model: one number z, and the sum of w z of what waits."""

    peer: PeerId
    z: float
    ledger: Ledger[float]
    receipts: Receipts = field(default_factory=lambda: Receipts(KEEP_S))
    waits: float = 0.0

    @property
    def held(self) -> tuple[float, float]:
        """(w, x) that is here, without what is under way."""
        return self.ledger.weight + self.ledger.waiting, self.ledger.weight * self.z + self.waits

    def step(self, to: list[PeerId]) -> list[Share[float]]:
        total = self.ledger.weight + self.ledger.waiting
        self.z = (self.ledger.weight * self.z + self.waits) / total
        self.waits = 0.0
        self.ledger.absorb()
        return self.ledger.split(to[: self.ledger.can_send(len(to))], self.z)


class Swarm:
    """Peers that push shares over a network that loses, repeats and reorders messages, both ways."""

    def __init__(self, seed: int, peers: int, loss: float = 0.2) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.nodes = [Node(peer_of(i), self.rng.gauss(0, 3), Ledger(self.rng.randbytes(8))) for i in range(peers)]
        self.start = (float(peers), sum(node.z for node in self.nodes))
        self.travelling: list[tuple[str, PeerId, Share[float], bool]] = []
        self.counted: Counter[Tag] = Counter()

    def post(self, kind: str, sender: PeerId, share: Share[float], answer: bool = False) -> None:
        for _ in range(1 + (self.rng.random() < 0.2)):
            if self.rng.random() >= self.loss:
                self.travelling.append((kind, sender, share, answer))

    def node(self, peer: PeerId) -> Node:
        return self.nodes[int.from_bytes(peer.digest, "big")]

    def deliver(self) -> None:
        kind, peer, share, answer = self.travelling.pop(self.rng.randrange(len(self.travelling)))
        receiver, sender = self.node(share.to), self.node(peer)
        if kind == "share":
            if receiver.receipts.admits(peer, share.tag, share.settled_below, 0.0) and receiver.receipts.take(
                peer, share.tag, 0.0
            ):
                receiver.waits += share.weight * share.content
                receiver.ledger.arrived(share.weight)
                self.counted[share.tag] += 1
                self.post("answer", peer, share, True)
            else:
                self.ask(peer, share)
        elif kind == "question":
            fate = receiver.receipts.fate(peer, share.tag, 0.0)
            if fate is not None:
                self.post("answer", peer, share, fate)
        elif answer:
            sender.ledger.delivered(share)
        elif sender.ledger.came_back(share):
            sender.waits += share.weight * share.content

    def ask(self, peer: PeerId, share: Share[float]) -> None:
        self.post("question", peer, share)

    def act(self) -> None:
        node = self.rng.choice(self.nodes)
        if self.rng.random() < 0.5:
            others = [n.peer for n in self.nodes if n is not node]
            for share in node.step(self.rng.sample(others, self.rng.randint(1, min(3, len(others))))):
                self.post("share", node.peer, share)
        elif node.ledger.open:
            self.ask(node.peer, self.rng.choice(node.ledger.open))

    def total(self) -> tuple[float, float]:
        """(sum of w, sum of x) over held, and over open shares that did not count at their receiver."""
        held = [node.held for node in self.nodes]
        lost = [s for node in self.nodes for s in node.ledger.open if not self.counted[s.tag]]
        return (
            sum(w for w, _ in held) + sum(s.weight for s in lost),
            sum(x for _, x in held) + sum(s.weight * s.content for s in lost),
        )

    def run(self, events: int) -> None:
        for _ in range(events):
            if self.travelling and self.rng.random() < 0.6:
                self.deliver()
            else:
                self.act()
            (w, x), (start_w, start_x) = self.total(), self.start
            assert abs(w - start_w) < 1e-9
            assert abs(x - start_x) < 1e-9

    def settle(self) -> None:
        """Everybody asks until every fate is known."""
        for _ in range(400):
            for node in self.nodes:
                for share in node.ledger.open:
                    self.ask(node.peer, share)
            while self.travelling:
                self.deliver()
            if not any(node.ledger.open for node in self.nodes):
                return
        pytest.fail("some shares' fates were never known")


def test_mass_is_conserved_under_loss_repetition_and_reordering() -> None:
    for seed in range(2000):
        swarm = Swarm(seed, 2 + seed % 5)
        swarm.run(40)
        swarm.settle()
        held = [node.held for node in swarm.nodes]
        assert sum(w for w, _ in held) == pytest.approx(swarm.start[0], abs=1e-9)
        assert sum(x for _, x in held) == pytest.approx(swarm.start[1], abs=1e-9)
        assert set(swarm.counted.values()) <= {1}


def test_everybody_reaches_the_mean_under_loss() -> None:
    swarm = Swarm(7, 8)
    for _ in range(200):
        for node in swarm.nodes:
            others = [n.peer for n in swarm.nodes if n is not node]
            for share in node.step([swarm.rng.choice(others)]):
                swarm.post("share", node.peer, share)
        swarm.settle()
    mean = swarm.start[1] / swarm.start[0]
    for node in swarm.nodes:
        node.step([])
        assert node.z == pytest.approx(mean, abs=1e-6)


def test_a_share_that_was_asked_about_before_it_arrived_is_refused() -> None:
    receipts, tag = Receipts(KEEP_S), Tag(b"incarnat", 3)
    assert receipts.admits(A, tag, 0, 0.0)
    assert receipts.fate(A, tag, 0.0) is False
    assert not receipts.admits(A, tag, 0, 0.0)
    assert not receipts.take(A, tag, 0.0)
    assert receipts.fate(A, tag, 0.0) is False


def test_a_share_counts_once_and_stays_counted() -> None:
    receipts, tag = Receipts(KEEP_S), Tag(b"incarnat", 3)
    assert receipts.take(A, tag, 0.0)
    assert not receipts.take(A, tag, 0.0)
    assert receipts.fate(A, tag, 0.0) is True
    assert receipts.fate(B, tag, 0.0) is False, "ids are the sender's own"
    assert receipts.admits(A, Tag(b"incarnat", 9), 9, 0.0)
    assert not receipts.take(A, tag, 0.0), "a repetition of what the sender has settled"
    assert receipts.fate(A, tag, 0.0) is None


def test_memory_of_shares_is_bounded_and_an_old_question_is_still_answered() -> None:
    receipts = Receipts(keep_s=10.0)
    taken = [n for n in range(10, 200) if receipts.take(A, Tag(b"incarnat", n), 0.0)]
    assert len(taken) == FATES_PER_SENDER
    assert receipts.fate(A, Tag(b"incarnat", 5), 0.0) is False, "questions have room of their own"
    others = [receipts.admits(A, Tag(i.to_bytes(8, "big"), 0), 0, 0.0) for i in range(20)]
    assert sum(others) == MAX_INCARNATIONS - 1
    assert receipts.admits(A, Tag(b"returned", 0), 0, 10.5), "what was idle for long is forgotten"


def test_a_ledger_sends_no_more_than_may_be_open_and_keeps_the_least() -> None:
    ledger: Ledger[None] = Ledger(b"incarnat")
    for _ in range(MAX_OPEN):
        assert ledger.can_send(3) >= 1
        ledger.split([B], None)
    assert ledger.can_send(3) == 0
    assert ledger.weight + ledger.under_way == 1.0
    assert [s.settled_below for s in ledger.open] == [0] * MAX_OPEN
    assert not ledger.came_back(Share(Tag(b"incarnat", 99), B, 1.0, None, 0))
    for share in ledger.open:
        assert ledger.came_back(share)
        assert not ledger.came_back(share)
        assert not ledger.delivered(share)
    assert ledger.absorb() == 0
    assert ledger.weight == 1.0
    while ledger.can_send(1):
        (share,) = ledger.split([B], None)
        assert ledger.delivered(share)
    assert LEAST_WEIGHT / 2 <= ledger.weight < LEAST_WEIGHT


def test_giving_everything_away_leaves_nothing() -> None:
    ledger: Ledger[None] = Ledger(b"incarnat", 0.75)
    (share,) = ledger.split([B], None, keep=False)
    assert (ledger.weight, share.weight) == (0.0, 0.75)


def test_a_peer_that_does_not_step_is_full_at_some_point() -> None:
    ledger: Ledger[None] = Ledger(b"incarnat")
    for _ in range(MAX_WAITING):
        assert not ledger.full
        ledger.arrived(0.5)
    assert ledger.full
    assert ledger.absorb() == MAX_WAITING
    assert not ledger.full


def test_a_reclaimed_share_that_counted_after_all_counts_twice_and_no_more() -> None:
    sender: Ledger[None] = Ledger(b"incarnat")
    receiver, receipts = Ledger[None](b"another "), Receipts(KEEP_S)
    (share,) = sender.split([B], None)
    assert receipts.take(A, share.tag, 0.0)
    receiver.arrived(share.weight)
    assert sender.came_back(share), "the receiver was silent for too long"
    total = sender.weight + sender.waiting + receiver.weight + receiver.waiting
    assert total == 2 + share.weight
    assert not receipts.take(A, share.tag, 0.0)
