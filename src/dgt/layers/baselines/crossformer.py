"""CrossFormer: cross-scale patches, and attention among near or among distant tokens.

For maps of any size; what :mod:`dgt.layers.baselines.swin` says of padding holds here. Written from
Wang et al., "CrossFormer: A Versatile Vision Transformer Hinging on Cross-scale Attention",
ICLR 2022.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from dgt.layers.attention import SelfAttention
from dgt.layers.baselines.swin import Window, cut_windows, index_offsets, join_windows, pad_map
from dgt.layers.checks import check_layer_input
from dgt.layers.convolution import mask_padding
from dgt.ops.checks import check_count


def cut_distant_groups(x: Tensor, down: int, right: int) -> Tensor:
    """Gather every ``down``-th row and every ``right``-th column of a map into a group.

    Args:
        x: (B, H, W, C); padded with zeros, below and on the right, to multiples of the intervals.
        down: interval between the rows of a group.
        right: interval between its columns.

    Returns:
        (B, down * right, N, C), N tokens a group, row by row.
    """
    x = pad_map(x, down, right)
    x = x.unflatten(1, [x.shape[1] // down, down])
    x = x.unflatten(3, [x.shape[3] // right, right])  # (B, rows, down, columns, right, C)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)


def join_distant_groups(groups: Tensor, columns: int, down: int, right: int) -> Tensor:
    """Undo :func:`cut_distant_groups`: (B, down * right, N, C) to a map (B, H, W = columns, C)."""
    width = columns // right
    x = groups.unflatten(1, [down, right]).unflatten(3, [groups.shape[2] // width, width])
    return x.permute(0, 3, 1, 4, 2, 5).flatten(3, 4).flatten(1, 2)


@register_notrace_module
class DynamicPositionBias(nn.Module):
    """A bias per head for every offset between two tokens, computed by a small network.

    Args:
        dim: channels of the layer that the bias is for; the network is a sixteenth as wide.
        num_heads: H.
        factory: ``device`` and ``dtype``.
    """

    def __init__(self, dim: int, num_heads: int, **factory: Any) -> None:
        super().__init__()
        width = dim // 16
        self.layers = nn.Sequential(nn.Linear(2, width, **factory))
        for out in (width, width, num_heads):
            self.layers.append(LayerNorm(width, **factory))
            self.layers.append(nn.ReLU())
            self.layers.append(nn.Linear(width, out, **factory))

    def forward(self, like: Tensor, height: int, width: int) -> Tensor:
        """Return the bias between the N tokens of a group.

        Args:
            like: a tensor on the device and of the type of the layer's input.
            height, width: rows and columns of the group.

        Returns:
            (H, N, N).
        """
        down = torch.arange(1 - height, height, device=like.device)
        right = torch.arange(1 - width, width, device=like.device)
        down = down.unsqueeze(1).expand(-1, 2 * width - 1)
        right = right.unsqueeze(0).expand(2 * height - 1, -1)
        offsets = torch.stack([down, right], dim=-1).flatten(0, 1)
        biases = self.layers(offsets.to(like.dtype))  # (offsets, H)
        index = index_offsets(height, width, (height - 1, width - 1), like)
        return biases[index].permute(2, 0, 1)


@register_notrace_module
class LongShortDistanceAttention(SelfAttention):
    """CrossFormer's attention: among G x G neighbors, or among every I-th token of every I-th row.

    Args:
        dim, num_heads, qkv_bias, cosine: as in :class:`SelfAttention`.
        group: side G of a group of neighbors, in tokens (short distance attention).
        interval: I of long distance attention, in tokens; 0 for short distance attention.
        factory: ``device`` and ``dtype``.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> attention = LongShortDistanceAttention(dim=96, num_heads=3, interval=8)
        >>> attention(torch.randn(2, 56, 56, 96)).shape
        torch.Size([2, 56, 56, 96])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        group: int = 7,
        interval: int = 0,
        qkv_bias: bool = True,
        cosine: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, cosine, **factory)
        check_count("group", group)
        check_count("interval", interval or 1)
        self.group = group
        self.interval = interval
        self.position_bias = DynamicPositionBias(dim, num_heads, **factory)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to the same shape.

        ``mask`` is bool (B, H, W), True where a token is real.
        """
        check_layer_input(x, self.dim, mask, is_map=True)
        rows, columns = x.shape[1], x.shape[2]
        largest = self.interval if self.interval > 0 else self.group
        step = (min(largest, rows), min(largest, columns))
        sees = self.visible(mask, x, step)
        # Padded before the projections, as CrossFormer's FLOPs have it.
        padded = pad_map(x, step[0], step[1])
        height, width = step
        if self.interval > 0:
            height = padded.shape[1] // step[0]
            width = padded.shape[2] // step[1]
        scores = self.position_bias(x, height, width)[None, :, None]  # (1, H, 1, N, N)
        if sees is not None:
            scores = scores.masked_fill(~sees.unsqueeze(1), float("-inf"))
        scores = scores.expand(x.shape[0], -1, -1, -1, -1).flatten(0, 1)
        groups: list[Tensor] = []
        for heads in self.split_heads(padded):
            maps = heads.reshape(-1, padded.shape[1], padded.shape[2], heads.shape[3])
            groups.append(self.cut(maps, step))
        query, key, value = groups
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=scores.to(query.dtype), scale=self.scale
        )
        if self.interval > 0:
            out = join_distant_groups(out, padded.shape[2], step[0], step[1])
        else:
            out = join_windows(out, padded.shape[1], padded.shape[2], Window(step[0], step[1]))
        out = out.reshape(x.shape[0], self.num_heads, -1, out.shape[-1])
        return self.merge_heads(out, padded)[:, :rows, :columns]

    def cut(self, x: Tensor, step: tuple[int, int]) -> Tensor:
        """Cut (B, H, W, C) into (B, groups, N, C): of neighbors with sides ``step``, or of tokens ``step`` apart."""
        if self.interval > 0:
            return cut_distant_groups(x, step[0], step[1])
        return cut_windows(x, Window(step[0], step[1]))

    def visible(self, mask: Tensor | None, x: Tensor, step: tuple[int, int]) -> Tensor | None:
        """Return which tokens of a group may see each other.

        Real tokens see real tokens; padding sees padding.

        Args:
            mask: bool (B, H, W), True where a token is real, or None.
            x: the map, (B, H, W, C).
            step: as in :meth:`cut`.

        Returns:
            Bool (1 or B, groups, N, N), or None where all may see each other.
        """
        rows, columns = x.shape[1], x.shape[2]
        if mask is None and rows % step[0] == 0 and columns % step[1] == 0:
            return None
        if mask is None:
            real = torch.ones(1, rows, columns, 1, dtype=torch.long, device=x.device)
        else:
            real = mask.view(-1, rows, columns, 1).long()
        real = self.cut(real, step).squeeze(-1)
        return real.unsqueeze(-1) == real.unsqueeze(-2)


class CrossScalePatches(nn.Module):
    """CrossFormer's cross-scale embedding: convolutions of several kernels and one stride.

    The smaller a kernel, the more channels it gives: half of them, a quarter, and so on; the last
    two give the same number.

    Args:
        in_dim: channels of the input.
        dim: channels of the result.
        kernels: sides of the kernels in pixels or tokens, from small to large.
        stride: of all convolutions.
        factory: ``device`` and ``dtype``.
    """

    def __init__(
        self, in_dim: int, dim: int, kernels: tuple[int, ...], stride: int, **factory: Any
    ) -> None:
        super().__init__()
        self.stride = stride
        self.convs = nn.ModuleList()
        for i, kernel in enumerate(kernels):
            width = dim // 2 ** min(i + 1, len(kernels) - 1)
            padding = (kernel - stride) // 2
            self.convs.append(nn.Conv2d(in_dim, width, kernel, stride, padding, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / stride), ceil(W / stride), dim)."""
        x = pad_map(x, self.stride, self.stride).permute(0, 3, 1, 2)
        parts = [conv(x) for conv in self.convs]
        return torch.cat(parts, dim=1).permute(0, 2, 3, 1)


class CrossScaleStem(nn.Module):
    """Cross-scale embedding of pixels, kernels of 1, 2, 4 and 8 strides, then LayerNorm."""

    def __init__(self, in_chans: int, dim: int, stride: int = 4, **factory: Any) -> None:
        super().__init__()
        kernels = (stride, 2 * stride, 4 * stride, 8 * stride)
        self.patches = CrossScalePatches(in_chans, dim, kernels, stride, **factory)
        self.norm = LayerNorm(dim, **factory)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map images to tokens; as :meth:`dgt.layers.baselines.swin.PatchStem.forward`."""
        x = self.norm(self.patches(image.permute(0, 2, 3, 1)))
        return mask_padding(x, mask)


@register_notrace_function
def keep_zero_tokens(before: Tensor, after: Tensor) -> Tensor:
    """Zero the tokens of ``after`` that are zero in ``before``: padding, which a stage zeroes."""
    return after * before.any(dim=-1, keepdim=True)


class CrossScaleMerging(nn.Module):
    """LayerNorm, then cross-scale embedding of tokens with kernels of 2 and 4 and a stride of 2."""

    def __init__(self, in_dim: int, dim: int, **factory: Any) -> None:
        super().__init__()
        self.norm = LayerNorm(in_dim, **factory)
        self.patches = CrossScalePatches(in_dim, dim, (2, 4), 2, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim)."""
        return self.patches(keep_zero_tokens(x, self.norm(x)))
