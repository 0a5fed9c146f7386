"""Windows and stripes: timm's Swin block, plain masked attention, any size, padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import LayerNorm
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from dgt.layers import Block
from dgt.layers.baselines.cswin import StripeAttention
from dgt.layers.baselines.swin import WindowAttention

SIDES = st.integers(1, 11)


def lively(attention: nn.Module) -> nn.Module:
    """Give every parameter values that matter, as after training."""
    for parameter in attention.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    return attention.eval()


def masked_attention(
    attention: nn.Module, x: Tensor, sees: Tensor, bias: Tensor | float = 0.0
) -> Tensor:
    """Textbook attention over all pairs of tokens: ``sees`` (B, H, L, L); returns (B, H, L, D), before projection."""
    query, key, value = attention.split_heads(x)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
    return scores.masked_fill(~sees, -math.inf).softmax(-1) @ value


def places(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Row and column of every token of a map, row by row."""
    grid = torch.arange(rows * columns)
    return grid // columns, grid % columns


def windows_of(place: Tensor, side: int, window: int, shift: int) -> Tensor:
    """The window of every row (or column): boundaries at shift, shift + window, shift + 2 window, ..."""
    if side <= window:
        return torch.zeros_like(place)
    return (place - shift).div(window, rounding_mode="floor")


@given(SIDES, SIDES, st.integers(1, 5), st.integers(0, 4))
@settings(max_examples=20)
def test_windows_are_masked_attention_with_a_bias_by_offset(rows, columns, window, shift) -> None:
    shift %= window
    attention = lively(WindowAttention(8, 2, window, shift))
    x = torch.randn(2, rows, columns, 8)
    row, column = places(rows, columns)
    in_row = windows_of(row, rows, window, shift)
    in_column = windows_of(column, columns, window, shift)
    sees = (in_row[:, None] == in_row) & (in_column[:, None] == in_column)
    down, right = row[:, None] - row, column[:, None] - column
    near = (down.abs() < window) & (right.abs() < window)
    index = ((down + window - 1) * (2 * window - 1) + right + window - 1).where(near, 0)
    bias = attention.relative_position_bias_table[index].permute(2, 0, 1)
    expected = attention.merge_heads(
        masked_attention(attention, x, sees.expand(2, 2, -1, -1), bias), x
    )
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-5)


def plain_lepe(value: Tensor, lepe: nn.Conv2d, stripe: Tensor, rows: int, columns: int) -> Tensor:
    """A depthwise 3x3 convolution of (B, L, C) values, neighbor by neighbor within a stripe."""
    row, column = places(rows, columns)
    out = lepe.bias.expand_as(value).clone()
    for here in range(rows * columns):
        for there in range(rows * columns):
            down, right = int(row[there] - row[here]), int(column[there] - column[here])
            if abs(down) <= 1 and abs(right) <= 1 and stripe[here] == stripe[there]:
                out[:, here] += lepe.weight[:, 0, 1 + down, 1 + right] * value[:, there]
    return out


def plain_stripes(attention: StripeAttention, x: Tensor) -> Tensor:
    """CSWin's attention from its definition: half of the heads by columns, half by rows."""
    rows, columns = x.shape[1:3]
    row, column = places(rows, columns)
    width = attention.width or max(rows, columns)
    stripes = torch.stack([column // width, row // width])  # vertical ones first
    sees = (stripes[:, :, None] == stripes[:, None]).repeat_interleave(
        attention.num_heads // 2, dim=0
    )
    attended = (
        masked_attention(attention, x, sees.expand(len(x), -1, -1, -1)).transpose(1, 2).flatten(2)
    )
    value = attention.split_heads(x)[2].transpose(1, 2).flatten(2)
    local = [
        plain_lepe(half, lepe, stripe, rows, columns)
        for half, lepe, stripe in zip(value.chunk(2, -1), attention.lepe, stripes, strict=True)
    ]
    return attention.proj(attended + torch.cat(local, dim=-1)).view(x.shape)


@pytest.mark.parametrize("width", [0, 1, 2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(4, 6), (5, 3), (1, 7), (2, 2)])
def test_stripes_are_masked_attention_with_lepe(rows, columns, width) -> None:
    attention, x = lively(StripeAttention(8, 4, width)), torch.randn(2, rows, columns, 8)
    torch.testing.assert_close(attention(x), plain_stripes(attention, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("size", [(14, 21), (7, 14), (4, 4)])
def test_the_swin_block_is_that_of_timm(size, shift) -> None:
    """With timm's weights, on maps that windows tile and on maps smaller than a window."""
    theirs = SwinTransformerBlock(
        32, size, 4, window_size=7, shift_size=shift, norm_layer=LayerNorm
    )
    lively(theirs)
    window = theirs.window_size[0]
    ours = Block(
        32, WindowAttention(32, 4, window, min(shift, window - 1)), cpe=False, ffn="mlp"
    ).eval()
    weights = {name.replace("mlp.", "ffn."): tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict({name: weights[name] for name in ours.state_dict()})
    x = torch.randn(2, *size, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_a_window_of_one_side_shrinks_with_its_table() -> None:
    """On a map of 3 x 14 tokens a window of 7 sees what timm's window of (3, 7) sees, offset by offset."""
    theirs = lively(
        SwinTransformerBlock(16, (3, 14), 2, window_size=7, shift_size=3, norm_layer=LayerNorm)
    )
    ours = Block(16, WindowAttention(16, 2, 7, 3), cpe=False, ffn="mlp").eval()
    weights = {name.replace("mlp.", "ffn."): tensor for name, tensor in theirs.state_dict().items()}
    table = torch.zeros(13, 13, 2)
    table[4:9] = weights.pop("attn.relative_position_bias_table").view(5, 13, 2)
    weights["attn.relative_position_bias_table"] = table.flatten(0, 1)
    ours.load_state_dict({name: weights[name] for name in ours.state_dict()})
    x = torch.randn(2, 3, 14, 16)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def make(kind: str, cosine: bool = False) -> nn.Module:
    attention = {
        "window": lambda: WindowAttention(16, 2, 3, cosine=cosine),
        "shifted": lambda: WindowAttention(16, 2, 3, 1, cosine=cosine),
        "stripe": lambda: StripeAttention(16, 2, 2, cosine=cosine),
        "whole": lambda: StripeAttention(16, 2, 0, cosine=cosine),
    }[kind]()
    return lively(attention)


@pytest.mark.parametrize("kind", ["window", "shifted", "stripe", "whole"])
@pytest.mark.parametrize(("height", "width"), [(4, 5), (7, 4)])
def test_a_padded_image_gives_what_it_gives_alone(height, width, kind) -> None:
    attention, small = make(kind, cosine=True), torch.randn(1, height, width, 16)
    batch = 3 * torch.randn(2, 8, 7, 16)
    batch[1, :height, :width] = small[0]
    mask = torch.ones(2, 8, 7, dtype=torch.bool)
    mask[1, height:] = mask[1, :, width:] = False
    out = attention(batch, mask)
    assert out.isfinite().all()
    torch.testing.assert_close(out[1, :height, :width], attention(small)[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(out[0], attention(batch)[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(attention(batch, mask.flatten(1)), out, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["window", "shifted", "stripe", "whole"])
def test_an_image_of_padding_alone_stays_finite(kind) -> None:
    attention, x = make(kind), torch.randn(2, 5, 4, 16, requires_grad=True)
    out = attention(x, torch.zeros(2, 5, 4, dtype=torch.bool))
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (WindowAttention, (16, 2, 0), "window must be at least 1, got 0"),
        (WindowAttention, (16, 2, 4, 4), "shift must be from 0 to window - 1, got 4"),
        (WindowAttention, (16, 3), "dim must be divisible by num_heads, got 16 and 3"),
        (StripeAttention, (16, 1), "num_heads must be even for vertical .* stripes, got 1"),
        (StripeAttention, (16, 2, -1), "width must be at least 1, got -1"),
    ],
)
def test_bad_settings(kind, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        kind(*arguments)


@pytest.mark.parametrize("kind", ["window", "stripe"])
def test_inputs_that_do_not_fit(kind) -> None:
    attention = make(kind)
    with pytest.raises(ValueError, match=r"x must be a \(B, H, W, 16\) map, got a \(2, 30, "):
        attention(torch.randn(2, 30, 16))
    with pytest.raises(ValueError, match=r"x must be a .* tensor, got a \(2, 6, 5, 8\) tensor"):
        attention(torch.randn(2, 6, 5, 8))
    with pytest.raises(ValueError, match=r"mask must be a bool tensor of shape \(2, 6, 5\)"):
        attention(torch.randn(2, 6, 5, 16), torch.ones(2, 5, 6, dtype=torch.bool))
