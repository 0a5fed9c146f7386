"""CMT: attention to a map reduced by a strided convolution.

The position table has a score for every pair of query and key place, shared by the blocks of a
stage. It is made for one size of the map and stretched (bilinear in both places) to any other.

Guo et al., "CMT: Convolutional Neural Networks Meet Vision Transformers", CVPR 2022.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from dgt.layers.attention import SelfAttention
from dgt.layers.baselines.swin import pad_map
from dgt.layers.checks import check_layer_input
from dgt.layers.convolution import mask_padding
from dgt.ops.checks import check_count


@register_notrace_module
class ReducedAttention(SelfAttention):
    """CMT's attention: queries from all tokens, keys and values from a smaller map.

    Args:
        dim, num_heads, qkv_bias, cosine: as in :class:`SelfAttention`.
        ratio: side of the square of tokens that one key stands for; 1 is global attention.
        factory: ``device`` and ``dtype``.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> ReducedAttention(dim=64, num_heads=2, ratio=8)(torch.randn(2, 56, 56, 64)).shape
        torch.Size([2, 56, 56, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        ratio: int = 1,
        qkv_bias: bool = True,
        cosine: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, cosine, **factory)
        check_count("ratio", ratio)
        del self.qkv  # queries and keys are projected from different maps
        self.query = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        self.key_value = nn.Linear(dim, 2 * dim, bias=qkv_bias, **factory)
        self.ratio = ratio
        self.reduce: nn.Module = nn.Identity()
        if ratio > 1:
            conv = nn.Conv2d(dim, dim, ratio, ratio, groups=dim, **factory)
            self.reduce = nn.Sequential(conv, nn.BatchNorm2d(dim, **factory))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, position: Tensor | None = None
    ) -> Tensor:
        """Map (B, H, W, C) to the same shape.

        Args:
            x: the map.
            mask: bool (B, H, W), True where a token is real; a key is real where its first token
                is.
            position: (H, L, K) scores to add, from :class:`PositionTable`.
        """
        check_layer_input(x, self.dim, mask, is_map=True)
        dim = x.shape[-1]
        mask = None if mask is None else mask.view(x.shape[:-1])
        reduced = pad_map(mask_padding(x, mask), self.ratio, self.ratio).permute(0, 3, 1, 2)
        reduced = self.reduce(reduced).flatten(2).transpose(1, 2)
        shape = [self.num_heads, dim // self.num_heads]
        query = self.query(x).flatten(1, 2).unflatten(-1, shape).transpose(1, 2)
        key_value = self.key_value(reduced).unflatten(-1, [2, *shape])
        key, value = key_value.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = self.comparable(query, key)
        scores = None if position is None else position.unsqueeze(0).to(query.dtype)
        if mask is not None:
            real = mask[:, :: self.ratio, :: self.ratio].flatten(1)[:, None, None, :]
            if scores is None:
                scores = torch.zeros_like(real, dtype=query.dtype)
            # Without a real key in an image (nothing but padding) no softmax row may be empty.
            real = real | ~real.any(-1, keepdim=True)
            scores = scores.masked_fill(~real, float("-inf"))
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=scores, scale=self.scale
        )
        return self.merge_heads(attended, x)


@register_notrace_module
class PositionTable(nn.Module):
    """CMT's learned score between every place of a map and every place of the map of keys.

    Args:
        num_heads: H.
        side: of the square map that the table is made for, in tokens.
        ratio: how many times smaller the map of keys is.
        factory: ``device`` and ``dtype``.
    """

    def __init__(self, num_heads: int, side: int, ratio: int, **factory: Any) -> None:
        super().__init__()
        self.side = side
        self.ratio = ratio
        small = -(-side // ratio)
        self.position_table = nn.Parameter(torch.empty(num_heads, side**2, small**2, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.normal_(self.position_table)

    def forward(self, x: Tensor) -> Tensor:
        """Return the (H, L, K) scores for a (B, H, W, C) map."""
        table: Tensor = self.position_table
        ratio = self.ratio
        rows, columns = x.shape[1], x.shape[2]
        if rows == self.side and columns == self.side:
            return table
        keys = [(rows + ratio - 1) // ratio, (columns + ratio - 1) // ratio]
        small = (self.side + ratio - 1) // ratio
        table = F.interpolate(table.unflatten(2, [small, small]), keys, mode="bilinear")
        table = table.flatten(2).transpose(1, 2)  # (H, K, side^2)
        table = table.unflatten(2, [self.side, self.side])
        return F.interpolate(table, [rows, columns], mode="bilinear").flatten(2).transpose(1, 2)
