"""Where kernels write gradients of query, key and value: into one tensor, which is the gradient of one projection.

Of (B, L, 3 H D) projections, cut into (B, L, 3, H, D), query, key and value are views. Their gradients side by side in
the same order are the gradient of the projections, and nothing has to be put together (:mod:`dgt.layers.attention`).
"""

from itertools import accumulate

import torch
from torch import Tensor


def new_gradients(query: Tensor, key: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor for all gradients.

    Args:
        query: (B, H, L, D).
        key: (B, H, S, D).
        dtype: of the result; None, query's.

    Returns:
        (B, L, 3, H, D) where S is L; else all elements, those of (B, L, H, D) queries first.
    """
    batch, heads, count, channels = query.shape
    if query.shape == key.shape:
        return query.new_empty((batch, count, 3, heads, channels), dtype=dtype)
    return query.new_empty(batch * heads * channels * (count + 2 * key.shape[2]), dtype=dtype)


def split_gradients(
    joined: Tensor, query_shape: torch.Size, key_shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, (B, H, L, D) and twice (B, H, S, D), as views."""
    if query_shape == key_shape:
        in_query, in_key, in_value = joined.permute(2, 0, 3, 1, 4).unbind(0)
        return in_query, in_key, in_value
    shapes = (query_shape, key_shape, key_shape)
    ends = accumulate(shape.numel() for shape in shapes)
    in_query, in_key, in_value = (
        joined[end - shape.numel() : end].view(*_by_token(shape)).transpose(1, 2)
        for end, shape in zip(ends, shapes, strict=True)
    )
    return in_query, in_key, in_value


def _by_token(shape: torch.Size) -> tuple[int, int, int, int]:
    """(B, L, H, D) of (B, H, L, D)."""
    batch, heads, count, channels = shape
    return batch, count, heads, channels
