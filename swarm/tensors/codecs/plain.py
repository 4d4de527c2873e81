"""Codecs that keep every element: `none` copies memory, `fp16` and `bf16` round to two bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarm.tensors.codecs.base import (
    FLOATS,
    Codec,
    Rng,
    host_flat,
    saturating_cast,
    saturating_copy,
    tensor_bytes,
)
from swarm.tensors.codecs.noise import bit_noise, seed_of
from swarm.tensors.codecs.scratch import TILE_ELEMENTS, scratch
from swarm.tensors.schema import DTYPE_NAMES

_NUMPY = frozenset((torch.float32, torch.float64, torch.int64, torch.int32))
_HIGH_HALF = -(1 << 16)


def typed(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as elements of a dtype, without a copy unless they start at an odd place."""
    if encoded.storage_offset() % dtype.itemsize:
        encoded = encoded.clone()
    return encoded.view(dtype)


def add_converted(values: Tensor, acc: Tensor, alpha: float) -> None:
    """`acc += alpha * values` for another dtype than that of `acc`, converted a tile at a time."""
    if values.dtype == acc.dtype or acc.device.type != "cpu":
        acc.add_(values.to(acc.device), alpha=alpha)
        return
    for start in range(0, acc.numel(), TILE_ELEMENTS):
        piece = values[start : start + TILE_ELEMENTS]
        wide = scratch("wide", piece.numel(), acc.dtype).copy_(piece)
        acc[start : start + TILE_ELEMENTS].add_(wide, alpha=alpha)


class NoneCodec(Codec):
    """The memory of the tensor as it is, little-endian."""

    name = "none"
    is_copy = True

    def carries(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPE_NAMES

    def exact(self, dtype: torch.dtype) -> bool:
        return True

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def encode(self, tensor: Tensor, *, rng: Rng = None) -> memoryview:
        if tensor.dtype in _NUMPY and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
            return tensor.numpy(force=True).data.cast("B")
        return tensor_bytes(host_flat(tensor))

    def encode_into(self, flat: Tensor, out: Tensor, *, rng: Rng = None, tile: int = 0) -> None:
        if flat.numel():
            out.copy_(flat.view(torch.uint8))

    def elements(self, encoded: Tensor, dtype: torch.dtype) -> Tensor | None:
        return typed(encoded, dtype)

    def decode_into(self, encoded: Tensor, out: Tensor) -> None:
        self.check_size(encoded.numel(), out.numel(), out.dtype)
        if out.numel():
            out.view(torch.uint8).copy_(encoded)

    def decode_add(self, encoded: Tensor, dtype: torch.dtype, acc: Tensor, alpha: float = 1.0) -> None:
        self.check_size(encoded.numel(), acc.numel(), dtype)
        add_converted(typed(encoded, dtype), acc, alpha)


class HalfCodec(Codec):
    """Two bytes an element: IEEE half (`fp16`) or bfloat16 (`bf16`), saturating. Carries floats of 2, 4 or 8 bytes.

    Error: bf16 at most 2^-8 of the value (or 2^-134), fp16 at most 2^-11 of it (or 2^-25), saturated beyond 65504. With
    `rng`, bf16 rounds stochastically (error below 2^-7 of the value or 2^-133), except for a tile of 65,536 elements
    that holds NaN, infinity or values whose sum overflows; fp16 always rounds to nearest.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def carries(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def exact(self, dtype: torch.dtype) -> bool:
        return dtype == self._dtype

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def encode(self, tensor: Tensor, *, rng: Rng = None) -> memoryview:
        return tensor_bytes(host_flat(tensor)) if tensor.dtype == self._dtype else super().encode(tensor, rng=rng)

    def encode_into(self, flat: Tensor, out: Tensor, *, rng: Rng = None, tile: int = 0) -> None:
        seed, half = seed_of(rng), out.view(self._dtype)
        if seed is not None and self._dtype == torch.bfloat16 and flat.dtype.itemsize > self._dtype.itemsize:
            _stochastic_bf16(flat, seed, tile, half)
        else:
            saturating_copy(half, flat)

    def elements(self, encoded: Tensor, dtype: torch.dtype) -> Tensor | None:
        return None if dtype == torch.float16 != self._dtype else typed(encoded, self._dtype)

    def decode_into(self, encoded: Tensor, out: Tensor) -> None:
        self.check_size(encoded.numel(), out.numel(), out.dtype)
        half = typed(encoded, self._dtype)
        # bf16 reaches further than fp16: 65504 rounds up to 65536, which an fp16 tensor cannot hold.
        out.copy_(saturating_cast(half, out.dtype) if out.dtype == torch.float16 else half)

    def decode_add(self, encoded: Tensor, dtype: torch.dtype, acc: Tensor, alpha: float = 1.0) -> None:
        self.check_size(encoded.numel(), acc.numel(), dtype)
        add_converted(typed(encoded, self._dtype), acc, alpha)


def _stochastic_bf16(flat: Tensor, seed: int, first: int, out: Tensor) -> None:
    """fp32 or fp64 to bf16: noise in the bits that are cut off carries into those that stay."""
    for index, start in enumerate(range(0, flat.numel(), TILE_ELEMENTS), first):
        tile = flat[start : start + TILE_ELEMENTS]
        to = out[start : start + TILE_ELEMENTS]
        single = saturating_cast(tile, torch.float32)
        noise = bit_noise(seed, index, tile.numel(), flat.device)
        bits = scratch("bits", tile.numel(), torch.int32) if flat.device.type == "cpu" else torch.empty_like(noise)
        torch.add(single.view(torch.int32), noise, out=bits).bitwise_and_(_HIGH_HALF)
        to.copy_(bits.view(torch.float32))
        # The carry may end in infinity, and takes some NaN to zero.
        if not math.isfinite(single.sum().item()) or not math.isfinite(to.sum().item()):
            to.copy_(saturating_cast(single, torch.bfloat16))
