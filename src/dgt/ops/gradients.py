"""Where kernels write gradients of query, key and value: into one tensor, which is the gradient of one projection.

Of (B, L, 3 H D) projections, cut into (B, L, 3, H, D), query, key and value are views. Their gradients side by side in
the same order are the gradient of the projections, and nothing has to be put together: :func:`split_projection`.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from dgt.ops.checks import is_plain


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


def new_dense_gradients(query: Tensor, key: Tensor) -> tuple[Tensor, torch.Size]:
    """Return an empty tensor for the gradients of dense attention, where heads of queries may share keys.

    Gradients of keys are those of every head of queries. Where keys are shared these are to be added, and all
    gradients are float32.

    Args:
        query: (B, H, L, D).
        key: (B, heads, S, D), heads a divisor of H.

    Returns:
        The tensor, and the shape of the gradients of keys and values, (B, H, S, D).
    """
    of_keys = key[:, :1].expand(-1, query.shape[1], -1, -1)
    dtype = query.dtype if key.shape == of_keys.shape else torch.float32
    return new_gradients(query, of_keys, dtype), of_keys.shape


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


def split_projection(projection: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut (B, L, 3 C) projections in three views (B, L, C), as ``projection.chunk(3, dim=-1)`` does.

    Where the gradients of the three lie side by side in memory, what they lie in is the gradient of the projections:
    only others are put together.
    """
    if projection.requires_grad and type(projection) is Tensor and is_plain():
        query, key, value = _Split.apply(projection)
    else:
        query, key, value = projection.chunk(3, dim=-1)
    return query, key, value


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, projection: Tensor) -> tuple[Tensor, ...]:
        return projection.chunk(3, dim=-1)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        if are_side_by_side(*grads) and not torch.is_grad_enabled():
            batch, count, channels = grads[0].shape
            width = len(grads) * channels
            strides = (count * width, width, 1)
            return grads[0].as_strided((batch, count, width), strides)
        return torch.cat(grads, dim=-1)


def are_side_by_side(*parts: Tensor) -> bool:
    """Tell whether (B, L, C) tensors are consecutive channels of one contiguous tensor, and all of them."""
    batch, count, channels = parts[0].shape
    width = len(parts) * channels
    strides = (count * width, width, 1)
    sizes = (batch, count, channels)
    if any(type(part) is not Tensor or part.layout != torch.strided for part in parts):
        return False
    if any(torch._C._functorch.is_legacy_batchedtensor(part) for part in parts):
        return False  # many at once, by torch.autograd.grad(..., is_grads_batched=True)
    if len({(part.dtype, part.untyped_storage().data_ptr()) for part in parts}) > 1:
        return False
    lie_so = all(
        size == 1 or stride == expected
        for part in parts
        for size, stride, expected in zip(sizes, part.stride(), strides, strict=True)
    )
    offsets = [part.storage_offset() for part in parts]
    return lie_so and all(after - before == channels for before, after in pairwise(offsets))
