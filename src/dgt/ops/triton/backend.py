"""The steps of the backend ``"triton"``, as :mod:`dgt.ops.backends` asks for them."""

import math

import torch
from torch import Tensor

from dgt.ops import lloyd
from dgt.ops.calls import AttentionCall
from dgt.ops.checks import check_no_nan
from dgt.ops.prefix import join_prefix, prepend_prefix
from dgt.ops.triton import operators
from dgt.ops.triton.launch import MAX_CHANNELS

__all__ = [
    "attend",
    "attend_with_logsumexp",
    "attention",
    "cluster_tokens",
    "group_matmul",
    "group_queries",
    "group_statistics",
    "move_centroids",
    "select_keys",
    "summarize_clusters",
    "summarize_unselected",
]

group_matmul = operators.group_matmul
move_centroids = operators.move_centroids


def group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """As :func:`dgt.ops.torch_ops.group_queries`."""
    check_no_nan("query", query)
    group_ids: Tensor = operators.group_queries(query.detach(), centroids.detach(), key_mask)
    return group_ids


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """As :func:`dgt.ops.torch_ops.select_keys`."""
    key_ids: Tensor = operators.select_keys(centroids.detach(), key.detach(), top_k, key_mask)
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
    """As :func:`dgt.ops.torch_ops.attend`; with a ``key_bias`` without gradients."""
    output: Tensor = operators.attend(
        query, key, value, group_ids, key_ids, float(scale), key_bias
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
    """As :func:`dgt.ops.torch_ops.attend_with_logsumexp`; without gradients."""
    output, sums, *_ = operators.attend(
        query, key, value, group_ids, key_ids, float(scale), key_bias
    )
    return output, sums * math.log(2)  # kernels count in powers of two


def group_statistics(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """As :func:`dgt.ops.torch_ops.group_statistics`, but deterministic."""
    found = operators.group_statistics(query.detach(), group_ids, num_groups)
    return found[..., :-1], found[..., -1]


def cluster_tokens(
    tokens: Tensor, num_clusters: int, steps: int, every: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As :func:`dgt.ops.lloyd.cluster_tokens`, but deterministic."""
    return lloyd.cluster_tokens_by(_sum_members, tokens, num_clusters, steps, every, mask)


def _sum_members(x: Tensor, ids: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """As :func:`dgt.ops.lloyd.sum_members`; concatenated heads may have more channels than kernels take."""
    parts = [operators.sum_groups(part, ids, num_clusters) for part in x.split(MAX_CHANNELS, 3)]
    return torch.cat([part[..., :-1] for part in parts], dim=3), parts[0][..., -1]


def summarize_clusters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_cluster_ids: Tensor,
    num_clusters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`dgt.ops.residual_keys.summarize_clusters`, in the keys' type and without gradients."""
    rest_key, rest_value, bias = operators.summarize_clusters(
        query, key, value, group_ids, key_ids, float(scale), key_cluster_ids, num_clusters
    )
    empty = bias.isneginf()
    return rest_key, rest_value, bias.masked_fill(empty, 0.0), empty


def summarize_unselected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`dgt.ops.remainder.summarize_unselected`: all real keys are one cluster."""
    clusters = torch.zeros(key.shape[:3], dtype=torch.int64, device=key.device)
    if key_mask is not None:
        clusters = clusters.masked_fill(~key_mask[:, None], -1)
    rest = summarize_clusters(query, key, value, group_ids, key_ids, scale, clusters, 1)
    rest_key, rest_value, bias, empty = (tensor.squeeze(3) for tensor in rest)
    return rest_key, rest_value, bias, empty


def attention(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The three steps in one operator, or None where it does not take the call.

    That is where queries and keys are of different tokens, where a prefix may be padding, or with
    residual keys for clusters of keys.
    """
    prefix, key_mask = call.num_prefix_tokens, call.key_mask
    if query.shape != key.shape or (prefix > 0 and key_mask is not None):
        return None
    if call.key_cluster_ids is not None:
        return None
    check_no_nan("query", query)
    output, _, group_ids, key_ids, *_ = torch.ops.dgt.triton_attention(
        query[:, :, prefix:],
        key,
        value,
        centroids.detach(),
        call.top_k,
        float(call.scale),
        key_mask,
        call.residual_keys > 0,
    )
    if prefix:
        output, group_ids = join_prefix(output, group_ids, query, key, value, call.scale, key_mask)
    return output, group_ids, prepend_prefix(key_ids, prefix, key_mask)
