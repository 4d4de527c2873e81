"""Blockwise integers: `int8` and `int4` share one scale among the elements of a block.

Both work on units of 4096 elements: the scales of a unit's blocks, then its integers. Only the last unit of a tensor
may be shorter.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import MalformedFrameError
from swarm.tensors.codecs.base import FLOATS, Codec, Rng, saturating_cast
from swarm.tensors.codecs.noise import centred_noise, seed_of
from swarm.tensors.codecs.scratch import TILE_ELEMENTS, scratch

UNIT = 4096
_ROWS = TILE_ELEMENTS // UNIT
_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = 2.0**-126
"""Smallest scale: below it reciprocals overflow."""
_ROUNDER = 1.5 * 2.0**23
"""Added to a small fp32 number, it rounds that to an integer, half to even, which then stands in the lowest bits."""
_HIGH_HALF = -(1 << 16)
_SLACK = 2.0**-21
"""Makes scales a little larger, so that noise never carries the largest magnitude beyond the last integer."""


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _work(name: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory [rows, columns] until the name is used again."""
    if device.type == "cpu":
        return scratch(name, rows * columns, dtype).view(rows, columns)
    return torch.empty(rows, columns, dtype=dtype, device=device)


class BlockCodec(Codec):
    """What blockwise integer codecs share.

    A block's scale is its largest magnitude divided by `levels`, and at least 2^-126. A block with NaN or infinity gets
    the scale NaN and decodes to NaN throughout.

    Attributes:
        levels: Integers go from -levels to levels.
        block_elements: Elements that share a scale; the last block of a tensor may be shorter.
    """

    unit_elements = UNIT
    levels: ClassVar[int]
    block_elements: ClassVar[int]
    _scale_dtype: ClassVar[torch.dtype]
    _smaller: ClassVar[float]
    """What the largest magnitude is divided by: `levels`, but for the slack."""
    _largest_scale: ClassVar[float]

    def carries(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def exact(self, dtype: torch.dtype) -> bool:
        return False

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        units, rest = divmod(numel, UNIT)
        return units * self._row_nbytes(UNIT) + (self._row_nbytes(self._padded(rest)) if rest else 0)

    def encode_into(self, flat: Tensor, out: Tensor, *, rng: Rng = None, tile: int = 0) -> None:
        seed = seed_of(rng)
        for index, (encoded, values) in enumerate(self._tiles(out, flat), tile):
            self._encode_rows(self._widened(values), seed, index, encoded)

    def finite(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> bool | None:
        largest = [float(scales.max()) for scales in self._checked_scales(encoded, numel)]
        if any(map(math.isnan, largest)):
            return False
        # Bytes that no encoder writes may hold an integer beyond `levels`, which overflows with the largest scales.
        return True if all(scale * (self.levels + 1) <= _LARGEST for scale in largest) else None

    def decode_into(self, encoded: Tensor, out: Tensor) -> None:
        encoded = encoded.to(out.device)
        scales = self._split(self._checked_scales(encoded, out.numel()))
        for (source, target), scale in zip(self._tiles(encoded, out), scales, strict=True):
            rows, columns = target.shape
            direct = out.dtype == torch.float32 and columns == self._padded(columns)
            wide = target if direct else _work("wide", rows, self._padded(columns), torch.float32, out.device)
            self._read_integers(source, wide)
            self._blocks(wide).mul_(scale)
            if not direct:
                target.copy_(saturating_cast(wide[:, :columns], out.dtype))

    def decode_add(self, encoded: Tensor, dtype: torch.dtype, acc: Tensor, alpha: float = 1.0) -> None:
        encoded = encoded.to(acc.device)
        scales = self._split(self._checked_scales(encoded, acc.numel()))
        for (source, target), scale in zip(self._tiles(encoded, acc), scales, strict=True):
            rows, columns = target.shape
            wide = _work("wide", rows, self._padded(columns), acc.dtype, acc.device)
            self._read_integers(source, wide)
            factor = scale.to(acc.dtype).mul_(alpha)
            if columns == wide.shape[1]:
                self._blocks(target).addcmul_(self._blocks(wide), factor)
            else:
                self._blocks(wide).mul_(factor)
                target.add_(wide[:, :columns])

    @abstractmethod
    def _padded(self, columns: int) -> int:
        """Elements that a row of so many is stored with."""

    @abstractmethod
    def _row_nbytes(self, columns: int) -> int:
        """Bytes of a row of so many (padded) elements."""

    @abstractmethod
    def _scale_columns(self, encoded: Tensor) -> Tensor:
        """The bytes of the scales in encoded rows."""

    @abstractmethod
    def _storable(self, scales: Tensor) -> Tensor:
        """Scales rounded up to what is stored, in place, as fp32."""

    @abstractmethod
    def _write_integers(self, integers: Tensor, encoded: Tensor) -> None:
        """Store small integers of any dtype [rows, padded columns] in encoded rows."""

    @abstractmethod
    def _read_integers(self, encoded: Tensor, out: Tensor) -> None:
        """Load the integers of encoded rows as floats [rows, padded columns]."""

    def _tiles(self, encoded: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of bytes and of elements that belong together; the last unit has a tile of its own if it is shorter."""
        unit_bytes = self._row_nbytes(UNIT)
        full = flat.numel() // UNIT
        step = _ROWS if flat.device.type == "cpu" else max(1, full)
        for start in range(0, full, step):
            stop = min(full, start + step)
            rows = encoded[start * unit_bytes : stop * unit_bytes].view(-1, unit_bytes)
            yield rows, flat[start * UNIT : stop * UNIT].view(-1, UNIT)
        if full * UNIT < flat.numel():
            yield encoded[full * unit_bytes :].view(1, -1), flat[full * UNIT :].view(1, -1)

    def _blocks(self, rows: Tensor) -> Tensor:
        """[rows, columns] as [rows, blocks, elements]."""
        count, columns = rows.shape
        return rows.view(count, -1, min(columns, self.block_elements))

    def _widened(self, values: Tensor) -> Tensor:
        """A tile as fp32 of padded columns."""
        rows, columns = values.shape
        padded = self._padded(columns)
        if padded == columns:
            if values.dtype == torch.float32:
                return values
            return _work("wide", rows, columns, torch.float32, values.device).copy_(
                saturating_cast(values, torch.float32) if values.dtype == torch.float64 else values
            )
        wide = _work("wide", rows, padded, torch.float32, values.device)
        wide[:, columns:] = 0
        wide[:, :columns] = saturating_cast(values, torch.float32)
        return wide

    def _encode_rows(self, values: Tensor, seed: int | None, tile: int, encoded: Tensor) -> None:
        """Encode fp32 [rows, padded columns]."""
        rows, columns = values.shape
        blocks = self._blocks(values)
        largest = torch.maximum(blocks.amax(2, keepdim=True), blocks.amin(2, keepdim=True).neg_())  # [rows, blocks, 1]
        scales = self._storable(largest.div(self._smaller).clamp_(min=_SMALLEST))
        factors = scales.reciprocal()
        scales.clamp_(max=self._largest_scale).add_(largest.mul_(0))  # NaN where the largest is not finite
        stored = self._scale_columns(encoded)
        stored.copy_(scales.to(self._scale_dtype).view(rows, -1).view(torch.uint8))
        scaled = _work("scaled", rows, columns, torch.float32, values.device)
        if seed is None:
            torch.addcmul(_rounder(values.device)[..., : blocks.shape[2]], blocks, factors, out=self._blocks(scaled))
            self._write_integers(scaled.view(torch.int32), encoded)
        else:
            noise = centred_noise(seed, tile, rows * columns, values.device).view_as(blocks)
            torch.addcmul(noise, blocks, factors, out=self._blocks(scaled))
            self._write_integers(scaled.round_(), encoded)

    def _checked_scales(self, encoded: Tensor, numel: int) -> list[Tensor]:
        """The scales of all full units and of the last shorter one, fp32 [units, blocks, 1], of what there is of each.

        Raises:
            MalformedFrameError: They are out of range, or the bytes not of the right size.
        """
        self.check_size(encoded.numel(), numel, torch.float32)
        unit_bytes = self._row_nbytes(UNIT)
        full = numel // UNIT
        groups = [encoded[: full * unit_bytes].view(-1, unit_bytes)] if full else []
        if full * UNIT < numel:
            groups.append(encoded[full * unit_bytes :].view(1, -1))
        found: list[Tensor] = []
        for rows in groups:
            columns = self._scale_columns(rows).clone(memory_format=torch.contiguous_format)  # aligned
            scales = columns.view(self._scale_dtype).float().unsqueeze(2)
            if not self._in_range(scales):
                raise MalformedFrameError(f"A block's scale in {self.name} data is out of range.")
            found.append(scales)
        return found

    def _in_range(self, scales: Tensor) -> bool:
        """Whether an encoder could have written these scales; NaN is one of them."""
        low, high = torch.aminmax(scales)
        if bool((low >= _SMALLEST) & (high <= self._largest_scale)):
            return True
        return not bool(((scales < _SMALLEST) | (scales > self._largest_scale)).any())

    def _split(self, scales: list[Tensor]) -> list[Tensor]:
        """Scales of each tile."""
        return [tile for group in scales for tile in (torch.split(group, _ROWS) if _on_cpu(group) else [group])]


class Int8Codec(BlockCodec):
    """A byte an element and an fp32 scale for every 4096: a quarter of fp32.

    Error: at most half a scale, a scale being 1/127 of the block's largest magnitude (2^-126 if that is less); with
    `rng` less than a scale, and zero on average.
    """

    name = "int8"
    levels = 127
    block_elements = UNIT
    _scale_dtype = torch.float32
    _smaller = levels / (1 + _SLACK)
    _largest_scale = float.fromhex("0x1.020406p+121")  # 127 of them are finite
    _scale_bytes = 4

    def _padded(self, columns: int) -> int:
        return columns

    def _row_nbytes(self, columns: int) -> int:
        return self._scale_bytes + columns

    def _scale_columns(self, encoded: Tensor) -> Tensor:
        return encoded[:, : self._scale_bytes]

    def _storable(self, scales: Tensor) -> Tensor:
        return scales

    def _write_integers(self, integers: Tensor, encoded: Tensor) -> None:
        encoded[:, self._scale_bytes :].view(torch.int8).copy_(integers)

    def _read_integers(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(encoded[:, self._scale_bytes :].view(torch.int8))


class Int4Codec(BlockCodec):
    """Half a byte an element and a bf16 scale for every 128: an eighth of fp32. Use it with error feedback.

    The scale is bf16, not fp16, because gradients of 1e-8 would vanish in fp16. A unit stores its first half in the low
    bits of its bytes and its second half in the high ones; a shorter last unit is filled up to 128 with zeros.

    Error: at most half a scale, a scale being 1/7 of the block's largest magnitude rounded up to bf16 (at most 2^-7
    more; 2^-126 if it is less); with `rng` less than a scale, and zero on average. Beyond 3.39e38 it is saturated.
    """

    name = "int4"
    levels = 7
    block_elements = 128
    _scale_dtype = torch.bfloat16
    _smaller = levels / (1 + _SLACK)
    _largest_scale = float.fromhex("0x1.24p+125")  # 7 of them are finite
    _block_bytes = 66

    def _padded(self, columns: int) -> int:
        return -(-columns // self.block_elements) * self.block_elements

    def _row_nbytes(self, columns: int) -> int:
        return columns // self.block_elements * self._block_bytes

    def _scale_columns(self, encoded: Tensor) -> Tensor:
        return encoded[:, : encoded.shape[1] // self._block_bytes * 2]

    def _integer_columns(self, encoded: Tensor) -> Tensor:
        return encoded[:, encoded.shape[1] // self._block_bytes * 2 :].view(torch.int8)

    def _storable(self, scales: Tensor) -> Tensor:
        return scales.view(torch.int32).add_(~_HIGH_HALF).bitwise_and_(_HIGH_HALF).view(torch.float32)

    def _write_integers(self, integers: Tensor, encoded: Tensor) -> None:
        half = integers.shape[1] // 2
        small = _work("integers", integers.shape[0], 2 * half, torch.int8, integers.device).copy_(integers)
        low = small[:, :half].bitwise_and_(15)
        torch.add(low, small[:, half:], alpha=16, out=self._integer_columns(encoded))

    def _read_integers(self, encoded: Tensor, out: Tensor) -> None:
        packed = self._integer_columns(encoded)
        rows, half = packed.shape
        integers = _work("integers", rows, 2 * half, torch.int8, packed.device)
        torch.bitwise_left_shift(packed, 4, out=integers[:, :half]).bitwise_right_shift_(4)
        torch.bitwise_right_shift(packed, 4, out=integers[:, half:])
        out.copy_(integers)


@lru_cache(maxsize=16)
def _rounder(device: torch.device) -> Tensor:
    return torch.full((1, 1, UNIT), _ROUNDER, device=device)
