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
from dgt.ops.cpu.structures import Problem, TokenClusters
from dgt.ops.lloyd import EVERY, STEPS, sample_distance, spread_out


def cluster_tokens(
    tokens: Tensor, num_clusters: int, steps: int, every: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As :func:`dgt.ops.lloyd.cluster_tokens`."""
    mask = as_mask(mask)
    batch, heads, count, channels = tokens.shape
    centroids = tokens.new_empty((batch, heads, num_clusters, channels), dtype=torch.float32)
    ids = tokens.new_empty((batch, heads, count), dtype=torch.int64)
    order = _order(tokens.shape[2], mask)
    problem = describe(tokens, tokens)
    problem.query_mask = pointer(mask)
    problem.query_clusters = _describe_clusters(num_clusters, steps, every, order)
    problem.query_clusters.centroids = centroids.data_ptr()
    write_ids_to(problem.query_clusters, ids)
    run("dgt_cluster_tokens", problem)
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
    query_mask, key_mask = as_mask(query_mask), as_mask(key_mask)
    keys = key.shape[2] - num_prefix_tokens
    output = new_tokens(query)
    problem = describe(query, key, value, scale, output)
    problem.prefix = num_prefix_tokens
    problem.list_length = num_prefix_tokens + min(top_k, keys)
    problem.first_order = first_order
    problem.query_mask = pointer(query_mask)
    problem.key_mask = pointer(key_mask)
    order_of_queries = _set_clusters(problem, "query_clusters", num_groups, query_mask)
    order_of_keys = _set_clusters(problem, "key_clusters", residual_keys, key_mask)
    run("dgt_clustered_attention", problem)
    del order_of_queries, order_of_keys  # until here the kernel reads them
    return output


def _set_clusters(problem: Problem, name: str, count: int, mask: Tensor | None) -> Tensor:
    """Let the kernel cluster queries or keys after the prefix; returns what must stay alive until it has."""
    prefix = problem.prefix
    behind = (problem.queries if name == "query_clusters" else problem.keys) - prefix
    order = _order(behind, None if mask is None else mask[:, prefix:])
    every = sample_distance(behind, max(1, count), EVERY)
    setattr(problem, name, _describe_clusters(count, STEPS, every, order))
    return order


def _describe_clusters(count: int, steps: int, every: int, order: Tensor) -> TokenClusters:
    clusters = TokenClusters()
    clusters.count = count
    clusters.steps = steps
    clusters.every = every
    clusters.order = order.data_ptr()
    clusters.order_image_stride = order.shape[1] if len(order) > 1 else 0
    return clusters


def write_ids_to(clusters: TokenClusters, ids: Tensor) -> None:
    """Let clusters have their (B, H, N) int64 ids there."""
    clusters.ids = ids.data_ptr()
    clusters.ids_image_stride, clusters.ids_head_stride = ids.stride()[:2]


def _order(count: int, mask: Tensor | None) -> Tensor:
    """Token numbers spread evenly as the kernels read them: (B or 1, N) int32."""
    if mask is None:
        return _order_of_all(count)
    return spread_out(count, mask, mask.device)[0].to(torch.int32)


@functools.lru_cache(maxsize=64)
def _order_of_all(count: int) -> Tensor:
    return spread_out(count, None, torch.device("cpu"))[0].to(torch.int32)
