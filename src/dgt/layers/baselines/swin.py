"""Swin: shifted windows for maps of any size, and its patches (CSWin's are of the same kind).

A map that windows do not tile is padded after the projections. Padding, including what a ``mask``
marks as such, is never in a real token's softmax. A window larger than the map shrinks to it and is
not shifted, as in the original. What counts there is the map with its padding: an image that alone
fits into a window is cut by the shift if it shares a wider map.

Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", ICCV 2021.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, trunc_normal_
from timm.models import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from dgt.layers.attention import SelfAttention
from dgt.layers.checks import check_layer_input
from dgt.layers.convolution import mask_padding
from dgt.ops.checks import check_count


class Window(NamedTuple):
    """The windows that a map is cut into: their size in tokens, and how far they are shifted."""

    height: int
    width: int
    down: int = 0
    right: int = 0


@register_notrace_function
def pad_map(x: Tensor, height: int, width: int) -> Tensor:
    """Pad a (B, H, W, C) map with zeros, below and on the right, to multiples of a size."""
    below = (height - x.shape[1] % height) % height
    right = (width - x.shape[2] % width) % width
    if below + right == 0:
        return x
    return F.pad(x, (0, 0, 0, right, 0, below))


def cut_windows(x: Tensor, window: Window) -> Tensor:
    """Cut a map into windows.

    Args:
        x: (B, H, W, C); padded with zeros to what windows tile.
        window: their size; shifted windows wrap around the edge.

    Returns:
        (B, windows, height * width, C), row by row.
    """
    x = pad_map(x, window.height, window.width)
    if window.down + window.right > 0:
        x = x.roll((-window.down, -window.right), (1, 2))
    x = x.unflatten(1, [x.shape[1] // window.height, window.height])
    x = x.unflatten(3, [x.shape[3] // window.width, window.width])  # six axes, C the last
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def join_windows(windows: Tensor, rows: int, columns: int, window: Window) -> Tensor:
    """Undo :func:`cut_windows`: (B, windows, height * width, C) to (B, rows, columns, C)."""
    across = (columns + window.width - 1) // window.width
    x = windows.unflatten(1, [windows.shape[1] // across, across])
    x = x.unflatten(3, [window.height, window.width])
    x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    if window.down + window.right > 0:
        x = x.roll((window.down, window.right), (1, 2))
    return x[:, :rows, :columns]


def visible(mask: Tensor | None, x: Tensor, window: Window) -> Tensor | None:
    """Tell which tokens of a window may see each other.

    Real tokens see real tokens that no shift brought around the edge; padding sees padding.

    Args:
        mask: bool (B, H, W), True where a token is real, or None.
        x: the map, (B, H, W, C).
        window: as in :func:`cut_windows`.

    Returns:
        Bool (1 or B, windows, N, N), or None where all may see each other.
    """
    rows, columns = x.shape[1], x.shape[2]
    tiled = rows % window.height == 0 and columns % window.width == 0
    if mask is None and window.down + window.right == 0 and tiled:
        return None
    row = torch.arange(rows, device=x.device)
    column = torch.arange(columns, device=x.device)
    wrapped_down = (row < window.down).long().unsqueeze(1)
    wrapped_right = (column < window.right).long()
    part = (1 + 2 * wrapped_down + wrapped_right).unsqueeze(0)  # 1 to 4; padding is 0
    if mask is not None:
        part = part * mask.view(-1, rows, columns)
    part = cut_windows(part.unsqueeze(-1), window).squeeze(-1)
    return part.unsqueeze(-1) == part.unsqueeze(-2)


def attend_in_windows(
    heads: tuple[Tensor, Tensor, Tensor],
    rows: int,
    window: Window,
    scores: Tensor | None,
    scale: float,
) -> Tensor:
    """Attend inside the windows of a map.

    Args:
        heads: query, key and value, each (B, H, L, D), L tokens row by row.
        rows: of the map.
        window: as in :func:`cut_windows`.
        scores: (B, H, 1 or windows, N, N), added to the scaled products; -inf hides a token.
        scale: factor of the products.

    Returns:
        (B, H, L, D).
    """
    batch, num_heads, tokens, channels = heads[0].shape
    columns = tokens // rows
    cut: list[Tensor] = []
    for x in heads:
        x = x.reshape(batch * num_heads, rows, columns, channels)
        cut.append(cut_windows(x, window))
    query, key, value = cut
    bias = None if scores is None else scores.flatten(0, 1).to(query.dtype)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    out = join_windows(out, rows, columns, window)
    return out.reshape(batch, num_heads, tokens, channels)


def index_offsets(height: int, width: int, reach: tuple[int, int], like: Tensor) -> Tensor:
    """Number the offsets between the tokens of a window, from key to query.

    Args:
        height, width: of the window, in tokens.
        reach: the largest offset down and right that the numbering has room for.
        like: a tensor on the device of the result.

    Returns:
        (N, N) indices into a table of (2 reach[0] + 1) * (2 reach[1] + 1) offsets, row by row.
    """
    row = torch.arange(height, device=like.device)
    column = torch.arange(width, device=like.device)
    down = (row.unsqueeze(1) - row + reach[0])[:, None, :, None]
    right = (column.unsqueeze(1) - column + reach[1])[None, :, None, :]
    return (down * (2 * reach[1] + 1) + right).flatten(2, 3).flatten(0, 1)


@register_notrace_module
class WindowAttention(SelfAttention):
    """Swin's attention: inside square windows, with a learned bias per head and offset.

    Args:
        dim, num_heads, options: as in :class:`SelfAttention`.
        window: side of a window in tokens.
        shift: how far windows are shifted, less than their side: 0, or in every other block half a
            window.
        table: whether to learn a position bias; without it a window has no position information.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> WindowAttention(dim=96, num_heads=3, shift=3)(torch.randn(2, 56, 56, 96)).shape
        torch.Size([2, 56, 56, 96])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int = 7,
        shift: int = 0,
        table: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads, **options)
        check_count("window", window)
        if not 0 <= shift < window:
            raise ValueError(
                f"shift must be from 0 to window - 1, got {shift} for a window of {window}"
            )
        self.window = window
        self.shift = shift
        offsets = (2 * window - 1) ** 2
        places = self.qkv.weight.new_zeros(offsets, num_heads)  # of the given device and type
        self.relative_position_bias_table = nn.Parameter(places) if table else None
        self.reset_table()

    def reset_parameters(self) -> None:
        """Set all parameters and buffers anew, whatever they hold."""
        super().reset_parameters()
        self.reset_table()

    def reset_table(self) -> None:
        """Draw the position bias anew."""
        if self.relative_position_bias_table is not None:
            trunc_normal_(self.relative_position_bias_table, std=0.02)

    def position_bias(self, height: int, width: int, like: Tensor) -> Tensor:
        """Return the learned bias between the tokens of a (height, width) window: (H, N, N).

        Without a table it is zero, of the type and on the device of ``like``.
        """
        table = self.relative_position_bias_table
        if table is None:
            tokens = height * width
            return like.new_zeros(self.num_heads, tokens, tokens)
        reach = (self.window - 1, self.window - 1)
        return table[index_offsets(height, width, reach, table)].permute(2, 0, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to the same shape.

        ``mask`` is bool (B, H, W), True where a token is real.
        """
        check_layer_input(x, self.dim, mask, is_map=True)
        rows, columns = x.shape[1], x.shape[2]
        height = min(self.window, rows)
        width = min(self.window, columns)
        down = self.shift if rows > height else 0
        right = self.shift if columns > width else 0
        window = Window(height, width, down, right)
        scores = self.position_bias(height, width, x)[None, :, None]  # (1, H, 1, N, N)
        sees = visible(mask, x, window)
        if sees is not None:
            scores = scores.masked_fill(~sees.unsqueeze(1), float("-inf"))
        scores = scores.expand(x.shape[0], -1, -1, -1, -1)
        attended = attend_in_windows(self.split_heads(x), rows, window, scores, self.scale)
        return self.merge_heads(attended, x)


class PatchStem(nn.Module):
    """One strided convolution of pixels to ``dim`` channels, then LayerNorm.

    Args:
        in_chans: channels of the image.
        dim: channels of the tokens.
        stride: side of a patch in pixels, even.
        overlap: whether the convolution sees 2 stride - 1 pixels (CSWin), or just its patch (Swin).
        factory: ``device`` and ``dtype``.
    """

    def __init__(
        self, in_chans: int, dim: int, stride: int = 4, overlap: bool = False, **factory: Any
    ) -> None:
        super().__init__()
        self.stride = stride
        kernel = 2 * stride - 1 if overlap else stride
        padding = stride // 2 if overlap else 0
        self.conv = nn.Conv2d(in_chans, dim, kernel, stride, padding, **factory)
        self.norm = LayerNorm(dim, **factory)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map images to tokens.

        Args:
            image: (B, in_chans, H, W).
            mask: bool (B, ceil(H / stride), ceil(W / stride)), True where a token is real.

        Returns:
            (B, ceil(H / stride), ceil(W / stride), dim).
        """
        padded = pad_map(image.permute(0, 2, 3, 1), self.stride, self.stride)
        x = self.conv(padded.permute(0, 3, 1, 2))
        return mask_padding(self.norm(x.permute(0, 2, 3, 1)), mask)


class PatchConcatenation(nn.Module):
    """Swin's patch merging: the channels of 2 x 2 tokens side by side, LayerNorm, a linear."""

    def __init__(self, in_dim: int, dim: int, **factory: Any) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * in_dim, **factory)
        self.reduction = nn.Linear(4 * in_dim, dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim)."""
        x = pad_map(x, 2, 2)
        top = x[:, ::2]
        bottom = x[:, 1::2]
        corners = [top[:, :, ::2], bottom[:, :, ::2], top[:, :, 1::2], bottom[:, :, 1::2]]
        return self.reduction(self.norm(torch.cat(corners, dim=-1)))
