"""Vision Longformer (ViL): attention to a sliding window and to global tokens.

A stage begins with its own global tokens, which see, and are seen by, all others; they end with
it. Written from Zhang et al., "Multi-Scale Vision Longformer: A New Vision Transformer for
High-Resolution Image Encoding", ICCV 2021.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.models import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from dgt.layers.attention import SelfAttention
from dgt.layers.baselines.swin import Window, cut_windows, join_windows
from dgt.layers.block import Block
from dgt.layers.checks import check_layer_input
from dgt.ops.checks import check_count


@register_notrace_function
def cut_neighborhoods(x: Tensor, side: int, reach: int) -> Tensor:
    """Gather, for every square of tokens, what is in it and around it.

    Args:
        x: (B, H, W, C).
        side: of a square, in tokens; squares tile the map from its upper left corner, as in
            :func:`dgt.layers.baselines.swin.cut_windows`.
        reach: how many tokens around it are gathered.

    Returns:
        (B, squares, (side + 2 reach)^2, C), row by row, zeros outside of the map.
    """
    below = (side - x.shape[1] % side) % side
    right = (side - x.shape[2] % side) % side
    x = F.pad(x, (0, 0, reach, reach + right, reach, reach + below))
    x = x.unfold(1, side + 2 * reach, side)
    x = x.unfold(2, side + 2 * reach, side)  # (B, rows, columns, C, height, width)
    return x.permute(0, 1, 2, 4, 5, 3).flatten(3, 4).flatten(1, 2)


@register_notrace_module
class LongformerAttention(SelfAttention):
    """ViL's attention: to a window around the token and to all global tokens, which see everything.

    A map no larger than the window is attended to as a whole, as in ViL's last two stages at 224
    pixels. Squares of ``window // 2`` tokens share their keys, 441 for a window of 15, of which
    each query sees 225. On the meta device, where FLOPs are counted and nothing is computed, every
    query has its own keys.

    Args:
        dim, num_heads, qkv_bias, cosine: as in :class:`SelfAttention`.
        window: side of the window in tokens, odd and at least 3.
        factory: ``device`` and ``dtype``.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> attention = LongformerAttention(dim=96, num_heads=3)
        >>> attention(torch.randn(2, 1 + 56 * 56, 96), rows=56, columns=56).shape
        torch.Size([2, 3137, 96])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int = 15,
        qkv_bias: bool = True,
        cosine: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, cosine, **factory)
        check_count("window", window)
        if window % 2 == 0 or window < 3:
            raise ValueError(f"window must be an odd number of at least 3, got {window}")
        self.window = window

    def forward(self, x: Tensor, rows: int, columns: int, mask: Tensor | None = None) -> Tensor:
        """Map tokens to the same shape.

        Args:
            x: (B, T, C): global tokens, then those of a map, row by row.
            rows, columns: of the map.
            mask: bool (B, rows * columns), True where a token of the map is real, or None.
        """
        check_layer_input(x, self.dim)
        query, key, value = self.split_heads(x)
        count = x.shape[1] - rows * columns  # of global tokens
        real: Tensor | None = None
        if mask is not None:
            real = torch.cat([mask.new_ones(x.shape[0], count), mask], dim=1)
            # Without a real key in an image (nothing but padding) no softmax row may be empty.
            real = (real | ~real.any(dim=1, keepdim=True))[:, None, None]
        if rows <= self.window and columns <= self.window:
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=real, scale=self.scale
            )
            return self.merge_heads(attended, x)
        near = self.attend_near(query[:, :, count:], key, value, rows, columns, mask)
        if count == 0:
            return self.merge_heads(near, x)
        everywhere = F.scaled_dot_product_attention(
            query[:, :, :count], key, value, attn_mask=real, scale=self.scale
        )
        return self.merge_heads(torch.cat([everywhere, near], dim=2), x)

    def attend_near(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: int,
        columns: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Attend from the tokens of a map to their windows and to the global tokens.

        Args:
            query: (B, H, L, D), of the map alone, L = rows * columns.
            key, value: (B, H, T, D), of global tokens and map.
            rows, columns, mask: as in :meth:`forward`.

        Returns:
            (B, H, L, D).
        """
        batch, heads, tokens, channels = query.shape
        count = key.shape[2] - tokens
        reach = self.window // 2
        side = 1 if query.is_meta else reach
        square = Window(side, side)
        queries = cut_windows(query.reshape(-1, rows, columns, channels), square)
        seen: list[Tensor] = []
        for x in (key, value):
            around = x[:, :, count:].reshape(-1, rows, columns, channels)
            around = cut_neighborhoods(around, side, reach)
            shared = x[:, :, :count].flatten(0, 1).unsqueeze(1)
            shared = shared.expand(-1, around.shape[1], -1, -1)
            seen.append(torch.cat([shared, around], dim=2))
        sees = self.visible(mask, query, rows, columns, side)
        sees = F.pad(sees, (count, 0), value=True)
        sees = sees | ~sees.any(dim=-1, keepdim=True)  # padding may be far from all that is real
        sees = sees.unsqueeze(1).expand(batch, heads, -1, -1, -1).flatten(0, 1)
        out = F.scaled_dot_product_attention(
            queries, seen[0], seen[1], attn_mask=sees, scale=self.scale
        )
        return join_windows(out, rows, columns, square).reshape(batch, heads, tokens, channels)

    def visible(
        self, mask: Tensor | None, query: Tensor, rows: int, columns: int, side: int
    ) -> Tensor:
        """Tell what each query of a square sees of the square's neighborhood.

        Args:
            mask, rows, columns: as in :meth:`forward`.
            query: a tensor on the device of the result.
            side: of a square.

        Returns:
            Bool (1 or B, squares, queries, keys).
        """
        reach = self.window // 2
        if mask is None:
            real = torch.ones(1, rows, columns, 1, device=query.device)
        else:
            real = mask.view(-1, rows, columns, 1).to(torch.float32)
        real = cut_neighborhoods(real, side, reach).squeeze(-1).unsqueeze(2) > 0
        place = torch.arange(side, device=query.device)
        around = torch.arange(-reach, side + reach, device=query.device)
        near = (around - place.unsqueeze(1)).abs() <= reach  # for rows and columns
        within = (near[:, None, :, None] & near[None, :, None, :]).flatten(2, 3).flatten(0, 1)
        return real & within


class LongformerBlock(Block):
    """A block around :class:`LongformerAttention`, for global tokens and map tokens."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rows: int, columns: int, mask: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, C) to the same shape; as :meth:`LongformerAttention.forward`."""
        if self.post_norm:
            x = x + self.drop_path1(self.norm1(self.attn(x, rows, columns, mask)))
            return x + self.drop_path2(self.norm2(self.ffn(x)))
        x = x + self.drop_path1(self.attn(self.norm1(x), rows, columns, mask))
        return x + self.drop_path2(self.ffn(self.norm2(x)))


def stretch(table: Tensor, length: int) -> Tensor:
    """Interpolate a (1, C, side) table of positions to (1, C, length)."""
    if table.shape[2] == length:
        return table
    return F.interpolate(table, [length], mode="linear")


@register_notrace_module
class GlobalTokensAndPositions(nn.Module):
    """What a stage of ViL adds to its map: learned positions and global tokens.

    One half of the channels has a position by row, the other by column.

    Args:
        dim: channels C.
        side: of the square map that the positions are made for, in tokens; they are stretched to
            other maps.
        count: number of global tokens.
        factory: ``device`` and ``dtype``.
    """

    def __init__(self, dim: int, side: int, count: int, **factory: Any) -> None:
        super().__init__()
        half = dim // 2
        self.row_position = nn.Parameter(torch.empty(1, half, side, **factory))
        self.column_position = nn.Parameter(torch.empty(1, dim - half, side, **factory))
        self.global_tokens = nn.Parameter(torch.empty(1, count, dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw positions and tokens anew."""
        for parameter in (self.row_position, self.column_position, self.global_tokens):
            trunc_normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, count + H W, C): global tokens, then the map's, row by row."""
        rows, columns = x.shape[1], x.shape[2]
        by_row = stretch(self.row_position, rows).transpose(1, 2)
        by_column = stretch(self.column_position, columns).transpose(1, 2)
        by_row = by_row.unsqueeze(2).expand(-1, -1, columns, -1)
        by_column = by_column.unsqueeze(1).expand(-1, rows, -1, -1)
        x = x + torch.cat([by_row, by_column], dim=-1)
        shared = self.global_tokens.expand(x.shape[0], -1, -1)
        return torch.cat([shared, x.flatten(1, 2)], dim=1)
