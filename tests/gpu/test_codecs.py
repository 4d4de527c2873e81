"""Codecs on CUDA tensors: encoded on the device, decoded anywhere, within the same bounds as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm.errors import MalformedFrameError
from swarm.tensors.codecs import CODECS, codec
from swarm.tensors.wire import from_frame, to_frame

DEVICE = torch.device("cuda")
LOSSY = [name for name in CODECS if name != "none"]
SIZES = [1, 127, 4096, 4099, 1_000_003]


def staged(encoded: memoryview) -> Tensor:
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def sample(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)) ** 3


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_both_devices_encode_alike(name: str, numel: int, dtype: torch.dtype) -> None:
    tensor = sample(numel).clamp(-1e4, 1e4).to(dtype)
    on_cpu = codec(name).decode(codec(name).encode(tensor), (numel,), dtype)
    encoded = codec(name).encode(tensor.to(DEVICE))
    assert len(encoded) == codec(name).encoded_nbytes(numel, dtype)
    on_cuda = codec(name).decode(encoded, (numel,), dtype)
    # a fused multiply-add may decide a tie the other way
    differ = on_cpu != on_cuda
    assert int(differ.sum()) <= numel * 1e-3
    step = {"int8": 1 / 127, "int4": 1 / 7}.get(name, 1e-2) * tensor.double().abs().max()
    assert ((on_cpu - on_cuda).abs().double() <= step * 1.02).all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("numel", SIZES)
def test_decoding_on_the_device_is_decoding_on_the_host(name: str, numel: int) -> None:
    encoded = staged(codec(name).encode(sample(numel)))
    for dtype in (torch.float32, torch.float16):
        host, device = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype, device=DEVICE)
        codec(name).decode_into(encoded, host)
        codec(name).decode_into(encoded, device)
        assert torch.equal(host, device.cpu())
    total, on_device = torch.ones(numel), torch.ones(numel, device=DEVICE)
    codec(name).decode_add(encoded, torch.float32, total, 0.5)
    codec(name).decode_add(encoded, torch.float32, on_device, 0.5)
    torch.testing.assert_close(on_device.cpu(), total)


def steps(name: str, tensor: Tensor) -> Tensor:
    """The distance of the two values that each element may be rounded to."""
    if name == "bf16":
        return 2.0 ** (tensor.abs().log2().floor() - 7)
    size, levels = {"int8": (4096, 127), "int4": (128, 7)}[name]
    return torch.cat([(b.abs().amax() / levels * (1 + 2.0**-7)).expand(b.numel()) for b in tensor.split(size)])


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_stochastic_rounding_is_unbiased_and_repeatable(name: str) -> None:
    tensor, rounds = sample(3000).to(DEVICE), 300
    assert bytes(codec(name).encode(tensor, rng=4)) == bytes(codec(name).encode(tensor, rng=4))
    generator = torch.Generator(DEVICE).manual_seed(1)
    got = torch.stack(
        [codec(name).decode(codec(name).encode(tensor, rng=generator), (3000,), torch.float32) for _ in range(rounds)]
    ).double()
    wide = tensor.cpu().double()
    off = (got.mean(0) - wide) / steps(name, wide)
    assert float(off.abs().max()) < 5 * 0.5 / rounds**0.5
    assert abs(float(off.mean())) < 5 * 0.5 / (rounds * 3000) ** 0.5


@pytest.mark.parametrize("name", LOSSY)
def test_values_that_are_not_finite_and_huge_ones(name: str) -> None:
    tensor = sample(10_000).to(DEVICE)
    tensor[5000] = 3e38
    decoded = codec(name).decode(codec(name).encode(tensor), (10_000,), torch.float32)
    assert torch.isfinite(decoded).all()
    tensor[100] = float("nan")
    assert codec(name).decode(codec(name).encode(tensor), (10_000,), torch.float32)[100].isnan()


@pytest.mark.parametrize("name", ["int8", "int4", "topk"])
def test_malformed_bytes_leave_the_output_alone(name: str) -> None:
    encoded = torch.full((codec(name).encoded_nbytes(5000, torch.float32),), 0xF0, dtype=torch.uint8)
    out = torch.ones(5000, device=DEVICE)
    with pytest.raises(MalformedFrameError):
        codec(name).decode_into(encoded, out)
    assert (out == 1).all()


@pytest.mark.parametrize("name", CODECS)
def test_frames_of_cuda_tensors(name: str) -> None:
    tensor = sample(300_000).view(300, 1000).to(DEVICE)
    received = from_frame(to_frame({}, [tensor.t()], name))[1][0]
    turned = tensor.t().contiguous()
    assert torch.equal(received, codec(name).decode(codec(name).encode(turned), (1000, 300), torch.float32))
