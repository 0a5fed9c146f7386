"""Swin: shifted windows for maps of any size, and its patches (CSWin's are of the same kind).

A map that windows do not tile is padded after the projections; padding, also what a ``mask`` calls so, is in no real
token's softmax. A window larger than the map shrinks to it and is not shifted, as in the original. What counts there is
the map with its padding: an image that alone fits into a window is cut by the shift if it shares a wider map.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, trunc_normal_
from timm.models import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from dgt.layers.attention import SelfAttention
from dgt.layers.convolution import TokenLinear, mask_padding
from dgt.layers.scripting import check_layer_input
from dgt.ops.checks import check_count


@register_notrace_function
def pad_map(x: Tensor, height: int, width: int) -> Tensor:
    """Pad a (B, H, W, C) map with zeros at its lower and right edge to multiples of ``height`` and ``width``."""
    below, right = (height - x.shape[1] % height) % height, (width - x.shape[2] % width) % width
    return F.pad(x, (0, 0, 0, right, 0, below)) if below + right > 0 else x


def cut_windows(x: Tensor, height: int, width: int, down: int = 0, right: int = 0) -> Tensor:
    """Cut a (B, H, W, C) map, padded to what windows tile, to (B, windows, height * width, C), row by row.

    Windows start ``down`` and ``right`` tokens further, and wrap around the edge.
    """
    x = pad_map(x, height, width)
    x = x.roll((-down, -right), (1, 2)) if down + right > 0 else x
    x = x.unflatten(1, [x.shape[1] // height, height])
    x = x.unflatten(3, [x.shape[3] // width, width])  # (B, rows, height, columns, width, C)
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def join_windows(
    windows: Tensor, rows: int, columns: int, height: int, width: int, down: int = 0, right: int = 0
) -> Tensor:
    """Undo :func:`cut_windows`: (B, windows, height * width, C) to (B, rows, columns, C)."""
    across = (columns + width - 1) // width
    x = windows.unflatten(1, [windows.shape[1] // across, across]).unflatten(3, [height, width])
    x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return (x.roll((down, right), (1, 2)) if down + right > 0 else x)[:, :rows, :columns]


def visible(mask: Tensor | None, x: Tensor, height: int, width: int, down: int = 0, right: int = 0) -> Tensor | None:
    """Tell which tokens of a window may see each other: bool (1 or B, windows, N, N), or None where all may.

    Real tokens see real tokens that no shift brought round the edge, padding sees padding. ``mask`` is bool (B, H, W),
    True where a token is real, or None; the rest as in :func:`cut_windows`.
    """
    rows, columns = x.shape[1], x.shape[2]
    if mask is None and down + right == 0 and rows % height == 0 and columns % width == 0:
        return None
    row, column = torch.arange(rows, device=x.device), torch.arange(columns, device=x.device)
    part = (1 + 2 * (row < down).long().unsqueeze(1) + (column < right).long()).unsqueeze(0)  # 1 to 4; padding is 0
    if mask is not None:
        part = part * mask.view(-1, rows, columns)
    part = cut_windows(part.unsqueeze(-1), height, width, down, right).squeeze(-1)
    return part.unsqueeze(-1) == part.unsqueeze(-2)


def attend_in_windows(
    heads: tuple[Tensor, Tensor, Tensor],
    rows: int,
    window: tuple[int, int, int, int],
    scores: Tensor | None,
    scale: float,
) -> Tensor:
    """Attend inside the windows of a map: (B, H, L, D) query, key and value of L tokens, row by row, to (B, H, L, D).

    ``window`` is height, width, down, right, as in :func:`cut_windows`; ``scores`` (B, H, 1 or windows, N, N) are added
    to those of the tokens times ``scale``, -inf where a token is not seen.
    """
    height, width, down, right = window
    batch, num_heads, tokens, channels = heads[0].shape
    columns = tokens // rows
    cut: list[Tensor] = []
    for x in heads:
        x = x.reshape(batch * num_heads, rows, columns, channels)
        cut.append(cut_windows(x, height, width, down, right))
    bias = None if scores is None else scores.flatten(0, 1).to(cut[0].dtype)
    out = F.scaled_dot_product_attention(cut[0], cut[1], cut[2], attn_mask=bias, scale=scale)
    out = join_windows(out, rows, columns, height, width, down, right)
    return out.reshape(batch, num_heads, tokens, channels)


@register_notrace_module
class WindowAttention(SelfAttention):
    """Swin's attention: inside square windows, with a learned bias per head and offset, every other block shifted.

    Args:
        dim, num_heads, options: as in :class:`SelfAttention`.
        window: side of a window in tokens.
        shift: how far windows are shifted, less than their side: 0, or in every other block half a window.
        table: whether there is the learned bias; without it the window has no positions of its own.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    def __init__(
        self, dim: int, num_heads: int, window: int = 7, shift: int = 0, table: bool = True, **options: Any
    ) -> None:
        super().__init__(dim, num_heads, **options)
        check_count("window", window)
        if not 0 <= shift < window:
            raise ValueError(f"shift must be from 0 to window - 1, got {shift} for a window of {window}")
        self.window, self.shift = window, shift
        places = self.qkv.weight.new_zeros((2 * window - 1) ** 2, num_heads)  # of the given device and type
        if table:
            self.relative_position_bias_table = nn.Parameter(trunc_normal_(places, std=0.02))
        else:
            self.register_buffer("relative_position_bias_table", places, persistent=False)

    def position_bias(self, height: int, width: int) -> Tensor:
        """Return the learned bias between the tokens of a (height, width) window: (H, N, N)."""
        device, side = self.relative_position_bias_table.device, 2 * self.window - 1
        y, x = torch.arange(height, device=device), torch.arange(width, device=device)
        down = (y.unsqueeze(1) - y + self.window - 1)[:, None, :, None]  # from key to query
        right = (x.unsqueeze(1) - x + self.window - 1)[None, :, None, :]
        index = (down * side + right).flatten(2, 3).flatten(0, 1)  # (N, N)
        return self.relative_position_bias_table[index].permute(2, 0, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to the same shape; ``mask`` is bool (B, H, W), True where a token is real."""
        check_layer_input(x, self.qkv.in_features, mask, is_map=True)
        rows, columns = x.shape[1], x.shape[2]
        height, width = min(self.window, rows), min(self.window, columns)
        down, right = self.shift if rows > height else 0, self.shift if columns > width else 0
        scores = self.position_bias(height, width)[None, :, None]  # (1, H, 1, N, N)
        sees = visible(mask, x, height, width, down, right)
        if sees is not None:
            scores = scores.masked_fill(~sees.unsqueeze(1), float("-inf"))
        scores = scores.expand(x.shape[0], -1, -1, -1, -1)
        attended = attend_in_windows(self.split_heads(x), rows, (height, width, down, right), scores, self.scale)
        return self.merge_heads(attended, x)


class PatchStem(nn.Module):
    """One strided convolution to ``dim`` channels, then LayerNorm.

    ``stride`` is the side of a patch in pixels, even; with ``overlap`` the convolution sees 2 stride - 1 pixels
    (CSWin), else just its patch (Swin).
    """

    def __init__(self, in_chans: int, dim: int, stride: int = 4, overlap: bool = False, **factory: Any) -> None:
        super().__init__()
        self.stride = stride
        kernel, padding = (2 * stride - 1, stride // 2) if overlap else (stride, 0)
        self.conv = nn.Conv2d(in_chans, dim, kernel, stride, padding, **factory)
        self.norm = LayerNorm(dim, **factory)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, in_chans, H, W) images to (B, ceil(H / stride), ceil(W / stride), dim); ``mask`` is of that size."""
        x = self.conv(pad_map(image.permute(0, 2, 3, 1), self.stride, self.stride).permute(0, 3, 1, 2))
        return mask_padding(self.norm(x.permute(0, 2, 3, 1)), mask)


class PatchConcatenation(nn.Module):
    """Swin's patch merging: the channels of 2 x 2 tokens side by side, LayerNorm, and a linear without bias."""

    def __init__(self, in_dim: int, dim: int, **factory: Any) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * in_dim, **factory)
        self.reduction = TokenLinear(4 * in_dim, dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim)."""
        x = pad_map(x, 2, 2)
        top, bottom = x[:, ::2], x[:, 1::2]
        x = torch.cat([top[:, :, ::2], bottom[:, :, ::2], top[:, :, 1::2], bottom[:, :, 1::2]], dim=-1)
        return self.reduction(self.norm(x))
