"""CrossFormer's attention and patches: plain masked attention from the definition, any size, padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dgt.layers.baselines.crossformer import (
    CrossScaleMerging,
    CrossScalePatches,
    DynamicPositionBias,
    LongShortDistanceAttention,
)

SIDES = st.integers(1, 11)


def lively(module: nn.Module) -> nn.Module:
    """Give every parameter values that matter, as after training."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    return module.eval()


def plain(attention: LongShortDistanceAttention, x: Tensor) -> Tensor:
    """Textbook attention over all pairs of tokens, those of other groups masked out."""
    rows, columns = x.shape[1:3]
    place = torch.arange(rows * columns)
    row, column = place // columns, place % columns
    if attention.interval:
        group = torch.stack([row % attention.interval, column % attention.interval])
    else:
        group = torch.stack([row // attention.group, column // attention.group])
    seen = (group[:, :, None] == group[:, None]).all(0)
    step = attention.interval or 1
    down = (row[:, None] - row).div(step, rounding_mode="floor")
    right = (column[:, None] - column).div(step, rounding_mode="floor")
    offsets = torch.stack([down, right], dim=-1).to(x.dtype)
    bias = attention.position_bias.layers(offsets).permute(2, 0, 1)
    query, key, value = attention.split_heads(x)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
    return attention.merge_heads(scores.masked_fill(~seen, -math.inf).softmax(-1) @ value, x)


@given(SIDES, SIDES, st.integers(1, 5), st.integers(0, 4))
@settings(max_examples=25)
def test_it_is_masked_attention_with_a_bias_by_offset(
    rows: int, columns: int, group: int, interval: int
) -> None:
    attention = lively(LongShortDistanceAttention(32, 2, group, interval))
    x = torch.randn(2, rows, columns, 32)
    torch.testing.assert_close(attention(x), plain(attention, x), rtol=0, atol=2e-5)


@pytest.mark.parametrize("interval", [0, 2])
@pytest.mark.parametrize(("height", "width"), [(4, 5), (7, 4), (6, 6)])
def test_a_padded_image_gives_what_it_gives_alone(height: int, width: int, interval: int) -> None:
    attention = lively(LongShortDistanceAttention(32, 2, 3, interval))
    small = torch.randn(1, height, width, 32)
    batch = 3 * torch.randn(2, 8, 7, 32)
    batch[1, :height, :width] = small[0]
    mask = torch.ones(2, 8, 7, dtype=torch.bool)
    mask[1, height:] = mask[1, :, width:] = False
    out = attention(batch, mask)
    assert out.isfinite().all()
    torch.testing.assert_close(out[1, :height, :width], attention(small)[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(out[0], attention(batch)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("interval", [0, 2])
def test_an_image_of_padding_alone_stays_finite_and_every_parameter_has_a_gradient(
    interval: int,
) -> None:
    attention = lively(LongShortDistanceAttention(32, 2, 3, interval, cosine=True))
    attention(
        torch.randn(2, 5, 4, 32), torch.zeros(2, 5, 4, dtype=torch.bool)
    ).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attention.parameters())
    attention(torch.randn(2, 5, 4, 32)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in attention.parameters())


def test_the_bias_depends_on_the_offset_alone() -> None:
    bias = lively(DynamicPositionBias(64, 2))(torch.zeros(1), 3, 4).view(2, 3, 4, 3, 4)
    torch.testing.assert_close(bias[:, 1:, 1:, 1:, 1:], bias[:, :-1, :-1, :-1, :-1])
    assert not torch.equal(bias[:, 0, 0, 0, 1], bias[:, 0, 1, 0, 0])


@pytest.mark.parametrize(("height", "width"), [(32, 32), (33, 50), (7, 9)])
def test_patches_lie_around_the_same_place(height: int, width: int) -> None:
    """A kernel with twice the side sees half a stride more at each edge: outputs at one position share their center."""
    patches = CrossScalePatches(1, 8, (4, 8, 16), 4)
    image = torch.zeros(1, height, width, 1)
    assert patches(image).shape == (1, -(-height // 4), -(-width // 4), 8)
    centers = [(conv.kernel_size[0] - 1) / 2 - conv.padding[0] for conv in patches.convs]
    assert centers == [1.5, 1.5, 1.5]


def test_padding_stays_zero_through_the_norm_of_a_merging() -> None:
    merge = lively(CrossScaleMerging(8, 16))
    x = torch.randn(1, 4, 4, 8)
    padded = nn.functional.pad(x, (0, 0, 0, 2, 0, 2))
    torch.testing.assert_close(merge(padded)[:, :2, :2], merge(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "group must be at least 1, got 0"), ((7, -1), "interval must be at least 1, got -1")],
)
def test_bad_settings(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongShortDistanceAttention(32, 2, *arguments)


def test_inputs_that_do_not_fit() -> None:
    attention = LongShortDistanceAttention(32, 2)
    with pytest.raises(ValueError, match=r"x must be a \(B, H, W, 32\) map, got a \(2, 30, "):
        attention(torch.randn(2, 30, 32))
