"""Queries, keys and values as views of one projection, whose gradients become one again without a copy."""

from typing import Any

import torch
from torch import Tensor

from dgt.layers.native import runs_natively


@torch.jit.ignore
def joins_gradients(qkv: Tensor) -> bool:
    """Tell whether :func:`split_heads_of` can take a projection: where gradients may come from the native kernels."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and qkv.requires_grad):
        return False
    return runs_natively(qkv)


@torch.jit.ignore
def split_heads_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split (B, L, 3, H, D) into views: query, key and value, each (B, H, L, D).

    The native kernels write the gradients of the three side by side, as the projection has them: then its gradient is
    their memory. PyTorch's own views would copy them twice.
    """
    query, key, value = _SplitHeads.apply(qkv)
    return query, key, value


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        joined = None if torch.is_grad_enabled() else _joined(grads)
        return torch.stack(grads).permute(1, 3, 0, 2, 4) if joined is None else joined


def _joined(grads: tuple[Tensor, ...]) -> Tensor | None:
    """Return the (B, L, 3, H, D) tensor that three (B, H, L, D) tensors are views of; None where they are not."""
    first = grads[0]
    batch, heads, count, channels = first.shape
    step = heads * channels
    strides = (3 * count * step, channels, 3 * step, 1)
    for place, grad in enumerate(grads):
        stands_beside = (
            type(grad) is Tensor
            and grad.stride() == strides
            and grad.data_ptr() == first.data_ptr() + place * step * grad.element_size()
            and grad.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        )
        if not stands_beside:
            return None
    return first.as_strided(
        (batch, count, 3, heads, channels), (strides[0], strides[2], step, channels, 1)
    )
