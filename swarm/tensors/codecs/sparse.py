"""`topk`: of every 4096 elements only the largest travel, as index and value. Made for error feedback."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from swarm.errors import MalformedFrameError
from swarm.tensors.codecs.base import FLOATS, Codec, Rng, saturating_cast
from swarm.tensors.codecs.scratch import TILE_ELEMENTS, scratch

UNIT = 4096
DEFAULT_KEPT = 64
MOST_KEPT = 1024
"""Beyond this `int8` is smaller and loses less."""
_ROWS = TILE_ELEMENTS // UNIT
_ENTRY_BYTES = 4
_INDEX_BITS = UNIT - 1
_MAGNITUDE_BITS = 0x7FFFFFFF & ~_INDEX_BITS


class TopKCodec(Codec):
    """The `kept` largest magnitudes of every 4096 elements (a shorter last unit: in proportion, at least one).

    A unit is its uint16 indices in rising order, then the values in bf16. Magnitudes are compared by their leading 11
    bits of mantissa, and of equal ones the first win, so that CPU and CUDA choose alike. Everything else decodes to 0.

    Error: what is sent is off by at most 2^-8 of itself (bf16); what is not is smaller than what is sent, but for
    2^-11. NaN and infinity are the largest and arrive as such. Rounds to nearest always: dropping is not unbiased.

    Source: top-k with error feedback as in SparseLoCo (2025), with bf16 in place of 2-bit values.
    """

    unit_elements = UNIT

    def __init__(self, kept: int = DEFAULT_KEPT) -> None:
        assert 1 <= kept <= MOST_KEPT
        self.kept = kept
        self.name = "topk" if kept == DEFAULT_KEPT else f"topk:{kept}"

    def carries(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def exact(self, dtype: torch.dtype) -> bool:
        return False

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        units, rest = divmod(numel, UNIT)
        return _ENTRY_BYTES * (units * self.kept + self._kept_of(rest))

    def encode_into(self, flat: Tensor, out: Tensor, *, rng: Rng = None, tile: int = 0) -> None:
        units, rest = divmod(flat.numel(), UNIT)
        split = units * self.kept * _ENTRY_BYTES
        if units:
            rows, encoded = flat[: units * UNIT].view(units, UNIT), out[:split].view(units, -1)
            step = _ROWS if flat.device.type == "cpu" else units
            for start in range(0, units, step):
                self._encode_rows(rows[start : start + step], self.kept, encoded[start : start + step])
        if rest:
            self._encode_rows(flat[units * UNIT :].view(1, -1), self._kept_of(rest), out[split:].view(1, -1))

    def decode_into(self, encoded: Tensor, out: Tensor) -> None:
        entries = self._entries(encoded, out)
        out.zero_()
        for rows, indices, values in entries:
            rows.scatter_(1, indices, saturating_cast(values, out.dtype))

    def decode_add(self, encoded: Tensor, dtype: torch.dtype, acc: Tensor, alpha: float = 1.0) -> None:
        for rows, indices, values in self._entries(encoded, acc):
            rows.scatter_add_(1, indices, values.to(acc.dtype).mul_(alpha))

    def _kept_of(self, rest: int) -> int:
        return -(-rest * self.kept // UNIT)

    def _encode_rows(self, rows: Tensor, kept: int, encoded: Tensor) -> None:
        single = saturating_cast(rows, torch.float32)
        indices = _largest_on_cpu(single, kept) if rows.device.type == "cpu" else _largest(single, kept)
        values = saturating_cast(single.gather(1, indices.long()), torch.bfloat16)
        encoded[:, : 2 * kept].copy_(indices.to(torch.int16).view(torch.uint8))
        encoded[:, 2 * kept :].copy_(values.view(torch.uint8))

    def _entries(self, encoded: Tensor, flat: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Rows of `flat`, the indices and the values in them: of all full units, and of the last shorter one."""
        self.check_size(encoded.numel(), flat.numel(), flat.dtype)
        units, rest = divmod(flat.numel(), UNIT)
        split = units * self.kept * _ENTRY_BYTES
        found = []
        if units:
            found.append(_parsed(encoded[:split].view(units, -1), flat[: units * UNIT].view(units, UNIT)))
        if rest:
            found.append(_parsed(encoded[split:].view(1, -1), flat[units * UNIT :].view(1, -1)))
        return found


def _parsed(encoded: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    half = encoded.shape[1] // 2
    aligned = encoded.clone(memory_format=torch.contiguous_format)
    indices = aligned[:, :half].view(torch.int16).long()
    rising = indices.shape[1] < 2 or bool((indices[:, 1:] > indices[:, :-1]).all())
    if not rising or int(indices[:, 0].min()) < 0 or int(indices[:, -1].max()) >= rows.shape[1]:
        raise MalformedFrameError("Indices in top-k data are out of range or not in rising order.")
    return rows, indices.to(rows.device), aligned[:, half:].view(torch.bfloat16).to(rows.device)


def _keys(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """int32 keys that order a row's elements by magnitude, then first to last, and hold their places. All differ."""
    keys = torch.bitwise_and(rows.view(torch.int32), _MAGNITUDE_BITS, out=out)
    return keys.bitwise_or_(_backwards(rows.device)[: rows.shape[1]])


@lru_cache(maxsize=16)
def _backwards(device: torch.device) -> Tensor:
    return torch.arange(UNIT - 1, -1, -1, dtype=torch.int32, device=device)


def _largest(rows: Tensor, kept: int) -> Tensor:
    """The places of each row's largest magnitudes, in rising order."""
    keys = torch.topk(_keys(rows), kept, dim=1, sorted=False).values
    return keys.bitwise_and_(_INDEX_BITS).neg_().add_(UNIT - 1).sort(dim=1).values


def _largest_on_cpu(rows: Tensor, kept: int) -> Tensor:
    """The same with numpy, whose partition is vectorised: a tenth of the time."""
    count, columns = rows.shape
    keys = _keys(rows, scratch("keys", count * columns, torch.int32).view(count, columns)).numpy()
    keys.partition(columns - kept, axis=1)
    places = (UNIT - 1 - (keys[:, columns - kept :] & _INDEX_BITS)).astype(np.int16)
    places.sort(axis=1)
    return torch.from_numpy(places)
