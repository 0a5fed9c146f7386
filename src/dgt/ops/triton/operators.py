"""The kernels as PyTorch operators: fake kernels, gradients, and FLOP counts.

Operators are opaque to ``torch.compile``, so they never break a graph. They work in the type of
their inputs, also under autocast, whose casts happen in the layers before them.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops import flops
from dgt.ops.triton import (
    dense,
    gathered,
    grouping,
    passes,
    products,
    residual,
    statistics,
)
from dgt.ops.triton.grouping import Segments, count_slots, no_segments, tile_size
from dgt.ops.triton.inverse import PAD, Lists, lists_of, with_prefix
from dgt.ops.triton.launch import Attended, check_runnable, new_rows, power_of_two
from dgt.ops.triton.passes import sort_queries

move_centroids = statistics.move_centroids

Three = tuple[Tensor, Tensor, Tensor]
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Whole = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("dgt::triton_group_queries", mutates_args=())
def group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Group of every query; contract as in :func:`dgt.group_queries`."""
    check_runnable("query", query)
    return passes.group(query, centroids, key_mask)


group_queries.register_fake(lambda query, *_: query.new_empty(query.shape[:3], dtype=torch.int64))


@torch.library.custom_op("dgt::triton_group_statistics", mutates_args=())
def group_statistics(query: Tensor, group_ids: Tensor, groups: int) -> Tensor:
    """Sum the unit queries of every group, and count them last (Eq. 3): float32 (H, G, D + 1)."""
    check_runnable("query", query)
    return grouping.sum_queries(query, group_ids, groups, unit=True).sum((0, 2))


group_statistics.register_fake(
    lambda q, _, groups: q.new_empty((q.shape[1], groups, q.shape[3] + 1)).float()
)


@torch.library.custom_op("dgt::triton_sum_groups", mutates_args=())
def sum_groups(tokens: Tensor, group_ids: Tensor, groups: int) -> Tensor:
    """Sum the tokens of every group of every head, and count them last: float32 (B, H, G, D + 1).

    Tokens of group -1 are left out. The same bits in every run.
    """
    check_runnable("tokens", tokens)
    return grouping.sum_queries(tokens, group_ids, groups, unit=False).sum(2)


sum_groups.register_fake(
    lambda x, _, groups: x.new_empty((*x.shape[:2], groups, x.shape[3] + 1), dtype=torch.float32)
)


@torch.library.custom_op("dgt::triton_summarize_clusters", mutates_args=())
def summarize_clusters(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float,
    key_cluster_ids: Tensor, num_clusters: int,
) -> Three:  # fmt: skip
    """Residual keys, their values and biases, as :func:`residual.summarize_clusters` returns them."""
    check_runnable("query", query)
    return residual.summarize_clusters(
        query, key, value, group_ids, key_ids, scale, key_cluster_ids, num_clusters
    )


@summarize_clusters.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float,
    key_cluster_ids: Tensor, num_clusters: int,
) -> Three:  # fmt: skip
    shape = (*key_ids.shape[:3], num_clusters)
    rest_key, rest_value = (key.new_empty((*shape, key.shape[3])) for _ in range(2))
    return rest_key, rest_value, key.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("dgt::triton_select_keys", mutates_args=())
def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Keys of every group; contract as in :func:`dgt.select_keys`."""
    check_runnable("key", key)
    return passes.select(centroids, key, top_k, key_mask)


@select_keys.register_fake
def _(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    shape = (*key.shape[:2], centroids.shape[1], torch.sym_min(top_k, key.shape[2]))
    return key.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("dgt::triton_attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float,
    key_bias: Tensor | None = None,
) -> Saved:  # fmt: skip
    """Attention inside each group: ``(output, logsum, ...)`` and what the gradients read.

    ``logsum`` is float32 (B, H, L), base 2; then come the :class:`Segments` and :class:`Lists`.
    There are no gradients of ``logsum``, and none at all with a ``key_bias``.
    """
    check_runnable("query", query)
    segments, lists = sort_queries(group_ids, key_ids.shape[2]), lists_of(key_ids, key.shape[2])
    found = gathered.attend(query, key, value, segments, lists, scale, key_bias)
    return (*found, *segments, *lists)


def _like_attend(query: Tensor, key: Tensor, groups: int, width: Any) -> Saved:
    """Empty tensors of the shapes that :func:`attend` returns."""
    heads, tokens = query.shape[0] * query.shape[1], query.shape[2]
    slots = count_slots(tokens, groups, tile_size(tokens, groups))
    shapes = (
        (heads, tokens),
        (heads, groups + 1),
        (heads, slots, 4),
        (heads, groups, -(-width // PAD) * PAD),
    )
    extra = (query.new_empty(shape, dtype=torch.int32) for shape in (*shapes, (heads, groups)))
    return (new_rows(query), query.new_empty(query.shape[:3], dtype=torch.float32), *extra)  # type: ignore[return-value]


attend.register_fake(
    lambda query, key, value, group_ids, key_ids, *_: _like_attend(query, key, *key_ids.shape[2:])
)


@torch.library.custom_op("dgt::triton_attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsum: Tensor,
    group_ids: Tensor, key_ids: Tensor, order: Tensor, ends: Tensor, tiles: Tensor, ids: Tensor,
    counts: Tensor, scale: float,
) -> Three:  # fmt: skip
    """Gradients of query, key and value; the same bits in every run."""
    check_runnable("query", query)
    attended = Attended(query, key, value, output, logsum)
    if not len(order):  # few tokens: the bits of groups stand in the place of the lists
        return dense.backward(grad, attended, group_ids, ids, scale)
    segments, lists = Segments(order, ends, tiles), Lists(ids, counts)
    return gathered.backward(grad, attended, segments, lists, scale)


attend_backward.register_fake(
    lambda grad, query, key, value, *_: (new_rows(query), new_rows(key), new_rows(value))
)


@torch.library.custom_op("dgt::triton_attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int, scale: float,
    key_mask: Tensor | None, remainder: bool = False,
) -> Whole:  # fmt: skip
    """The whole operator.

    Returns what :func:`attend` does, with ``group_ids`` and ``key_ids`` in third and fourth place.

    Keys before the last L, a prefix, stand in all lists, but not in ``key_ids``, which count from
    the first of the L. Few tokens save bits in place of segments and lists. There are no gradients
    with a ``remainder``.
    """
    check_runnable("query", query)
    prefix = key.shape[2] - query.shape[2]
    keys, values = key[:, :, prefix:], value[:, :, prefix:]
    many = remainder or not dense.are_few(query, key)
    group_ids, segments, key_ids, lists = passes.group_and_select(
        query, keys, centroids, top_k, key_mask, many
    )
    if not many:
        found = dense.attend(query, key, value, group_ids, lists.ids, scale)
        return (*found, group_ids, key_ids, *segments, *lists)
    rest_of = None
    if remainder:
        rest_of = residual.summarize_unselected(
            query, keys, values, group_ids, lists, scale, key_mask
        )
    lists = with_prefix(lists, key_ids.shape[3], prefix) if prefix else lists
    found = gathered.attend(query, key, value, segments, lists, scale, None, rest_of)
    return (*found, group_ids, key_ids, *segments, *lists)


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int, scale: float,
    key_mask: Tensor | None, remainder: bool = False,
) -> Whole:  # fmt: skip
    groups, width = centroids.shape[1], torch.sym_min(top_k, query.shape[2])
    group_ids = query.new_empty(query.shape[:3], dtype=torch.int64)
    key_ids = key.new_empty((*key.shape[:2], groups, width), dtype=torch.int64)
    output, logsum, *extra = _like_attend(query, key, groups, width + key.shape[2] - query.shape[2])
    if not remainder and dense.are_few(query, key):
        words = extra[0].new_empty(
            (query.shape[0] * query.shape[1], groups, power_of_two(key.shape[2], 32) // 32)
        )
        extra = [*no_segments(words), words, words.new_empty(0)]
    return (output, logsum, group_ids, key_ids, *extra)  # type: ignore[return-value]


def group_matmul(
    form: int,
    left: Tensor,
    right: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    tokens: int,
    fill: float,
) -> Tensor:
    """Multiply group by group, as :func:`dgt.group_matmul`, whose operator calls this."""
    check_runnable("right" if form == 2 else "left", right if form in (2, 4) else left)
    segments = sort_queries(group_ids, key_ids.shape[2])
    if form <= 2:
        return products.by_rows(form, left, right, segments, key_ids, fill)
    if form == 3:
        columns = products.by_columns(right, left, segments, key_ids, tokens)
        return columns.transpose(2, 3).contiguous()
    return products.by_columns(left, right, segments, key_ids, tokens)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what the gradients of :func:`attend` and :func:`attention` need."""
    whole = len(output) == 9
    query, key, value = inputs[:3]
    group_ids, key_ids = output[2:4] if whole else inputs[3:5]
    ctx.save_for_backward(query, key, value, *output[:2], group_ids, key_ids, *output[-5:])
    ctx.scale, ctx.forward_only = inputs[5], isinstance(inputs[-1], Tensor) or inputs[-1] is True


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    if ctx.forward_only:
        raise NotImplementedError(
            'backend="triton" has no gradients with residual keys or key_bias; use backend="torch"'
        )
    grads: Three = torch.ops.dgt.triton_attend_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*grads, *[None] * (len(ctx.needs_input_grad) - 3))


def _refuse_backward(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        'backend="triton" is differentiable only once; use backend="reference" for second derivatives'
    )


attend_backward.register_autograd(_refuse_backward)
attend.register_autograd(_backward, setup_context=_save)
attention.register_autograd(_backward, setup_context=_save)

register_flop_formula(torch.ops.dgt.triton_group_queries)(flops.group_queries)
register_flop_formula(torch.ops.dgt.triton_select_keys)(flops.select_keys)
register_flop_formula(torch.ops.dgt.triton_attend)(flops.attend)
register_flop_formula(torch.ops.dgt.triton_attention)(flops.attention)
register_flop_formula(torch.ops.dgt.triton_group_statistics)(
    lambda query, *_, **__: 2 * math.prod(query)
)
register_flop_formula(torch.ops.dgt.triton_sum_groups)(lambda tokens, *_, **__: math.prod(tokens))
register_flop_formula(torch.ops.dgt.triton_summarize_clusters)(
    lambda query, key, value, groups, lists, *_, **__: 6 * math.prod(key) * int(lists[2])
)
register_flop_formula(torch.ops.dgt.triton_attend_backward)(
    lambda grad, *s, **_: 10 * math.prod(grad) * int(s[6][3])
)
