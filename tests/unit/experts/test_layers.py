"""The built-in expert classes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from swarm.errors import ConfigError
from swarm.experts.layers import CausalTransformerBlock, ConvBlock, FeedForward, Nop, TransformerBlock
from swarm.experts.registry import check_grid
from swarm.experts.spec import ExpertGrid, TensorSpec


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


def test_the_causal_transformer_is_the_transformer_without_a_look_ahead() -> None:
    causal, plain = CausalTransformerBlock(8, heads=2), TransformerBlock(8, heads=2)
    plain.load_state_dict(causal.state_dict())
    x = torch.randn(2, 4, 8)
    later = x.clone()
    later[:, 3, 0] += 1  # not all of it: layer norm would take that out
    torch.testing.assert_close(causal(x)[:, :3], causal(later)[:, :3])
    assert not torch.allclose(plain(x)[:, :3], plain(later)[:, :3])
    torch.testing.assert_close(causal(x[:, :1]), plain(x[:, :1]))
    with pytest.raises(ConfigError, match="multiple"):
        check_grid(ExpertGrid("a", "causal_transformer", config={"hid": 9}))


def test_conv_adds_two_convolutions_of_normalised_images_and_keeps_no_batch_statistics() -> None:
    conv = ConvBlock(8, groups=2, kernel=5)
    x = torch.randn(3, 8, 6, 7)
    y = F.conv2d(F.silu(F.group_norm(x, 2)), conv.first.weight, conv.first.bias, padding=2)
    y = F.conv2d(F.silu(F.group_norm(y, 2)), conv.second.weight, conv.second.bias, padding=2)
    torch.testing.assert_close(conv(x), x + y)
    assert list(conv.buffers()) == []
    torch.testing.assert_close(conv.eval()(x), conv.train()(x))


def test_conv_checks_its_config_and_draws_random_numbers_only_with_dropout() -> None:
    plain = check_grid(ExpertGrid("a", "conv", config={"channels": 8, "height": 4, "width": 6}))
    assert plain.inputs == plain.outputs == (TensorSpec((None, 8, 4, 6)),)
    assert not plain.random
    assert check_grid(ExpertGrid("a", "conv", config={"channels": 8, "dropout": 0.1})).random
    for wrong in ({"channels": 9}, {"channels": 8, "kernel": 2}):
        with pytest.raises(ConfigError):
            check_grid(ExpertGrid("a", "conv", config=wrong))


def test_nop_returns_its_input() -> None:
    x = torch.randn(2, 3)
    assert Nop(3)(x) is x
