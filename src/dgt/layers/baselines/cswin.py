"""CSWin: crossed stripes for maps of any size.

What :mod:`dgt.layers.baselines.swin` says of padding holds here.

Dong et al., "CSWin Transformer: A General Vision Transformer Backbone with Cross-Shaped Windows",
CVPR 2022.
"""

from typing import Any

import torch
from timm.models import register_notrace_module
from torch import Tensor, nn

from dgt.layers.attention import SelfAttention
from dgt.layers.baselines.swin import Window, attend_in_windows, cut_windows, join_windows, visible
from dgt.layers.checks import check_layer_input
from dgt.ops.checks import check_count


@register_notrace_module
class StripeAttention(SelfAttention):
    """CSWin's attention: half of the heads in vertical stripes, half in horizontal ones.

    The locally enhanced position encoding (LePE) adds a depthwise 3x3 convolution of the values,
    stripe by stripe.

    Args:
        dim, num_heads, qkv_bias, cosine: as in :class:`SelfAttention`; ``num_heads`` is even.
        width: of a stripe in tokens; 0 for the whole map (CSWin's last stage).
        factory: ``device`` and ``dtype``.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> StripeAttention(dim=64, num_heads=2, width=1)(torch.randn(2, 56, 56, 64)).shape
        torch.Size([2, 56, 56, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        width: int = 7,
        qkv_bias: bool = True,
        cosine: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, cosine, **factory)
        if num_heads % 2:
            raise ValueError(
                f"num_heads must be even for vertical and horizontal stripes, got {num_heads}"
            )
        check_count("width", width or 1)
        self.width = width
        half = dim // 2
        self.lepe = nn.ModuleList()
        for _ in range(2):
            self.lepe.append(nn.Conv2d(half, half, 3, padding=1, groups=half, **factory))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to the same shape.

        ``mask`` is bool (B, H, W), True where a token is real.
        """
        check_layer_input(x, self.dim, mask, is_map=True)
        query, key, value = self.split_heads(x)
        if mask is not None:
            value = value * mask.flatten(1)[:, None, :, None]  # LePE sees padding as its own
        rows, columns = x.shape[1], x.shape[2]
        half = self.num_heads // 2
        width = self.width if self.width > 0 else max(rows, columns)
        vertical = Window(rows, min(width, columns))
        horizontal = Window(min(width, rows), columns)
        halves: list[Tensor] = []
        for i, lepe in enumerate(self.lepe):
            stripe = vertical if i == 0 else horizontal
            first = i * half
            end = first + half
            heads = (query[:, first:end], key[:, first:end], value[:, first:end])
            scores = self.hide(visible(mask, x, stripe), x)
            attended = attend_in_windows(heads, rows, stripe, scores, self.scale)
            stripes = heads[2].transpose(1, 2).flatten(2).unflatten(1, [rows, columns])
            stripes = cut_windows(stripes, stripe)
            maps = stripes.flatten(0, 1).unflatten(1, [stripe.height, stripe.width])
            local = lepe(maps.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
            local = local.unflatten(0, [x.shape[0], stripes.shape[1]])
            local = join_windows(local, rows, columns, stripe)
            halves.append(attended.transpose(1, 2).flatten(2) + local.flatten(1, 2))
        return self.proj(torch.cat(halves, dim=-1).view(x.shape))

    def hide(self, sees: Tensor | None, x: Tensor) -> Tensor | None:
        """Turn what :func:`visible` tells into scores (B, H / 2, stripes, N, N), -inf if hidden."""
        if sees is None:
            return None
        scores = torch.zeros_like(sees, dtype=x.dtype).masked_fill(~sees, float("-inf"))
        return scores.unsqueeze(1).expand(x.shape[0], self.num_heads // 2, -1, -1, -1)
