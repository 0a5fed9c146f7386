"""The native CPU backend: the steps of attention in C++, alone and in one, and their gradients.

The kernels (``kernels/dgt_native.cpp`` says how they work) read queries, keys and values of any strides, such as views
of one projection, in float32, bfloat16 or float16, compute in float32, and write the output as (B, L, H, D) in memory,
which the next projection reads as it is. Results are the same bits in every run and with any number of threads.
:mod:`dgt.ops.operators` calls these functions, and :mod:`dgt.ops.attention` checks the arguments before.
"""

import torch
from torch import Tensor

from dgt.ops.cpu.clustered import cluster_tokens, clustered_attention, write_ids_to
from dgt.ops.cpu.dense import dense, dense_backward
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
from dgt.ops.cpu.structures import Problem

__all__ = [
    "attend_backward",
    "attend_to_residual_keys",
    "attend_to_residual_keys_backward",
    "attend_with_logsumexp",
    "attention",
    "attention_backward",
    "attention_to_residual_keys",
    "cluster_tokens",
    "clustered_attention",
    "dense",
    "dense_backward",
    "group_queries",
    "group_statistics",
    "select_keys",
]


def group_queries(query: Tensor, centroids: Tensor, query_mask: Tensor | None) -> Tensor:
    """Assign (B, H, L, D) queries to the nearest of (H, G, D) centroids: (B, H, L) int64, -1 at padding."""
    centroids = as_centroids(centroids)
    mask = as_mask(query_mask)
    group_ids = query.new_empty(query.shape[:3], dtype=torch.int64)
    problem = describe(query, query)
    problem.groups = centroids.shape[1]
    problem.centroids = centroids.data_ptr()
    problem.query_mask = pointer(mask)
    problem.group_ids = group_ids.data_ptr()
    run("dgt_group_queries", problem)
    return group_ids


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Select the best of (B, H, S, D) keys of every centroid: (B, H, G, min(top_k, S)) int64, then -1 (Eq. 1)."""
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


def attend_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend inside groups (Eq. 2), and the (B, H, L) log-sum-exp of every query; -inf where it sees no key."""
    group_ids = group_ids.contiguous()
    key_ids = key_ids.contiguous()
    bias = None if key_bias is None else key_bias.float().contiguous()
    output = new_tokens(query)
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
    problem = describe(query, key, value, scale, output)
    _set_groups(problem, group_ids, key_ids, logsumexp)
    problem.key_bias = pointer(bias)
    run("dgt_attend", problem)
    return output, logsumexp


def attend_to_residual_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_cluster_ids: Tensor | None,
    residual_keys: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend inside groups, to residual keys as well: output, log-sum-exp, and what the gradients need.

    That is (B, H, G, M, 2, D) residual keys with their values, and (B, H, G, M) biases, in float32.
    """
    ids = (group_ids.contiguous(), key_ids.contiguous())
    clusters = None if key_cluster_ids is None else key_cluster_ids.contiguous()
    output = new_tokens(query)
    problem = describe(query, key, value, scale, output)
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
    pairs, biases = _new_residual_keys(key_ids, query.shape[3], residual_keys)
    _set_groups(problem, *ids, logsumexp)
    _set_residual_keys(problem, clusters, pairs, biases)
    run("dgt_attend", problem)
    return output, logsumexp, pairs, biases


def attention_to_residual_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    key_cluster_ids: Tensor | None,
    residual_keys: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The three steps in one: output, log-sum-exp, groups and keys, residual keys and biases.

    A key that the mask hides must be of cluster -1.
    """
    centroids = as_centroids(centroids)
    query_mask, key_mask = as_mask(query_mask), as_mask(key_mask)
    clusters = None if key_cluster_ids is None else key_cluster_ids.contiguous()
    output = new_tokens(query)
    problem = describe(query, key, value, scale, output)
    lists = (*query.shape[:2], centroids.shape[1], min(top_k, key.shape[2]))
    key_ids = query.new_empty(lists, dtype=torch.int64)
    group_ids = query.new_empty(query.shape[:3], dtype=torch.int64)
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
    pairs, biases = _new_residual_keys(key_ids, query.shape[3], residual_keys)
    problem.centroids = centroids.data_ptr()
    problem.query_mask = pointer(query_mask)
    problem.key_mask = pointer(key_mask)
    _set_groups(problem, group_ids, key_ids, logsumexp)
    _set_residual_keys(problem, clusters, pairs, biases)
    run("dgt_attention", problem)
    return output, logsumexp, group_ids, key_ids, pairs, biases


def attend_to_residual_keys_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    pairs: Tensor,
    biases: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    key_cluster_ids: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in query, key and value, in float32."""
    grad_query, grad_key, grad_value = (
        query.new_empty(shape, dtype=torch.float32) for shape in (query.shape, key.shape, key.shape)
    )
    grad = with_channels_together(grad.to(query.dtype))
    ids = (group_ids.contiguous(), key_ids.contiguous())
    clusters = None if key_cluster_ids is None else key_cluster_ids.contiguous()
    problem = describe(query, key, value, scale, output)
    _set_groups(problem, *ids, logsumexp)
    _set_residual_keys(problem, clusters, pairs, biases)
    problem.grad_output = tokens(grad)
    problem.grad_query = tokens(grad_query)
    problem.grad_key = tokens(grad_key)
    problem.grad_value = tokens(grad_value)
    run("dgt_attend_backward", problem)
    return grad_query, grad_key, grad_value


def group_statistics(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sum the normalized queries of every group, (H, G, D), and count them, (H, G) (Eq. 3 in parts)."""
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


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    num_prefix_tokens: int,
    return_ids: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three steps in one: output, log-sum-exp, groups and keys.

    All but the first are empty without ``return_ids``: ids of few tokens weigh more than the tokens.
    """
    batch, heads, queries, channels = query.shape
    groups, keys = centroids.shape[1], key.shape[2]
    length = num_prefix_tokens + min(top_k, keys - num_prefix_tokens)
    centroids = centroids.to(torch.float32).contiguous()
    output = query.new_empty((batch, queries, heads, channels)).transpose(1, 2)
    of_queries = (batch, heads, queries) if return_ids else (0,)
    of_keys = (batch, heads, groups, length) if return_ids else (0,)
    logsumexp = query.new_empty(of_queries, dtype=torch.float32)
    group_ids = query.new_empty(of_queries, dtype=torch.int64)
    key_ids = query.new_empty(of_keys, dtype=torch.int64)
    problem = describe(query, key, value, scale, output)
    problem.groups = groups
    problem.list_length = length
    problem.prefix = num_prefix_tokens
    problem.centroids = centroids.data_ptr()
    if query_mask is not None:
        query_mask = query_mask.contiguous()
        problem.query_mask = query_mask.data_ptr()
    if key_mask is not None:
        key_mask = key_mask.contiguous()
        problem.key_mask = key_mask.data_ptr()
    if return_ids:
        problem.logsumexp = logsumexp.data_ptr()
        problem.group_ids = group_ids.data_ptr()
        problem.key_ids = key_ids.data_ptr()
    run("dgt_attention", problem)
    return output, logsumexp, group_ids, key_ids


def attend_backward(
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
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    num_prefix_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in query, key, value and key_bias (empty where there is none), in float32.

    The weights are computed again, from the output and the log-sum-exp.
    """
    shapes = (query.shape, key.shape, key.shape, (0,) if key_bias is None else key.shape[:3])
    grad_query, grad_key, grad_value, grad_bias = (
        query.new_empty(shape, dtype=torch.float32) for shape in shapes
    )
    grad = with_channels_together(grad.to(query.dtype))
    bias = None if key_bias is None else key_bias.float().contiguous()
    grad_sums = None if grad_logsumexp is None else grad_logsumexp.float().contiguous()
    ids = (group_ids.contiguous(), key_ids.contiguous())
    masks = as_mask(query_mask), as_mask(key_mask)
    problem = describe(query, key, value, scale, output)
    _set_attended(problem, grad, logsumexp, *ids, *masks, num_prefix_tokens)
    problem.key_bias = pointer(bias)
    problem.grad_logsumexp = pointer(grad_sums)
    problem.grad_query = tokens(grad_query)
    problem.grad_key = tokens(grad_key)
    problem.grad_value = tokens(grad_value)
    problem.grad_key_bias = None if bias is None else grad_bias.data_ptr()
    run("dgt_attend_backward", problem)
    return grad_query, grad_key, grad_value, grad_bias


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    num_prefix_tokens: int,
) -> Tensor:
    """Gradients in query, key and value of one shape, float32, side by side as in one projection: (B, L, 3, H, D)."""
    batch, heads, count, channels = query.shape
    grads = query.new_empty((batch, count, 3, heads, channels), dtype=torch.float32)
    grad_query, grad_key, grad_value = grads.permute(2, 0, 3, 1, 4).unbind(0)
    grad = with_channels_together(grad.to(query.dtype))
    ids = (group_ids.contiguous(), key_ids.contiguous())
    masks = as_mask(query_mask), as_mask(key_mask)
    problem = describe(query, key, value, scale, output)
    _set_attended(problem, grad, logsumexp, *ids, *masks, num_prefix_tokens)
    problem.grad_query = tokens(grad_query)
    problem.grad_key = tokens(grad_key)
    problem.grad_value = tokens(grad_value)
    run("dgt_attend_backward", problem)
    return grads


def _set_attended(
    problem: Problem,
    grad: Tensor,
    logsumexp: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    num_prefix_tokens: int,
) -> None:
    """Describe what a forward pass read and wrote, and the gradient of its output."""
    _set_groups(problem, group_ids, key_ids, logsumexp)
    problem.prefix = num_prefix_tokens
    problem.query_mask = pointer(query_mask)
    problem.key_mask = pointer(key_mask)
    problem.grad_output = tokens(grad)


def _set_groups(problem: Problem, group_ids: Tensor, key_ids: Tensor, logsumexp: Tensor) -> None:
    """Describe groups, their lists, and where the log-sum-exp of every query stands."""
    problem.groups, problem.list_length = key_ids.shape[2:]
    problem.group_ids = group_ids.data_ptr()
    problem.key_ids = key_ids.data_ptr()
    problem.logsumexp = logsumexp.data_ptr()


def _new_residual_keys(key_ids: Tensor, channels: int, count: int) -> tuple[Tensor, Tensor]:
    """Room for residual keys with their values, and for their biases."""
    shape = (*key_ids.shape[:3], count)
    pairs = key_ids.new_empty((*shape, 2, channels), dtype=torch.float32)
    return pairs, key_ids.new_empty(shape, dtype=torch.float32)


def _set_residual_keys(
    problem: Problem, key_cluster_ids: Tensor | None, pairs: Tensor, biases: Tensor
) -> None:
    """Describe clusters of keys, one of all where there are no ids, and their residual keys."""
    problem.key_clusters.count = biases.shape[3]
    if key_cluster_ids is not None:
        write_ids_to(problem.key_clusters, key_cluster_ids)
    problem.residual_keys = pairs.data_ptr()
    problem.residual_biases = biases.data_ptr()
