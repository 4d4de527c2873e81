"""A model of matchmaking: matchmakers without a network, driven through generated orders of everything that can happen.

A `Plan` is drawn from a seed; `Net` plays it in virtual time and checks what must hold at every step and at the end.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.averaging.decisions import (
    AnswerJoin,
    AnswerSeal,
    AskFailed,
    AskJoin,
    Begin,
    Committed,
    Concluded,
    Hinted,
    JoinAnswered,
    JoinAsked,
    MatchEvent,
    Nudge,
    OfferSeal,
    Released,
    SealAnswered,
    SealOffered,
    SendCommit,
    SendRelease,
    Terms,
    Tick,
    Timing,
    Verdict,
)
from swarm.averaging.gossip import Pairing
from swarm.averaging.matchmaking import Matchmaker
from swarm.averaging.rounds import Member, Mismatch, Seal
from swarm.averaging.seals import declared
from swarm.averaging.search import Phase
from swarm.averaging.view import priority
from swarm.identity import PeerId

KEY = "trunk"
TIMING = Timing(window_s=4.0, poll_s=0.2, settle_s=0.4, answer_s=1.0, check_s=0.5)
SCHEMA = b"s" * 32
OTHER_SCHEMA = b"t" * 32
NUMEL = 1000


def peer_ids(count: int) -> list[PeerId]:
    """Ids in ascending order of their priority numbers."""
    ids = [PeerId(bytes([i]) * 32) for i in range(count)]
    return sorted(ids, key=lambda peer: priority(KEY, peer))


@dataclass(frozen=True)
class Plan:
    """What happens in one run of the model."""

    seed: int
    count: int = 4
    min_group: int = 2
    max_group: int = 16
    spread_s: float = 0.0
    """Peers begin at random within this time."""
    rounds: int = 1
    """Searches of each peer, one soon after the other."""
    random_order: bool = False
    latency_s: float = 0.05
    loss: float = 0.0
    duplicates: float = 0.0
    """Share of messages that arrive twice, the second time up to two windows late."""
    slow: float = 0.0
    """Share of messages that take up to two answers' patience."""
    deaths: int = 0
    """The first of them is whoever leads when it is time to die, if somebody does."""
    wrong_hints: bool = False
    """Hints leave peers out, name strangers, or do not come."""
    stale_joins: int = 0
    """Requests to join that nobody sent just now: sent earlier, or by a second process with the same identity."""
    others: int = 0
    """Peers that average other tensors."""
    senders: int = 0
    """Peers that reduce nothing, and that nobody can call: what they are told, they fetch."""

    @property
    def faultless(self) -> bool:
        faults = (self.loss, self.duplicates, self.slow, self.deaths, self.wrong_hints, self.stale_joins)
        return not any(faults)

    @staticmethod
    def draw(seed: int, faults: bool) -> Plan:
        """A plan with random sizes and orders, and if `faults`, some of all kinds of faults."""
        rng = random.Random(seed)
        count, min_group = rng.randint(2, 8), rng.choice([2, 2, 2, 3, 4])
        plan = {
            "count": count,
            "min_group": min_group,
            "max_group": rng.choice([m for m in (2, 3, 4, 16) if m >= min_group]),
            "spread_s": rng.choice([0.0, 0.3, 1.2]),
            "rounds": rng.choice([1, 1, 2, 3]),
            "random_order": rng.random() < 0.3,
            "latency_s": rng.choice([0.0005, 0.02, 0.05]),
            "others": rng.choice([0, 0, 0, 1, 2]),
            "senders": rng.choice([0, 0, 0, 1, 2, count]),
        }
        if faults:
            plan |= {
                "spread_s": 3.5 * rng.random(),
                "loss": rng.choice([0.0, 0.0, 0.05, 0.3]),
                "duplicates": rng.choice([0.0, 0.0, 0.2]),
                "slow": rng.choice([0.0, 0.0, 0.1, 0.5]),
                "deaths": rng.choice([0, 0, 1, 2]),
                "wrong_hints": rng.random() < 0.3,
                "stale_joins": rng.choice([0, 0, 3, 20]),
            }
        return Plan(seed, **plan)


@dataclass
class Node:
    peer: PeerId
    maker: Matchmaker
    pairing: Pairing
    dead: bool = False
    pledges: list[bytes] = field(default_factory=list)
    """Seals that it accepted."""
    begun_at: float = 0.0
    rounds_left: int = 0
    concluded: Concluded | None = None
    concluded_at: float = 0.0
    history: list[Concluded] = field(default_factory=list)


class Net:
    """Matchmakers on a network with random latencies, lost, repeated and late messages, and deaths."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(f"net {plan.seed}")
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.counter = itertools.count()
        self.nodes: dict[PeerId, Node] = {}
        self.seals: dict[bytes, Seal] = {}
        self.terms: dict[PeerId, Terms] = {}
        for peer in peer_ids(plan.count):
            pairing = Pairing(KEY, peer)
            maker = Matchmaker(
                KEY,
                Member(peer, (), 1.0),
                TIMING,
                random.Random(self.rng.random()),
                new_nonce=lambda: self.rng.randbytes(16),
                random_order=plan.random_order,
                partner=pairing.partner if plan.random_order and plan.max_group == 2 else None,
            )
            self.nodes[peer] = Node(peer, maker, pairing)

    # Plans -----------------------------------------------------------------------------------------------------------

    def play(self) -> Net:
        """Play the whole plan and check it."""
        plan, peers = self.plan, list(self.nodes)
        others = self.rng.sample(peers, min(plan.others, len(peers) - 1))
        senders = self.rng.sample(peers, min(plan.senders, len(peers)))
        for peer in peers:
            schema = OTHER_SCHEMA if peer in others else SCHEMA
            self.nodes[peer].rounds_left = plan.rounds - 1
            self.begin(peer, plan.spread_s * self.rng.random(), schema_hash=schema, sends_only=peer in senders)
        horizon = TIMING.window_s * plan.rounds
        for index in range(min(plan.deaths, len(peers) - 1)):
            self.at(horizon * self.rng.random(), lambda lead=index == 0: self.kill(lead))  # type: ignore[misc]
        for _ in range(plan.stale_joins):
            sender, to = self.rng.choice(peers), self.rng.choice(peers)
            stale = JoinAsked(Member(sender, (), self.rng.choice([1.0, 2.0])), self.rng.choice([SCHEMA, OTHER_SCHEMA]))
            if sender != to:
                self.at(horizon * self.rng.random(), lambda to=to, stale=stale: self.feed(to, stale))  # type: ignore[misc]
        self.run()
        self.check()
        return self

    def kill(self, leader: bool) -> None:
        alive = [node for node in self.nodes.values() if not node.dead]
        leading = [node for node in alive if node.maker.phase is Phase.SEALING] if leader else []
        self.rng.choice(leading or alive).dead = True

    def begin(self, peer: PeerId, time: float, **terms: object) -> None:
        plan = self.plan
        values: dict[str, object] = {"schema_hash": SCHEMA, "weight": 1.0, "numel": NUMEL}
        values |= {"min_group": plan.min_group, "max_group": plan.max_group} | terms
        self.terms[peer] = Terms(**values)  # type: ignore[arg-type]
        self.at(time, lambda: self.start(peer))

    def start(self, peer: PeerId) -> None:
        node = self.nodes[peer]
        if not node.dead:
            node.begun_at, node.concluded = self.now, None
            node.pairing.advance()
            self.feed(peer, Begin(self.terms[peer], warm=bool(node.history) and self.rng.random() < 0.7))
            self.later(lambda: self.hint(peer))

    def hint(self, peer: PeerId) -> None:
        node = self.nodes[peer]
        if node.dead or node.maker.phase is Phase.IDLE:
            return
        named = list(self.nodes)
        if self.plan.wrong_hints:
            named = self.rng.sample(named, self.rng.randint(0, len(named)))
            named += [PeerId(self.rng.randbytes(32)) for _ in range(self.rng.randint(0, 2))]
        if not self.plan.wrong_hints or self.rng.random() < 0.8:
            self.feed(peer, Hinted(tuple(named), tuple(p for p in named if self.pulls(p))))
        self.at(self.now + 0.5, lambda: self.hint(peer))

    def pulls(self, peer: PeerId) -> bool:
        return peer in self.terms and self.terms[peer].sends_only

    def order(self, peer: PeerId) -> tuple[bool, bytes]:
        """Waiting goes towards lower ones."""
        return self.pulls(peer), priority(KEY, peer)

    # Messages --------------------------------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (time, next(self.counter), action))

    def later(self, action: Callable[[], None], to: PeerId | None = None) -> None:
        """Deliver a message: late, twice or never, as the plan has it. Who cannot be called has to ask first."""
        if self.rng.random() < self.plan.loss:
            return
        delay = self.plan.latency_s * (0.1 + 1.9 * self.rng.random())
        if to is not None and self.pulls(to):
            delay += self.plan.latency_s * (0.1 + 1.9 * self.rng.random())
        if self.rng.random() < self.plan.slow:
            delay += 2 * TIMING.answer_s * self.rng.random()
        self.at(self.now + delay, action)
        if self.rng.random() < self.plan.duplicates:
            self.at(self.now + delay + 2 * TIMING.window_s * self.rng.random() ** 2, action)

    def call(
        self, to: PeerId, event: MatchEvent, answered: Callable[[object], None], failed: Callable[[], None]
    ) -> None:
        """A request with one answer; it fails when that is not there after the patience for it."""
        open_ = [True]

        def close(action: Callable[[], None]) -> None:
            if open_[0]:
                open_[0] = False
                action()

        def arrive() -> None:
            answer = self.feed(to, event)
            if answer is not None:
                self.later(lambda: close(lambda: answered(answer)))

        self.at(self.now + TIMING.answer_s, lambda: close(failed))
        self.later(arrive, to)

    def feed(self, peer: PeerId, event: MatchEvent) -> object:
        node = self.nodes.get(peer)
        if node is None or node.dead:
            return None
        before = (node.maker.phase, node.maker.leader)
        answer = None
        for instruction in node.maker.handle(event, self.now):
            if isinstance(instruction, AnswerJoin | AnswerSeal):
                answer = instruction
            else:
                self.carry_out(node, instruction)
        if isinstance(event, SealOffered) and isinstance(answer, AnswerSeal) and answer.accepted:
            pledged_elsewhere = before[0] is Phase.PLEDGED and before[1] != event.leader
            assert not pledged_elsewhere, "pledged to two leaders at once"
            node.pledges.append(event.seal.nonce)
        if node.maker.wake_at < float("inf"):
            wake = max(node.maker.wake_at, self.now)
            self.at(wake, lambda: self.tick(peer, wake))
        return answer

    def tick(self, peer: PeerId, due: float) -> None:
        node = self.nodes[peer]
        if not node.dead and node.maker.wake_at <= due:
            self.feed(peer, Tick())

    def carry_out(self, node: Node, instruction: object) -> None:
        me = node.peer
        match instruction:
            case AskJoin(peer) | Nudge(peer):
                terms = node.maker.terms
                assert terms is not None
                asks = isinstance(instruction, AskJoin)
                if not self.plan.stale_joins:  # those give wrong names to who can be called
                    assert not self.pulls(peer), "nobody can call it"
                    assert (self.order(peer) < self.order(me)) is asks, "waiting must go towards lower numbers only"
                request = JoinAsked(
                    declared(Member(me, (), terms.weight), terms), terms.schema_hash,
                    node.maker.closes_at - self.now, terms.cell,
                )  # fmt: skip

                def answered(answer: object, to: PeerId = peer) -> None:
                    assert isinstance(answer, AnswerJoin)
                    if asks or answer.verdict in (Verdict.MISMATCH, Verdict.PROBATION):
                        told = (answer.verdict, answer.seal_within_s, answer.leader, answer.schema_hash, answer.reason)
                        self.feed(me, JoinAnswered(to, *told))

                self.call(peer, request, answered, lambda: self.feed(me, AskFailed(peer, "lost")))
            case OfferSeal(seal):
                self.seals[seal.nonce] = seal
                for member in seal.members:
                    if member.peer_id != me:
                        self.offer(me, member.peer_id, seal)
            case SendCommit(seal):
                for member in seal.members:
                    if member.peer_id != me:
                        to = member.peer_id
                        self.later(lambda to=to: self.feed(to, Committed(seal.nonce)), to)  # type: ignore[misc]
            case SendRelease(peer, redirect):
                self.later(lambda: self.feed(peer, Released(me, redirect)), peer)
            case Concluded():
                self.conclude(node, instruction)
            case _:
                raise AssertionError(instruction)

    def offer(self, leader: PeerId, to: PeerId, seal: Seal) -> None:
        def answered(answer: object) -> None:
            assert isinstance(answer, AnswerSeal)
            self.feed(leader, SealAnswered(to, seal.nonce, answer.accepted, answer.reason))

        lost = SealAnswered(to, seal.nonce, False, "lost")
        self.call(to, SealOffered(leader, seal), answered, lambda: self.feed(leader, lost))

    # What must hold --------------------------------------------------------------------------------------------------

    def conclude(self, node: Node, concluded: Concluded) -> None:
        assert node.concluded is None, "a search ended twice"
        assert self.now - node.begun_at <= 2 * TIMING.window_s + 1e-6, "a search took more than twice its window"
        node.concluded, node.concluded_at = concluded, self.now
        node.history.append(concluded)
        seal, outcome = concluded.seal, concluded.outcome
        if seal is not None:
            assert seal == self.seals[seal.nonce], "members hold different seals"
            assert node.peer in [member.peer_id for member in seal.members]
            assert seal.schema_hash == self.terms[node.peer].schema_hash
            assert sum(member.part for member in seal.members) == NUMEL
            assert self.plan.min_group <= len(seal.members) <= self.plan.max_group
            for member in seal.members:
                accepted = member.peer_id == seal.members[0].peer_id or seal.nonce in self.nodes[member.peer_id].pledges
                assert accepted, "a group exists that not all of its members accepted"
                assert member.part == 0 or not self.pulls(member.peer_id)
            assert not self.pulls(seal.members[0].peer_id), "who only sends leads nobody"
        if isinstance(outcome, Mismatch):
            assert outcome.ours == self.terms[node.peer].schema_hash.hex()
            assert outcome.theirs != outcome.ours
            assert outcome.theirs in (SCHEMA.hex(), OTHER_SCHEMA.hex())
            assert PeerId.parse(outcome.peer) in self.nodes
        if node.rounds_left > 0:
            node.rounds_left -= 1
            self.at(self.now + 0.2 * self.rng.random(), lambda: self.start(node.peer))

    def run(self) -> None:
        steps = 0
        while self.queue:
            self.now, _, action = heapq.heappop(self.queue)
            action()
            steps += 1
            assert steps < 200_000, "the matchmakers never rest"
            assert self.now < 100, "somebody waits for ever"

    def groups(self) -> dict[bytes, list[PeerId]]:
        """Members by nonce, of all rounds: those that hold the seal."""
        found: dict[bytes, list[PeerId]] = {}
        for node in self.nodes.values():
            for concluded in node.history:
                if concluded.seal is not None:
                    found.setdefault(concluded.seal.nonce, []).append(node.peer)
        return found

    def check(self) -> None:
        """Everybody is done; and without faults whoever could find a group did."""
        for node in self.nodes.values():
            assert node.dead or (node.concluded is not None and node.maker.phase is Phase.IDLE)
        if not self.plan.faultless:
            return
        for nonce, members in self.groups().items():
            assert len(members) == len(self.seals[nonce].members), "a member of a group does not know of it"
        if self.plan.rounds == 1:
            for schema in (SCHEMA, OTHER_SCHEMA):
                alike = [n for n in self.nodes.values() if self.terms[n.peer].schema_hash == schema]
                left = [n for n in alike if n.concluded is not None and n.concluded.seal is None]
                leaders = [n for n in left if not self.pulls(n.peer)]
                assert len(left) < self.plan.min_group or not leaders, f"{len(left)} of {len(alike)} found no group"
