"""CSWin: crossed stripes for maps of any size; what :mod:`dgt.layers.baselines.swin` says of padding holds here."""

from typing import Any

import torch
from timm.models import register_notrace_module
from torch import Tensor, nn

from dgt.layers.attention import SelfAttention
from dgt.layers.baselines.swin import attend_in_windows, cut_windows, join_windows, visible
from dgt.layers.scripting import check_layer_input
from dgt.ops.checks import check_count


@register_notrace_module
class StripeAttention(SelfAttention):
    """CSWin's attention: half of the heads in vertical stripes, half in horizontal ones, with LePE.

    LePE, locally enhanced position encoding, adds a depthwise 3x3 convolution of the values, stripe by stripe.

    Args:
        dim, num_heads, qkv_bias, cosine: as in :class:`SelfAttention`; ``num_heads`` is even.
        width: of a stripe in tokens; 0 for the whole map (CSWin's last stage).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    def __init__(
        self, dim: int, num_heads: int, width: int = 7, qkv_bias: bool = True, cosine: bool = False, **factory: Any
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, cosine, **factory)
        if num_heads % 2:
            raise ValueError(f"num_heads must be even for vertical and horizontal stripes, got {num_heads}")
        check_count("width", width or 1)
        self.width = width
        half = dim // 2
        self.lepe = nn.ModuleList(nn.Conv2d(half, half, 3, padding=1, groups=half, **factory) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to the same shape; ``mask`` is bool (B, H, W), True where a token is real."""
        check_layer_input(x, self.qkv.in_features, mask, is_map=True)
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
            attended = attend_in_windows((q, k, v), rows, (height, across, 0, 0), scores, self.scale)
            stripes = cut_windows(v.transpose(1, 2).flatten(2).unflatten(1, [rows, columns]), height, across)
            local = lepe(stripes.flatten(0, 1).unflatten(1, [height, across]).permute(0, 3, 1, 2))
            local = local.flatten(2).transpose(1, 2).unflatten(0, [x.shape[0], stripes.shape[1]])
            local = join_windows(local, rows, columns, height, across)
            halves.append(attended.transpose(1, 2).flatten(2) + local.flatten(1, 2))
        return self.proj(torch.cat(halves, dim=-1).view(x.shape))
