"""Dense attention on the native kernels: every query attends to every key, under a mask; forward and backward."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops.cpu.interface import (
    BOOL_MASK,
    FLOAT_MASK,
    Problem,
    describe,
    new_tokens,
    run,
    tokens,
    with_channels_together,
)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attend from (B, H, L, D) queries to (B, heads, S, D) keys, heads a divisor of H.

    Args:
        query: (B, H, L, D).
        key, value: (B, heads, S, D).
        mask: optional (B, H, L, S), bool (True where a query sees a key) or float32 (added to the scores); broadcast
            dimensions may have a stride of zero.
        scale: factor on the scores.

    Returns:
        (B, H, L, D), as (B, L, H, D) in memory; zero where a query sees no key.
    """
    output: Tensor = torch.ops.dgt.native_dense(query, key, value, mask, scale)[0]
    return output


@torch.library.custom_op("dgt::native_dense", mutates_args=())
def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = (with_channels_together(tensor) for tensor in (query, key, value))
    output = new_tokens(query)
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
    problem = describe(query, key, value, scale)
    _set_mask(problem, mask)
    problem.output = tokens(output)
    problem.logsumexp = logsumexp.data_ptr()
    run("dgt_dense", problem)
    return output, logsumexp


@_dense.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return new_tokens(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dgt::native_dense_backward", mutates_args=())
def _dense_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in query, key and value, in float32; those of keys for every head of queries."""
    query, key, value, output, grad = (
        with_channels_together(tensor)
        for tensor in (query, key, value, output, grad.to(query.dtype))
    )
    grad_query, grad_key, grad_value = _new_gradients(query, key)
    problem = describe(query, key, value, scale)
    _set_mask(problem, mask)
    problem.output = tokens(output)
    problem.logsumexp = logsumexp.data_ptr()
    problem.grad_output = tokens(grad)
    problem.grad_query = tokens(grad_query)
    problem.grad_key = tokens(grad_key)
    problem.grad_value = tokens(grad_value)
    run("dgt_dense_backward", problem)
    return grad_query, grad_key, grad_value


@_dense_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _new_gradients(query, key)


def _new_gradients(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, _, channels = query.shape
    of_keys = (batch, heads, key.shape[2], channels)
    grad_query = query.new_empty(query.shape, dtype=torch.float32)
    return (
        grad_query,
        query.new_empty(of_keys, dtype=torch.float32),
        query.new_empty(of_keys, dtype=torch.float32),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, ctx.scale = inputs
    attended, logsumexp = output
    ctx.mark_non_differentiable(logsumexp)
    ctx.save_for_backward(query, key, value, mask, attended, logsumexp)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, mask, output, logsumexp = ctx.saved_tensors
    grad_query, grad_key, grad_value = torch.ops.dgt.native_dense_backward(
        grad, query, key, value, mask, output, logsumexp, ctx.scale
    )
    in_key = _sum_over_sharing_heads(grad_key, key)
    in_value = _sum_over_sharing_heads(grad_value, value)
    return grad_query.to(query.dtype), in_key, in_value, None, None


_dense.register_autograd(_gradients, setup_context=_save)


def _sum_over_sharing_heads(grad: Tensor, like: Tensor) -> Tensor:
    """Gradients of keys that several heads of queries share are the sums of those heads'."""
    if grad.shape != like.shape:
        grad = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    return grad.to(like.dtype)


def _set_mask(problem: Problem, mask: Tensor | None) -> None:
    if mask is None:
        return
    problem.mask = mask.data_ptr()
    problem.mask_type = BOOL_MASK if mask.dtype == torch.bool else FLOAT_MASK
    problem.mask_strides = mask.stride()


def _dense_flops(query: Any, key: Any, *_: Any, **__: Any) -> int:
    batch, heads, queries, channels = query
    return 4 * batch * heads * queries * int(key[2]) * channels


register_flop_formula(torch.ops.dgt.native_dense)(_dense_flops)
