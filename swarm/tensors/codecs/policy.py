"""Which codec a tensor travels with when nobody chose one: by its role, size and dtype."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from swarm.errors import UsageError
from swarm.tensors.codecs.base import FLOATS

Role = Literal["parameters", "gradients", "state"]
SMALL_ELEMENTS = 16 * 1024
"""Biases, norms and small layers: a few percent of the bytes of a model, and its most sensitive values."""
LARGE_ELEMENTS = 128 * 1024
"""From here on int8's quarter of the bytes pays."""


def auto(role: Role, numel: int, dtype: torch.dtype) -> str:
    """The name of the codec for a tensor of this role, size and dtype.

    - `parameters`: `bf16` for fp32 and fp64 of 16 Ki elements or more, else `none`. A weight moves by far less than
      1/127 of its block's largest in a round, which int8 would round away; bf16 keeps 2^-8 of each weight itself.
    - `gradients` (and differences of parameters): `int8` from 128 Ki elements, `bf16` from 16 Ki, else `none`. Their
      noise is larger than the rounding, which is unbiased when stochastic and made up for by error feedback.
    - `state` (moments of an optimizer): `none`. Second moments far below their block's largest would become 0 in
      blockwise codecs, and the next step divides by their root; and with beta2 = 0.999 a step changes them by less than
      bf16 resolves.

    What is no float, or already of two bytes, travels as it is, but for large gradients.

    Raises:
        UsageError: The role is unknown.
    """
    if role not in get_args(Role):
        raise UsageError(f"The role {role!r} is unknown.", fix=f"Use one of {', '.join(get_args(Role))}.")
    if role == "state" or dtype not in FLOATS or numel < SMALL_ELEMENTS:
        return "none"
    if role == "gradients" and numel >= LARGE_ELEMENTS:
        return "int8"
    return "none" if dtype.itemsize <= torch.bfloat16.itemsize else "bf16"
