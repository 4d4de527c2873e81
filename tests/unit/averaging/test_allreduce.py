"""Layout, reduction order and chunk arithmetic of the butterfly, against exact weighted means."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.averaging.allreduce import (
    NO_VALUES,
    AllReduce,
    ChunkReducer,
    FlatVector,
    PartReduction,
    decode_chunk,
    encode_chunk,
    equal_parts,
)
from swarm.averaging.gossip import Gossip
from swarm.errors import MalformedFrameError, UnsupportedDtypeError, UsageError
from swarm.identity import PeerId
from swarm.tensors.codecs import codec as find_codec
from swarm.tensors.schema import TensorMeta

A, B, C = (PeerId(bytes([i]) * 32) for i in range(3))
NONE = find_codec("none")


def vector_of(tensors: list[Tensor]) -> FlatVector:
    vector = FlatVector([TensorMeta.of(t) for t in tensors])
    vector.load(tensors)
    return vector


def butterfly(vectors: list[FlatVector], weights: list[float], codec_name: str, chunk_bytes: int) -> None:
    """The whole exchange in one loop: what the network does, without it."""
    codec, n = find_codec(codec_name), len(vectors)
    start = 0
    for reducer, part in enumerate(equal_parts(vectors[0].numel, n)):
        for chunk in vectors[0].chunks(start, start + part, codec, chunk_bytes):
            arrived = [
                (PeerId(bytes([i]) * 32), weights[i], encode_chunk(codec, vectors[i].view(chunk)))
                for i in range(n)
                if i != reducer and weights[i] > 0
            ]
            reduced = ChunkReducer(codec).reduce(vectors[reducer].view(chunk), weights[reducer], arrived)
            assert reduced.offenders == ()
            if reduced.encoded is not None:
                for i in range(n):
                    if i != reducer:
                        decode_chunk(codec, reduced.encoded, vectors[i].view(chunk))
        start += part


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=5),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), min_size=5, max_size=5
    ),
    weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0]), min_size=2, max_size=5),
    codec_name=st.sampled_from(["none", "fp16", "bf16"]),
    chunk_bytes=st.sampled_from([2, 16, 64, 1 << 20]),
    seed=st.integers(0, 2**31),
)
def test_all_members_get_the_same_bits_and_they_are_the_weighted_mean(
    shapes: list[list[int]],
    dtypes: list[torch.dtype],
    weights: list[float],
    codec_name: str,
    chunk_bytes: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    inputs = [[torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=False)] for _ in weights]
    vectors = [vector_of(tensors) for tensors in inputs]
    butterfly(vectors, weights, codec_name, chunk_bytes)
    outputs = [vector.views() for vector in vectors]
    for index, first in enumerate(outputs[0]):
        if not any(weights):
            for i, out in enumerate(outputs):
                assert torch.equal(out[index], inputs[i][index])
            continue
        for out in outputs[1:]:
            assert torch.equal(
                out[index].view(torch.uint8) if out[index].dim() else out[index],
                first.view(torch.uint8) if first.dim() else first,
            )
        exact = sum(w * x[index].double() for w, x in zip(weights, inputs, strict=True)) / sum(weights)
        coarse = codec_name == "bf16" or first.dtype == torch.bfloat16
        half = codec_name == "fp16" or first.dtype == torch.float16
        tolerance = 4e-2 if coarse else 5e-3 if half else 1e-6
        torch.testing.assert_close(first.double(), exact, rtol=tolerance, atol=tolerance)


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    cuts=st.integers(1, 9),
    chunk_bytes=st.integers(1, 100),
)
def test_chunks_cover_every_element_once(sizes: list[int], cuts: int, chunk_bytes: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    vector = FlatVector([TensorMeta((n,), d) for n, d in zip(sizes, dtypes, strict=False)])
    for segment in vector.segments:
        segment.zero_()
    start = 0
    for part in equal_parts(vector.numel, cuts):
        for chunk in vector.chunks(start, start + part, NONE, chunk_bytes):
            view = vector.view(chunk)
            assert view.numel() == chunk.numel > 0
            assert view.nbytes <= max(chunk_bytes, view.element_size())
            view.add_(1)
        start += part
    assert all(bool((segment == 1).all()) for segment in vector.segments)


def test_the_vector_carries_strided_and_scalar_tensors_there_and_back() -> None:
    tensors = [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(7.0),
        torch.empty(0, 4),
        torch.arange(3).to(torch.bfloat16),
    ]
    vector = vector_of(tensors)
    assert vector.numel == 10
    targets = [torch.zeros_like(t) for t in tensors]
    vector.store(targets)
    assert all(torch.equal(a, b) for a, b in zip(tensors, targets, strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_what_has_no_mean_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedDtypeError):
        FlatVector([TensorMeta((3,), dtype)])


def payload(*values: float) -> bytes:
    return encode_chunk(NONE, torch.tensor(values))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sender_without_finite_values_is_named_and_left_out(bad: float) -> None:
    own = torch.tensor([1.0, 2.0])
    reduced = ChunkReducer(NONE).reduce(own, 1.0, [(A, 1.0, payload(bad, 5.0)), (B, 2.0, payload(4.0, 5.0))])
    assert reduced.offenders == (A,)
    assert reduced.contributors == (None, B)
    assert torch.equal(own, torch.tensor([3.0, 4.0]))
    assert reduced.encoded == payload(3.0, 4.0)


def test_a_reducer_without_finite_values_takes_the_mean_of_the_others() -> None:
    own = torch.tensor([math.nan, 2.0])
    reduced = ChunkReducer(NONE).reduce(own, 1.0, [(A, 1.0, payload(3.0, 5.0))])
    assert reduced.offenders == (None,)
    assert torch.equal(own, torch.tensor([3.0, 5.0]))


def test_when_no_values_are_finite_local_ones_stand() -> None:
    own = torch.tensor([math.nan, 2.0])
    reduced = ChunkReducer(NONE).reduce(own, 1.0, [(A, 1.0, payload(math.inf, 5.0))])
    assert reduced.encoded is None
    assert own[1] == 2.0


def test_finite_values_whose_sum_overflows_stay_local() -> None:
    own = torch.full((2,), 3e38)
    reduced = ChunkReducer(NONE).reduce(own, 1.0, [(A, 1.0, payload(3e38, 3e38)), (B, 1.0, payload(1.0, 1.0))])
    assert reduced.encoded is None
    assert reduced.offenders == ()
    assert torch.equal(own, torch.full((2,), 3e38))


def test_weights_whose_sum_overflows_still_weigh() -> None:
    own = torch.tensor([1.0, 2.0])
    reduced = ChunkReducer(NONE).reduce(own, 1e308, [(A, 1e308, payload(4.0, 5.0)), (B, 0.5e308, payload(5.0, 5.0))])
    assert reduced.encoded == payload(*own.tolist())
    torch.testing.assert_close(own, torch.tensor([3.0, 3.8]))


def test_weight_zero_contributes_nothing_and_all_zero_keeps_local_values() -> None:
    own = torch.tensor([1.0])
    assert ChunkReducer(NONE).reduce(own, 0.0, []).encoded is None
    assert own.item() == 1.0
    reduced = ChunkReducer(NONE).reduce(own, 0.0, [(A, 2.0, payload(5.0))])
    assert reduced.contributors == (A,)
    assert own.item() == 5.0


def test_large_finite_values_are_not_taken_for_infinite_ones() -> None:
    own = torch.full((8,), 1e38)
    reduced = ChunkReducer(NONE).reduce(own, 1.0, [(A, 3.0, encode_chunk(NONE, torch.full((8,), 1e38)))])
    assert reduced.offenders == ()
    torch.testing.assert_close(own, torch.full((8,), 1e38))


def test_a_payload_of_another_size_is_malformed() -> None:
    vector = vector_of([torch.zeros(4)])
    (chunk,) = vector.chunks(0, 4, NONE, 1 << 20)
    reducer = ChunkReducer(NONE)
    reducer.check_size(chunk, torch.float32, b"\0" * 16)
    reducer.check_size(chunk, torch.float32, NO_VALUES)
    for size in (0, 2, 15, 17):
        with pytest.raises(MalformedFrameError):
            reducer.check_size(chunk, torch.float32, b"\0" * size)


# Which chunk is due -------------------------------------------------------------------------------------------------


def test_chunks_are_reduced_in_order_when_all_have_arrived() -> None:
    part = PartReduction(2, [(A, 1.0), (B, 2.0)])
    part.arrived(A, b"a0")
    part.arrived(A, b"a1")
    assert part.missing() == [B]
    part.arrived(B, b"b0")
    assert part.missing() == []
    assert part.take() == [(A, 1.0, b"a0"), (B, 2.0, b"b0")]
    assert part.missing() == [B]
    part.arrived(B, NO_VALUES)
    assert part.take() == [(A, 1.0, b"a1")]
    assert part.done


def test_a_lost_sender_counts_for_what_it_sent_and_no_more() -> None:
    part = PartReduction(3, [(A, 1.0), (B, 1.0)])
    part.arrived(B, b"b0")
    assert part.lose(B, "stalled")
    assert not part.lose(B, "again")
    for index in range(3):
        part.arrived(A, f"a{index}".encode())
    assert part.take() == [(A, 1.0, b"a0"), (B, 1.0, b"b0")]
    part.arrived(B, b"b1")
    assert part.take() == [(A, 1.0, b"a1")]
    assert part.take() == [(A, 1.0, b"a2")]


def test_a_chunk_that_comes_after_its_reduction_is_forgotten() -> None:
    part = PartReduction(2, [(A, 1.0)])
    part.lose(A, "stalled")
    assert part.take() == []
    part.arrived(A, b"a0")
    assert part.take() == []


def test_losing_a_sender_that_has_sent_everything_changes_nothing() -> None:
    part = PartReduction(1, [(A, 1.0)])
    part.arrived(A, b"a0")
    assert not part.lose(A, "gone")
    assert not part.lose(C, "never was one")
    assert part.take() == [(A, 1.0, b"a0")]


def test_a_fast_sender_is_read_a_window_ahead() -> None:
    part = PartReduction(10, [(A, 1.0), (B, 1.0)], window=2)
    for _ in range(2):
        assert part.wants(A)
        part.arrived(A, b"a")
    assert not part.wants(A)
    part.arrived(B, b"b")
    part.take()
    assert part.wants(A)


@pytest.mark.parametrize("sizes", [(1, 4), (3, 2), (2, 1000)])
def test_groups_of_impossible_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(UsageError):
        AllReduce(min_group=sizes[0], max_group=sizes[1])


def test_unknown_codecs_are_refused_by_every_strategy() -> None:
    for strategy in (AllReduce, Gossip):
        with pytest.raises(UnsupportedDtypeError):
            strategy(codec="zip")
    assert (Gossip().min_group, Gossip().max_group) == (2, 2)
