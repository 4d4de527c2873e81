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
    PartReduction,
    Reduced,
    choose_codecs,
    make_feedback,
    rounding_seed,
)
from swarm.averaging.gossip import Gossip
from swarm.averaging.vector import Chunk, FlatVector
from swarm.errors import UnsupportedDtypeError, UsageError
from swarm.identity import PeerId
from swarm.tensors.codecs import codec as find_codec
from swarm.tensors.memory import peek
from swarm.tensors.partition import split
from swarm.tensors.schema import TensorMeta

A, B, C = (PeerId(bytes([i]) * 32) for i in range(3))


def vector_of(tensors: list[Tensor], codec_name: str = "none") -> FlatVector:
    vector = FlatVector([TensorMeta.of(t) for t in tensors], [find_codec(codec_name)] * len(tensors))
    vector.load(tensors)
    return vector


def equal_parts(numel: int, members: int) -> list[int]:
    return [len(part) for part in split(numel, [1.0] * members)]


def encode(codec_name: str, values: Tensor) -> bytes:
    return bytes(find_codec(codec_name).encode(values))


def butterfly(vectors: list[FlatVector], weights: list[float], chunk_bytes: int) -> None:
    """The whole exchange in one loop: what the network does, without it."""
    n, start = len(vectors), 0
    for reducer, part in enumerate(equal_parts(vectors[0].numel, n)):
        for chunk in vectors[0].chunks(start, start + part, chunk_bytes):
            codec = vectors[0].segments[chunk.segment].codec
            arrived = [
                (PeerId(bytes([i]) * 32), weights[i], bytes(codec.encode(vectors[i].read(chunk))))
                for i in range(n)
                if i != reducer and weights[i] > 0
            ]
            reduced = ChunkReducer(vectors[reducer]).reduce(chunk, weights[reducer], arrived)
            assert reduced.offenders == ()
            if reduced.encoded is not None:
                decoded = torch.empty(chunk.numel, dtype=vectors[0].segments[chunk.segment].dtype)
                codec.decode_into(peek(reduced.encoded), decoded)
                for i in range(n):
                    if i != reducer:
                        vectors[i].write(chunk, decoded)
        start += part


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=5),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), min_size=5, max_size=5
    ),
    weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0]), min_size=2, max_size=5),
    codec_name=st.sampled_from(["none", "fp16", "bf16", "int8", "int4"]),
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
    vectors = [vector_of(tensors, codec_name) for tensors in inputs]
    butterfly(vectors, weights, chunk_bytes)
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
        if codec_name.startswith("int"):  # each of two roundings is off by a fraction of the largest value, about 4
            tolerance = {"int8": 0.1, "int4": 1.5}[codec_name]
        torch.testing.assert_close(first.double(), exact, rtol=tolerance, atol=tolerance)


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    cuts=st.integers(1, 9),
    chunk_bytes=st.integers(1, 100),
)
def test_chunks_cover_every_element_once(sizes: list[int], cuts: int, chunk_bytes: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    vector = FlatVector([TensorMeta((n,), d) for n, d in zip(sizes, dtypes, strict=False)])
    for segment in vector.views():
        segment.zero_()
    start = 0
    for part in equal_parts(vector.numel, cuts):
        for chunk in vector.chunks(start, start + part, chunk_bytes):
            values = vector.read(chunk)
            assert values.numel() == chunk.numel > 0
            assert values.nbytes <= max(chunk_bytes, values.element_size())
            vector.write(chunk, values + 1)
        start += part
    assert all(bool((view == 1).all()) for view in vector.views())


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
    return encode("none", torch.tensor(values))


def reduce(own: Tensor, weight: float, arrived: list[tuple[PeerId, float, bytes]], codec: str = "none") -> Reduced:
    """Reduce one chunk in place."""
    vector = FlatVector([TensorMeta.of(own)], [find_codec(codec)], over=[own])
    return ChunkReducer(vector).reduce(Chunk(0, 0, own.numel()), weight, arrived)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sender_without_finite_values_is_named_and_left_out(bad: float) -> None:
    own = torch.tensor([1.0, 2.0])
    reduced = reduce(own, 1.0, [(A, 1.0, payload(bad, 5.0)), (B, 2.0, payload(4.0, 5.0))])
    assert reduced.offenders == (A,)
    assert reduced.contributors == (None, B)
    assert torch.equal(own, torch.tensor([3.0, 4.0]))
    assert reduced.encoded == payload(3.0, 4.0)


def test_a_reducer_without_finite_values_takes_the_mean_of_the_others() -> None:
    own = torch.tensor([math.nan, 2.0])
    reduced = reduce(own, 1.0, [(A, 1.0, payload(3.0, 5.0))])
    assert reduced.offenders == (None,)
    assert torch.equal(own, torch.tensor([3.0, 5.0]))


def test_when_no_values_are_finite_local_ones_stand() -> None:
    own = torch.tensor([math.nan, 2.0])
    reduced = reduce(own, 1.0, [(A, 1.0, payload(math.inf, 5.0))])
    assert reduced.encoded is None
    assert own[1] == 2.0


def test_finite_values_whose_sum_overflows_stay_local() -> None:
    own = torch.full((2,), 3e38)
    reduced = reduce(own, 1.0, [(A, 1.0, payload(3e38, 3e38)), (B, 1.0, payload(1.0, 1.0))])
    assert reduced.encoded is None
    assert reduced.offenders == ()
    assert torch.equal(own, torch.full((2,), 3e38))


def test_weights_whose_sum_overflows_still_weigh() -> None:
    own = torch.tensor([1.0, 2.0])
    reduced = reduce(own, 1e308, [(A, 1e308, payload(4.0, 5.0)), (B, 0.5e308, payload(5.0, 5.0))])
    assert reduced.encoded == payload(*own.tolist())
    torch.testing.assert_close(own, torch.tensor([3.0, 3.8]))


def test_weight_zero_contributes_nothing_and_all_zero_keeps_local_values() -> None:
    own = torch.tensor([1.0])
    assert reduce(own, 0.0, []).encoded is None
    assert own.item() == 1.0
    reduced = reduce(own, 0.0, [(A, 2.0, payload(5.0))])
    assert reduced.contributors == (A,)
    assert own.item() == 5.0


def test_large_finite_values_are_not_taken_for_infinite_ones() -> None:
    own = torch.full((8,), 1e38)
    reduced = reduce(own, 1.0, [(A, 3.0, encode("none", torch.full((8,), 1e38)))])
    assert reduced.offenders == ()
    torch.testing.assert_close(own, torch.full((8,), 1e38))


@pytest.mark.parametrize("codec", ["int8", "int4", "topk"])
def test_bytes_that_no_encoder_writes_cost_only_their_sender(codec: str) -> None:
    own, other = torch.linspace(-1, 1, 4096), torch.linspace(1, 2, 4096)
    broken = bytes(len(encode(codec, own)))  # scales of zero, or one index for all
    expected, got = own.clone(), own.clone()
    reduce(expected, 1.0, [(B, 2.0, encode(codec, other))], codec)
    reduced = reduce(got, 1.0, [(A, 1.0, broken), (B, 2.0, encode(codec, other))], codec)
    assert (reduced.malformed, reduced.contributors) == ((A,), (None, B))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("codec", ["int8", "int4", "topk", "bf16"])
def test_a_sender_without_finite_values_is_named_with_every_codec(codec: str) -> None:
    own, bad = torch.ones(4096), torch.ones(4096)
    bad[7] = math.nan
    reduced = reduce(own, 1.0, [(A, 1.0, encode(codec, bad)), (B, 1.0, encode(codec, torch.ones(4096)))], codec)
    assert (reduced.offenders, reduced.contributors) == ((A,), (None, B))
    assert bool(torch.isfinite(own).all())


def test_a_vector_over_tensors_is_their_memory() -> None:
    tensors = [torch.arange(5.0), torch.ones(3, 2, requires_grad=True), torch.arange(4.0).double(), torch.empty(0)]
    assert FlatVector.fits_over(tensors)
    vector = FlatVector([TensorMeta.of(t) for t in tensors], over=tensors)
    versions = [t._version for t in tensors]
    whole = Chunk(0, 2, 9)  # the end of the first tensor, the beginning of the second
    assert vector.read(whole).tolist() == [2, 3, 4, 1, 1, 1, 1]
    vector.write(whole, torch.arange(7.0) * 10)
    assert tensors[0].tolist() == [0, 1, 0, 10, 20]
    assert tensors[1].tolist() == [[30, 40], [50, 60], [1, 1]]
    assert all(t._version > v for t, v in zip(tensors[:2], versions, strict=False)), "autograd must notice"
    assert vector.flat().dtype == torch.float64
    assert not FlatVector.fits_over([torch.ones(2, 3).t()])


def test_tensors_share_a_segment_by_dtype_and_codec() -> None:
    metas = [TensorMeta((n,), torch.float32) for n in (10, 200_000, 20, 20_000, 300_000)]
    codecs = choose_codecs("auto", "gradients", metas)
    assert [c.name for c in codecs] == ["none", "int8", "none", "bf16", "int8"]
    vector = FlatVector(metas, codecs)
    assert [(s.codec.name, s.numel) for s in vector.segments] == [("none", 30), ("int8", 500_000), ("bf16", 20_000)]
    feedback = make_feedback(None, vector, b"layout")
    assert feedback is not None
    assert [feedback.covers(i) for i in range(3)] == [False, True, False]
    always = make_feedback(True, vector, b"layout")
    assert always is not None
    assert [always.covers(i) for i in range(3)] == [False, True, True]
    assert make_feedback(False, vector, b"layout") is None
    assert make_feedback(None, FlatVector(metas), b"layout") is None


def test_noise_differs_between_rounds_members_parts_and_chunks() -> None:
    places = [(nonce, m, p, c) for nonce in (b"a" * 16, b"b" * 16) for m in (0, 1) for p in (0, 1) for c in (0, 1)]
    seeds = [rounding_seed(*place) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [rounding_seed(*place) for place in places]


# Which chunk is due -------------------------------------------------------------------------------------------------


def part_of(chunks: int, senders: dict[PeerId, float], window: int = 8) -> PartReduction:
    part = PartReduction(chunks, list(senders), window)
    for peer, weight in senders.items():
        part.admit(peer, weight)
    return part


def test_chunks_are_reduced_in_order_when_all_have_arrived() -> None:
    part = part_of(2, {A: 1.0, B: 2.0})
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


def test_who_has_not_said_what_its_values_weigh_is_waited_for() -> None:
    part = PartReduction(1, [A, B])
    assert part.missing() == [A, B]
    part.admit(A, 0.0)
    assert part.missing() == [B]
    part.admit(B, 3.0)
    part.arrived(B, b"b0")
    assert part.take() == [(B, 3.0, b"b0")]


def test_a_lost_sender_counts_for_what_it_sent_and_no_more() -> None:
    part = part_of(3, {A: 1.0, B: 1.0})
    part.arrived(B, b"b0")
    assert part.lose(B)
    assert not part.lose(B)
    for index in range(3):
        part.arrived(A, f"a{index}".encode())
    assert part.take() == [(A, 1.0, b"a0"), (B, 1.0, b"b0")]
    part.arrived(B, b"b1")
    assert part.take() == [(A, 1.0, b"a1")]
    assert part.take() == [(A, 1.0, b"a2")]


def test_a_sender_left_behind_counts_again_when_it_has_caught_up() -> None:
    part = part_of(4, {A: 1.0, B: 1.0})
    for index in range(4):
        part.arrived(A, f"a{index}".encode())
    part.leave_behind(B)
    assert part.missing() == []
    assert part.behind() == [B]
    assert part.take() == [(A, 1.0, b"a0")]
    assert part.take() == [(A, 1.0, b"a1")]
    part.arrived(B, b"b0")
    assert part.behind() == [B]  # it still lags: that chunk is done
    part.arrived(B, b"b1")
    part.arrived(B, b"b2")
    assert part.take() == [(A, 1.0, b"a2"), (B, 1.0, b"b2")]
    assert part.missing() == [B], "it is waited for again"


def test_losing_a_sender_that_has_sent_everything_changes_nothing() -> None:
    part = part_of(1, {A: 1.0})
    part.arrived(A, b"a0")
    assert not part.lose(A)
    assert not part.lose(C), "it never was one"
    assert part.take() == [(A, 1.0, b"a0")]


def test_a_fast_sender_is_read_a_window_ahead() -> None:
    part = part_of(10, {A: 1.0, B: 1.0}, window=2)
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


def test_sparse_codecs_average_differences_only() -> None:
    for strategy in (AllReduce, Gossip):
        with pytest.raises(UsageError, match="gradients"):
            strategy(codec="topk")
        with pytest.raises(UsageError, match="role"):
            strategy(role="weights")  # type: ignore[arg-type]
        assert strategy(codec="topk", role="gradients").codec == "topk"
        assert strategy(codec="auto").codec == "auto"
