"""The demo's model: a byte-level language model with a small dense trunk and one layer of remote experts."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from swarm.experts.moe import MixtureOfExperts

CONTEXT_BYTES = 16
EMBEDDING = 24
DIM = 64
INNER = 128
K = 2


class ByteModel(nn.Module):
    """Predicts each byte from the `CONTEXT_BYTES` before it.

    Embedding and one causal convolution look at the context; the experts do the rest, one token at a time.

    Args:
        experts: The mixture-of-experts layer, [..., DIM] -> [..., DIM].
    """

    def __init__(self, experts: MixtureOfExperts) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, EMBEDDING)
        self.convolution = nn.Conv1d(EMBEDDING, DIM, CONTEXT_BYTES)
        self.experts = experts
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the bytes that follow each full context.

        Args:
            text: [windows, CONTEXT_BYTES + n - 1] int64

        Returns:
            [windows, n, 256]
        """
        hidden = self.convolution(self.embedding(text).transpose(1, 2))  # [windows, DIM, n]
        hidden = F.gelu(hidden).transpose(1, 2)
        hidden = hidden + self.experts(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte. `windows`: [windows, CONTEXT_BYTES + n] int64"""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, CONTEXT_BYTES:].flatten())


def learning_rate(step: int, steps: int, peak: float, warmup: int = 30) -> float:
    """Linear warm-up, then a cosine down to a tenth of `peak`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
