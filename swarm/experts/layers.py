"""The built-in experts: `ffn`, `transformer` and `nop`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from swarm.errors import ConfigError
from swarm.experts.spec import TensorSpec, expert


def _tokens(config: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec((None, config["hid"]))]


@expert("ffn", inputs=_tokens)
class FeedForward(nn.Module):
    """The feed-forward block of a transformer: `hid -> inner -> hid` with GELU, layer norm first.

    The same layout as the customary `ffn` of decentralized mixtures of experts, except that LayerNorm comes first.

    Args:
        hid: Size of a token.
        inner: Hidden size; None takes `4 * hid`.
        residual: Return `x + f(x)` instead of `f(x)`.
    """

    def __init__(self, hid: int = 256, inner: int | None = None, residual: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hid)
        self.up = nn.Linear(hid, inner or 4 * hid)
        self.down = nn.Linear(inner or 4 * hid, hid)
        self.residual = residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hid] -> [tokens, hid]"""
        y: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y if self.residual else y


@expert("transformer", inputs=lambda c: [TensorSpec((None, c["seq"], c["hid"]))])
class TransformerBlock(nn.Module):
    """A transformer encoder layer, layer norm first. The "tokens" of a call are whole sequences.

    Args:
        hid: Size of a token.
        seq: Length of a sequence; None lets it differ from call to call.
        heads: Attention heads; `hid` is a multiple of it.
        inner: Hidden size of the feed-forward half; None takes `4 * hid`.
        dropout: Probability; calls of a training expert are then computed one by one.
        causal: Let a token attend to earlier ones only.
    """

    def __init__(
        self,
        hid: int = 256,
        seq: int | None = None,
        heads: int = 4,
        inner: int | None = None,
        dropout: float = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if hid % heads:
            raise ConfigError(f"hid={hid} is not a multiple of heads={heads}.")
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norm_attention, self.norm_ffn = nn.LayerNorm(hid), nn.LayerNorm(hid)
        self.qkv, self.out = nn.Linear(hid, 3 * hid), nn.Linear(hid, hid)
        self.up, self.down = nn.Linear(hid, inner or 4 * hid), nn.Linear(inner or 4 * hid, hid)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[sequences, seq, hid] -> [sequences, seq, hid]"""
        n, seq, hid = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(n, seq, 3, self.heads, hid // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [sequences, heads, seq, hid / heads]
        rate = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=self.causal)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(n, seq, hid)), rate, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_ffn(x)))), rate, self.training)


@expert("nop", inputs=_tokens)
class Nop(nn.Module):
    """Returns its input: measures everything around the computation.

    Args:
        hid: Size of a token.
    """

    def __init__(self, hid: int = 256) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hid] -> [tokens, hid]"""
        return x
