"""CMT's attention: its formula, padding, and interpolated position tables."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dgt
from dgt.layers import Block
from dgt.layers.baselines.cmt import PositionTable, ReducedAttention


def make(ratio: int = 2, cosine: bool = False) -> ReducedAttention:
    attention = ReducedAttention(16, 2, ratio, cosine=cosine)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    for norm in attention.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, 0.0, 0.2)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return attention.eval()


@pytest.mark.parametrize(("rows", "columns"), [(6, 4), (5, 7), (1, 1)])
def test_it_is_the_formula_of_cmt(rows, columns) -> None:
    """Keys and values from a depthwise convolution of stride 2 and its BatchNorm; zeros beyond the edge."""
    attention, x = make(), torch.randn(3, rows, columns, 16)
    position = torch.randn(2, rows * columns, -(-rows // 2) * -(-columns // 2))
    conv, norm = attention.reduce
    padded = nn.functional.pad(x.permute(0, 3, 1, 2), (0, columns % 2, 0, rows % 2))
    smaller = norm(conv(padded)).flatten(2).transpose(1, 2)  # (B, K, C)
    query = attention.query(x).flatten(1, 2).unflatten(-1, (2, 8)).transpose(1, 2)
    key, value = (
        part.unflatten(-1, (2, 8)).transpose(1, 2)
        for part in attention.key_value(smaller).chunk(2, dim=-1)
    )
    scores = query @ key.transpose(-1, -2) / math.sqrt(8) + position
    expected = attention.merge_heads(scores.softmax(-1) @ value, x)
    torch.testing.assert_close(attention(x, None, position), expected, rtol=0, atol=1e-5)


def test_ratio_one_is_global_attention() -> None:
    attention, x = make(1, cosine=True), torch.randn(2, 5, 4, 16)
    everything = dgt.GlobalAttention(16, 2, cosine=True)
    everything.proj, everything.logit_scale = attention.proj, attention.logit_scale
    for name in ("weight", "bias"):
        parts = (getattr(attention.query, name), getattr(attention.key_value, name))
        setattr(everything.qkv, name, nn.Parameter(torch.cat(parts)))
    torch.testing.assert_close(attention(x), everything(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize(("height", "width"), [(4, 5), (3, 3), (1, 2)])
def test_a_padded_image_gives_what_it_gives_alone(height, width, ratio) -> None:
    attention, small = make(ratio), torch.randn(1, height, width, 16)
    batch = 3 * torch.randn(2, 7, 6, 16)
    batch[1, :height, :width] = small[0]
    mask = torch.ones(2, 7, 6, dtype=torch.bool)
    mask[1, height:] = mask[1, :, width:] = False
    out = attention(batch, mask)
    torch.testing.assert_close(out[1, :height, :width], attention(small)[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(out[0], attention(batch)[0], rtol=0, atol=2e-5)


def test_an_image_of_padding_alone_stays_finite() -> None:
    assert make()(torch.randn(2, 5, 4, 16), torch.zeros(2, 5, 4, dtype=torch.bool)).isfinite().all()


def test_a_table_is_itself_at_its_own_size_and_stretches_to_others() -> None:
    table = PositionTable(2, 6, 2)
    assert table(torch.empty(1, 6, 6, 8)) is table.position_table
    assert table(torch.empty(1, 9, 4, 8)).shape == (2, 36, 10)
    assert table(torch.empty(1, 1, 1, 8)).shape == (2, 1, 1)
    # A score that increases with the row of the query and decreases with the row of the key.
    with torch.no_grad():
        rows, keys = torch.arange(6.0).repeat_interleave(6), torch.arange(3.0).repeat_interleave(3)
        table.position_table.copy_((rows[:, None] - keys).expand(2, -1, -1))
    stretched = table(torch.empty(1, 12, 12, 8)).view(2, 12, 12, 6, 6)
    assert (stretched.diff(dim=1) >= 0).all()
    assert (stretched.diff(dim=3) <= 0).all()
    assert not stretched.diff(dim=2).any()
    stretched.sum().backward()
    assert table.position_table.grad.all()


def test_a_block_hands_its_attention_the_positions() -> None:
    block, x = Block(16, make()).eval(), torch.randn(2, 6, 4, 16)
    position = torch.randn(2, 24, 6)
    x1 = x + block.cpe(x)
    x2 = x1 + block.attn(block.norm1(x1), None, position)
    torch.testing.assert_close(
        block(x, None, position), x2 + block.ffn(block.norm2(x2)), rtol=0, atol=1e-5
    )


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="ratio must be at least 1, got 0"):
        ReducedAttention(16, 2, 0)
    with pytest.raises(ValueError, match=r"x must be a \(B, H, W, 16\) map"):
        make()(torch.randn(2, 30, 16))
    with pytest.raises(ValueError, match="ffn must be 'irffn' or 'mlp', got 'linear'"):
        Block(16, make(), ffn="linear")
