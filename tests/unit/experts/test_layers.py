"""The built-in expert classes."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from swarm.experts.layers import FeedForward, Nop, TransformerBlock


def test_ffn_is_layer_norm_then_two_layers_with_gelu() -> None:
    ffn = FeedForward(6, inner=10)
    x = torch.randn(3, 6)
    expected = ffn.down(F.gelu(ffn.up(ffn.norm(x))))
    assert torch.equal(ffn(x), expected)
    ffn.residual = True
    assert torch.equal(ffn(x), x + expected)
    assert FeedForward(6).up.out_features == 24


def test_transformer_equals_torchs_own_layer_in_the_same_layout() -> None:
    mine = TransformerBlock(8, heads=2, inner=16)
    theirs = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True, norm_first=True)
    with torch.no_grad():
        pairs = [
            (theirs.self_attn.in_proj_weight, mine.qkv.weight),
            (theirs.self_attn.in_proj_bias, mine.qkv.bias),
            (theirs.self_attn.out_proj.weight, mine.out.weight),
            (theirs.self_attn.out_proj.bias, mine.out.bias),
            (theirs.linear1.weight, mine.up.weight),
            (theirs.linear1.bias, mine.up.bias),
            (theirs.linear2.weight, mine.down.weight),
            (theirs.linear2.bias, mine.down.bias),
        ]
        for target, source in pairs:
            target.copy_(source)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_nop_returns_its_input() -> None:
    x = torch.randn(2, 3)
    assert Nop(3)(x) is x
