"""Flat views of many tensors, and how a flat vector is split between peers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.errors import SchemaMismatchError


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype | None = torch.float32, out: Tensor | None = None) -> Tensor:
    """Copy tensors one after another into a flat CPU vector.

    Args:
        tensors: Any shapes, dtypes, layouts and devices.
        dtype: Element type of the vector; none takes the tensors' own, which must then be one.
        out: A vector of the right size and dtype to write into instead of a new one.

    Returns:
        A 1-d tensor of sum(numel) elements.

    Raises:
        SchemaMismatchError: `dtype` is none and the tensors have several, or `out` has another size or dtype.
    """
    if dtype is None:
        kinds = list(dict.fromkeys(t.dtype for t in tensors))
        if len(kinds) > 1:
            raise SchemaMismatchError(f"Tensors of {', '.join(map(str, kinds))} do not fit into one native vector.")
        dtype = kinds[0] if kinds else torch.float32
    total = sum(t.numel() for t in tensors)
    if out is None:
        out = torch.empty(total, dtype=dtype)
    elif out.shape != (total,) or out.dtype != dtype:
        raise SchemaMismatchError(f"The buffer is {out.dtype}{list(out.shape)} where {dtype}[{total}] is needed.")
    with torch.no_grad():
        for view, tensor in zip(_views(out, tensors), tensors, strict=True):
            view.copy_(tensor)
    return out


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat vector with the shapes of `like` (same memory, the vector's dtype).

    Raises:
        SchemaMismatchError: The vector has another number of elements.
    """
    total = sum(t.numel() for t in like)
    if flat.dim() != 1 or flat.numel() != total:
        raise SchemaMismatchError(f"A vector of shape {list(flat.shape)} where {total} elements are needed.")
    return _views(flat, like)


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    views, start = [], 0
    for tensor in like:
        views.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return views


def split(numel: int, weights: Sequence[float]) -> list[range]:
    """Cut `range(numel)` into consecutive parts in proportion to `weights`, whole elements by largest remainder.

    Equal remainders favour the earlier part, so that all peers cut alike. A part of weight 0 is empty.

    Raises:
        ValueError: No weights, a negative or non-finite one, or all are zero.
    """
    if not weights or not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise ValueError(f"Weights must be finite, not negative and not all zero: {list(weights)}.")
    largest = max(weights)
    scaled = [w / largest for w in weights]  # sums of huge weights would overflow
    total = math.fsum(scaled)
    exact = [numel * (w / total) for w in scaled]
    sizes = [min(numel, math.floor(e)) for e in exact]
    order = sorted((i for i, w in enumerate(scaled) if w > 0), key=lambda i: (sizes[i] - exact[i], i))
    missing = numel - sum(sizes)
    for step in range(abs(missing)):
        # Rounding errors on vectors beyond 2^53 elements may leave one element too many or more than one a part.
        sizes[order[step % len(order)]] += 1 if missing > 0 else -1
    parts, start = [], 0
    for size in sizes:
        parts.append(range(start, start + size))
        start += size
    return parts


def bandwidth_shares(b: Sequence[float]) -> list[float]:
    """Shares of a vector for the reducers of a butterfly all-reduce, by their bandwidths.

    Peer i receives n - 1 copies of its part and sends the rest of the vector; the shares minimise the slowest peer's
    time xi = max (1 + (n - 2) w_i) / b_i under w_i <= 2 / n, so that a peer that boasts cannot take the whole vector.
    At the optimum w_i = min(2 / n, (xi b_i - 1) / (n - 2)); without capped peers xi = (n - 2 + n+) / sum(b), n+ being
    the peers with b > 0. A peer too slow to send even its own vector in time xi sets the pace instead: xi = 1 / b_min,
    and the shares are scaled down to sum to 1.

    Args:
        b: Bandwidth of each peer in any common unit, min(up, down); 0 = reduces nothing.

    Returns:
        Weights that sum to 1. For n <= 2, and where at most n / 2 peers have bandwidth, these share equally.

    Raises:
        ValueError: No peer has bandwidth, or one is negative or not finite.
    """
    if not all(math.isfinite(x) and x >= 0 for x in b) or not any(b):
        raise ValueError(f"Bandwidths must be finite, not negative and not all zero: {list(b)}.")
    n, fastest = len(b), max(b)
    rates = [x / fastest for x in b]
    eligible = sorted((i for i, r in enumerate(rates) if r > 0), key=lambda i: (-rates[i], i))
    if n <= 2 or len(eligible) * 2 <= n:
        return [1 / len(eligible) if r > 0 else 0.0 for r in rates]
    cap, slowest = 2 / n, rates[eligible[-1]]
    for capped in range(len(eligible)):  # the fastest peers reach the cap first
        rest = [rates[i] for i in eligible[capped:]]
        xi = max(((n - 2) * (1 - capped * cap) + len(rest)) / math.fsum(rest), 1 / slowest)
        if (xi * rest[0] - 1) / (n - 2) <= cap:
            break
    shares = [min(cap, max(0.0, (xi * r - 1) / (n - 2))) if r > 0 else 0.0 for r in rates]
    total = math.fsum(shares)
    return [s / total for s in shares]
