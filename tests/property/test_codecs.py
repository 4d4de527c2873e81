"""Codecs over random tensors: their error bounds, exact sizes, independence of cuts, and bytes that nobody encoded."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.errors import MalformedFrameError, WireError
from swarm.tensors.codecs import CODECS, Codec, codec, tensor_bytes
from swarm.tensors.wire import encode, from_frame, to_frame

LOSSY = ["fp16", "bf16", "int8", "int4", "topk", "topk:512"]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LEVELS = {"int8": (127, 4096), "int4": (7, 128)}
SMALLEST = 2.0**-126

sizes = st.one_of(st.integers(1, 300), st.integers(4090, 4100), st.integers(1, 9000))
magnitudes = st.sampled_from([0.0, 1e-45, 1e-39, 1e-30, 1e-8, 1.0, 6e4, 1e20, 3e38])


@st.composite
def values(draw: st.DrawFn) -> Tensor:
    """fp64 of very different magnitudes, with ties and zeros."""
    numel, seed = draw(sizes), draw(st.integers(0, 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(numel, generator=generator, dtype=torch.float64) * 2 - 1
    match draw(st.sampled_from(["uniform", "spiky", "ties", "stripes"])):
        case "spiky":
            x = x**21
        case "ties":
            x = (x * 3).round() / 3
        case "stripes":
            x *= 10.0 ** torch.randint(-40, 1, (-(-numel // 128),), generator=generator).repeat_interleave(128)[:numel]
    return x * draw(magnitudes)


def staged(encoded: memoryview | bytes) -> Tensor:
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if len(encoded) else torch.empty(0).byte()


def decoded(with_codec: Codec, encoded: memoryview | bytes, numel: int, dtype: torch.dtype) -> Tensor:
    return with_codec.decode(bytes(encoded), (numel,), dtype)


def block_bounds(name: str, x: Tensor) -> Tensor:
    """The largest error for each element when rounding to nearest: half its block's scale."""
    levels, size = LEVELS[name]
    padded = torch.cat([x.double().abs(), torch.zeros(-x.numel() % size)]).view(-1, size)
    scale = (padded.amax(1, keepdim=True) / levels * (1 + 2.0**-20)).clamp_min(SMALLEST)
    if name == "int4":
        scale *= 1 + 2.0**-7  # rounded up to bf16
    return (scale / 2).expand_as(padded).reshape(-1)[: x.numel()]


def bounds(name: str, x: Tensor, stochastic: bool) -> Tensor:
    """The largest error for each element of fp32 `x` that the codecs' docstrings allow."""
    wide = x.double().abs()
    if name == "fp16":
        return torch.where(wide > 65504, wide - 65504, (wide * 2.0**-11).clamp_min(2.0**-25))
    if name == "bf16":
        return (wide * 2.0**-8).clamp_min(2.0**-134) * (2 if stochastic else 1)
    return block_bounds(name, x) * (2 if stochastic else 1) * (1 + 2.0**-20)


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "int4"])
@settings(max_examples=60)
@given(values(), st.none() | st.integers(0, 1 << 62))
def test_error_bounds(name: str, x: Tensor, seed: int | None) -> None:
    single = x.float()
    got = decoded(codec(name), codec(name).encode(single, rng=seed), x.numel(), torch.float32)
    error = (got.double() - single.double()).abs()
    assert torch.isfinite(got).all()
    assert (error <= bounds(name, single, seed is not None)).all()
    assert torch.equal(got[single == 0], single[single == 0])


@settings(max_examples=60)
@given(values(), st.sampled_from([64, 1, 512]))
def test_top_k_keeps_the_largest(x: Tensor, kept: int) -> None:
    single, with_codec = x.float(), codec(f"topk:{kept}")
    got = decoded(with_codec, with_codec.encode(single), x.numel(), torch.float32)
    for row, out in zip(single.split(4096), got.split(4096), strict=True):
        count = math.ceil(row.numel() * kept / 4096)
        sent = out != 0
        assert int(sent.sum()) <= count
        # below its normal range bf16 has a fixed step of 2^-133
        assert ((out - row)[sent].abs() <= row[sent].abs() * 2.0**-8 + 2.0**-134).all()
        missed = row[~sent].abs().max() if bool((~sent).any()) else torch.tensor(0.0)
        # what bf16 rounds to zero counts as sent
        if float(missed) > 2.0**-133:
            assert int(sent.sum()) == count
            assert missed * (1 - 2.0**-11) <= row[sent].abs().min()


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=25)
@given(values(), st.sampled_from(FLOATS), st.none() | st.integers(0, 1 << 62))
def test_sizes_and_finiteness_in_every_dtype(name: str, x: Tensor, dtype: torch.dtype, seed: int | None) -> None:
    limit = torch.finfo(dtype).max
    tensor, with_codec = x.clamp(-limit, limit).to(dtype), codec(name)
    encoded = with_codec.encode(tensor, rng=seed)
    assert len(encoded) == with_codec.encoded_nbytes(x.numel(), dtype)
    got = decoded(with_codec, encoded, x.numel(), dtype)
    assert torch.isfinite(got).all()
    assert bytes(encoded) == bytes(with_codec.encode(tensor, rng=seed))


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=25)
@given(values(), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0), st.none() | st.integers(0, 9))
def test_values_that_are_not_finite_stay_so(name: str, x: Tensor, bad: float, place: int, seed: int | None) -> None:
    single = x.float()
    single[place % x.numel()] = bad
    got = decoded(codec(name), codec(name).encode(single, rng=seed), x.numel(), torch.float32)
    assert not math.isfinite(got[place % x.numel()])
    if name in LEVELS:
        size = LEVELS[name][1]
        block = place % x.numel() // size
        inside = torch.arange(x.numel()) // size == block
        assert got[inside].isnan().all()
        assert torch.isfinite(got[~inside]).all()


@pytest.mark.parametrize("name", [*LOSSY, "none"])
@settings(max_examples=20)
@given(values(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 3))
def test_pieces_of_whole_units_give_the_same_bytes(name: str, x: Tensor, dtype: torch.dtype, units: int) -> None:
    tensor, with_codec = x.to(dtype), codec(name)
    whole = bytes(with_codec.encode(tensor))
    step = units * with_codec.unit_elements
    assert b"".join(bytes(with_codec.encode(piece)) for piece in tensor.split(step)) == whole
    messages = list(encode({}, [tensor], name, chunk_bytes=3000))
    assert b"".join(messages) == to_frame({}, [tensor], name)
    received = from_frame(b"".join(messages))[1][0]
    assert torch.equal(received, decoded(with_codec, whole, x.numel(), dtype))


@pytest.mark.parametrize("name", [*LOSSY, "none"])
@settings(max_examples=20)
@given(values(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.floats(-3, 3), st.booleans())
def test_adding_is_decoding_and_adding(name: str, x: Tensor, dtype: torch.dtype, alpha: float, double: bool) -> None:
    x = x.clamp(-1e30, 1e30)
    with_codec, wide = codec(name), torch.float64 if double else torch.float32
    encoded = staged(with_codec.encode(x.to(dtype)))
    values = decoded(with_codec, tensor_bytes(encoded), x.numel(), dtype).to(wide)
    acc = torch.linspace(-1, 1, x.numel(), dtype=wide)
    expected = acc + alpha * values
    with_codec.decode_add(encoded, dtype, acc, alpha)
    rounded = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-22  # blockwise values, only when they are decoded
    slack = 2.0**-22 * (1 + values.abs() * abs(alpha)) + rounded * values.abs() * abs(alpha)
    assert ((acc - expected).abs() <= slack).all()


@pytest.mark.parametrize("name", [*LOSSY, "none"])
@settings(max_examples=40)
@given(st.data(), st.integers(0, 4500), st.integers(0, 1 << 30))
def test_any_bytes_of_the_right_size_decode_or_are_refused(
    name: str, data: st.DataObject, numel: int, seed: int
) -> None:
    with_codec, generator = codec(name), torch.Generator().manual_seed(seed)
    encoded = staged(with_codec.encode(torch.randn(numel, generator=generator)))
    if encoded.numel() and data.draw(st.booleans()):
        encoded.random_(0, 256, generator=generator)
    elif encoded.numel():
        for place, value in data.draw(st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4)):
            encoded[place % encoded.numel()] = value
    for dtype in (torch.float32, torch.float16):
        if name == "none" and dtype != torch.float32:
            continue
        out, acc = torch.full((numel,), 7, dtype=dtype), torch.full((numel,), 7.0)
        try:
            with_codec.decode_into(encoded, out)
        except MalformedFrameError:
            with pytest.raises(MalformedFrameError):
                with_codec.decode_add(encoded, dtype, acc)
            assert (out == 7).all()
            assert (acc == 7).all()
        else:
            with_codec.decode_add(encoded, dtype, acc)


@settings(max_examples=60)
@given(st.sampled_from([*CODECS, "topk:7"]), st.integers(0, 9000), st.integers(-70, 70).filter(bool))
def test_other_sizes_are_refused(name: str, numel: int, off: int) -> None:
    with_codec = codec(name)
    size = with_codec.encoded_nbytes(numel, torch.float32)
    wrong = torch.zeros(max(0, size + off), dtype=torch.uint8)
    if wrong.numel() == size:
        return
    with pytest.raises(MalformedFrameError):
        with_codec.decode_into(wrong, torch.empty(numel))
    with pytest.raises(MalformedFrameError):
        with_codec.decode_add(wrong, torch.float32, torch.empty(numel))


@settings(max_examples=100)
@given(
    st.sampled_from(LOSSY), st.integers(1, 600), st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=5)
)
def test_damaged_frames(name: str, numel: int, damage: list[tuple[int, int]]) -> None:
    frame = bytearray(to_frame({}, [torch.linspace(-1, 1, numel), torch.ones(3)], [name, "none"]))
    for place, value in damage:
        frame[place % len(frame)] = value
    try:
        received = from_frame(bytes(frame))[1]
    except WireError:
        return
    assert len(received) <= 2
