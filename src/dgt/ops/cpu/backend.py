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
    new_residual,
    new_tokens,
    pointer,
    run,
    set_gradients,
    tokens,
    with_channels_together,
)
from dgt.ops.cpu.structures import Problem
from dgt.ops.gradients import new_gradients, split_gradients

__all__ = [
    "attend",
    "attend_backward",
    "attention",
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
    """Attend inside groups (Eq. 2), to M residual keys as well, of given clusters or, without ids, of all keys.

    Returns the output, the (B, H, L) log-sum-exp of every query, -inf where it sees no key, and :func:`new_residual`.
    """
    group_ids = group_ids.contiguous()
    key_ids = key_ids.contiguous()
    bias = None if key_bias is None else key_bias.float().contiguous()
    clusters = None if key_cluster_ids is None else key_cluster_ids.contiguous()
    output = new_tokens(query)
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
    residual = new_residual(query, key_ids.shape[2], residual_keys)
    problem = describe(query, key, value, scale, output)
    _set_groups(problem, group_ids, key_ids, logsumexp)
    problem.key_bias = pointer(bias)
    problem.key_clusters.count = residual_keys
    if clusters is not None:
        write_ids_to(problem.key_clusters, clusters)
    if residual_keys:
        _write_residual_keys_to(problem, residual)
    run("dgt_attend", problem)
    return output, logsumexp, residual


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
    """The three steps in one: output, log-sum-exp, groups and keys, and :func:`new_residual`.

    All but the first are empty without ``return_ids``: ids of few tokens weigh more than the tokens.
    """
    batch, heads, queries, channels = query.shape
    groups = centroids.shape[1]
    length = num_prefix_tokens + min(top_k, key.shape[2] - num_prefix_tokens)
    centroids = centroids.to(torch.float32).contiguous()
    output = query.new_empty((batch, queries, heads, channels)).transpose(1, 2)
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
    wants_ids = return_ids or residual_keys > 0  # which the kernel sums up by groups and lists
    of_queries = (batch, heads, queries) if wants_ids else (0,)
    of_keys = (batch, heads, groups, length) if wants_ids else (0,)
    group_ids = query.new_empty(of_queries, dtype=torch.int64)
    key_ids = query.new_empty(of_keys, dtype=torch.int64)
    logsumexp = query.new_empty(of_queries if return_ids else (0,), dtype=torch.float32)
    if wants_ids:
        problem.group_ids = group_ids.data_ptr()
        problem.key_ids = key_ids.data_ptr()
    if return_ids:
        problem.logsumexp = logsumexp.data_ptr()
    elements = batch * heads * groups * residual_keys * (2 * channels + 1) if return_ids else 0
    residual = query.new_empty(elements, dtype=torch.float32)
    problem.key_clusters.count = residual_keys
    if key_cluster_ids is not None:
        key_cluster_ids = key_cluster_ids.contiguous()
        write_ids_to(problem.key_clusters, key_cluster_ids)
    if elements:
        _write_residual_keys_to(problem, residual)
    run("dgt_attention", problem)
    if wants_ids and not return_ids:
        group_ids, key_ids = group_ids.new_empty(0), key_ids.new_empty(0)
    return output, logsumexp, group_ids, key_ids, residual


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
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    num_prefix_tokens: int,
    residual_keys: int,
) -> tuple[Tensor, Tensor]:
    """Gradients in query, key and value (:mod:`dgt.ops.gradients`), and in key_bias, empty where there is none.

    The weights are computed again, from the output and the log-sum-exp; sums are in float32.
    """
    grads = new_gradients(query, key)
    grad_query, grad_key, grad_value = split_gradients(grads, query.shape, key.shape)
    of_bias = (0,) if key_bias is None else key_bias.shape
    grad_bias = query.new_empty(of_bias, dtype=torch.float32)
    grad = with_channels_together(grad.to(query.dtype))
    bias = None if key_bias is None else key_bias.float().contiguous()
    grad_sums = None if grad_logsumexp is None else grad_logsumexp.float().contiguous()
    group_ids, key_ids = group_ids.contiguous(), key_ids.contiguous()
    clusters = None if key_cluster_ids is None else key_cluster_ids.contiguous()
    query_mask, key_mask = as_mask(query_mask), as_mask(key_mask)
    problem = describe(query, key, value, scale, output)
    _set_groups(problem, group_ids, key_ids, logsumexp)
    problem.key_clusters.count = residual_keys
    if clusters is not None:
        write_ids_to(problem.key_clusters, clusters)
    if residual_keys:
        _write_residual_keys_to(problem, residual)
    problem.prefix = num_prefix_tokens
    problem.query_mask = pointer(query_mask)
    problem.key_mask = pointer(key_mask)
    problem.key_bias = pointer(bias)
    problem.grad_output = tokens(grad)
    problem.grad_logsumexp = pointer(grad_sums)
    set_gradients(problem, grad_query, grad_key, grad_value)
    problem.grad_key_bias = None if bias is None else grad_bias.data_ptr()
    run("dgt_attend_backward", problem)
    return grads, grad_bias


def _set_groups(problem: Problem, group_ids: Tensor, key_ids: Tensor, logsumexp: Tensor) -> None:
    """Describe groups, their lists, and where the log-sum-exp of every query stands."""
    problem.groups, problem.list_length = key_ids.shape[2:]
    problem.group_ids = group_ids.data_ptr()
    problem.key_ids = key_ids.data_ptr()
    problem.logsumexp = logsumexp.data_ptr()


def _write_residual_keys_to(problem: Problem, residual: Tensor) -> None:
    """Let the kernel write residual keys and their biases there, or read them."""
    each = 2 * problem.channels + 1
    biases = residual.numel() // each * (each - 1)
    problem.residual_keys = residual.data_ptr()
    problem.residual_biases = residual[biases:].data_ptr()
