"""Codecs: exact sizes, rounding as torch rounds, saturation instead of infinity."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import MalformedFrameError, UnsupportedDtypeError
from swarm.tensors.codecs import CODECS, codec, host_flat, saturating_cast, tensor_bytes

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


@pytest.mark.parametrize("name", HALF)
def test_what_halves_cannot_carry(name: str) -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16):
        assert not codec(name).carries(dtype)
        with pytest.raises(UnsupportedDtypeError, match=f"{name} cannot carry"):
            codec(name).decode(b"", (0,), dtype)


@pytest.mark.parametrize("name", CODECS)
def test_buffers_of_the_wrong_size_are_refused(name: str) -> None:
    for size in (0, 5, 9):
        with pytest.raises(MalformedFrameError, match=f"{size} bytes"):
            codec(name).decode(bytes(size), (3,), torch.float32)


@pytest.mark.parametrize("name", ["zip", "", None, 3, "NONE"])
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
