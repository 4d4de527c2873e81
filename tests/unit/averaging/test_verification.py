"""Statements, verdicts and what members make of them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.averaging.allreduce import NO_VALUES, AllReduce
from swarm.averaging.probation import Offence
from swarm.averaging.rounds import Member
from swarm.averaging.verification import (
    Decision,
    Finding,
    Input,
    Statement,
    Verdict,
    VerifiedPart,
    checker_of,
    digest,
    judge_inputs,
    same_average,
)
from swarm.errors import MalformedFrameError, UsageError
from swarm.identity import PeerId
from swarm.tensors.codecs import codec

DATA = b"an average"
STATED = Statement((Input(0, 1.0, digest(b"a")), Input(2, 2.5, digest(b"c"))))


def members(*parts: int) -> list[Member]:
    return [Member(PeerId(bytes([i]) * 32), (), 1.0, part) for i, part in enumerate(parts)]


def test_the_next_reducer_checks() -> None:
    group = members(5, 0, 3, 4, 0)
    assert [checker_of(group, place) for place in (0, 2, 3)] == [2, 3, 0]
    assert checker_of(members(0, 9, 0), 1) is None
    assert [checker_of(members(1, 1), place) for place in (0, 1)] == [1, 0]


def test_what_is_said_arrives() -> None:
    assert Statement.from_bytes(STATED.to_bytes(), 3) == STATED
    assert Statement.from_bytes(Statement().to_bytes(), 3) == Statement()
    for verdict in (Verdict(Finding.CONFIRMED, digest(DATA)), Verdict(Finding.UNSEEN, digest(b""), 7)):
        assert Verdict.from_bytes(verdict.to_bytes()) == verdict


@given(st.binary(max_size=120))
def test_other_bytes_are_refused(data: bytes) -> None:
    with contextlib.suppress(MalformedFrameError):
        assert Statement.from_bytes(data, 3).to_bytes() == data
    with contextlib.suppress(MalformedFrameError):
        assert Verdict.from_bytes(data).to_bytes() == data


@pytest.mark.parametrize("inputs", [(1, 0), (0, 0), (0, 3)])
def test_members_are_named_once_in_order(inputs: tuple[int, ...]) -> None:
    data = Statement(tuple(Input(place, 1.0, digest(b"")) for place in inputs)).to_bytes()
    with pytest.raises(MalformedFrameError):
        Statement.from_bytes(data, 3)


def test_inputs_are_compared() -> None:
    about, seen = digest(DATA), {0: (1.0, b"a"), 1: (1.0, b"b"), 2: (2.5, b"c")}
    assert judge_inputs(STATED, seen, about) is None
    assert judge_inputs(STATED, {0: (1.0, b"a")}, about) == Verdict(Finding.UNSEEN, about, 2)
    assert judge_inputs(STATED, {**seen, 0: (1.0, b"A")}, about) == Verdict(Finding.MISSTATED, about, 0)
    assert judge_inputs(STATED, {**seen, 2: (2.0, b"c")}, about) == Verdict(Finding.MISSTATED, about, 2)


def decided(me: int, verdict: Verdict | None, payload: bytes | None = DATA, sent: bytes = digest(b"c")) -> Decision:
    """Of a part that member 0 reduces and member 1 checks."""
    part = VerifiedPart(0, 1, me)
    assert not part.due
    part.sent[0] = sent
    if payload is not None:
        part.averages[0] = (STATED, payload)
    else:
        part.averages_over = True
    if verdict is not None:
        part.verdicts[0] = verdict
    elif payload is not None:
        assert not part.due
        part.verdicts_over = True
    assert part.due
    decision = part.decide(NO_VALUES)
    assert part.decided == 1
    return decision


def test_only_what_is_confirmed_is_written() -> None:
    assert decided(2, Verdict(Finding.CONFIRMED, digest(DATA))) == Decision(DATA)
    assert decided(2, Verdict(Finding.CONFIRMED, digest(NO_VALUES)), NO_VALUES) == Decision(None)
    for finding in (Finding.REFUTED, Finding.MISSTATED, Finding.UNSEEN):
        decision = decided(2, Verdict(finding, digest(DATA)))
        assert decision.payload is None
        assert decision.known
        assert decision.problem
    for verdict, payload in [(Verdict(Finding.CONFIRMED, digest(b"x")), DATA), (None, DATA), (None, None)]:
        decision = decided(2, verdict, payload)
        assert decision.payload is None
        assert decision.problem
    assert not decided(2, None).known


def test_who_is_told_on_depends_on_what_one_knows() -> None:
    refuted = Verdict(Finding.REFUTED, digest(DATA))
    both = ((0, Offence.DISPUTED), (1, Offence.DISPUTED))
    assert decided(2, refuted).offences == both
    assert decided(1, refuted).offences == ((0, Offence.LIED),)
    assert decided(0, refuted).offences == ((1, Offence.LIED),)
    assert decided(2, Verdict(Finding.MISSTATED, digest(DATA), 3)).offences == (*both, (3, Offence.DISPUTED))
    assert decided(2, Verdict(Finding.UNSEEN, digest(DATA), 3)).offences == ()
    assert decided(2, Verdict(Finding.CONFIRMED, digest(DATA)), sent=digest(b"C")).offences == ((0, Offence.LIED),)


@pytest.mark.parametrize(("name", "lie"), [("none", 1e-3), ("bf16", 0.02), ("int8", 0.05), ("int4", 0.3)])
def test_last_bits_may_differ_and_lies_may_not(name: str, lie: float) -> None:
    generator = torch.Generator().manual_seed(0)
    mean, way = torch.randn(20_000, generator=generator), codec(name)

    def travelled(values: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(values))
        way.decode_into(torch.frombuffer(bytearray(bytes(way.encode(values))), dtype=torch.uint8), out)
        return out

    noise = 1e-7 * torch.randn(20_000, generator=generator)
    assert same_average(travelled(mean), travelled(mean), way)
    assert same_average(travelled(mean), travelled(mean * (1 + noise)), way)
    assert not same_average(travelled(mean), travelled(mean + lie), way)
    assert not same_average(travelled(mean), travelled(-mean), way)
    one_wrong = mean.clone()
    one_wrong[7] += 5
    assert not same_average(travelled(mean), travelled(one_wrong), way)


def test_verified_parts_and_error_feedback_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="held back"):
        AllReduce(verify_parts=True, error_feedback=True)
    AllReduce(verify_parts=True, codec="int8")
