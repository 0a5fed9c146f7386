"""The steps of attention on the Triton kernels; :mod:`dgt.ops.operators` calls them.

They work in the type of their inputs, also under autocast, whose casts happen in the layers before them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dgt.ops.checks import check_no_nan
from dgt.ops.cpu.interface import new_residual
from dgt.ops.gradients import split_gradients
from dgt.ops.triton import (
    dense,
    gathered,
    grouping,
    launch,
    passes,
    products,
    statistics,
)
from dgt.ops.triton.inverse import lists_of
from dgt.ops.triton.launch import MAX_CHANNELS, Attended, check_runnable, rows_of
from dgt.ops.triton.passes import sort_queries
from dgt.ops.triton.residual import (
    append_summaries,
    summaries_backward,
    summarize_clusters,
    views_of_summaries,
)

can_run = launch.can_run
move_centroids = statistics.move_centroids


def group_queries(query: Tensor, centroids: Tensor, query_mask: Tensor | None) -> Tensor:
    """Group of every query; contract as in :func:`dgt.group_queries`."""
    check_runnable("query", query)
    check_no_nan("query", query)
    return passes.group(query, as_centroids(centroids), as_mask(query_mask))


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Keys of every group; contract as in :func:`dgt.select_keys`."""
    check_runnable("key", key)
    return passes.select(as_centroids(centroids), key, top_k, as_mask(key_mask))


def group_statistics(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sum the unit queries of every group, and count them (Eq. 3), the same bits in every run."""
    check_runnable("query", query)
    sums = grouping.sum_queries(query, group_ids, num_groups, unit=True).sum((0, 2))
    return sums[..., :-1].contiguous(), sums[..., -1].contiguous()


def sum_groups(tokens: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    """Sum the tokens of every group of every head, and count them last: float32 (B, H, G, D + 1).

    Tokens of group -1 are left out. The same bits in every run.
    """
    check_runnable("tokens", tokens)
    return grouping.sum_queries(tokens, group_ids, num_groups, unit=False).sum(2)


def sum_members(x: Tensor, ids: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """As :func:`dgt.ops.lloyd.sum_members`; concatenated heads may have more channels than kernels take."""
    sum_part = torch.ops.dgt.sum_groups
    parts = [sum_part(part, ids, num_clusters) for part in x.split(MAX_CHANNELS, 3)]
    return torch.cat([part[..., :-1] for part in parts], dim=3), parts[0][..., -1]


def sum_up_clusters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_cluster_ids: Tensor,
    residual_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Residual keys, their values and biases, as :func:`residual.sum_up` returns them."""
    check_runnable("query", query)
    return summarize_clusters(
        query, key, value, group_ids, key_ids, scale, key_cluster_ids, residual_keys
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    residual_keys: int = 0,
    key_cluster_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention inside each group, the log-sum-exp of every query, and :func:`new_residual`, both float32.

    With residual keys there is no ``key_bias``.
    """
    check_runnable("query", query)
    kept = new_residual(query, key_ids.shape[2], residual_keys)
    if residual_keys:
        rest = summarize_clusters(
            query, key, value, group_ids, key_ids, scale, key_cluster_ids, residual_keys
        )
        for part, found in zip(views_of_summaries(kept, key, key_ids.shape[2]), rest, strict=True):
            part.copy_(found)
        key, value, key_ids, key_bias = append_summaries(key, value, key_ids, rest)
    segments = sort_queries(group_ids, key_ids.shape[2])
    lists = lists_of(key_ids, key.shape[2])
    output, sums = gathered.attend(query, key, value, segments, lists, scale, key_bias)
    return output, sums * math.log(2), kept  # kernels count in powers of two


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    *,
    top_k: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    num_prefix_tokens: int,
    residual_keys: int,
    key_cluster_ids: Tensor | None,
    return_ids: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The three steps together, of queries and keys of the same tokens, without a prefix and residual keys."""
    check_runnable("query", query)
    check_no_nan("query", query)
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    centroids = as_centroids(centroids)
    query_mask, key_mask = as_mask(query_mask), as_mask(key_mask)
    if dense.are_few(query, key):
        output, sums, group_ids, key_ids = passes.attend_to_few(
            query, key, value, centroids, top_k, scale, query_mask, key_mask, return_ids
        )
    else:
        group_ids, key_ids, segments, lists = passes.group_and_list(
            query, key, centroids, top_k, query_mask, key_mask, return_ids
        )
        output, sums = gathered.attend(query, key, value, segments, lists, scale)
    residual = query.new_empty(0, dtype=torch.float32)
    if group_ids is None or key_ids is None:
        of_groups, of_keys = (query.new_empty(0, dtype=torch.int64) for _ in range(2))
        return output, residual.new_empty(0), of_groups, of_keys, residual
    return output, sums * math.log(2), group_ids, key_ids, residual


def as_centroids(centroids: Tensor) -> Tensor:
    """(H, G, D) centroids as kernels read them."""
    return centroids.float().contiguous()


def as_mask(mask: Tensor | None) -> Tensor | None:
    """(B, L) booleans as kernels read them, or none."""
    return None if mask is None else mask.contiguous()


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    grad_logsumexp: Tensor | None,
    residual: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    key_bias: Tensor | None,
    key_cluster_ids: Tensor | None,
    scale: float,
    residual_keys: int,
    **_nothing: Any,
) -> tuple[Tensor, Tensor]:
    """Gradients of query, key and value (:mod:`dgt.ops.gradients`), and of key_bias, empty where there is none.

    The same bits in every run. There is no prefix.
    """
    check_runnable("query", query)
    logsum = logsumexp / math.log(2)
    seen_key, seen_value, seen_ids = key, value, key_ids
    if residual_keys:
        *pair, bias = views_of_summaries(residual, key, key_ids.shape[2])
        rest_key, rest_value = (part.to(key.dtype).contiguous() for part in pair)
        rest = (rest_key, rest_value, bias)
        seen_key, seen_value, seen_ids, key_bias = append_summaries(key, value, key_ids, rest)
    attended = Attended(query, seen_key, seen_value, output, logsum)
    if dense.are_few(query, seen_key) and key_bias is None and grad_logsumexp is None:
        return dense.backward(grad, attended, group_ids, key_ids, scale), logsum.new_empty(0)
    segments = sort_queries(group_ids, key_ids.shape[2])
    lists = lists_of(seen_ids, seen_key.shape[2])
    grads, grad_bias = gathered.backward(
        grad, attended, segments, lists, scale, key_bias, grad_logsumexp
    )
    if not residual_keys:
        return grads, grad_bias
    in_query, in_key, in_value = split_gradients(grads, query.shape, seen_key.shape)
    grads = summaries_backward(
        (in_query, in_key, in_value, grad_bias),
        query,
        key,
        value,
        rest,
        group_ids=group_ids,
        key_ids=key_ids,
        key_cluster_ids=key_cluster_ids,
        scale=scale,
    )
    return grads, logsum.new_empty(0)


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
