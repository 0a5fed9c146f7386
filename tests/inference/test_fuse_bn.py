"""Fused layers equal the original ones: inside, at every border, for any size, under a mask."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dgt.inference.form import FoldedConv, fold_after, fold_before, inference_form
from dgt.layers import Block, ConvStem, DGAttention, GlobalAttention, Head, InvertedResidualFFN


def norm_of(channels: int) -> nn.BatchNorm2d:
    """A BatchNorm in evaluation mode that has seen data; its first scale is zero, another one negative."""
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(channels))
        norm.weight[0] = 0.0
        norm.bias.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.3, 3.0)
    return norm.eval()


def seasoned(module: nn.Module) -> nn.Module:
    """The module in evaluation mode, with norms and biases as after some training."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.load_state_dict(norm_of(part.num_features).state_dict())
            elif isinstance(part, nn.LayerNorm):
                part.weight.uniform_(0.5, 1.5)
                part.bias.normal_()
    return module.eval()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 7),
    st.sampled_from(["dense", "depthwise"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_a_folded_convolution_is_exact_everywhere(
    height, width, kind, residual, channels_last, masked, seed
) -> None:
    torch.manual_seed(seed)
    conv = nn.Conv2d(5, 5, 3, padding=1, groups=5 if kind == "depthwise" else 1).double()
    norm = norm_of(5).double()
    x = torch.randn(2, 5, height, width).double()
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    mask = torch.rand(2, height, width) < 0.6 if masked else None
    y = norm(x) if mask is None else norm(x) * mask.unsqueeze(1)
    expected = y + conv(y) if residual else conv(y)
    folded = FoldedConv(conv, norm, residual)(x, mask)
    torch.testing.assert_close(folded, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (5, 1), (2, 3)])
@torch.no_grad()
def test_a_compiled_folded_convolution_is_exact_at_its_borders(size) -> None:
    conv, norm, x = nn.Conv2d(5, 5, 3, padding=1, groups=5), norm_of(5), torch.randn(2, 5, *size)
    torch.compiler.reset()
    compiled = torch.compile(FoldedConv(conv, norm), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), conv(norm(x)), rtol=1e-5, atol=1e-5)


def test_pointwise_convolutions_take_in_norms_on_both_sides() -> None:
    before, conv, after = norm_of(6).double(), nn.Conv2d(6, 4, 1).double(), norm_of(4).double()
    x = torch.randn(2, 6, 3, 5).double()
    torch.testing.assert_close(
        fold_after(fold_before(before, conv), after)(x), after(conv(before(x)))
    )


PARTS = {
    "stem": (lambda: ConvStem(3, 8), (2, 3, 21, 34)),
    "feed-forward": (lambda: InvertedResidualFFN(8), (2, 5, 9, 8)),
    "group attention": (lambda: DGAttention(16, 2, 4, 10), (2, 6, 7, 16)),
    "group attention, many tokens": (lambda: DGAttention(16, 2, 4, 10), (2, 12, 13, 16)),
    "cosine attention": (lambda: DGAttention(16, 2, 4, 10, cosine=True), (2, 6, 7, 16)),
    "global attention": (lambda: GlobalAttention(16, 2), (2, 6, 7, 16)),
    "block": (lambda: Block(16, DGAttention(16, 2, 4, 10)), (2, 6, 7, 16)),
    "block, post-norm": (
        lambda: Block(16, DGAttention(16, 2, 4, 10, cosine=True), post_norm=True),
        (2, 6, 7, 16),
    ),
    "block of Swin": (
        lambda: Block(16, GlobalAttention(16, 2), cpe=False, ffn="mlp"),
        (2, 6, 7, 16),
    ),
    "head": (lambda: Head(8, 12, 5), (2, 8, 4, 3)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_every_part_gives_the_same_and_leaves_its_input_alone(name, masked) -> None:
    torch.manual_seed(1)
    build, shape = PARTS[name]
    part = seasoned(build())
    x = torch.randn(shape)
    mask = None
    if masked:
        grid = (11, 17) if name == "stem" else shape[2:] if name == "head" else shape[1:-1]
        mask = torch.zeros(2, *grid, dtype=torch.bool)
        mask[:, : grid[0] - 1, : grid[1] - 2] = True
    options = {"mask": mask}
    untouched = x.clone()
    with torch.no_grad():
        expected = part(x, **options)
        actual = inference_form(copy.deepcopy(part))(x, **options)
    if masked and expected.dim() == 4:  # values at padding do not matter
        real = mask.unsqueeze(-1)
        expected, actual = expected * real, actual * real
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(x, untouched)


def test_a_norm_without_statistics_cannot_be_folded() -> None:
    with pytest.raises(ValueError, match="must track running statistics"):
        fold_after(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
