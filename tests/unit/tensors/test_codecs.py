"""Codecs: exact sizes, rounding as stated, unbiased when stochastic, saturation instead of infinity."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from swarm.errors import MalformedFrameError, UnsupportedDtypeError, UsageError
from swarm.tensors.codecs import CODECS, auto, blockwise, codec, host_flat, saturating_cast, sparse, tensor_bytes

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("name", ["none", *HALF])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5)])
def test_encode_and_decode(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    encoded = codec(name).encode(tensor)
    assert len(encoded) == codec(name).encoded_nbytes(tensor.numel(), dtype)
    decoded = codec(name).decode(encoded, shape, dtype)
    expected = tensor if name == "none" else tensor.to(HALF[name]).to(dtype)
    assert decoded.dtype == dtype
    assert torch.equal(decoded, expected)
    assert decoded.data_ptr() != tensor.data_ptr() or tensor.numel() == 0


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("dtype", FLOATS)
def test_no_finite_value_becomes_infinite(name: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.tensor([largest, -largest, 1.0, 0.0], dtype=dtype)
    decoded = codec(name).decode(codec(name).encode(tensor), (4,), dtype)
    assert torch.isfinite(decoded).all()
    limit = min(largest, torch.finfo(HALF[name]).max)
    assert decoded[0].item() == pytest.approx(limit, rel=0.01)
    assert decoded[1].item() == -decoded[0].item()
    assert decoded[2:].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", HALF)
def test_infinity_and_nan_stay_what_they_are_next_to_saturated_values(name: str) -> None:
    tensor = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e39, -2e300], dtype=torch.float64)
    decoded = codec(name).decode(codec(name).encode(tensor), (5,), torch.float64)
    assert decoded[0] == float("inf")
    assert decoded[1] == float("-inf")
    assert decoded[2].isnan()
    limit = torch.finfo(HALF[name]).max
    assert decoded[3:].tolist() == [limit, -limit]


def test_sums_that_overflow_do_not_confuse_saturation() -> None:
    tensor = torch.full((64,), 3e38)
    assert torch.equal(saturating_cast(tensor, torch.bfloat16), tensor.bfloat16())
    assert torch.isfinite(saturating_cast(tensor, torch.bfloat16)).all()


def test_subnormal_halves_survive() -> None:
    tensor = torch.tensor([6e-8, -6e-8])
    assert torch.equal(saturating_cast(tensor, torch.float16), tensor.half())


@pytest.mark.parametrize("name", [*HALF, "int8", "int4", "topk"])
def test_what_lossy_codecs_cannot_carry(name: str) -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16):
        assert not codec(name).carries(dtype)
        with pytest.raises(UnsupportedDtypeError, match=f"{name} cannot carry"):
            codec(name).decode(b"", (0,), dtype)


@pytest.mark.parametrize("name", CODECS)
def test_buffers_of_the_wrong_size_are_refused(name: str) -> None:
    for size in (0, 3, 9):
        with pytest.raises(MalformedFrameError, match=f"{size} bytes"):
            codec(name).decode(bytes(size), (3,), torch.float32)


@pytest.mark.parametrize(
    "name", ["zip", "", None, 3, "NONE", "topk:0", "topk:1025", "topk:064", "topk:-1", "topk:", "topk:٣", "topk:7\n"]
)
def test_unknown_codecs(name: object) -> None:
    with pytest.raises(UnsupportedDtypeError, match="unknown"):
        codec(name)


def test_contiguous_cpu_tensors_are_read_without_a_copy() -> None:
    tensor = torch.zeros(4)
    view = tensor_bytes(host_flat(tensor))
    tensor[0] = 1
    assert bytes(view[:4]) == torch.ones(1).numpy().tobytes()
    assert codec("none").encode(tensor).obj is not None
    assert host_flat(tensor.view(2, 2)).data_ptr() == tensor.data_ptr()


def recoded(name: str, tensor: Tensor, rng: int | torch.Generator | None = None) -> Tensor:
    return codec(name).decode(codec(name).encode(tensor, rng=rng), tensor.shape, tensor.dtype)


def test_sizes_on_the_wire() -> None:
    sizes = {
        name: [codec(name).encoded_nbytes(n, torch.float32) for n in (0, 1, 128, 4095, 4096, 4097, 1 << 20)]
        for name in ("int8", "int4", "topk", "topk:256")
    }
    assert sizes == {
        "int8": [0, 5, 132, 4099, 4100, 4105, 256 * 4100],
        "int4": [0, 66, 66, 32 * 66, 32 * 66, 33 * 66, 256 * 32 * 66],
        "topk": [0, 4, 8, 256, 256, 260, 256 * 256],
        "topk:256": [0, 4, 32, 1024, 1024, 1028, 256 * 1024],
    }
    assert codec("topk:64") is codec("topk")
    assert codec("topk:256") is codec("topk:256")
    assert codec("topk:256").name == "topk:256"


def test_exact_codecs_have_no_residual() -> None:
    assert codec("none").exact(torch.float64)
    assert codec("bf16").exact(torch.bfloat16)
    assert codec("fp16").exact(torch.float16)
    for name, dtype in [
        ("bf16", torch.float32),
        ("fp16", torch.bfloat16),
        ("int8", torch.float16),
        ("topk", torch.float32),
    ]:
        assert not codec(name).exact(dtype)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_of_the_scale_come_back_as_they_are(name: str) -> None:
    levels = {"int8": 127, "int4": 7}[name]
    tensor = torch.arange(-levels, levels + 1).float()
    torch.testing.assert_close(recoded(name, tensor), tensor, rtol=0.008 if name == "int4" else 1e-6, atol=0)


def test_ties_of_int8_round_to_even() -> None:
    """Averages of integers are often halves: rounding them all up would drift."""
    tensor = torch.tensor([127.0, *(n + 0.5 for n in range(-100, 100))])
    drift = (recoded("int8", tensor * (1 + 2.0**-21)) - tensor).mean()
    assert abs(float(drift)) < 0.02


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_extreme_blocks(name: str) -> None:
    largest = torch.finfo(torch.float32).max
    for value in (largest, 3e38, 1e-38, 1e-45, 2.0**-126):
        tensor = torch.tensor([value, -value, value / 3, 0.0])
        for seed in (None, *range(20)):
            got = recoded(name, tensor, seed)
            assert torch.isfinite(got).all()
            step = max(value / 7 * (1 + 2.0**-7) * (1.05 if value > 3.39e38 else 1), 2.0**-126)
            assert ((got.double() - tensor.double()).abs() <= step).all()
            assert got[0] >= 0 >= got[1]
    assert recoded(name, torch.zeros(300)).tolist() == [0.0] * 300
    huge = torch.tensor([1e300, -1e300, float("inf")], dtype=torch.float64)
    assert recoded(name, huge[:2]).abs().max() <= largest
    assert recoded(name, huge).isnan().all()
    halves = torch.tensor([65504.0, -65504.0], dtype=torch.float16)
    assert torch.isfinite(recoded(name, halves)).all()


def steps(name: str, tensor: Tensor) -> Tensor:
    """The distance of the two values that each element may be rounded to."""
    wide = tensor.double().abs()
    if name == "bf16":
        return 2.0 ** (wide.log2().floor() - 7)
    size, levels = {"int8": (4096, 127), "int4": (128, 7)}[name]
    return torch.cat([(b.amax() / levels * (1 + 2.0**-7)).expand(b.numel()) for b in wide.split(size)])


@pytest.mark.parametrize("name", ["int8", "int4", "bf16"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(3))
    total, rounds, errors = torch.zeros(3000, dtype=torch.float64), 400, []
    for seed in range(rounds):
        got = recoded(name, tensor, seed)
        total += got
        errors.append(got - tensor)
    step = steps(name, tensor)
    off = (total / rounds - tensor.double()) / step
    assert float(off.abs().max()) < 5 * 0.5 / rounds**0.5
    assert abs(float(off.mean())) < 5 * 0.5 / (rounds * 3000) ** 0.5
    nearest = (recoded(name, tensor).double() - tensor.double()) / step
    assert float(nearest.abs().max()) > 5 * 0.5 / rounds**0.5, "the test would not see a bias"
    # the noise of two seeds, and of two elements of one, has nothing in common
    both = torch.corrcoef(torch.stack([*errors[:8], errors[0].roll(1)]))
    assert float((both - torch.eye(9)).abs().max()) < 5 / 3000**0.5


def test_seeds_decide() -> None:
    tensor = torch.randn(70_000, generator=torch.Generator().manual_seed(1))
    for name in ("int8", "int4", "bf16"):
        first, again, other = (bytes(codec(name).encode(tensor, rng=seed)) for seed in (5, 5, 6))
        assert first == again != other
        generators = [torch.Generator().manual_seed(9) for _ in range(2)]
        drawn = [bytes(codec(name).encode(tensor, rng=g)) for g in generators]
        assert drawn[0] == drawn[1] != bytes(codec(name).encode(tensor, rng=generators[0]))
    for name in ("none", "fp16", "topk"):
        assert bytes(codec(name).encode(tensor, rng=5)) == bytes(codec(name).encode(tensor))


def test_threads_do_not_disturb_each_other() -> None:
    tensors = [torch.randn(300_000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    jobs = [(name, tensor) for name in CODECS for tensor in tensors] * 3
    expected = [recoded(name, tensor, 7) for name, tensor in jobs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda job: recoded(*job, 7), jobs))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_top_k_of_ties_takes_the_first() -> None:
    got = recoded("topk", torch.ones(8192))
    assert got.nonzero().flatten().tolist() == [*range(64), *range(4096, 4160)]
    assert recoded("topk", torch.zeros(5000)).tolist() == [0.0] * 5000


def test_both_ways_to_choose_the_largest_agree() -> None:
    """torch on accelerators, numpy on the CPU."""
    for columns, kept in [(1, 1), (5, 1), (4096, 64), (900, 15)]:
        rows = (torch.randn(20, columns, generator=torch.Generator().manual_seed(columns)) * 3).round()
        rows[3, columns // 2] = float("nan")
        assert torch.equal(sparse._largest(rows, kept), sparse._largest_on_cpu(rows, kept).int())


def test_top_k_of_negative_and_strided_values() -> None:
    tensor = torch.zeros(2, 4096)
    tensor[0, 7], tensor[1, 4095] = -3.0, 2.0
    assert torch.equal(recoded("topk", tensor), tensor)
    assert torch.equal(recoded("topk", tensor.t()), tensor.t())
    assert torch.equal(recoded("topk", tensor.double() * 1e300)[0, 7], torch.tensor(-3.3895313892515355e38).double())


def damaged(name: str, place: int, raw: bytes) -> None:
    encoded = bytearray(codec(name).encode(torch.linspace(-1, 1, 5000)))
    encoded[place : place + len(raw)] = raw
    codec(name).decode(encoded, (5000,), torch.float32)


@pytest.mark.parametrize("scale", [float("inf"), -1.0, 0.0, 1e-39, 3e38])
@pytest.mark.parametrize("place", [0, 4100])
def test_scales_that_nobody_writes(scale: float, place: int) -> None:
    with pytest.raises(MalformedFrameError, match="scale"):
        damaged("int8", place, torch.tensor([scale]).numpy().tobytes())
    with pytest.raises(MalformedFrameError, match="scale"):
        damaged("int4", 2112 * (place > 0) + 2, bytes(tensor_bytes(torch.tensor([scale]).bfloat16())))
    damaged("int8", place, torch.tensor([float("nan")]).numpy().tobytes())


@pytest.mark.parametrize("raw", [b"\0\0\0\0", b"\5\0\4\0", b"\xff\xff\1\0", b"\0\x10\1\x10", b"\xfe\xff\xff\xff"])
def test_indices_that_nobody_writes(raw: bytes) -> None:
    with pytest.raises(MalformedFrameError, match="Indices"):
        damaged("topk", 0, raw)
    with pytest.raises(MalformedFrameError, match="Indices"):
        damaged("topk", 256, raw)


def test_the_last_unit_of_top_k_is_shorter() -> None:
    with pytest.raises(MalformedFrameError, match="Indices"):  # 904 elements are left, in 15 entries
        damaged("topk", 256 + 2 * 14, b"\x88\3")
    damaged("topk", 256 + 2 * 14, b"\x87\3")


def test_bytes_at_odd_places() -> None:
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    for name in CODECS:
        encoded = codec(name).encode(tensor)
        shifted = torch.zeros(len(encoded) + 1, dtype=torch.uint8)
        tensor_bytes(shifted)[1:] = encoded
        out, acc = torch.empty(5000), torch.zeros(5000)
        codec(name).decode_into(shifted[1:], out)
        codec(name).decode_add(shifted[1:], torch.float32, acc, 2.0)
        assert torch.equal(out, recoded(name, tensor))
        torch.testing.assert_close(acc, 2 * out)


def test_codecs_by_role() -> None:
    large, medium, small = 1 << 20, 1 << 15, 1 << 13
    names = {
        (role, dtype): tuple(auto(role, n, dtype) for n in (large, medium, small))
        for role in ("parameters", "gradients", "state")
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
    }
    as_is = ("none", "none", "none")
    assert names == {
        ("parameters", torch.float32): ("bf16", "bf16", "none"),
        ("parameters", torch.bfloat16): as_is,
        ("parameters", torch.int64): as_is,
        ("gradients", torch.float32): ("int8", "bf16", "none"),
        ("gradients", torch.bfloat16): ("int8", "none", "none"),
        ("gradients", torch.int64): as_is,
        ("state", torch.float32): as_is,
        ("state", torch.bfloat16): as_is,
        ("state", torch.int64): as_is,
    }
    with pytest.raises(UsageError, match="unknown"):
        auto("weights", 1, torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("extreme", [0.5 - 2.0**-19, 2.0**-19 - 0.5])
def test_no_noise_carries_beyond_the_last_integer(name: str, extreme: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 would come back as -128."""
    monkeypatch.setattr(blockwise, "centred_noise", lambda seed, tile, numel, device: torch.full((numel,), extreme))
    generator = torch.Generator().manual_seed(1)
    largest = torch.cat([2.0 ** (torch.rand(3000, generator=generator) * 240 - 115), torch.tensor([3.4028235e38, 1.0])])
    block = {"int8": 4096, "int4": 128}[name]
    tensor = torch.zeros(len(largest), block)
    tensor[:, 0], tensor[:, 1] = largest, -largest
    got = recoded(name, tensor, 1)[:, :2]
    torch.testing.assert_close(got, tensor[:, :2], rtol=0.2 if name == "int4" else 0.01, atol=0)


def test_stochastic_bf16_neither_overflows_nor_loses_nan() -> None:
    """Noise carries the largest values into infinity, and NaN of all ones into zero."""
    largest = torch.tensor([3.4028235e38, -3.4028235e38, 1.0])
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    for seed in range(10):
        assert torch.isfinite(recoded("bf16", largest, seed)).all()
        assert recoded("bf16", nans, seed).isnan().all()
        assert recoded("bf16", torch.tensor([math.inf, -math.inf, 1.0]), seed).tolist() == [math.inf, -math.inf, 1.0]
