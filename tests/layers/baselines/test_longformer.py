"""ViL's attention: plain masked attention from its definition, global tokens, any size, padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dgt.layers.baselines.longformer import (
    GlobalTokensAndPositions,
    LongformerAttention,
    LongformerBlock,
)


def lively(module: nn.Module) -> nn.Module:
    """Give every parameter values that matter, as after training."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    return module.eval()


def sees(rows: int, columns: int, window: int, count: int) -> Tensor:
    """Which tokens see which, from the definition: (T, T), global tokens first."""
    place = torch.arange(rows * columns)
    down = (place[:, None] // columns - place // columns).abs()
    right = (place[:, None] % columns - place % columns).abs()
    near = (down <= window // 2) & (right <= window // 2)
    if rows <= window and columns <= window:
        near = torch.ones_like(near)
    everything = torch.ones(count + len(place), count + len(place), dtype=torch.bool)
    everything[count:, count:] = near
    return everything


def plain(attention: LongformerAttention, x: Tensor, seen: Tensor) -> Tensor:
    """Textbook attention over all pairs of tokens."""
    query, key, value = attention.split_heads(x)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return attention.merge_heads(weights @ value, x)


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([3, 5, 7]), st.integers(0, 2))
@settings(max_examples=25)
def test_it_is_masked_attention(rows: int, columns: int, window: int, count: int) -> None:
    attention = lively(LongformerAttention(8, 2, window))
    x = torch.randn(2, count + rows * columns, 8)
    expected = plain(attention, x, sees(rows, columns, window, count))
    torch.testing.assert_close(attention(x, rows, columns), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize(("rows", "columns"), [(9, 4), (3, 3)])
def test_padding_is_no_key(rows: int, columns: int, count: int) -> None:
    attention = lively(LongformerAttention(8, 2, 3))
    x = torch.randn(2, count + rows * columns, 8)
    mask = torch.ones(2, rows, columns, dtype=torch.bool)
    mask[1, 2:] = mask[1, :, 2:] = False
    mask = mask.flatten(1)
    seen = sees(rows, columns, 3, count)[None].repeat(2, 1, 1)
    seen[:, :, count:] &= mask[:, None]
    real = torch.cat([mask.new_ones(2, count), mask], dim=1)
    # Outputs at padding are not compared.
    expected = plain(attention, x, (seen | ~real[:, :, None])[:, None])
    out = attention(x, rows, columns, mask)
    assert out.isfinite().all()
    torch.testing.assert_close(out[real], expected[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1])
def test_an_image_of_padding_alone_stays_finite(count: int) -> None:
    attention = lively(LongformerAttention(8, 2, 3))
    x = torch.randn(1, count + 20, 8, requires_grad=True)
    attention(x, 5, 4, torch.zeros(1, 20, dtype=torch.bool)).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_every_query_has_its_own_keys_where_flops_are_counted() -> None:
    """On the meta device: 225 keys and a global token for a window of 15, as the paper counts."""
    from torch.utils.flop_counter import FlopCounterMode

    attention = LongformerAttention(8, 2, 15, device="meta")
    with FlopCounterMode(display=False) as counter:
        attention(torch.empty(1, 1 + 20 * 20, 8, device="meta"), 20, 20)
    linears = 4 * 8 * 8 * 401
    pairs = 226 * 400 + 401
    assert counter.get_total_flops() == 2 * (linears + 2 * pairs * 8)


def test_positions_are_stretched_to_other_maps() -> None:
    tokens = lively(GlobalTokensAndPositions(6, 4, 2))
    x = torch.zeros(1, 4, 4, 6)
    made = tokens(x)
    assert made.shape == (1, 2 + 16, 6)
    grid = made[0, 2:].unflatten(0, [4, 4])
    torch.testing.assert_close(grid[..., :3], tokens.row_position[0].T[:, None].expand(4, 4, 3))
    torch.testing.assert_close(grid[..., 3:], tokens.column_position[0].T[None].expand(4, 4, 3))
    assert tokens(torch.zeros(1, 7, 3, 6)).shape == (1, 2 + 21, 6)


def test_a_block_keeps_global_tokens_and_map_together() -> None:
    block = LongformerBlock(8, LongformerAttention(8, 2, 3), cpe=False, ffn="mlp").eval()
    x = torch.randn(2, 1 + 12, 8)
    x.requires_grad_()
    block(x, 4, 3)[:, 0].sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum(-1).all()  # a global token sees all


@pytest.mark.parametrize("window", [0, 4])
def test_bad_windows(window: int) -> None:
    with pytest.raises(ValueError, match=f"window must be .*, got {window}"):
        LongformerAttention(8, 2, window)
