"""The native CPU backend: the three steps, alone and in one, with gradients, as operators of PyTorch.

The kernels are in C++ (``kernels/dgt_native.cpp`` says how they work). They read queries, keys and values of any
strides, such as views of one projection, in float32, bfloat16 or float16, compute in float32, and write the output as
(B, L, H, D) in memory, which the next projection reads as it is. Results are the same bits in every run and with any
number of threads. Arguments are right already: the doors of :mod:`dgt.ops.attention` check them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops import flops
from dgt.ops.calls import AttentionCall
from dgt.ops.checks import needs_gradients
from dgt.ops.cpu.clustered import cluster_tokens, clustered_attention
from dgt.ops.cpu.gradients import differentiate_attend, differentiate_attention
from dgt.ops.cpu.interface import (
    as_centroids,
    as_mask,
    describe,
    new_tokens,
    pointer,
    run,
    tokens,
    with_channels_together,
)
from dgt.ops.remainder import summarize_unselected
from dgt.ops.residual_keys import summarize_clusters

__all__ = [
    "attend",
    "attend_with_logsumexp",
    "attention",
    "cluster_tokens",
    "clustered_attention",
    "group_queries",
    "group_statistics",
    "select_keys",
    "summarize_clusters",
    "summarize_unselected",
]

# ---- the steps alone -------------------------------------------------------------------------------------------------


@torch.library.custom_op("dgt::native_group_queries", mutates_args=())
def _group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    query = with_channels_together(query)
    centroids = as_centroids(centroids)
    mask = as_mask(key_mask)
    group_ids = query.new_empty(query.shape[:3], dtype=torch.int64)
    problem = describe(query, query)
    problem.groups = centroids.shape[1]
    problem.centroids = centroids.data_ptr()
    problem.query_mask = pointer(mask)
    problem.group_ids = group_ids.data_ptr()
    run("dgt_group_queries", problem)
    return group_ids


@_group_queries.register_fake
def _(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.int64)


@torch.library.custom_op("dgt::native_select_keys", mutates_args=())
def _select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    key = with_channels_together(key)
    centroids = as_centroids(centroids)
    mask = as_mask(key_mask)
    batch, heads, count, _ = key.shape
    key_ids = key.new_empty(
        (batch, heads, centroids.shape[1], min(top_k, count)), dtype=torch.int64
    )
    problem = describe(key, key)
    problem.groups, problem.list_length = key_ids.shape[2:]
    problem.centroids = centroids.data_ptr()
    problem.key_mask = pointer(mask)
    problem.key_ids = key_ids.data_ptr()
    run("dgt_select_keys", problem)
    return key_ids


@_select_keys.register_fake
def _(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    batch, heads, count, _ = key.shape
    return key.new_empty(
        (batch, heads, centroids.shape[1], torch.sym_min(top_k, count)), dtype=torch.int64
    )


@torch.library.custom_op("dgt::native_attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    query, key, value = (with_channels_together(tensor) for tensor in (query, key, value))
    group_ids = group_ids.contiguous()
    key_ids = key_ids.contiguous()
    bias = None if key_bias is None else key_bias.float().contiguous()
    output = new_tokens(query)
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
    problem = describe(query, key, value, scale)
    problem.groups, problem.list_length = key_ids.shape[2:]
    problem.group_ids = group_ids.data_ptr()
    problem.key_ids = key_ids.data_ptr()
    problem.key_bias = pointer(bias)
    problem.output = tokens(output)
    problem.logsumexp = logsumexp.data_ptr()
    run("dgt_attend", problem)
    return output, logsumexp


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return new_tokens(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dgt::native_group_statistics", mutates_args=())
def _group_statistics(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    query = with_channels_together(query)
    group_ids = group_ids.contiguous()
    batch, heads, _, channels = query.shape
    sums = query.new_empty((batch, heads, num_groups, channels), dtype=torch.float32)
    counts = query.new_empty((batch, heads, num_groups), dtype=torch.float32)
    problem = describe(query, query)
    problem.groups = num_groups
    problem.group_ids = group_ids.data_ptr()
    problem.group_sums = sums.data_ptr()
    problem.group_counts = counts.data_ptr()
    run("dgt_group_statistics", problem)
    return sums.sum(0), counts.sum(0)


@_group_statistics.register_fake
def _(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    _, heads, _, channels = query.shape
    sums = query.new_empty((heads, num_groups, channels), dtype=torch.float32)
    return sums, query.new_empty((heads, num_groups), dtype=torch.float32)


# ---- the three steps in one ------------------------------------------------------------------------------------------


@torch.library.custom_op("dgt::native_attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float,
    key_mask: Tensor | None,
    num_prefix_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    length = num_prefix_tokens + min(top_k, key.shape[2] - num_prefix_tokens)
    output = new_tokens(query)
    logsumexp = query.new_empty((batch, heads, queries), dtype=torch.float32)
    group_ids = query.new_empty((batch, heads, queries), dtype=torch.int64)
    key_ids = query.new_empty((batch, heads, centroids.shape[1], length), dtype=torch.int64)
    results = _Results(output, logsumexp, group_ids, key_ids)
    call = AttentionCall(top_k, scale, key_mask, num_prefix_tokens)
    _run_attention(query, key, value, centroids, call, results)
    return output, logsumexp, group_ids, key_ids


@_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float,
    key_mask: Tensor | None,
    num_prefix_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    length = num_prefix_tokens + torch.sym_min(top_k, key.shape[2] - num_prefix_tokens)
    return (
        new_tokens(query),
        query.new_empty((batch, heads, queries), dtype=torch.float32),
        query.new_empty((batch, heads, queries), dtype=torch.int64),
        query.new_empty((batch, heads, centroids.shape[1], length), dtype=torch.int64),
    )


@torch.library.custom_op("dgt::native_attention_output", mutates_args=())
def _attention_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float,
    key_mask: Tensor | None,
    num_prefix_tokens: int,
) -> Tensor:
    """The output alone, without gradients: ids of few tokens weigh more than the tokens."""
    output = new_tokens(query)
    results = _Results(output, None, None, None)
    call = AttentionCall(top_k, scale, key_mask, num_prefix_tokens)
    _run_attention(query, key, value, centroids, call, results)
    return output


@_attention_output.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return new_tokens(query)


class _Results(NamedTuple):
    """Where the kernel writes; None for what is not wanted."""

    output: Tensor
    logsumexp: Tensor | None
    group_ids: Tensor | None
    key_ids: Tensor | None


def _run_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    call: AttentionCall,
    results: _Results,
) -> None:
    query, key, value = (with_channels_together(tensor) for tensor in (query, key, value))
    centroids = as_centroids(centroids)
    mask = as_mask(call.key_mask)
    queries, keys = query.shape[2], key.shape[2]
    prefix = call.num_prefix_tokens
    problem = describe(query, key, value, call.scale)
    problem.groups = centroids.shape[1]
    problem.list_length = prefix + min(call.top_k, keys - prefix)
    problem.prefix = prefix
    problem.centroids = centroids.data_ptr()
    problem.query_mask = pointer(mask if queries == keys else None)
    problem.key_mask = pointer(mask)
    problem.output = tokens(results.output)
    problem.logsumexp = pointer(results.logsumexp)
    problem.group_ids = pointer(results.group_ids)
    problem.key_ids = pointer(results.key_ids)
    run("dgt_attention", problem)


# ---- the backend: the functions that every backend offers --------------------------------------------------------


def group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Assign (B, H, L, D) queries to the nearest of (H, G, D) centroids: (B, H, L) int64, -1 at padding."""
    group_ids: Tensor = torch.ops.dgt.native_group_queries(
        query.detach(), centroids.detach(), key_mask
    )
    return group_ids


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Select the best of (B, H, S, D) keys for (H, G, D) centroids: (B, H, G, min(top_k, S)) int64, then -1 (Eq. 1)."""
    key_ids: Tensor = torch.ops.dgt.native_select_keys(
        centroids.detach(), key.detach(), top_k, key_mask
    )
    return key_ids


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every query over the keys of its group (Eq. 2); shapes as in :func:`dgt.attend`."""
    output: Tensor = torch.ops.dgt.native_attend(
        query, key, value, group_ids, key_ids, scale, key_bias
    )[0]
    return output


def attend_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and the (B, H, L) logarithm of every query's sum of exponentials; -inf where it sees no key."""
    output, logsumexp = torch.ops.dgt.native_attend(
        query, key, value, group_ids, key_ids, scale, key_bias
    )
    return output, logsumexp


def group_statistics(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sum the normalized queries of every group, (H, G, D), and count them, (H, G) (Eq. 3 in parts)."""
    sums, counts = torch.ops.dgt.native_group_statistics(query.detach(), group_ids, num_groups)
    return sums, counts


def attention(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The three steps in one: output, group ids and key ids, as :func:`dgt.dynamic_group_attention` returns them.

    None with residual keys, for which the three steps have to be taken one by one. Without gradients no ids and no sums
    are written where nobody asks for them.
    """
    if call.residual_keys:
        return None
    arguments = (query, key, value, centroids.detach(), call.top_k, call.scale, call.key_mask)
    if call.return_ids or needs_gradients(query, key, value):
        whole = torch.ops.dgt.native_attention(*arguments, call.num_prefix_tokens)
        output, _, group_ids, key_ids = whole
        return output, group_ids, key_ids
    output = torch.ops.dgt.native_attention_output(*arguments, call.num_prefix_tokens)
    return output, output, output  # nobody reads the ids


differentiate_attend(_attend)
differentiate_attention(_attention)

register_flop_formula(torch.ops.dgt.native_group_queries)(flops.group_queries)
register_flop_formula(torch.ops.dgt.native_select_keys)(flops.select_keys)
register_flop_formula(torch.ops.dgt.native_attend)(flops.attend)
register_flop_formula(torch.ops.dgt.native_attention)(flops.attention)
register_flop_formula(torch.ops.dgt.native_attention_output)(flops.attention)
