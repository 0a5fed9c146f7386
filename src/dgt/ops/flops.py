"""Floating-point operations of the operators, for ``torch.utils.flop_counter``.

They follow from shapes; a multiply-add counts as two.

DG-Attention is 2 k L C + 2 L G C multiply-adds, and choosing the keys counts k G log2(L) a head
more, as in the paper. Every operator registers its formula where it is defined, for all backends
alike. A formula gets the arguments of a call by name, with shapes in the place of tensors.
"""

import math
from types import SimpleNamespace

from dgt.ops.lloyd import EVERY, STEPS, sample_distance


def group_queries(call: SimpleNamespace) -> int:
    """Every query against every centroid: L G C."""
    return 2 * math.prod(call.query) * int(call.centroids[1])


def select_keys(call: SimpleNamespace) -> int:
    """Every key against every centroid, L G C, and the choice of the largest, k G log2(L)."""
    batch, heads, tokens, _ = call.key
    groups = int(call.centroids[1])
    choice = min(call.top_k, tokens) * groups * math.log2(tokens)
    return 2 * math.prod(call.key) * groups + 2 * batch * heads * round(choice)


def attend(call: SimpleNamespace) -> int:
    """Two products of every query with the keys of its group, 2 k L C, residual keys among them, and for these three of
    every group with all keys.
    """
    listed = int(call.key_ids[3]) + call.residual_keys
    summed = summarize_clusters(call) if call.residual_keys else 0
    return 4 * math.prod(call.query) * listed + summed


def attend_backward(call: SimpleNamespace) -> int:
    """Five products of every query with the keys of its group; with residual keys seven of every group with all keys:
    with e and dv' two each, and one for each gradient.
    """
    listed = int(call.key_ids[3]) + call.residual_keys
    summed = 14 * math.prod(call.key) * int(call.key_ids[2]) if call.residual_keys else 0
    return 10 * math.prod(call.query) * listed + summed


def attention(call: SimpleNamespace) -> int:
    """The three steps together."""
    attended = 4 * math.prod(call.query) * (min(call.top_k, call.key[2]) + call.residual_keys)
    summed = 6 * math.prod(call.key) * int(call.centroids[1]) if call.residual_keys else 0
    return group_queries(call) + select_keys(call) + attended + summed


def dense(call: SimpleNamespace) -> int:
    """Two products of every query with all keys."""
    return 4 * math.prod(call.query) * int(call.key[2])


def dense_backward(call: SimpleNamespace) -> int:
    """Five products of every query with all keys."""
    return 10 * math.prod(call.query) * int(call.key[2])


def group_statistics(call: SimpleNamespace) -> int:
    """Squares and sums of the queries."""
    return 2 * math.prod(call.query)


def sum_groups(call: SimpleNamespace) -> int:
    """Sums of the tokens."""
    return math.prod(call.tokens)


def summarize_clusters(call: SimpleNamespace) -> int:
    """Three products of every group with all keys."""
    return 6 * math.prod(call.key) * int(call.key_ids[2])


def group_matmul(call: SimpleNamespace) -> int:
    """One product of every query with the keys of its group: k L C."""
    channels = call.left[3] if call.form in (1, 3) else call.right[3]
    return 2 * math.prod(call.group_ids) * int(call.key_ids[3]) * int(channels)


def cluster_tokens(call: SimpleNamespace) -> int:
    """Every token with every centroid once, and those of the sample in every step on it."""
    return clustering(call.tokens, call.num_clusters, call.steps, call.every)


def clustering(
    shape: tuple[int, ...], num_clusters: int, steps: int = STEPS, every: int = EVERY
) -> int:
    """The same for tokens of a (B, H, N, D) shape."""
    passes = 1 + steps / sample_distance(shape[2], num_clusters, every)
    return round(2 * math.prod(shape) * num_clusters * passes)


def clustered_attention(call: SimpleNamespace) -> int:
    """Clusters, and distances from their centers; scores and two sums of every group; two products of every query with
    its list; the prefix. To first order, covariances of keys with values from a quarter of the keys, one of every
    group, and one product of every query with it.
    """
    batch, heads, tokens, channels = call.query
    key_heads, all_keys = int(call.key[1]), int(call.key[2])
    prefix, groups, residual_keys = call.num_prefix_tokens, call.num_groups, call.residual_keys
    queries, keys = tokens - prefix, all_keys - prefix
    passes = 1 if residual_keys == 0 else 3
    listed = prefix + min(call.top_k, keys) + residual_keys
    total = clustering((batch, heads, queries, channels), groups)
    if residual_keys > 0:
        total += 4 * batch * key_heads * keys * channels
    if residual_keys > 1:
        total += clustering((batch, key_heads, keys, channels), residual_keys)
    pairs = passes * groups * keys + 2 * queries * listed + 2 * prefix * all_keys
    if call.first_order:
        total += batch * key_heads * keys * channels * channels // 2
        pairs += (groups * residual_keys + queries) * channels
    return int(total + 2 * batch * heads * channels * pairs)


def single_numbers(call: SimpleNamespace) -> int:
    """None, as PyTorch counts functions of single numbers and their normalization."""
    return 0


def depthwise(call: SimpleNamespace) -> int:
    """Every number of the map against nine taps, as PyTorch counts the convolution."""
    return 18 * math.prod(call.input)


def depthwise_backward(call: SimpleNamespace) -> int:
    """Twice as many: for the input, and for the taps."""
    return 2 * depthwise(call)
