"""A control that is in no paper: the same number of keys, selected at random."""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dgt.layers.attention import GlobalAttention
from dgt.layers.checks import check_layer_input
from dgt.ops.checks import check_count


@lru_cache(maxsize=4)  # drawing is slower than attending
def draw_keys(heads: int, tokens: int, top_k: int) -> Tensor:
    """bool (heads, tokens, tokens): which keys each query sees, the same in every call."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (heads, tokens, tokens)
    with _disable_current_modes():  # an export would keep the draw instead of what was drawn
        drawn = torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)
        smallest = drawn.topk(min(top_k, tokens)).values[..., -1:]
        return drawn >= smallest


@register_notrace_module
class RandomKeyAttention(GlobalAttention):
    """Every query of every head attends to ``top_k`` random tokens, the same ones in all images.

    They are drawn once for each number of tokens, with that number as the seed.

    Args:
        dim, num_heads, options: as in :class:`GlobalAttention`.
        top_k: k >= 1, clamped to the number of tokens.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> RandomKeyAttention(dim=64, num_heads=2, top_k=98)(torch.randn(2, 14, 14, 64)).shape
        torch.Size([2, 14, 14, 64])
    """

    def __init__(self, dim: int, num_heads: int, top_k: int, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        check_count("top_k", top_k)
        self.top_k = top_k

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) or (B, L, C) to the same shape.

        ``mask`` is bool, True where a token is real. Padding is never a key, unless a query has
        drawn nothing else.
        """
        check_layer_input(x, self.dim, mask)
        query, key, value = self.split_heads(x)
        sees = draw_keys(self.num_heads, query.shape[2], self.top_k).to(x.device)[None]
        if mask is not None:
            real = sees & mask.flatten(1)[:, None, None, :]
            sees = torch.where(real.any(-1, keepdim=True), real, sees)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=sees, scale=self.scale
        )
        return self.merge_heads(attended, x)
