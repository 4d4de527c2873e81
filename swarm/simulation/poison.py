"""What members that lie about their values send to an averaging group instead of them, for tests and examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Attack = Literal["sign_flip", "scale", "random"]
"""`sign_flip`: the values with the opposite sign. `scale`: 100 times the values. `random`: noise, 10 times as large."""

ATTACKS: tuple[Attack, ...] = get_args(Attack)
_SCALE, _NOISE = 100.0, 10.0


def poison(tensors: Sequence[Tensor], attack: Attack, generator: torch.Generator) -> None:
    """Replace values in place. They stay finite, so that no finite check catches them."""
    with torch.no_grad():
        for tensor in tensors:
            if attack == "sign_flip":
                tensor.neg_()
            elif attack == "scale":
                tensor.mul_(_SCALE)
            else:
                usual = tensor.square().mean().sqrt()
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * usual * _NOISE)
            tensor.nan_to_num_(nan=0.0)
