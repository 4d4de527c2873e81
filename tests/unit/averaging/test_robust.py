"""Robust reducers: exact where nobody lies, bounded where a minority does, whatever numbers it sends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.averaging.allreduce import AllReduce, ChunkReducer
from swarm.averaging.robust import (
    CenteredClip,
    Median,
    RobustReducer,
    TrimmedMean,
    bounded_weights,
)
from swarm.averaging.vector import Chunk, FlatVector
from swarm.errors import UsageError
from swarm.identity import PeerId
from swarm.tensors.codecs import codec
from swarm.tensors.schema import TensorMeta

ROBUST = [CenteredClip(), Median(), TrimmedMean()]


def combined(reducer: RobustReducer, rows: Tensor, weights: list[float] | None = None) -> Tensor:
    out = torch.empty(rows.shape[1], dtype=rows.dtype)
    reducer.combine(rows.clone(), weights or [1.0] * len(rows), out)
    return out


def rows_of(members: int, numel: int = 300, seed: int = 0) -> Tensor:
    return torch.randn(members, numel, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(
    members=st.integers(1, 20),
    numel=st.sampled_from([1, 7, 16 * 1024 + 3]),
    seed=st.integers(0, 999),
    ties=st.booleans(),
)
def test_medians_and_trimmed_means_are_those_of_every_column(members: int, numel: int, seed: int, ties: bool) -> None:
    rows = rows_of(members, numel, seed)
    rows = rows.round() if ties else rows
    ordered = rows.sort(0).values
    middle = (ordered[(members - 1) // 2] + ordered[members // 2]) / 2
    torch.testing.assert_close(combined(Median(), rows), middle)
    cut = TrimmedMean(0.3).trimmed(members)
    torch.testing.assert_close(combined(TrimmedMean(0.3), rows), ordered[cut : members - cut].mean(0))


@settings(max_examples=60)
@given(weights=st.lists(st.integers(1, 5), min_size=1, max_size=12), seed=st.integers(0, 999), ties=st.booleans())
def test_weights_count_as_so_many_equal_members(weights: list[int], seed: int, ties: bool) -> None:
    rows = rows_of(len(weights), 50, seed)
    rows = rows.round() if ties else rows
    repeated = np.repeat(rows.numpy(), weights, axis=0)
    found = combined(Median(), rows, [float(w) for w in weights])
    torch.testing.assert_close(found, torch.from_numpy(np.median(repeated, axis=0).astype(np.float32)))
    order = rows.sort(0)
    heavy = torch.tensor(weights).float()[order.indices]
    cut = TrimmedMean().trimmed(len(weights))
    kept = slice(cut, len(weights) - cut)
    if not ties:  # between equal values the weights are anybody's
        exact = (order.values[kept] * heavy[kept]).sum(0) / heavy[kept].sum(0)
        torch.testing.assert_close(combined(TrimmedMean(), rows, [float(w) for w in weights]), exact)


def test_a_wide_radius_makes_the_weighted_mean() -> None:
    for members in (1, 2, 5, 16):
        rows, weights = rows_of(members), torch.arange(1, members + 1).float()
        exact = (weights[:, None] * rows).sum(0) / weights.sum()
        torch.testing.assert_close(combined(CenteredClip(tau=1e6), rows, weights.tolist()), exact, rtol=1e-5, atol=1e-5)


def test_clipping_is_that_of_the_paper() -> None:
    rows, weights = rows_of(7, 40, seed=3).double(), [1.0, 2.0, 1.0, 1.5, 1.0, 1.0, 2.0]
    rows[2] *= -20
    at = rows.median(0).values
    for _ in range(10):
        away = rows - at
        norms = away.norm(dim=1)
        radius = 0.5 * norms.median()
        pull = torch.tensor(weights).double() / sum(weights) * (radius / norms).clamp(max=1)
        at = at + (pull[:, None] * away).sum(0)
    torch.testing.assert_close(combined(CenteredClip(tau=0.5), rows, weights), at, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reducer", ROBUST, ids=lambda r: r.spec)
@pytest.mark.parametrize("lie", [-1.0, 100.0, 1e6, 1e20, 3e38, -3e38])
@pytest.mark.parametrize("claimed", [1.0, 1e9, 1e-9])
def test_two_liars_of_ten_move_an_average_by_no_more_than_honest_members_differ(
    reducer: RobustReducer, lie: float, claimed: float
) -> None:
    truth = rows_of(1, 2000, seed=5)[0]
    honest = truth + 0.1 * rows_of(8, 2000, seed=6)
    spread = float((honest - honest.mean(0)).norm(dim=1).median())
    liars = (lie * truth.sign() if abs(lie) > 1e30 else lie * truth).expand(2, -1)
    rows = torch.cat([liars, honest])
    found = combined(reducer, rows, bounded_weights([claimed] * 2 + [1.0] * 8))
    assert torch.isfinite(found).all()
    assert float((found - honest.mean(0)).norm()) < spread
    plain = rows.double().mean(0)
    assert float((plain - honest.double().mean(0)).norm()) > spread, "the lie is none"


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_clipping_needs_no_knowledge_of_scales(scale: float) -> None:
    rows = rows_of(6, seed=8)
    rows[0] *= 50
    torch.testing.assert_close(
        combined(CenteredClip(), rows * scale) / scale, combined(CenteredClip(), rows), rtol=1e-3, atol=1e-4
    )


def test_who_are_equal_and_most_win() -> None:
    rows = torch.ones(5, 40)
    rows[3:] = rows_of(2, 40)
    for reducer in (CenteredClip(), Median()):
        assert torch.equal(combined(reducer, rows), torch.ones(40))
    assert torch.equal(combined(CenteredClip(), torch.ones(4, 9)), torch.ones(9))


def test_weights_are_bounded_by_what_is_usual() -> None:
    assert bounded_weights([3.0, 3.0, 3.0]) == [1.0, 1.0, 1.0]
    assert bounded_weights([2.0, 4.0, 1e308, 1.0, 4.0]) == [0.5, 1.0, 2.0, 0.25, 1.0]
    assert bounded_weights([1.0, 1e300]) == [1.0, 2.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrimmedMean(0.5),
        lambda: TrimmedMean(-0.1),
        lambda: CenteredClip(tau=0.0),
        lambda: CenteredClip(iterations=0),
        lambda: AllReduce(reducer="average"),  # type: ignore[arg-type]
        lambda: AllReduce(reducer=Median(), codec="topk", role="gradients"),
        lambda: AllReduce(reducer=Median(), max_group=2),
    ],
)
def test_settings_that_cannot_work_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError):
        make()


def test_a_robust_reducer_needs_three_members() -> None:
    assert AllReduce(reducer=Median()).min_group == 3
    assert AllReduce(reducer=Median(), min_group=5).min_group == 5
    assert AllReduce().min_group == 2


def test_a_reducer_leaves_out_what_is_not_finite_or_cannot_be_decoded() -> None:
    values = rows_of(6, 500)
    int8 = codec("int8")
    vector = FlatVector([TensorMeta((500,), torch.float32)], [int8], over=[values[0].clone()])
    payloads = [bytes(int8.encode(row)) for row in values[1:]]
    payloads[0] = bytes(int8.encode(torch.full((500,), float("nan"))))
    payloads[1] = b"\xff" * len(payloads[1])
    peers = [PeerId(bytes([i]) * 32) for i in range(5)]
    arrived = [(peer, 1.0, payload) for peer, payload in zip(peers, payloads, strict=True)]
    reduced = ChunkReducer(vector, reducer=Median()).reduce(Chunk(0, 0, 500), 1.0, arrived)
    assert set(reduced.offenders) | set(reduced.malformed) == {peers[0], peers[1]}
    assert reduced.contributors == (None, *peers[2:])
    exact = values[[0, 3, 4, 5]].sort(0).values[1:3].mean(0)
    torch.testing.assert_close(vector.flat(), exact, rtol=0.05, atol=0.05)
