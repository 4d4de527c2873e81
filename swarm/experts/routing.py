"""Which tokens go to which experts, and how their answers are mixed: pure tensor code, no network.

The gate follows the product-key gate of Ryabinin & Gusev, "Towards Crowdsourced Training of Large Neural Networks using
Decentralized Mixture-of-Experts" (2020); the balance loss is that of Switch Transformers (Fedus et al., 2021), applied
to every dimension of the grid; the router z-loss is that of ST-MoE (Zoph et al., 2022).
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Choice:
    """What the gate decided for a batch of tokens.

    Attributes:
        experts: Flat index of each chosen expert in the grid (row-major), best first. [tokens, k'], k' = min(k, live)
        scores: The gate's score of each chosen expert; carries the gradient. [tokens, k']
        logits: The gate's logits for each dimension of the grid; carry the gradient. Each [tokens, dims[i]]
        live_coordinates: For each dimension, which coordinates any live expert has. Each [dims[i]]
    """

    experts: Tensor
    scores: Tensor
    logits: tuple[Tensor, ...]
    live_coordinates: tuple[Tensor, ...]


class ProductKeyGate(nn.Module):
    """Scores every expert of a grid with one linear map: an expert's score is the sum of its coordinates' logits.

    Args:
        dim: Width of a token.
        dims: Extents of the grid, e.g. `(4, 4)` for 16 experts.
    """

    def __init__(self, dim: int, dims: Sequence[int]) -> None:
        super().__init__()
        if not dims or min(dims) < 1:
            raise ValueError(f"The extents of a grid must be positive, got {tuple(dims)}.")
        self.dims = tuple(dims)
        self.projection = nn.Linear(dim, sum(self.dims))

    @property
    def n_experts(self) -> int:
        return math.prod(self.dims)

    def logits(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The logits for each dimension of the grid. [tokens, dim] -> each [tokens, dims[i]]"""
        return tuple(torch.split(self.projection(tokens).float(), list(self.dims), dim=-1))

    def forward(self, tokens: Tensor, live: Tensor, k: int) -> Choice:
        """Choose the `k` best live experts of every token.

        Args:
            tokens: [tokens, dim]
            live: Which experts can be called. [n_experts] bool; at least one is true.
            k: Experts per token; fewer are chosen where fewer are live.
        """
        logits = self.logits(tokens)
        live = live.to(tokens.device)
        with torch.no_grad():
            total = logits[0]
            for more in logits[1:]:
                total = (total.unsqueeze(-1) + more.unsqueeze(-2)).flatten(-2)  # [tokens, experts so far]
            n_live = int(live.sum())
            if n_live < self.n_experts:
                total = total.masked_fill(~live, -torch.inf)
            experts = total.topk(min(k, n_live), dim=-1).indices
        grid = live.view(self.dims)
        others = [[j for j in range(len(self.dims)) if j != i] for i in range(len(self.dims))]
        return self.choice(logits, experts, [grid.any(dim=o) if o else grid for o in others])

    def choice(self, logits: tuple[Tensor, ...], experts: Tensor, live_coordinates: Sequence[Tensor]) -> Choice:
        """Score experts that were found elsewhere, by beam search in a grid too large to score all of it.

        Args:
            logits: As from `logits`.
            experts: Flat indices, best first. [tokens, k']
            live_coordinates: For each dimension, which coordinates any live expert has. Each [dims[i]] bool
        """
        device = logits[0].device
        experts = experts.to(device)
        coordinates = self.coordinates(experts)
        scores = torch.stack([one.gather(-1, at) for one, at in zip(logits, coordinates, strict=True)]).sum(0)
        return Choice(experts, scores, logits, tuple(live.to(device) for live in live_coordinates))

    def coordinates(self, experts: Tensor) -> list[Tensor]:
        """The coordinates of flat expert indices: one tensor of the same shape for each dimension of the grid."""
        return list(torch.unravel_index(experts, self.dims))

    def balance_loss(self, choice: Choice) -> Tensor:
        """The sum over dimensions of D * sum_i f_i p_i: 1 for each dimension that is used evenly, up to D otherwise.

        f_i is the fraction of choices with coordinate i (a count: no gradient), p_i the mean probability that the gate
        gives to it among coordinates that have live experts (this is where the gradient flows).
        """
        loss = choice.scores.new_zeros(())
        for size, logits, alive, at in zip(
            self.dims, choice.logits, choice.live_coordinates, self.coordinates(choice.experts), strict=True
        ):
            fraction = torch.bincount(at.flatten(), minlength=size).to(logits.dtype) / max(1, at.numel())
            probability = logits.masked_fill(~alive, -torch.inf).softmax(-1).mean(0)
            loss = loss + alive.sum() * (fraction * probability).sum()
        return loss

    def log_probabilities(self, choice: Choice) -> Tensor:
        """Log of the gate's probability of each chosen expert; carries the gradient. [tokens, k']

        The product over the dimensions of the softmax over coordinates that have live experts: over a grid of one
        dimension, the softmax over its live experts.
        """
        total = choice.scores
        for logits, alive in zip(choice.logits, choice.live_coordinates, strict=True):
            total = total - logits.masked_fill(~alive, -torch.inf).logsumexp(-1, keepdim=True)
        return total

    def z_loss(self, choice: Choice) -> Tensor:
        """The sum over dimensions of mean(logsumexp(logits)^2), which keeps logits small."""
        loss = choice.scores.new_zeros(())
        for logits, alive in zip(choice.logits, choice.live_coordinates, strict=True):
            loss = loss + logits.masked_fill(~alive, -torch.inf).logsumexp(-1).square().mean()
        return loss


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The chosen (token, slot) pairs sorted by expert, so that each expert's tokens are one contiguous block of rows.

    Pairs that are not sent come last, so that the shapes do not depend on their number: activation checkpointing wants
    the repeated pass to have those of the first.

    Attributes:
        experts: Flat indices of the experts that have tokens, ascending.
        counts: How many rows each of them has.
        tokens: The token of each row that is sent, and then of those that are not. [tokens * k']
        positions: Where each of them is in the flattened [tokens, k'] choice. [tokens * k']
    """

    experts: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: Tensor
    positions: Tensor

    @classmethod
    def of(cls, choice: Choice, sent: Tensor | None = None) -> Dispatch:
        """Sort a choice by expert; within an expert tokens keep their order.

        Args:
            choice: What the gate decided.
            sent: Which pairs are sent; all by default. [tokens, k'] bool
        """
        flat = choice.experts.flatten()
        if sent is not None:
            flat = flat.masked_fill(~sent.flatten(), torch.iinfo(flat.dtype).max)
        ordered, positions = flat.sort(stable=True)
        n_sent = flat.shape[0] if sent is None else int(sent.sum())
        experts, counts = torch.unique_consecutive(ordered[:n_sent], return_counts=True)
        tokens = positions // max(1, choice.experts.shape[1])
        return cls(tuple(experts.tolist()), tuple(counts.tolist()), tokens, positions)

    @property
    def sent_tokens(self) -> Tensor:
        """The token of each row that is sent. [rows]"""
        return self.tokens[: sum(self.counts)]

    @property
    def dropped(self) -> int:
        """How many pairs are not sent."""
        return self.tokens.shape[0] - sum(self.counts)

    def answered_slots(self, answered: Sequence[bool], like: Tensor) -> Tensor:
        """Where in the choice the slot's expert answered (`answered` follows `experts`). Shape of `like`, bool"""
        if all(answered) and not self.dropped:
            return torch.ones_like(like, dtype=torch.bool)
        rows = torch.tensor(answered, dtype=torch.bool).repeat_interleave(torch.tensor(self.counts)).to(like.device)
        rows = F.pad(rows, (0, self.dropped))
        return torch.zeros_like(like, dtype=torch.bool).view(-1).index_copy(0, self.positions, rows).view(like.shape)


def mixture_weights(scores: Tensor, answered: Tensor) -> Tensor:
    """Softmax of each token's scores over the experts that answered; zero for the others.

    A token without any answer gets zeros only, and no gradient.

    Args:
        scores: [tokens, k']
        answered: [tokens, k'] bool
    """
    some = answered.any(-1, keepdim=True)
    weights = scores.masked_fill(~answered & some, -torch.inf).softmax(
        -1
    )  # never a row of -inf alone: that would be NaN
    return weights * answered


def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    """Mix the experts' answers.

    Args:
        rows: Answers in the order of `dispatch`; rows without an answer are zero. [rows that were sent, out]
        weights: [tokens, k']

    Returns:
        [tokens, out]
    """
    rows = F.pad(rows, (0, 0, 0, dispatch.dropped)) if dispatch.dropped else rows
    weighted = rows * weights.flatten().index_select(0, dispatch.positions).unsqueeze(-1).to(rows.dtype)
    return rows.new_zeros(weights.shape[0], rows.shape[1]).index_add(0, dispatch.tokens, weighted)


class AuxiliaryLoss:
    """Collects a layer's balance and z losses until the training step asks for them.

    Several forward passes in one step add up. Each thread has its own: what one adds, only it takes. Activation
    checkpointing runs a forward pass twice: what is added while a backward pass is running is such a repetition, and is
    left out.
    """

    MAX_PENDING = 256
    """Forward passes kept when nobody asks: older ones are dropped, so that their graphs do not fill the memory."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __deepcopy__(self, memo: dict[int, object]) -> AuxiliaryLoss:
        return AuxiliaryLoss()  # pending losses hold graphs, which cannot be copied

    def add(self, loss: Tensor) -> None:
        if not torch.is_grad_enabled() or _in_backward():
            return
        pending: list[Tensor] = self._local.__dict__.setdefault("pending", [])
        pending.append(loss)
        if len(pending) > self.MAX_PENDING:
            message = f"aux_loss() was not called for {self.MAX_PENDING} forward passes; the oldest is dropped."
            warnings.warn(message, stacklevel=3)
            del pending[: -self.MAX_PENDING]

    def take(self, like: Tensor) -> Tensor:
        """The sum since the last call (a scalar; zero without forward passes), which starts again from zero."""
        pending = self._local.__dict__.pop("pending", [])
        return torch.stack([loss.to(like.device) for loss in pending]).sum() if pending else like.new_zeros(())


def _in_backward() -> bool:
    # torch has no public name for this; its own checkpointing reads the same id, which is -1 outside of backward
    task_id = getattr(torch._C, "_current_graph_task_id", None)
    return task_id is not None and task_id() != -1
