"""Codecs: how the elements of a tensor become bytes, by a name that travels in the header.

A codec cuts a flat tensor into units of `unit_elements` that are encoded independently of each other, so that a large
tensor is converted chunk by chunk while the network carries the chunks before it.

| name | bytes of fp32 | what is lost |
|---|---|---|
| `none` | all | nothing |
| `bf16`, `fp16` | 1/2 | all but 8 or 11 bits of every value |
| `int8` | 1/4 | what is below 1/254 of the largest of 4096 |
| `int4` | 1/8 | what is below 1/14 of the largest of 128 |
| `topk`, `topk:N` | 1/64, N/4096 | all but the 64 (N) largest of 4096 |

The lossy ones saturate: a finite value beyond the range of the format becomes the largest finite value, while NaN and
infinity stay what they are, or become NaN with their block, so that the receiver's finite check still sees them.
"""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from swarm.errors import UnsupportedDtypeError
from swarm.tensors.codecs.base import Codec, Rng, device_flat, host_flat, saturating_cast, tensor_bytes
from swarm.tensors.codecs.blockwise import Int4Codec, Int8Codec
from swarm.tensors.codecs.plain import HalfCodec, NoneCodec
from swarm.tensors.codecs.policy import Role, auto
from swarm.tensors.codecs.sparse import DEFAULT_KEPT, MOST_KEPT, TopKCodec

__all__ = [
    "CODECS",
    "NONE",
    "Codec",
    "Rng",
    "Role",
    "auto",
    "codec",
    "device_flat",
    "host_flat",
    "saturating_cast",
    "tensor_bytes",
]

NONE = NoneCodec()
CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        NONE,
        HalfCodec("fp16", torch.float16),
        HalfCodec("bf16", torch.bfloat16),
        Int8Codec(),
        Int4Codec(),
        TopKCodec(),
    )
}
"""Every codec by name, but for `topk:N`."""
_SPARSE = re.compile(r"topk:([1-9][0-9]{0,3})", re.ASCII)


def codec(name: object) -> Codec:
    """The codec of this name; `topk:N` keeps N of every 4096 elements. Raises `UnsupportedDtypeError`."""
    found = CODECS.get(name) if isinstance(name, str) else None
    if found is None and isinstance(name, str):
        found = _sparse(name)
    if found is None:
        raise UnsupportedDtypeError(
            f"The codec {str(name)[:60]!r} is unknown here.",
            fix=f"Use one of {', '.join(CODECS)} or topk:1 to topk:{MOST_KEPT}, or update swarm.",
        )
    return found


def _sparse(name: str) -> Codec | None:
    match = _SPARSE.fullmatch(name)
    return None if match is None else _keeping(int(match[1]))


@lru_cache(maxsize=64)
def _keeping(kept: int) -> Codec | None:
    if kept == DEFAULT_KEPT or kept > MOST_KEPT:
        return CODECS["topk"] if kept == DEFAULT_KEPT else None
    return TopKCodec(kept)
