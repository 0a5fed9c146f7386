"""The settings of attention calls as backends get them: checked and complete."""

from typing import NamedTuple

from torch import Tensor


class AttentionCall(NamedTuple):
    """The settings of :func:`dgt.dynamic_group_attention`."""

    top_k: int
    scale: float
    key_mask: Tensor | None = None  # bool (B, S)
    num_prefix_tokens: int = 0
    residual_keys: int = 0
    key_cluster_ids: Tensor | None = None  # (B, H, S) int64
    return_ids: bool = True


class ClusteredCall(NamedTuple):
    """The settings of :func:`dgt.clustered_attention`."""

    num_groups: int
    top_k: int
    residual_keys: int
    num_prefix_tokens: int
    scale: float
    key_mask: Tensor | None  # bool (B, S)
    share_key_clusters: bool
