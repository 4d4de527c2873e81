"""Parts that are reduced twice: what a reducer states, what its checker finds, and what members make of it; no I/O.

The next reducer in the seal is the checker of a part: it gets the same values as the part's reducer, repeats each
reduction, and tells all members. The reducer precedes each average with a *statement*: whose values are in it, with
their weights and hashes. A member writes an average only if the checker confirms exactly the bytes that it was given,
and otherwise keeps local values. So a false average is applied only if reducer and checker lie together.

Who lied? The checker knows, when it has the stated values and they give another average; so does a member whose own
values are misstated; a reducer knows that its checker does. The others know that one of two or three lied: all of them
are suspects (`Offence.DISPUTED`), and who lies again is suspected again, each time beside somebody else.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from swarm.averaging.probation import Offence
from swarm.averaging.rounds import Member
from swarm.errors import MalformedFrameError
from swarm.tensors.codecs import Codec

DIGEST_BYTES = 16
_INPUT = struct.Struct(f"<Hd{DIGEST_BYTES}s")
_VERDICT = struct.Struct(f"<BH{DIGEST_BYTES}s")
VERDICT_BYTES = _VERDICT.size
NOBODY = 0xFFFF
_QUANTUM = {"fp16": 1e-3, "bf16": 8e-3, "int8": 2 / 127, "int4": 2 / 7, "topk": 8e-3}
"""One step of a codec, relative to the largest value."""
_ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""By how much sums on different processors may differ, relative to the largest value."""
_FLIPPED = 1e-3
"""The part of the values that such a difference may round to the next step."""


def digest(payload: bytes) -> bytes:
    """A hash that nobody can make two payloads for."""
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Input:
    """Values in an average: whose (the place in the seal), their weight, and the hash of how they travelled."""

    place: int
    weight: float
    digest: bytes


@dataclass(frozen=True, slots=True)
class Statement:
    """What a reducer says that an average was made of."""

    inputs: tuple[Input, ...] = ()

    def of(self, place: int) -> Input | None:
        return next((i for i in self.inputs if i.place == place), None)

    def to_bytes(self) -> bytes:
        return b"\0" + b"".join(_INPUT.pack(i.place, i.weight, i.digest) for i in self.inputs)

    @classmethod
    def from_bytes(cls, data: bytes, members: int) -> Statement:
        """Raises `MalformedFrameError`."""
        if data[:1] != b"\0" or (len(data) - 1) % _INPUT.size or len(data) > 1 + members * _INPUT.size:
            raise MalformedFrameError("A statement about an average is malformed.")
        inputs = tuple(Input(*fields) for fields in _INPUT.iter_unpack(data[1:]))
        places = [i.place for i in inputs]
        if places != sorted(set(places)) or any(place >= members for place in places):
            raise MalformedFrameError("A statement about an average names members that are none.")
        return cls(inputs)


class Finding(IntEnum):
    """What a checker found."""

    CONFIRMED = 1
    REFUTED = 2
    """The stated values give another average."""
    MISSTATED = 3
    """A member sent the checker other values than the reducer states."""
    UNSEEN = 4
    """A member's values did not reach the checker in time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A checker's word on one average.

    Attributes:
        about: `digest` of the average as the checker got it.
        place: The member concerned, where it is about one.
    """

    finding: Finding
    about: bytes
    place: int = NOBODY

    def to_bytes(self) -> bytes:
        return _VERDICT.pack(self.finding, self.place, self.about)

    @classmethod
    def from_bytes(cls, data: bytes) -> Verdict:
        """Raises `MalformedFrameError`."""
        try:
            finding, place, about = _VERDICT.unpack(data)
            return cls(Finding(finding), about, place)
        except (struct.error, ValueError) as error:
            raise MalformedFrameError("A verdict on an average is malformed.") from error


def checker_of(members: Sequence[Member], place: int) -> int | None:
    """Who checks a member's part: the next one in the seal that reduces a part itself. None if nobody else does."""
    count = len(members)
    return next((p % count for p in range(place + 1, place + count) if members[p % count].part > 0), None)


def same_average(one: Tensor, other: Tensor, codec: Codec) -> bool:
    """Whether two decoded averages differ by no more than processors may disagree about the same sum.

    The sums may differ in their last bits; a lossy codec turns some of these differences into a step of its own.
    """
    if torch.equal(one, other):
        return True
    apart = (one.double() - other.double()).abs_()
    largest = float(other.double().abs().max())
    rounding = _ROUNDING[one.dtype] * largest
    if codec.exact(one.dtype) and one.dtype in (torch.float32, torch.float64):
        return float(apart.max()) <= rounding
    step = max(_QUANTUM.get(codec.name.split(":")[0], 0.0) * largest, rounding)
    return float(apart.max()) <= step and float(apart.sum()) <= step * (2 + _FLIPPED * one.numel())


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with an average.

    Attributes:
        payload: The average to write; none keeps local values.
        known: Everybody who got the same messages decides the same.
        problem: Why local values stay.
        offences: Who did something, or is a suspect (places).
    """

    payload: bytes | None = None
    known: bool = True
    problem: str = ""
    offences: tuple[tuple[int, Offence], ...] = ()


@dataclass(slots=True)
class VerifiedPart:
    """What one member has heard about a part that is verified.

    Attributes:
        place: Of the part's reducer in the seal.
        checker: Of its checker.
        me: Of this member.
        sent: Hashes of the values that this member sent to the reducer, by chunk.
        averages: What the reducer sent.
        verdicts: What the checker found.
        averages_over, verdicts_over: No more will come.
        decided: Chunks decided so far, in order.
    """

    place: int
    checker: int
    me: int
    sent: dict[int, bytes] = field(default_factory=dict)
    averages: dict[int, tuple[Statement, bytes]] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    averages_over: bool = False
    verdicts_over: bool = False
    decided: int = 0

    @property
    def due(self) -> bool:
        """Whether the next chunk can be decided."""
        if self.decided not in self.averages:
            return self.averages_over
        return self.decided in self.verdicts or self.verdicts_over

    def decide(self, nothing: bytes) -> Decision:
        """Decide about the next chunk and forget it.

        Args:
            nothing: The payload that stands for a chunk without an average.
        """
        index, self.decided = self.decided, self.decided + 1
        average, verdict = self.averages.pop(index, None), self.verdicts.pop(index, None)
        sent = self.sent.pop(index, None)
        if average is None:
            return Decision(known=False, problem="no average came")
        statement, payload = average
        mine = statement.of(self.me)
        if mine is not None and self.me != self.place and mine.digest != sent:
            return Decision(
                known=False, problem="its reducer misstates our values", offences=((self.place, Offence.LIED),)
            )
        if verdict is None:
            return Decision(known=False, problem="its checker gave no verdict")
        suspects: tuple[tuple[int, Offence], ...] = (
            (self.place, Offence.DISPUTED),
            (self.checker, Offence.DISPUTED),
        )
        if self.me == self.place:  # which knows that it did not lie
            suspects = ((self.checker, Offence.LIED),)
        elif self.me == self.checker:
            suspects = ((self.place, Offence.LIED),)
        if verdict.about != digest(payload):
            return Decision(known=False, problem="its checker was given another average than we", offences=suspects)
        match verdict.finding:
            case Finding.CONFIRMED:
                return Decision(None if payload == nothing else payload)
            case Finding.REFUTED:
                return Decision(problem="its checker finds another average", offences=suspects)
            case Finding.MISSTATED:
                involved = dict.fromkeys((self.place, self.checker, verdict.place))
                suspects = tuple((place, Offence.DISPUTED) for place in involved if place < NOBODY)
                problem = "a member's values differ between reducer and checker"
                return Decision(problem=problem, offences=suspects)
            case _:
                return Decision(problem="its checker did not get all values in time")


def judge_inputs(statement: Statement, seen: Mapping[int, tuple[float, bytes]], about: bytes) -> Verdict | None:
    """The verdict where the stated inputs are not what the checker has; none if they are.

    Args:
        seen: Weight and payload of the members whose values reached the checker, by place.
        about: `digest` of the average.
    """
    for stated in statement.inputs:
        found = seen.get(stated.place)
        if found is None:
            return Verdict(Finding.UNSEEN, about, stated.place)
        if (stated.weight, stated.digest) != (found[0], digest(found[1])):
            return Verdict(Finding.MISSTATED, about, stated.place)
    return None
