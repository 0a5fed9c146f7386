"""Hand-made windows, the attention the paper compares itself with: Swin's shifted squares and CSWin's crossed stripes.

Both work on maps of any size. A map that windows do not tile is padded after the projections; padding, and whatever a
``mask`` calls padding, is in no real token's softmax. A window larger than the map shrinks to it and is not shifted, as
in the originals, so a map that fits into one window attends globally. What counts there is the map with its padding: an
image that alone fits into a window is cut by the shift if it shares a wider map with padding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.models import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from dgt.layers.attention import SelfAttention, check_map_in, check_mask
from dgt.ops.checks import check_count


@register_notrace_function
def pad_map(x: Tensor, height: int, width: int) -> Tensor:
    """Pad a (B, H, W, C) map with zeros at its lower and right edge to multiples of ``height`` and ``width``."""
    below, right = (height - x.shape[1] % height) % height, (width - x.shape[2] % width) % width
    return F.pad(x, (0, 0, 0, right, 0, below)) if below + right > 0 else x


def cut_windows(x: Tensor, height: int, width: int) -> Tensor:
    """Cut a (B, H, W, C) map, which the windows tile, to (B, windows, height * width, C), row by row."""
    x = x.unflatten(1, [x.shape[1] // height, height])
    x = x.unflatten(3, [x.shape[3] // width, width])  # (B, rows, height, columns, width, C)
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def join_windows(windows: Tensor, height: int, width: int, rows: int, columns: int) -> Tensor:
    """Undo :func:`cut_windows` and the padding: (B, windows, height * width, C) to (B, rows, columns, C)."""
    across = (columns + width - 1) // width
    x = windows.unflatten(1, [windows.shape[1] // across, across]).unflatten(3, [height, width])
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :rows, :columns]


def visible(mask: Tensor | None, x: Tensor, height: int, width: int, down: int = 0, right: int = 0) -> Tensor | None:
    """Tell which tokens of a window may see each other: bool (1 or B, windows, N, N), or None where all may.

    Real tokens see real tokens that no shift brought round the edge, padding sees padding.

    Args:
        mask: bool (B, H, W), True where a token is real, or None.
        x: the (B, H, W, C) map.
        height, width: of a window.
        down, right: the shift.
    """
    rows, columns = x.shape[1], x.shape[2]
    if mask is None and down + right == 0 and rows % height == 0 and columns % width == 0:
        return None
    row, column = torch.arange(rows, device=x.device), torch.arange(columns, device=x.device)
    part = (1 + 2 * (row < down).long().unsqueeze(1) + (column < right).long()).unsqueeze(0)  # 1 to 4; padding is 0
    if mask is not None:
        part = part * mask.view(-1, rows, columns)
    part = pad_map(part.unsqueeze(-1), height, width)
    part = cut_windows(part.roll((-down, -right), (1, 2)), height, width).squeeze(-1)
    return part.unsqueeze(-1) == part.unsqueeze(-2)


def attend_in_windows(
    heads: tuple[Tensor, Tensor, Tensor],
    rows: int,
    window: tuple[int, int],
    shift: tuple[int, int],
    scores: Tensor | None,
    scale: float,
) -> Tensor:
    """Attend inside the windows of a map.

    Args:
        heads: query, key and value, each (B, H, L, D), L tokens row by row.
        rows: height of the map in tokens.
        window: height and width of a window.
        shift: down and right: windows start that much further, and wrap around the edge.
        scores: what is added to the scores, -inf where a token is not seen: (B, H, 1 or windows, N, N), or None.
        scale: what scores are multiplied with.

    Returns:
        (B, H, L, D).
    """
    (height, width), (down, right) = window, shift
    batch, num_heads, tokens, channels = heads[0].shape
    columns = tokens // rows
    cut: list[Tensor] = []
    for x in heads:
        x = pad_map(x.reshape(batch * num_heads, rows, columns, channels), height, width)
        cut.append(cut_windows(x.roll((-down, -right), (1, 2)) if down + right > 0 else x, height, width))
    bias = None if scores is None else scores.flatten(0, 1).to(cut[0].dtype)
    out = F.scaled_dot_product_attention(cut[0], cut[1], cut[2], attn_mask=bias, scale=scale)
    padded_rows, padded_columns = -(-rows // height) * height, -(-columns // width) * width
    out = join_windows(out, height, width, padded_rows, padded_columns)
    out = out.roll((down, right), (1, 2)) if down + right > 0 else out
    return out[:, :rows, :columns].reshape(batch, num_heads, tokens, channels)


@register_notrace_module
class WindowAttention(SelfAttention):
    """Swin's attention: inside square windows, with a learned bias per head and offset, every other block shifted.

    Args:
        dim: channels C.
        num_heads: H; divides ``dim``.
        window: side of a window in tokens.
        shift: how far windows are shifted; 0 for every other block, half a window for the rest.
        qkv_bias, cosine: as in :class:`SelfAttention`.

    Raises:
        TypeError, ValueError: for a count below 1, a shift not within the window, or as in :class:`SelfAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int = 7,
        shift: int = 0,
        qkv_bias: bool = True,
        cosine: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, cosine, **factory)
        check_count("window", window)
        if not 0 <= shift < window:
            raise ValueError(f"shift must be from 0 to window - 1, got {shift} for a window of {window}")
        self.window, self.shift = window, shift
        self.relative_position_bias_table = nn.Parameter(torch.empty((2 * window - 1) ** 2, num_heads, **factory))
        trunc_normal_(self.relative_position_bias_table, std=0.02)

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
        if not torch.jit.is_scripting():
            check_map_in(x, self.qkv.in_features)
            check_mask(mask, x)
        rows, columns = x.shape[1], x.shape[2]
        height, width = min(self.window, rows), min(self.window, columns)
        down, right = self.shift if rows > height else 0, self.shift if columns > width else 0
        scores = self.position_bias(height, width)[None, :, None]  # (1, H, 1, N, N)
        sees = visible(mask, x, height, width, down, right)
        if sees is not None:
            scores = scores.masked_fill(~sees.unsqueeze(1), float("-inf"))
        scores = scores.expand(x.shape[0], -1, -1, -1, -1)
        attended = attend_in_windows(self.split_heads(x), rows, (height, width), (down, right), scores, self.scale)
        return self.merge_heads(attended, x)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, window={self.window}, shift={self.shift}"


@register_notrace_module
class StripeAttention(SelfAttention):
    """CSWin's attention: half of the heads in vertical stripes, half in horizontal ones, with LePE.

    LePE, locally enhanced position encoding, adds a depthwise 3x3 convolution of the values, stripe by stripe.

    Args:
        dim: channels C.
        num_heads: H, even; divides ``dim``.
        width: of a stripe in tokens; 0 for the whole map (CSWin's last stage).
        qkv_bias, cosine: as in :class:`SelfAttention`.

    Raises:
        TypeError, ValueError: for an odd number of heads, a negative width, or as in :class:`SelfAttention`.
    """

    def __init__(
        self, dim: int, num_heads: int, width: int = 7, qkv_bias: bool = True, cosine: bool = False, **factory: Any
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, cosine, **factory)
        if num_heads % 2:
            raise ValueError(f"num_heads must be even for vertical and horizontal stripes, got {num_heads}")
        if width:
            check_count("width", width)
        self.width = width
        half = dim // 2
        self.lepe = nn.ModuleList(nn.Conv2d(half, half, 3, padding=1, groups=half, **factory) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to the same shape; ``mask`` is bool (B, H, W), True where a token is real."""
        if not torch.jit.is_scripting():
            check_map_in(x, self.qkv.in_features)
            check_mask(mask, x)
        query, key, value = self.split_heads(x)
        if mask is not None:
            value = value * mask.flatten(1)[:, None, :, None]  # LePE sees padding as its own
        rows, columns, half = x.shape[1], x.shape[2], self.num_heads // 2
        width = self.width if self.width > 0 else max(rows, columns)
        halves: list[Tensor] = []
        for i, lepe in enumerate(self.lepe):
            height, across = (rows, min(width, columns)) if i == 0 else (min(width, rows), columns)
            own = (i * half, (i + 1) * half)
            q, k, v = query[:, own[0] : own[1]], key[:, own[0] : own[1]], value[:, own[0] : own[1]]
            scores: Tensor | None = None
            sees = visible(mask, x, height, across)
            if sees is not None:
                scores = torch.zeros_like(sees, dtype=x.dtype).masked_fill(~sees, float("-inf")).unsqueeze(1)
                scores = scores.expand(x.shape[0], half, -1, -1, -1)
            attended = attend_in_windows((q, k, v), rows, (height, across), (0, 0), scores, self.scale)
            values = pad_map(v.transpose(1, 2).flatten(2).unflatten(1, [rows, columns]), height, across)
            stripes = cut_windows(values, height, across)
            local = lepe(stripes.flatten(0, 1).unflatten(1, [height, across]).permute(0, 3, 1, 2))
            local = local.flatten(2).transpose(1, 2).unflatten(0, [x.shape[0], stripes.shape[1]])
            local = join_windows(local, height, across, rows, columns)
            halves.append(attended.transpose(1, 2).flatten(2) + local.flatten(1, 2))
        return self.proj(torch.cat(halves, dim=-1).view(x.shape))

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, width={self.width}"
