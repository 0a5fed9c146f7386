"""Dynamic Group Attention as pure functions of tensors (section 3.1 of the paper).

Letters used in every docstring, einsum string and test of the project: B batch, H heads, L tokens,
D channels per head, G groups, K selected keys (``top_k``), N_j queries in group j.
"""

from dgt.ops.attention import (
    DynamicGroupAttentionOutput,
    attend,
    attend_with_logsumexp,
    dynamic_group_attention,
    merge_attention,
)
from dgt.ops.clustered import clustered_attention
from dgt.ops.clusters import Clusters, cluster_tokens
from dgt.ops.dense import dense_attention
from dgt.ops.group_matmul import group_matmul
from dgt.ops.grouping import find_centroids, group_queries, seed_centroids, update_centroids
from dgt.ops.selection import select_keys

__all__ = [
    "Clusters",
    "DynamicGroupAttentionOutput",
    "attend",
    "attend_with_logsumexp",
    "cluster_tokens",
    "clustered_attention",
    "dense_attention",
    "dynamic_group_attention",
    "find_centroids",
    "group_matmul",
    "group_queries",
    "merge_attention",
    "seed_centroids",
    "select_keys",
    "update_centroids",
]
