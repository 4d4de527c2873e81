"""Error feedback over rounds in which anything may fail: no mass is ever lost, none is applied twice."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.tensors.codecs import Codec, codec
from swarm.tensors.feedback import ErrorFeedback

NUMEL, CHUNK = 640, 160


@dataclass
class Member:
    feedback: ErrorFeedback
    values: Tensor
    weight: float


def staged(encoded: memoryview) -> Tensor:
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def chunk_round(
    members: list[Member], reducer: int, start: int, with_codec: Codec, rng: random.Random, failures: float
) -> tuple[Tensor, Tensor] | None:
    """One chunk of one round as members and reducer see it: applied and true mass (fp64), or none if it failed."""
    stop = start + CHUNK
    if rng.random() < failures:
        return None  # the reducer died: nobody learnt anything
    acc = torch.zeros(CHUNK)
    counted: list[tuple[Member, Tensor]] = []
    true, total = torch.zeros(CHUNK, dtype=torch.float64), 0.0
    for index, member in enumerate(members):
        values = member.values[start:stop]
        if member.weight == 0 or (index != reducer and rng.random() < failures):
            continue  # sends nothing, or too late to be counted
        if index == reducer:
            acc.add_(values, alpha=member.weight)
        else:
            sent = member.feedback.compensated(0, start, values, member.weight)
            encoded = staged(with_codec.encode(sent, rng=rng.getrandbits(32)))
            with_codec.decode_add(encoded, values.dtype, acc, member.weight)
            counted.append((member, encoded))
        true += values.double() * member.weight
        total += member.weight
    if total == 0:
        return None
    feedback = members[reducer].feedback
    mean = acc.div_(total)
    feedback.add_to_mean(0, start, mean, total)
    average = staged(with_codec.encode(mean, rng=rng.getrandbits(32)))
    applied = torch.empty(CHUNK)
    with_codec.decode_into(average, applied)
    feedback.reduced(0, start, mean, total, applied)
    for member, encoded in counted:
        member.feedback.counted(0, start, member.values[start:stop], member.weight, with_codec, encoded)
    return applied.double() * total, true


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk", "topk:1"])
@settings(max_examples=15)
@given(st.integers(0, 1 << 30), st.integers(2, 5), st.integers(1, 12), st.sampled_from([0.0, 0.1, 0.5]))
def test_mass_is_conserved_whatever_fails(name: str, seed: int, count: int, rounds: int, failures: float) -> None:
    rng, generator, with_codec = random.Random(seed), torch.Generator().manual_seed(seed), codec(name)
    members = [Member(ErrorFeedback([NUMEL]), torch.zeros(NUMEL), 1.0) for _ in range(count)]
    applied, true = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    size = 0.0
    for _ in range(rounds):
        for member in members:
            member.values = torch.randn(NUMEL, generator=generator) * 10.0 ** rng.randint(-3, 3)
            member.weight = rng.choice([0.0, 1.0, 3.0, 250.0])
            size += float(member.values.abs().max()) * member.weight
        for start in range(0, NUMEL, CHUNK):
            outcome = chunk_round(members, rng.randrange(count), start, with_codec, rng, failures)
            if outcome is not None:
                applied[start : start + CHUNK] += outcome[0]
                true[start : start + CHUNK] += outcome[1]
    held = torch.stack([member.feedback.residual(0, 0, NUMEL) for member in members]).double().sum(0)
    assert float((applied + held - true).abs().max()) <= 1e-6 * size


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk"])
def test_the_long_run_mean_is_exact(name: str) -> None:
    """Without feedback the same small value is rounded away in every round."""
    rng, with_codec, rounds = random.Random(4), codec(name), 400
    generator = torch.Generator().manual_seed(4)
    members = [Member(ErrorFeedback([NUMEL]), torch.randn(NUMEL, generator=generator), 1.0) for _ in range(3)]
    plain = [Member(ErrorFeedback([0]), member.values, 1.0) for member in members]
    mean = torch.stack([m.values for m in members]).double().mean(0)
    worst = {}
    for label, group in (("feedback", members), ("plain", plain)):
        total = torch.zeros(CHUNK, dtype=torch.float64)
        for _ in range(rounds):
            # the same seed for all: stochastic rounding would be exact in the long run by itself
            outcome = chunk_round(group, 0, 0, Nearest(with_codec), rng, 0.0)
            assert outcome is not None
            total += outcome[0] / 3
        worst[label] = float((total / rounds - mean[:CHUNK]).abs().max())
    held = max(float(m.feedback.residual(0, 0, CHUNK).abs().max()) for m in members)
    assert worst["feedback"] <= 3 * held / rounds + 1e-6
    assert worst["feedback"] < 0.2 * worst["plain"]


class Nearest(Codec):
    """A codec that ignores seeds."""

    def __init__(self, inner: Codec) -> None:
        self.inner = inner
        self.name = inner.name

    def carries(self, dtype: torch.dtype) -> bool:
        return self.inner.carries(dtype)

    def exact(self, dtype: torch.dtype) -> bool:
        return self.inner.exact(dtype)

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.inner.encoded_nbytes(numel, dtype)

    def encode_into(self, flat: Tensor, out: Tensor, *, rng: object = None, tile: int = 0) -> None:
        self.inner.encode_into(flat, out)

    def decode_into(self, encoded: Tensor, out: Tensor) -> None:
        self.inner.decode_into(encoded, out)

    def decode_add(self, encoded: Tensor, dtype: torch.dtype, acc: Tensor, alpha: float = 1.0) -> None:
        self.inner.decode_add(encoded, dtype, acc, alpha)
