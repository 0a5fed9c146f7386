"""The kernels as operators of PyTorch: shapes for tracing, gradients, and counts of floating-point operations.

Operators are opaque to ``torch.compile``, so they never break a graph. They work in the type of their inputs, also
under autocast, whose casts happen in the layers before them.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops import flops
from dgt.ops.triton import few_backward, few_tokens, grouping, many_backward, many_tokens, products, selection
from dgt.ops.triton.launch import check_runnable, new_rows
from dgt.ops.triton.sorting import sort_queries

Ids = tuple[Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("dgt::triton_group_queries", mutates_args=())
def group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Group of every query; contract as in :func:`dgt.group_queries`."""
    check_runnable("query", query)
    return grouping.assign(query, centroids, key_mask)[0]


@group_queries.register_fake
def _(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.int64)


@torch.library.custom_op("dgt::triton_group_statistics", mutates_args=())
def group_statistics(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Grads:
    """Group of every query, and of every group the sum of its unit queries and their number (Eq. 3), in one pass.

    Returns:
        ``(group_ids, sums, counts)``: (B, H, L) int64, float32 (H, G, D) and (H, G).

    Raises:
        ValueError: for more than 128 groups, or more than 4096 numbers in G x D, each padded to a power of two.
    """
    check_runnable("query", query)
    if not grouping.can_count(*centroids.shape[1:]):
        raise ValueError(
            f"centroids must hold at most {grouping.MOST_COUNTED} groups, and at most {grouping.MOST_SUMMED} numbers a "
            "head (G x D, each padded to a power of two of at least 16), to be counted in one pass, "
            f"got {tuple(centroids.shape)}"
        )
    return grouping.assign(query, centroids, key_mask, statistics=True)


@group_statistics.register_fake
def _(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Grads:
    exact = centroids.new_empty(centroids.shape, dtype=torch.float32)
    return query.new_empty(query.shape[:3], dtype=torch.int64), exact, exact.new_empty(centroids.shape[:2])


@torch.library.custom_op("dgt::triton_select_keys", mutates_args=())
def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Keys of every group; contract as in :func:`dgt.select_keys`."""
    check_runnable("key", key)
    return selection.select(centroids, key, top_k, key_mask)


@select_keys.register_fake
def _(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    shape = (*key.shape[:2], centroids.shape[1], torch.sym_min(top_k, key.shape[2]))
    return key.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("dgt::triton_attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float) -> Ids:
    """Attention inside each group; ``(output, logsum)``, the latter float32 (B, H, L), base 2, for the gradients."""
    check_runnable("query", query)
    return _attend(query, key, value, group_ids, key_ids, scale)


def _attend(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float) -> Ids:
    """Attend in the regime that suits the sizes."""
    if few_tokens.fits(query, key, key_ids.shape[2]):
        return few_tokens.attend(query, key, value, group_ids, key_ids, scale)
    return many_tokens.attend(query, key, value, sort_queries(group_ids, key_ids.shape[2]), key_ids, scale)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float) -> Ids:
    return new_rows(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dgt::triton_attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsum: Tensor,
    group_ids: Tensor, key_ids: Tensor, scale: float,
) -> Grads:  # fmt: skip
    """Gradients of query, key and value; the same bits in every run."""
    check_runnable("query", query)
    if few_tokens.fits(query, key, key_ids.shape[2]):
        return few_backward.backward(grad, query, key, value, output, logsum, group_ids, key_ids, scale)
    segments = sort_queries(group_ids, key_ids.shape[2])
    return many_backward.backward(grad, query, key, value, output, logsum, segments, key_ids, scale)


@attend_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsum: Tensor,
    group_ids: Tensor, key_ids: Tensor, scale: float,
) -> Grads:  # fmt: skip
    return new_rows(query), new_rows(key), new_rows(value)


@torch.library.custom_op("dgt::triton_attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole operator; ``(output, logsum, group_ids, key_ids)``, in one kernel where a head fits on chip."""
    check_runnable("query", query)
    if few_tokens.fits_on_chip(query, centroids.shape[1]):
        return few_tokens.attention(query, key, value, centroids, top_k, scale, key_mask)
    group_ids = grouping.assign(query, centroids, key_mask)[0]
    key_ids = selection.select(centroids, key, top_k, key_mask)
    return (*_attend(query, key, value, group_ids, key_ids, scale), group_ids, key_ids)


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (*key.shape[:2], centroids.shape[1], torch.sym_min(top_k, key.shape[2]))
    logsum = query.new_empty(query.shape[:3], dtype=torch.float32)
    return new_rows(query), logsum, torch.empty_like(logsum, dtype=torch.int64), key.new_empty(shape, dtype=torch.int64)


def group_matmul(
    form: int, left: Tensor, right: Tensor, group_ids: Tensor, key_ids: Tensor, tokens: int, fill: float
) -> Tensor:
    """Multiply group by group; contract as in :func:`dgt.group_matmul`, whose operator calls this."""
    check_runnable("right" if form == 2 else "left", right if form in (2, 4) else left)
    segments = sort_queries(group_ids, key_ids.shape[2])
    if form == 1:
        return products.rows_by_keys(left, right, segments, key_ids, fill)
    if form == 2:
        return products.weights_by_rows(left, right, segments, key_ids)
    if form == 3:
        columns = products.weights_by_columns(right, left, segments, key_ids, tokens)
        return columns.transpose(2, 3).contiguous()
    return products.weights_by_columns(left, right, segments, key_ids, tokens)


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, group_ids, key_ids, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, group_ids, key_ids)


def _attend_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads: Grads = torch.ops.dgt.triton_attend_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*grads, None, None, None)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, _, _, ctx.scale, _ = inputs
    ctx.save_for_backward(query, key, value, *output)


def _attention_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads: Grads = torch.ops.dgt.triton_attend_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*grads, None, None, None, None)


def _refuse_backward(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError('backend="triton" is differentiable once; use backend="reference" for second derivatives')


attend_backward.register_autograd(_refuse_backward)
attend.register_autograd(_attend_backward, setup_context=_save_attend)
attention.register_autograd(_attention_backward, setup_context=_save_attention)


register_flop_formula(torch.ops.dgt.triton_group_queries)(flops.group_queries)
register_flop_formula(torch.ops.dgt.triton_select_keys)(flops.select_keys)
register_flop_formula(torch.ops.dgt.triton_attend)(flops.attend)
register_flop_formula(torch.ops.dgt.triton_attention)(flops.attention)


@register_flop_formula(torch.ops.dgt.triton_group_statistics)
def _(query: Any, centroids: Any, *_: Any, **__: Any) -> int:
    return flops.group_queries(query, centroids) + 2 * math.prod(query)


@register_flop_formula(torch.ops.dgt.triton_attend_backward)
def _(grad: Any, *shapes: Any, **_: Any) -> int:
    return 10 * math.prod(grad) * int(shapes[6][3])
