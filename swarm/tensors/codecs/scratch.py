"""Working memory of codecs: kept per thread, because fresh memory costs more than the work done in it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 18
"""Elements converted at a time: few enough for their working memory to stay in cache, enough to pay for the calls."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype], Tensor] = {}


_kept = _Kept()


def scratch(name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised CPU memory of this thread under this name, at most a tile; valid until the name is taken again."""
    assert numel <= TILE_ELEMENTS
    held = _kept.tensors.get((name, dtype))
    if held is None:
        held = _kept.tensors[name, dtype] = torch.empty(TILE_ELEMENTS, dtype=dtype)
    return held[:numel]
