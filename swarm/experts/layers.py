"""The built-in experts: `ffn`, `transformer`, `causal_transformer`, `conv` and `nop`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from swarm.errors import ConfigError
from swarm.experts.spec import TensorSpec, expert


def _tokens(config: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec((None, config["hid"]))]


def _sequences(config: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec((None, config["seq"], config["hid"]))]


def _images(config: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec((None, config["channels"], config["height"], config["width"]))]


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


@expert("transformer", inputs=_sequences)
class TransformerBlock(nn.Module):
    """A transformer encoder layer, layer norm first. The "tokens" of a call are whole sequences.

    Args:
        hid: Size of a token.
        seq: Length of a sequence; None lets it differ from call to call.
        heads: Attention heads; `hid` is a multiple of it.
        inner: Hidden size of the feed-forward half; None takes `4 * hid`.
        dropout: Probability; calls of a training expert are then computed one by one.
    """

    causal = False

    def __init__(
        self,
        hid: int = 256,
        seq: int | None = None,
        heads: int = 4,
        inner: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if hid % heads:
            raise ConfigError(f"hid={hid} is not a multiple of heads={heads}.")
        self.heads, self.dropout = heads, dropout
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


@expert("causal_transformer", inputs=_sequences)
class CausalTransformerBlock(TransformerBlock):
    """A transformer decoder layer: as `transformer`, with the same arguments, but a token sees only earlier ones."""

    causal = True


@expert("conv", inputs=_images)
class ConvBlock(nn.Module):
    """A residual block of two convolutions, each after GroupNorm and SiLU. The "tokens" of a call are whole images.

    The layout of pre-activation ResNets (He et al., 2016) with GroupNorm (Wu & He, 2018) in place of BatchNorm, whose
    statistics would mix the images of a batch, which on a host come from several trainers.

    Args:
        channels: Channels of an image, in and out.
        height, width: Size of an image; None lets it differ from call to call.
        groups: Groups of GroupNorm; `channels` is a multiple of it.
        kernel: Width of both kernels; odd, so that images keep their size.
        dropout: Probability, before the second convolution; calls of a training expert are then computed one by one.
    """

    def __init__(
        self,
        channels: int = 64,
        height: int | None = None,
        width: int | None = None,
        groups: int = 8,
        kernel: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if channels % groups:
            raise ConfigError(f"channels={channels} is not a multiple of groups={groups}.")
        if kernel % 2 != 1:
            raise ConfigError(f"kernel={kernel} is not odd, so that images would change their size.")
        self.dropout = dropout
        self.norm_first, self.norm_second = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)
        self.first = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)
        self.second = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, height, width] -> [n, channels, height, width]"""
        y = F.silu(self.norm_second(self.first(F.silu(self.norm_first(x)))))
        result: torch.Tensor = x + self.second(F.dropout(y, self.dropout, self.training))
        return result


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
