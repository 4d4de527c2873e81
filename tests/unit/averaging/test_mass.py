"""The values of push-sum: shares, what waits, and how it is taken in."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from swarm.averaging.mass import Mass
from swarm.averaging.vector import FlatVector
from swarm.errors import MalformedFrameError, NonFiniteError
from swarm.tensors.codecs import Codec, codec
from swarm.tensors.schema import TensorMeta


def vector_of(*tensors: Tensor, name: str = "none") -> FlatVector:
    found: list[Codec] = [codec(name)] * len(tensors)
    vector = FlatVector([TensorMeta.of(t) for t in tensors], found)
    vector.load(tensors)
    return vector


def numbers(*values: float) -> FlatVector:
    return vector_of(torch.tensor(values, dtype=torch.float64))


def mass_of(vector: FlatVector) -> Mass:
    return Mass(vector, 1 << 20)


def test_what_waits_is_mixed_in_by_weight() -> None:
    vector = numbers(1.0, 2.0)
    mass = mass_of(vector)
    mass.add(0.5, mass.encode(numbers(3.0, 3.0), 1))
    mass.add(0.25, mass.encode(numbers(-1.0, 1.0), 1))
    assert mass.absorb(vector, 1.0, 0.75, moved=0.0) == 0
    assert vector.flat().tolist() == pytest.approx([(1 + 1.5 - 0.25) / 1.75, (2 + 1.5 + 0.25) / 1.75])
    before = vector.flat()
    assert mass.absorb(vector, 1.75, 0.25, moved=0.0) == 0
    torch.testing.assert_close(vector.flat(), before * 1.75 / 2), "what was taken in waits no more"


@pytest.mark.parametrize("moved", [0.0, 0.25, 0.5])
def test_training_moves_what_waited_meanwhile_too(moved: float) -> None:
    vector = numbers(1.0)
    mass = mass_of(vector)
    mass.stepped(vector)
    mass.add(0.5, mass.encode(numbers(1.0), 1))
    vector.load([torch.tensor([4.0], dtype=torch.float64)])
    mass.absorb(vector, 0.5, 0.5, moved=moved)
    assert vector.flat().item() == pytest.approx(1.0 + 3.0 * (0.5 + moved))


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_the_sender_keeps_what_its_shares_leave_out(name: str) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector = vector_of(values, name=name)
    mass = mass_of(vector)
    payloads = mass.encode(vector, 2)
    kept = vector.flat().clone()
    taken = mass_of(vector)
    taken.add(1.0, payloads)
    sent = vector_of(torch.zeros_like(values), name=name)
    taken.absorb(sent, 0.0, 1.0, moved=0.0)
    assert not torch.equal(kept, values)
    torch.testing.assert_close(kept + 2 * sent.flat(), 3 * values, rtol=0, atol=1e-5 if "int" in name else 1e-12)


def test_sums_that_are_not_finite_leave_local_values() -> None:
    vector = vector_of(torch.ones(3))
    mass = mass_of(vector)
    huge = mass.encode(vector_of(torch.full((3,), 3e38)), 1)
    mass.add(1.0, huge)
    mass.add(1.0, huge)
    assert mass.absorb(vector, 1.0, 2.0, moved=0.0) == 1
    assert torch.equal(vector.flat(), torch.ones(3))
    mass.add(1.0, mass.encode(vector_of(torch.zeros(3)), 1))
    assert mass.absorb(vector, 1.0, 1.0, moved=0.0) == 0, "nothing of it stays behind"
    assert torch.equal(vector.flat(), torch.full((3,), 0.5))


@pytest.mark.parametrize("name", ["none", "bf16", "int8"])
def test_chunks_that_cannot_be_are_refused(name: str) -> None:
    vector = vector_of(torch.ones(300), name=name)
    mass = mass_of(vector)
    (good,) = mass.encode(vector, 1)
    mass.check(0, good)
    with pytest.raises(MalformedFrameError):
        mass.check(0, good[:-1])
    (bad,) = mass.encode(vector_of(torch.full((300,), math.nan), name=name), 1)
    with pytest.raises((NonFiniteError, MalformedFrameError)):
        mass.check(0, bad)
