"""Gradients of the native operators: the weights are computed again, from the output and the sums that were kept."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgt.ops.cpu.interface import as_mask, describe, pointer, run, tokens, with_channels_together


class _Kept(NamedTuple):
    """What a forward pass read and wrote."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    logsumexp: Tensor
    group_ids: Tensor
    key_ids: Tensor
    key_bias: Tensor | None
    key_mask: Tensor | None
    scale: float
    num_prefix_tokens: int


class _Gradients(NamedTuple):
    """Where gradients go: float32, of any strides but the last."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_bias: Tensor


def _run_backward(grad: Tensor, grad_logsumexp: Tensor | None, kept: _Kept, to: _Gradients) -> None:
    query, key, value, output, grad = (
        with_channels_together(tensor)
        for tensor in (kept.query, kept.key, kept.value, kept.output, grad.to(kept.query.dtype))
    )
    group_ids = kept.group_ids.contiguous()
    key_ids = kept.key_ids.contiguous()
    bias = None if kept.key_bias is None else kept.key_bias.float().contiguous()
    mask = as_mask(kept.key_mask)
    grad_sums = None if grad_logsumexp is None else grad_logsumexp.float().contiguous()
    problem = describe(query, key, value, kept.scale)
    problem.groups, problem.list_length = key_ids.shape[2:]
    problem.prefix = kept.num_prefix_tokens
    problem.query_mask = pointer(mask if query.shape[2] == key.shape[2] else None)
    problem.key_mask = pointer(mask)
    problem.key_bias = pointer(bias)
    problem.group_ids = group_ids.data_ptr()
    problem.key_ids = key_ids.data_ptr()
    problem.output = tokens(output)
    problem.logsumexp = kept.logsumexp.data_ptr()
    problem.grad_output = tokens(grad)
    problem.grad_logsumexp = pointer(grad_sums)
    problem.grad_query = tokens(to.query)
    problem.grad_key = tokens(to.key)
    problem.grad_value = tokens(to.value)
    problem.grad_key_bias = to.key_bias.data_ptr() if bias is not None else None
    run("dgt_attend_backward", problem)


@torch.library.custom_op("dgt::native_attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    key_bias: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    num_prefix_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in query, key, value and key_bias (empty where there is none), in float32."""
    grads = _new_gradients(query, key, key_bias)
    kept = _Kept(
        query,
        key,
        value,
        output,
        logsumexp,
        group_ids,
        key_ids,
        key_bias,
        key_mask,
        scale,
        num_prefix_tokens,
    )
    _run_backward(grad, grad_logsumexp, kept, _Gradients(*grads))
    return grads


@_attend_backward.register_fake
def _(
    grad: Tensor, grad_logsumexp: Tensor | None, query: Tensor, key: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _new_gradients(query, key, rest[5])


def _new_gradients(
    query: Tensor, key: Tensor, key_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = (query.shape, key.shape, key.shape, (0,) if key_bias is None else key.shape[:3])
    grad_query, grad_key, grad_value, grad_bias = (
        query.new_empty(shape, dtype=torch.float32) for shape in shapes
    )
    return grad_query, grad_key, grad_value, grad_bias


@torch.library.custom_op("dgt::native_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    key_mask: Tensor | None,
    scale: float,
    num_prefix_tokens: int,
) -> Tensor:
    """Gradients in query, key and value of one shape, float32, side by side as in one projection: (B, L, 3, H, D)."""
    grads = _new_joined(grad, query)
    in_query, in_key, in_value = grads.permute(2, 0, 3, 1, 4).unbind(0)
    kept = _Kept(
        query,
        key,
        value,
        output,
        logsumexp,
        group_ids,
        key_ids,
        None,
        key_mask,
        scale,
        num_prefix_tokens,
    )
    _run_backward(grad, None, kept, _Gradients(in_query, in_key, in_value, grads))
    return grads


@_attention_backward.register_fake
def _new_joined(grad: Tensor, query: Tensor, *_: Any) -> Tensor:
    batch, heads, count, channels = query.shape
    return query.new_empty((batch, count, 3, heads, channels), dtype=torch.float32)


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, group_ids, key_ids, ctx.scale, key_bias = inputs
    ctx.save_for_backward(
        query, key, value, *output, group_ids, _small(key_ids, key), key_bias, None
    )
    ctx.num_prefix_tokens = 0


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, _, _, ctx.scale, key_mask, ctx.num_prefix_tokens = inputs
    attended, logsumexp, group_ids, key_ids = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(group_ids, key_ids)
    ctx.save_for_backward(
        query, key, value, attended, logsumexp, group_ids, _small(key_ids, key), None, key_mask
    )


def _gradients(
    ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None
) -> tuple[Tensor | None, ...]:
    query, key, value, output, logsumexp, group_ids, key_ids, key_bias, key_mask = ctx.saved_tensors
    grads = torch.ops.dgt.native_attend_backward(
        torch.zeros_like(output) if grad is None else grad,
        grad_logsumexp,
        query,
        key,
        value,
        output,
        logsumexp,
        group_ids,
        key_ids.long(),
        key_bias,
        key_mask,
        ctx.scale,
        ctx.num_prefix_tokens,
    )
    grad_query, grad_key, grad_value, grad_bias = grads
    in_query = grad_query.to(query.dtype)
    in_key = grad_key.to(key.dtype)
    in_value = grad_value.to(value.dtype)
    return in_query, in_key, in_value, None if key_bias is None else grad_bias.to(key_bias.dtype)


def _attend_gradients(
    ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None
) -> tuple[Tensor | None, ...]:
    in_query, in_key, in_value, in_bias = _gradients(ctx, grad, grad_logsumexp)
    return in_query, in_key, in_value, None, None, None, in_bias


def _attention_gradients(
    ctx: Any, grad: Tensor | None, grad_logsumexp: Any, *_: Any
) -> tuple[Tensor | None, ...]:
    query, key, value, output, logsumexp, group_ids, key_ids, _, key_mask = ctx.saved_tensors
    if query.shape != key.shape:
        in_query, in_key, in_value = _gradients(ctx, grad, None)[:3]
        return in_query, in_key, in_value, None, None, None, None, None
    grads = torch.ops.dgt.native_attention_backward(
        torch.zeros_like(output) if grad is None else grad,
        query,
        key,
        value,
        output,
        logsumexp,
        group_ids,
        key_ids.long(),
        key_mask,
        ctx.scale,
        ctx.num_prefix_tokens,
    )
    in_query, in_key, in_value = grads.to(query.dtype).permute(2, 0, 3, 1, 4).unbind(0)
    return in_query, in_key, in_value, None, None, None, None, None


def differentiate_attend(operator: Any) -> None:
    """Give ``dgt::native_attend`` its gradients."""
    operator.register_autograd(_attend_gradients, setup_context=_save_attend)


def differentiate_attention(operator: Any) -> None:
    """Give ``dgt::native_attention`` its gradients."""
    operator.register_autograd(_attention_gradients, setup_context=_save_attention)


def _small(key_ids: Tensor, key: Tensor) -> Tensor:
    """Key ids as they are kept for the backward pass: many groups have as many of them as there are features."""
    return key_ids.to(torch.int16 if key.shape[2] <= 1 << 15 else torch.int32)
