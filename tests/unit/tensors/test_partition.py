"""Flat vectors, splits and bandwidth shares."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swarm.errors import SchemaMismatchError
from swarm.tensors.partition import bandwidth_shares, flatten, split, unflatten


class TestFlatten:
    def test_round_trip_over_shapes_dtypes_and_layouts(self) -> None:
        tensors = [
            torch.arange(6.0).view(2, 3).t(),
            torch.tensor(7.0),
            torch.empty(0, 3),
            torch.tensor([1, 2]),
            torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True),
        ]
        flat = flatten(tensors)
        assert flat.dtype == torch.float32
        assert flat.tolist() == [0, 3, 1, 4, 2, 5, 7, 1, 2, 0.5]
        assert not flat.requires_grad
        parts = unflatten(flat, tensors)
        assert [p.shape for p in parts] == [t.shape for t in tensors]
        assert all(torch.equal(p, t.detach().float()) for p, t in zip(parts, tensors, strict=True))

    def test_views_share_the_vectors_memory(self) -> None:
        flat = torch.zeros(5)
        first, second = unflatten(flat, [torch.empty(2), torch.empty(3)])
        first.fill_(1)
        second[0] = 2
        assert flat.tolist() == [1, 1, 2, 0, 0]

    def test_native_keeps_the_dtype(self) -> None:
        assert flatten([torch.ones(2).half(), torch.ones(1).half()], dtype=None).dtype == torch.float16
        assert flatten([], dtype=None).numel() == 0
        with pytest.raises(SchemaMismatchError, match=r"float16.*float32|float32.*float16"):
            flatten([torch.ones(1), torch.ones(1).half()], dtype=None)

    def test_into_a_buffer(self) -> None:
        buffer = torch.zeros(3)
        assert flatten([torch.ones(3)], out=buffer) is buffer
        assert buffer.tolist() == [1, 1, 1]
        for wrong in (torch.zeros(2), torch.zeros(3).half(), torch.zeros(3, 1)):
            with pytest.raises(SchemaMismatchError, match="buffer"):
                flatten([torch.ones(3)], out=wrong)

    @pytest.mark.parametrize("flat", [torch.zeros(4), torch.zeros(6), torch.zeros(5, 1)])
    def test_a_vector_of_another_size(self, flat: torch.Tensor) -> None:
        with pytest.raises(SchemaMismatchError):
            unflatten(flat, [torch.empty(2), torch.empty(3)])


class TestSplit:
    def test_proportions(self) -> None:
        assert split(10, [1, 1]) == [range(5), range(5, 10)]
        assert split(10, [3, 1, 1]) == [range(6), range(6, 8), range(8, 10)]
        assert split(10, [0, 1, 0]) == [range(0), range(10), range(10, 10)]
        assert split(0, [1, 2]) == [range(0), range(0)]

    def test_equal_remainders_favour_the_earlier_part(self) -> None:
        assert [len(p) for p in split(5, [1, 1, 1])] == [2, 2, 1]

    @pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [math.nan], [math.inf, 1]])
    def test_weights_that_cannot_be(self, weights: list[float]) -> None:
        with pytest.raises(ValueError, match="Weights"):
            split(3, weights)

    @settings(deadline=None)
    @given(
        st.integers(0, 1 << 60),
        st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.floats(0, 1)), min_size=1, max_size=20),
    )
    def test_covers_everything_close_to_the_proportion(self, numel: int, weights: list[float]) -> None:
        if not any(weights):
            weights[0] = 1.0
        parts = split(numel, weights)
        assert parts[0].start == 0
        assert parts[-1].stop == numel
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
        largest = max(weights)
        total = math.fsum(w / largest for w in weights)
        for part, weight in zip(parts, weights, strict=True):
            exact = numel * (weight / largest / total)
            assert abs(part.stop - part.start - exact) <= 1 + 1e-12 * numel
            assert weight > 0 or len(part) == 0


def optimum(b: list[float]) -> float:
    """The least time of the slowest peer under the cap of 2 / n, by bisection."""
    n = len(b)
    eligible = [x for x in b if x > 0]

    def reachable(xi: float) -> float:
        return math.fsum(min(2 / n, max(0.0, (xi * x - 1) / (n - 2))) for x in eligible)

    low = 1 / min(eligible)
    if reachable(low) >= 1:
        return low
    high = low * 2
    while reachable(high) < 1:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if reachable(middle) >= 1 else (middle, high)
    return high


bandwidths = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.sampled_from([1.0, 2.0])), min_size=3, max_size=16
)


class TestBandwidthShares:
    @settings(max_examples=300, deadline=None)
    @given(bandwidths)
    def test_are_optimal_under_the_cap(self, b: list[float]) -> None:
        n = len(b)
        assume(sum(x > 0 for x in b) * 2 > n)
        shares = bandwidth_shares(b)
        assert math.fsum(shares) == pytest.approx(1)
        assert max(shares) <= 2 / n + 1e-9
        assert all(s == 0 for s, x in zip(shares, b, strict=True) if x == 0)
        slowest = max((1 + (n - 2) * s) / x for s, x in zip(shares, b, strict=True) if x > 0)
        assert slowest <= optimum(b) * (1 + 1e-9)

    @settings(max_examples=100, deadline=None)
    @given(bandwidths.filter(any), st.floats(1e-6, 1e6))
    def test_do_not_depend_on_the_unit(self, b: list[float], unit: float) -> None:
        assert bandwidth_shares([x * unit for x in b]) == pytest.approx(bandwidth_shares(b), abs=1e-9)

    def test_closed_form(self) -> None:
        b = [3.0, 2.0, 2.0, 2.0]
        xi = (4 - 2 + 4) / sum(b)
        assert bandwidth_shares(b) == pytest.approx([(xi * x - 1) / 2 for x in b])

    def test_equal_peers_share_equally(self) -> None:
        assert bandwidth_shares([5.0] * 4) == pytest.approx([0.25] * 4)

    def test_a_very_slow_peer_reduces_nothing(self) -> None:
        shares = bandwidth_shares([1.0, 1.0, 1.0, 1e-6])
        assert shares[3] == pytest.approx(0, abs=1e-5)
        assert shares[0] == pytest.approx(1 / 3, abs=1e-5)

    def test_a_boaster_gets_no_more_than_the_cap(self) -> None:
        shares = bandwidth_shares([1e9, 1.0, 1.0, 1.0])
        assert shares == pytest.approx([0.5, 1 / 6, 1 / 6, 1 / 6])

    def test_few_peers(self) -> None:
        assert bandwidth_shares([3.0]) == [1.0]
        assert bandwidth_shares([3.0, 1.0]) == [0.5, 0.5]
        assert bandwidth_shares([3.0, 0.0]) == [1.0, 0.0]
        assert bandwidth_shares([0.0, 0.0, 2.0]) == [0.0, 0.0, 1.0]
        assert bandwidth_shares([0.0, 0.0, 2.0, 1.0]) == [0.0, 0.0, 0.5, 0.5]

    @pytest.mark.parametrize("b", [[], [0.0, 0.0], [-1.0, 2.0], [math.nan, 1.0], [math.inf, 1.0]])
    def test_bandwidths_that_cannot_be(self, b: list[float]) -> None:
        with pytest.raises(ValueError, match="Bandwidths"):
            bandwidth_shares(b)
