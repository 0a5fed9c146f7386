"""Clusters of tokens, and attention in groups with residual keys, on the native kernels; forward only."""

import functools

import torch
from torch import Tensor

from dgt.ops.cpu.interface import (
    as_mask,
    describe,
    new_tokens,
    pointer,
    run,
)
from dgt.ops.cpu.structures import TokenClusters
from dgt.ops.lloyd import EVERY, STEPS, sample_distance, spread_out


def cluster_tokens(
    tokens: Tensor, num_clusters: int, steps: int, every: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As :func:`dgt.ops.lloyd.cluster_tokens`."""
    mask = as_mask(mask)
    batch, heads, count, channels = tokens.shape
    centroids = tokens.new_empty((batch, heads, num_clusters, channels), dtype=torch.float32)
    ids = tokens.new_empty((batch, heads, count), dtype=torch.int64)
    problem = describe(tokens, tokens)
    problem.query_mask = pointer(mask)
    order = _set_clusters(problem.query_clusters, num_clusters, steps, every, count, mask)
    problem.query_clusters.centroids = centroids.data_ptr()
    write_ids_to(problem.query_clusters, ids)
    run("dgt_cluster_tokens", problem)
    del order  # until here the kernel reads it
    return centroids, ids


def clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_groups: int,
    top_k: int,
    residual_keys: int,
    num_prefix_tokens: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    first_order: bool,
) -> Tensor:
    """All steps of :func:`dgt.clustered_attention` in one."""
    queries, keys = query.shape[2] - num_prefix_tokens, key.shape[2] - num_prefix_tokens
    output = new_tokens(query)
    problem = describe(query, key, value, scale, output)
    problem.prefix = num_prefix_tokens
    problem.list_length = num_prefix_tokens + min(top_k, keys)
    problem.first_order = first_order
    real_queries = real_keys = None
    if query_mask is not None:
        query_mask = query_mask.contiguous()
        problem.query_mask = query_mask.data_ptr()
        real_queries = query_mask[:, num_prefix_tokens:]
    if key_mask is not None:
        key_mask = key_mask.contiguous()
        problem.key_mask = key_mask.data_ptr()
        real_keys = key_mask[:, num_prefix_tokens:]
    every = sample_distance(queries, num_groups, EVERY)
    of_queries = _set_clusters(
        problem.query_clusters, num_groups, STEPS, every, queries, real_queries
    )
    every = sample_distance(keys, max(1, residual_keys), EVERY)
    of_keys = _set_clusters(problem.key_clusters, residual_keys, STEPS, every, keys, real_keys)
    run("dgt_clustered_attention", problem)
    del of_queries, of_keys, query_mask, key_mask  # until here the kernel reads them
    return output


def _set_clusters(
    clusters: TokenClusters, count: int, steps: int, every: int, tokens: int, mask: Tensor | None
) -> Tensor:
    """Let the kernel cluster tokens; returns what must stay alive until it has."""
    order = _order_of_all(tokens) if mask is None else _order_of_real(mask)
    clusters.count = count
    clusters.steps = steps
    clusters.every = every
    clusters.order = order.data_ptr()
    clusters.order_image_stride = order.shape[1] if len(order) > 1 else 0
    return order


def write_ids_to(clusters: TokenClusters, ids: Tensor) -> None:
    """Let clusters have their (B, H, N) int64 ids there."""
    clusters.ids = ids.data_ptr()
    clusters.ids_image_stride, clusters.ids_head_stride = ids.stride()[:2]


def _order_of_real(mask: Tensor) -> Tensor:
    """Token numbers spread evenly, as the kernels read them, those that a mask (B, N) hides last:
    (B, N) int32.
    """
    return spread_out(mask.shape[1], mask, mask.device)[0].to(torch.int32)


@functools.lru_cache(maxsize=64)
def _order_of_all(count: int) -> Tensor:
    """As :func:`_order_of_real` where all are real: (1, N) int32."""
    return spread_out(count, None, torch.device("cpu"))[0].to(torch.int32)
