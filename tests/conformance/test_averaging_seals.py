"""Leaders that seal what members did not say, on both transports: members find it out, and do without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from swarm.averaging import calls
from swarm.averaging.decisions import SealAnswered, Terms
from swarm.averaging.declarations import declare, read
from swarm.averaging.messages import seal_request
from swarm.averaging.probation import PeerOnProbation
from swarm.averaging.rounds import Group, Seal
from swarm.averaging.service import JOIN, SEAL
from swarm.averaging.view import priority
from swarm.errors import BadSignatureError, MalformedFrameError
from swarm.identity import KeyPair
from swarm.net.transport import Contact
from swarm.pb import averaging_pb2 as pb
from tests.conformance.test_averaging import Mate, copies, mates, mean_of, random_values, step_all
from tests.support import World

Falsify = Callable[[pb.SealGroupRequest], None]


def subsets(things: Sequence[int]) -> list[tuple[int, ...]]:
    return [who for count in range(1, len(things) + 1) for who in combinations(things, count)]


def by_priority(group: Sequence[Mate]) -> list[Mate]:
    return sorted(group, key=lambda mate: priority("trunk", mate.endpoint.peer_id))


def lie(monkeypatch: pytest.MonkeyPatch, liar: Mate, falsify: Falsify) -> None:
    """Whatever this peer seals is falsified on its way to the others."""

    def sealed(key: str, seal: Seal) -> pb.SealGroupRequest:
        request = seal_request(key, seal)
        if seal.members[0].peer_id == liar.endpoint.peer_id:
            falsify(request)
        return request

    monkeypatch.setattr(calls, "seal_request", sealed)


def sent_only_once(identity: KeyPair, schema_hash: bytes) -> pb.SignedDeclaration:
    """What a peer signed when nobody could call it."""
    member = declare(identity, "trunk", (), Terms(schema_hash, 1.0, 5, sends_only=True))
    return pb.SignedDeclaration.FromString(member.signed)


def says_that_the_last_only_sends(request: pb.SealGroupRequest) -> None:
    declaration = pb.MemberDeclaration.FromString(request.members[-1].declaration)
    declaration.sends_only = True
    request.members[-1].declaration = declaration.SerializeToString()


def says_that_it_was_measured_fast(request: pb.SealGroupRequest) -> None:
    declaration = pb.MemberDeclaration.FromString(request.members[-1].declaration)
    leader = read("trunk", request.members[0]).member.peer_id
    declaration.measured.add(peer_id=leader.digest, up=1e12, down=1e12)
    request.members[-1].declaration = declaration.SerializeToString()


def invents_a_member(request: pb.SealGroupRequest) -> None:
    schema_hash = pb.MemberDeclaration.FromString(request.members[0].declaration).schema_hash
    invented = sent_only_once(KeyPair.generate(), schema_hash)
    invented.signature = bytes(64)
    request.members.append(invented)


def turns_the_order_around(request: pb.SealGroupRequest) -> None:
    last = pb.SignedDeclaration.FromString(request.members[-1].SerializeToString())
    request.members[-1].CopyFrom(request.members[-2])
    request.members[-2].CopyFrom(last)


@pytest.mark.parametrize(
    ("falsify", "reason"),
    [
        (says_that_the_last_only_sends, "did not say"),
        (says_that_it_was_measured_fast, "did not say"),
        (invents_a_member, "did not say"),
        (turns_the_order_around, "not in their order"),
    ],
)
def test_whoever_seals_what_nobody_said_goes_on_probation_and_others_average_without_it(
    world: World, monkeypatch: pytest.MonkeyPatch, falsify: Falsify, reason: str
) -> None:
    async def main() -> None:
        values = random_values(3)
        group = by_priority(await mates(world, copies(values)))
        liar, *honest = group
        before = [[t.clone() for t in mate.tensors] for mate in group]
        lie(monkeypatch, liar, falsify)
        rounds = await step_all(group)
        assert not rounds[0].averaged
        _same(liar.tensors, before[0])
        assert [len(r.members) for r in rounds[1:]] == [2, 2]
        for mate in honest:
            assert reason in mate.averaging.probation.reason(liar.endpoint.peer_id, mate.endpoint.runtime.clock.time())
            assert mate.endpoint.runtime.events.count(PeerOnProbation) == 1
            for mine, exact in zip(mate.tensors, mean_of(before[1:], [1.0, 1.0]), strict=True):
                torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-6)
        assert await _next_is_without(liar, honest)

    world.run(main)


def _same(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


async def _next_is_without(liar: Mate, honest: Sequence[Mate]) -> bool:
    rounds = await step_all(honest)
    return all(r.averaged and str(liar.endpoint.peer_id) not in r.members for r in rounds)


def test_a_member_does_not_accept_what_it_said_for_an_earlier_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        low, high = by_priority(await mates(world, random_values(2)))
        earlier = sent_only_once(high.endpoint.identity, low.averager.schema_hash)

        def replay(request: pb.SealGroupRequest) -> None:
            request.members[-1].CopyFrom(earlier)

        lie(monkeypatch, low, replay)
        rounds = await step_all([low, high])
        assert not any(r.averaged for r in rounds)
        assert "another round" in rounds[1].outcome.reason  # type: ignore[union-attr]

    world.run(main)


def test_members_that_were_sealed_differently_mix_nothing_up_and_suspect_the_leader(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        values = random_values(3)
        group = by_priority(await mates(world, copies(values)))
        low, one, other = group
        before = [[t.clone() for t in mate.tensors] for mate in group]
        earlier = sent_only_once(other.endpoint.identity, low.averager.schema_hash)
        real = calls.Calls.offer

        async def offer(self: calls.Calls, contact: Contact, seal: Seal) -> SealAnswered:
            if contact.peer_id == one.endpoint.peer_id:
                *others, last = seal.members
                seal = replace(seal, members=(*others, replace(last, signed=earlier.SerializeToString())))
            return await real(self, contact, seal)

        monkeypatch.setattr(calls.Calls, "offer", offer)
        rounds = await step_all(group)
        assert all(isinstance(r.outcome, Group) for r in rounds)
        notes = [note for r in rounds for note in r.degraded]
        assert any("another seal" in note for note in notes)
        suspects = one.averaging.probation._cases
        assert low.endpoint.peer_id in suspects
        assert other.endpoint.peer_id in suspects
        # Each element is the mean of some members' values in that place, or local.
        for mate in group:
            for place, tensor in enumerate(mate.tensors):
                means = [mean_of([before[i] for i in who], [1.0] * len(who))[place] for who in subsets(range(3))]
                near = torch.stack([(tensor - mean).abs() < 1e-6 for mean in means])
                assert bool(near.any(0).all())

    world.run(main)


def test_declarations_that_cannot_be_are_refused(world: World) -> None:
    async def main() -> None:
        one, two = await mates(world, [[torch.ones(5)], [torch.ones(5)]])
        call, to = one.endpoint.transport.call, two.endpoint.contact

        async def asks(
            identity: KeyPair, spoil: Callable[[pb.SignedDeclaration], None] = lambda _: None, **terms: object
        ) -> object:
            values = {"schema_hash": b"s" * 32, "weight": 1.0, "numel": 5} | terms
            member = declare(identity, "trunk", (), Terms(**values))  # type: ignore[arg-type]
            signed = pb.SignedDeclaration.FromString(member.signed)
            spoil(signed)
            return await call(to, JOIN, pb.JoinGroupRequest(key="trunk", declared=signed), timeout_s=5.0)

        me = one.endpoint.identity
        for terms in ({"schema_hash": b"short"}, {"weight": float("nan")}, {"weight": -1.0}, {"enters_in_s": 1e9}):
            with pytest.raises(MalformedFrameError):
                await asks(me, **terms)
        with pytest.raises(MalformedFrameError, match="another peer's"):
            await asks(KeyPair.generate())
        with pytest.raises(BadSignatureError):
            await asks(me, lambda signed: setattr(signed, "signature", bytes(64)))
        with pytest.raises(MalformedFrameError):
            await asks(me, lambda signed: setattr(signed, "public_key", b"short"))
        await asks(me)
        answer = await call(to, SEAL, pb.SealGroupRequest(key="trunk", nonce=b"n" * 16), timeout_s=5.0)
        assert not answer.accepted
        assert all(r.averaged for r in await step_all([one, two]))

    world.run(main)
