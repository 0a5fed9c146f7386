"""Floating-point operations of the operators, for ``torch.utils.flop_counter``.

They follow from shapes; a multiply-add counts as two.

DG-Attention is 2 k L C + 2 L G C multiply-adds, and choosing the keys counts k G log2(L) a head
more, as in the paper. Every operator registers its formula where it is defined, in plain PyTorch
and in Triton alike.
"""

import math
from typing import Any

from dgt.ops.lloyd import EVERY, STEPS, sample_distance


def group_queries(query: Any, centroids: Any, *_: Any, **__: Any) -> int:
    """Every query against every centroid: L G C."""
    return 2 * math.prod(query) * int(centroids[1])


def select_keys(centroids: Any, key: Any, top_k: int, *_: Any, **__: Any) -> int:
    """Every key against every centroid, L G C, and the choice of the largest, k G log2(L)."""
    choice = min(top_k, key[2]) * int(centroids[1]) * math.log2(key[2])
    return 2 * math.prod(key) * int(centroids[1]) + 2 * key[0] * key[1] * round(choice)


def attend(
    query: Any, key: Any, value: Any, group_ids: Any, key_ids: Any, *_: Any, **__: Any
) -> int:
    """Two products of every query with the keys of its group: 2 k L C."""
    return 4 * math.prod(query) * int(key_ids[3])


def attend_backward(
    grad: Any,
    grad_logsumexp: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    *rest: Any,
    **__: Any,
) -> int:
    """Five products of every query with the keys of its group."""
    return 10 * math.prod(query) * int(rest[2][3])


def attention_backward(
    grad: Any, query: Any, key: Any, value: Any, output: Any, *rest: Any, **__: Any
) -> int:
    """The same."""
    return 10 * math.prod(query) * int(rest[2][3])


def attend_to_residual_keys(
    query: Any,
    key: Any,
    value: Any,
    group_ids: Any,
    key_ids: Any,
    scale: float,
    key_cluster_ids: Any,
    residual_keys: int,
    **__: Any,
) -> int:
    """Two products of every query with its list and the residual keys, three of every group with all keys."""
    listed = (*key_ids[:3], int(key_ids[3]) + residual_keys)
    summed = summarize_clusters(query, key, value, group_ids, key_ids)
    return attend(query, key, value, group_ids, listed) + summed


def attention_to_residual_keys(
    query: Any,
    key: Any,
    value: Any,
    centroids: Any,
    top_k: int,
    scale: float,
    key_mask: Any,
    key_cluster_ids: Any,
    residual_keys: int,
    **__: Any,
) -> int:
    """Groups and lists, and then the same."""
    lists = (*query[:2], int(centroids[1]), min(top_k, key[2]))
    chosen = group_queries(query, centroids) + select_keys(centroids, key, top_k)
    return chosen + attend_to_residual_keys(
        query, key, value, None, lists, 1.0, None, residual_keys
    )


def attend_to_residual_keys_backward(
    grad: Any, query: Any, key: Any, value: Any, output: Any, *rest: Any, **__: Any
) -> int:
    """Five products of every query, and seven of every group: with e and dv' two each, and one for each gradient."""
    _logsumexp, _pairs, biases, _group_ids, key_ids, *_ = rest
    listed = int(key_ids[3]) + int(biases[3])
    return 10 * math.prod(query) * listed + 14 * math.prod(key) * int(key_ids[2])


def dense(query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Two products of every query with all keys."""
    return 4 * math.prod(query) * int(key[2])


def dense_backward(grad: Any, query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Five products of every query with all keys."""
    return 10 * math.prod(query) * int(key[2])


def group_statistics(query: Any, *_: Any, **__: Any) -> int:
    """Squares and sums of the queries."""
    return 2 * math.prod(query)


def sum_groups(tokens: Any, *_: Any, **__: Any) -> int:
    """Sums of the tokens."""
    return math.prod(tokens)


def summarize_clusters(
    query: Any, key: Any, value: Any, group_ids: Any, key_ids: Any, *_: Any, **__: Any
) -> int:
    """Three products of every group with all keys."""
    return 6 * math.prod(key) * int(key_ids[2])


def attention(
    query: Any, key: Any, value: Any, centroids: Any, top_k: int, *_: Any, **__: Any
) -> int:
    """The three steps together."""
    chosen = (*query[:2], int(centroids[1]), min(top_k, key[2]))
    steps = group_queries(query, centroids), select_keys(centroids, key, top_k)
    return sum(steps) + attend(query, key, value, None, chosen)


def group_matmul(
    form: int, left: Any, right: Any, group_ids: Any, key_ids: Any, *_: Any, **__: Any
) -> int:
    """One product of every query with the keys of its group: k L C."""
    channels = left[3] if form in (1, 3) else right[3]
    return 2 * math.prod(group_ids) * int(key_ids[3]) * int(channels)


def cluster_tokens(
    shape: Any, num_clusters: int, steps: int = STEPS, every: int = EVERY, *_: Any, **__: Any
) -> int:
    """Every token with every centroid once, and those of the sample in every step on it."""
    passes = 1 + steps / sample_distance(shape[2], num_clusters, every)
    return round(2 * math.prod(shape) * num_clusters * passes)


def clustered_attention(
    query: Any,
    key: Any,
    value: Any,
    num_groups: int,
    top_k: int,
    residual_keys: int,
    num_prefix_tokens: int,
    scale: float,
    key_mask: Any,
    share_key_clusters: bool,
    first_order: bool,
    *_: Any,
    **__: Any,
) -> int:
    """Clusters, and distances from their centers; scores and two sums of every group; two products of every query with
    its list; the prefix. To first order, covariances of keys with values from a quarter of the keys, one of every
    group, and one product of every query with it.
    """
    batch, heads, tokens, channels = query
    queries, keys = tokens - num_prefix_tokens, int(key[2]) - num_prefix_tokens
    product = 2 * batch * heads * channels
    passes = 1 if residual_keys == 0 else 3
    listed = num_prefix_tokens + min(top_k, keys) + residual_keys
    total = cluster_tokens((batch, heads, queries, channels), num_groups)
    if residual_keys > 0:
        total += 4 * batch * int(key[1]) * keys * channels
    if residual_keys > 1:
        total += cluster_tokens((batch, int(key[1]), keys, channels), residual_keys)
    pairs = passes * num_groups * keys + 2 * queries * listed + 2 * num_prefix_tokens * int(key[2])
    if first_order:
        total += batch * int(key[1]) * keys * channels * channels // 2
        pairs += (num_groups * residual_keys + queries) * channels
    return total + product * pairs
