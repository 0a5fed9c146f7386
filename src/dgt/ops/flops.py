"""Floating-point operations of the operators, for ``torch.utils.flop_counter``.

They follow from shapes; a multiply-add counts as two.

DG-Attention is 2 k L C + 2 L G C multiply-adds, and choosing the keys counts k G log2(L) a head
more, as in the paper. Every operator registers its formula where it is defined, in plain PyTorch
and in Triton alike.
"""

import math
from typing import Any


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
