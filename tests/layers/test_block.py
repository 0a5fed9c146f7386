"""Block and convolutional parts: their equations, shapes, any size, and padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dgt
from dgt.layers import (
    Block,
    ConditionalPositionEncoding,
    ConvStem,
    InvertedResidualFFN,
    PatchMerging,
    mask_padding,
)


def randomise(module: nn.Module) -> nn.Module:
    """Give norms weights and statistics as after training, and set evaluation mode."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.normal_(part.weight, 1.0, 0.2)
            nn.init.normal_(part.bias, 0.0, 0.2)
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean, 0.0, 0.2)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    return module.eval()


def make_block(kind: str = "group", post_norm: bool = False) -> Block:
    attention = {
        "group": lambda: dgt.DGAttention(16, 2, num_groups=5, top_k=6, cosine=post_norm),
        "global": lambda: dgt.GlobalAttention(16, 2, cosine=post_norm),
    }[kind]()
    return randomise(Block(16, attention, post_norm=post_norm))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 1), (7, 5), (8, 8)])
def test_shapes(height, width) -> None:
    x = torch.randn(2, height, width, 16)
    halved = ((height + 1) // 2, (width + 1) // 2)
    assert ConditionalPositionEncoding(16)(x).shape == x.shape
    assert InvertedResidualFFN(16)(x).shape == x.shape
    assert make_block()(x).shape == x.shape
    assert PatchMerging(16, 24)(x).shape == (2, *halved, 24)
    assert ConvStem(3, 8)(torch.randn(2, 3, height, width)).shape == (2, *halved, 8)
    assert ConvStem(3, 8, stride=1)(torch.randn(2, 3, height, width)).shape == (2, height, width, 8)


def test_pre_norm_block_is_equations_8_to_10() -> None:
    block, x = make_block(), torch.randn(2, 6, 5, 16)
    x1 = x + block.cpe(x)
    x2 = x1 + block.attn(block.norm1(x1))
    torch.testing.assert_close(block(x), x2 + block.ffn(block.norm2(x2)), rtol=0, atol=1e-5)


def test_post_norm_block_normalizes_what_comes_out() -> None:
    block, x = make_block(post_norm=True), torch.randn(2, 6, 5, 16)
    x1 = x + block.cpe(x)
    x2 = x1 + block.norm1(block.attn(x1))
    torch.testing.assert_close(block(x), x2 + block.norm2(block.ffn(x2)), rtol=0, atol=1e-5)


def test_feed_forward_is_that_of_cmt() -> None:
    """The residual connection around the depthwise convolution is added before its GELU."""
    ffn, x = randomise(InvertedResidualFFN(16)), torch.randn(2, 6, 5, 16)
    gelu = nn.functional.gelu
    hidden = ffn.norm1(gelu(pointwise(ffn.expand, x.permute(0, 3, 1, 2))))
    hidden = ffn.norm2(gelu(hidden + ffn.depthwise(hidden)))
    expected = ffn.norm3(pointwise(ffn.project, hidden)).permute(0, 2, 3, 1)
    torch.testing.assert_close(ffn(x), expected, rtol=0, atol=1e-5)
    assert ffn.expand.out_features == 64


def pointwise(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A linear of channels as CMT's convolution of 1x1."""
    return nn.functional.conv2d(x, linear.weight[:, :, None, None], linear.bias)


def pad(x: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Put (1, h, w, C) into noise (2, height, width, C) as its second image; also the mask (2, height, width)."""
    batch = 3 * torch.randn(2, height, width, x.shape[-1])
    batch[1, : x.shape[1], : x.shape[2]] = x[0]
    mask = torch.ones(2, height, width, dtype=torch.bool)
    mask[1, x.shape[1] :] = mask[1, :, x.shape[2] :] = False
    return batch, mask


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("kind", ["group", "global"])
@pytest.mark.parametrize(("height", "width"), [(4, 3), (1, 1), (6, 4)])
def test_a_padded_image_gives_what_it_gives_alone_in_a_block(
    height, width, kind, post_norm
) -> None:
    block, small = make_block(kind, post_norm), torch.randn(1, height, width, 16)
    out = block(*pad(small, 6, 5))
    torch.testing.assert_close(out[1, :height, :width], block(small)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_padded_image_gives_what_it_gives_alone_in_the_parts(stride) -> None:
    small = torch.randn(1, 5, 3, 16)
    batch, mask = pad(small, 9, 8)
    ffn, merge = randomise(InvertedResidualFFN(16)), randomise(PatchMerging(16, 24))
    torch.testing.assert_close(
        ffn(mask_padding(batch, mask), mask)[1, :5, :3], ffn(small)[0], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        merge(mask_padding(batch, mask))[1, :3, :2], merge(small)[0], rtol=0, atol=1e-5
    )
    stem = randomise(ConvStem(16, 8, stride))
    alone = stem(small.permute(0, 3, 1, 2))[0]
    out = stem(mask_padding(batch, mask).permute(0, 3, 1, 2), mask[:, ::stride, ::stride])
    torch.testing.assert_close(out[1, : alone.shape[0], : alone.shape[1]], alone, rtol=0, atol=1e-5)


def test_a_mask_of_real_tokens_alone_changes_nothing() -> None:
    block, x = make_block(), torch.randn(2, 6, 5, 16)
    torch.testing.assert_close(
        block(x, torch.ones(2, 6, 5, dtype=torch.bool)), block(x), rtol=0, atol=1e-6
    )
