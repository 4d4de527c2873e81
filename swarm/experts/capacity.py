"""How many tokens an expert takes at most, and which ones: the capacity of Switch Transformers (Fedus et al., 2021).

They drop what comes last in the batch; here the least wanted go, as in V-MoE's batch prioritized routing (Riquelme et
al., 2021).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def capacity(factor: float, tokens: int, k: int, live: int) -> int:
    """The most (token, slot) pairs for one expert: `factor` times its even share, rounded up."""
    return max(1, math.ceil(factor * tokens * k / live - 1e-9))  # 1.1 * 10 is a little more than 11


def within_capacity(experts: Tensor, scores: Tensor, limit: int) -> Tensor:
    """Which (token, slot) pairs are among the `limit` best of their expert; of equals, the earlier token's.

    Args:
        experts: The chosen experts. [tokens, k']
        scores: How much the gate wants each of them. [tokens, k']
        limit: The capacity.

    Returns:
        [tokens, k'] bool
    """
    flat = experts.flatten()
    best_first = scores.detach().flatten().argsort(descending=True, stable=True)
    ordered, at = flat[best_first].sort(stable=True)  # by expert, and within one the best first
    places = torch.arange(flat.shape[0], device=flat.device)
    # where each expert's block begins, seen from each of its pairs
    begins = torch.searchsorted(ordered, ordered)
    sent = torch.empty_like(flat, dtype=torch.bool)
    sent[best_first[at]] = places - begins < limit
    return sent.view(experts.shape)
