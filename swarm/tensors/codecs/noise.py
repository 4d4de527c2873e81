"""Noise for stochastic rounding, at the price of reading it.

On the CPU drawing random numbers costs ten times as much as quantising. Each tile instead reads a stretch of one fixed
table at an offset that its seed decides. The table is a shuffled even grid, so that over seeds the noise of every
element is exactly uniform: rounding is unbiased, and two encodings share noise once in 262,144 pairs of seeds.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from swarm.tensors.codecs.base import Rng

_GRID = 1 << 18
_MASK = (1 << 64) - 1
_SHUFFLE = 0x5EED


@lru_cache(maxsize=1)
def _table() -> Tensor:
    order = torch.randperm(_GRID, generator=torch.Generator().manual_seed(_SHUFFLE))
    even = (order.double() + 0.5) / _GRID - 0.5
    return torch.cat([even, even]).float()


@lru_cache(maxsize=1)
def _bits_table() -> Tensor:
    return ((_table().double() + 0.5) * (1 << 16)).to(torch.int32)


def seed_of(rng: Rng) -> int | None:
    """The seed of one encoding. Draws once from a generator."""
    if isinstance(rng, torch.Generator):
        return int(torch.randint(0, 1 << 62, (), generator=rng, device=rng.device).item())
    return rng


def _mixed(seed: int, index: int) -> int:
    """SplitMix64: neighbouring seeds and tiles get unrelated offsets."""
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def centred_noise(seed: int, index: int, numel: int, device: torch.device) -> Tensor:
    """fp32 noise in (-0.5, 0.5) for one tile (1-d, only for reading)."""
    if device.type != "cpu":
        generator = torch.Generator(device).manual_seed(_mixed(seed, index) >> 1)
        return torch.rand(numel, generator=generator, device=device).sub_(0.5)
    start = _mixed(seed, index) % _GRID
    return _table()[start : start + numel]


def bit_noise(seed: int, index: int, numel: int, device: torch.device) -> Tensor:
    """Whole noise in [0, 65536) for one tile as int32 (1-d, only for reading): what fp32 has more than bf16."""
    if device.type != "cpu":
        generator = torch.Generator(device).manual_seed(_mixed(seed, index) >> 1)
        return torch.randint(0, 1 << 16, (numel,), generator=generator, device=device, dtype=torch.int32)
    start = _mixed(seed, index) % _GRID
    return _bits_table()[start : start + numel]
