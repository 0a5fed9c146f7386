"""What residual keys lose to first order, added: for queries that are apart from the mean of their group.

Let delta = q - m, and p the weights of the keys U that a group left of a cluster for its mean query m. A residual key
(:mod:`dgt.ops.residual_keys`) carries their mean value v', and their mass to first order in delta. With the center and
the covariance of the cluster, C = mean (k - center)(v - center)^T, the same for all groups and estimated from one in
``SAMPLED`` members, the next terms are

    mass:    h t added to its score,   h = s^2 |delta|^2 / 2 D,   t = sum_U p |k - k'|^2, the spread of U
    values:  s w J^T delta,            J = sum over clusters of (Z / sum Z) (t / spread of the cluster) C

with w the weight that the query gives to all residual keys, Z = sum_U exp(s m.k), h at most 1 over the largest t, and
ratios of spreads at most ``MOST_SPREAD``. Both vanish where q = m, and where nothing is left out.

Scores and weights are those of attention in groups with one channel more: queries have h there and residual keys t;
values have 0 and those of residual keys 1, which makes the output there w.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops.checks import full_precision, wide_type
from dgt.ops.dispatch import Steps
from dgt.ops.residual_keys import (
    append_residual_keys,
    cut_into_blocks,
    gather_blocks,
    sort_by_cluster,
    sum_blocks,
    sum_groups,
)

SAMPLED = 4  # one in so many members, for covariances
LEAST = 1e-12  # spread, so that gradients are finite where there is none
MOST_SPREAD = 2.0  # of what is left of a cluster, relative to all of it


def attend_to_first_order(
    steps: Steps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    *,
    scale: float,
    cluster_ids: Tensor,
    count: int,
) -> Tensor:
    """Attend inside groups, to M residual keys as well, with what these lose to first order.

    Args:
        steps: the backend's.
        query: (B, H, L, D).
        key, value: (B, H, S, D).
        group_ids: (B, H, L) int64, -1 for queries of no group.
        key_ids: (B, H, G, K) int64, -1 for an empty place.
        scale: factor on the scores, s.
        cluster_ids: (B, H, S) int64; a key of cluster -1 is part of no residual key.
        count: M.

    Returns:
        (B, H, L, D), zero where a query sees no key.
    """
    dtype, groups = query.dtype, key_ids.shape[2]
    query, key, value = (tokens.to(wide_type(dtype)) for tokens in (query, key, value))
    with full_precision(query.device):
        key_centers = _centers(key, cluster_ids, count)
        value_centers = _centers(value, cluster_ids, count)
        apart = key - _of(key_centers, cluster_ids)
        squares = apart.square().sum(-1, keepdim=True)
        spread = _centers(squares, cluster_ids, count)[..., 0]  # (B, H, M)
        covariance = _covariances(
            apart, value - _of(value_centers, cluster_ids), cluster_ids, count
        )

        wide = (F.pad(query, (0, 1)), F.pad(key, (0, 1)), torch.cat([value, squares], -1))
        residual = steps.summarize_clusters(
            *wide,
            group_ids,
            key_ids,
            scale=scale,
            key_cluster_ids=cluster_ids,
            residual_keys=count,
        )
        rest_key, rest_value, bias, empty = residual  # (B, H, G, M, D + 1), (B, H, G, M)
        rest_key, rest_value, rest_square = (
            rest_key[..., :-1],
            rest_value[..., :-1],
            rest_value[..., -1],
        )
        moved = (rest_key - key_centers[:, :, None]).square().sum(-1)
        left = (rest_square - moved).clamp(min=0.0).masked_fill(empty, 0.0)  # t

        means = _centers(query, group_ids, groups)
        delta = query - _of(means, group_ids)
        mass = (bias + scale * (rest_key @ means[..., None])[..., 0]).masked_fill(empty, -torch.inf)
        mass = mass.masked_fill(empty.all(-1, keepdim=True), 0.0).softmax(-1)
        ratio = (left / spread[:, :, None].clamp(min=LEAST)).clamp(max=MOST_SPREAD)
        mixed = torch.einsum("bhgm,bhmde->bhgde", mass * ratio, covariance)  # J

        most = scale**2 * _of(left.amax(-1, keepdim=True), group_ids)[..., 0]
        height = torch.minimum(
            delta.square().sum(-1) / (2 * query.shape[-1]), 1.0 / most.clamp(min=LEAST)
        )
        wide_query = torch.cat([query, scale * height[..., None]], -1)
        rest = (
            torch.cat([rest_key, left[..., None]], -1),
            torch.cat([rest_value, torch.ones_like(left)[..., None]], -1),
        )
        more = append_residual_keys(
            F.pad(key, (0, 1)), F.pad(value, (0, 1)), key_ids, (*rest, bias, empty)
        )
        output: Tensor = steps.attend(
            wide_query,
            more.key,
            more.value,
            group_ids,
            more.key_ids,
            scale,
            key_bias=more.key_bias,
        )
        lost = _times_matrix_of_group(delta, mixed, group_ids)
        return (output[..., :-1] + scale * output[..., -1:] * lost).to(dtype)


def _centers(tokens: Tensor, ids: Tensor, count: int) -> Tensor:
    """The means of the (B, H, N, D) tokens of every group or cluster, (B, H, M, D); zero where there are none."""
    sums, counts = sum_groups(tokens.flatten(0, 1)[None], ids.flatten(0, 1)[None], count)
    return (sums / counts.clamp(min=1)[..., None]).unflatten(0, tokens.shape[:2])


def _of(rows: Tensor, ids: Tensor) -> Tensor:
    """The row (B, H, N, D) of every token's group or cluster, of (B, H, M, D); the first for tokens of none."""
    return torch.take_along_dim(rows, ids.clamp(min=0)[..., None], 2)


def _covariances(key: Tensor, value: Tensor, cluster_ids: Tensor, count: int) -> Tensor:
    """(B, H, M, D, D) covariances of centered keys with values, of the first of every ``SAMPLED`` members."""
    ids = cluster_ids.flatten(0, 1)
    order, starts, _ = sort_by_cluster(ids, count)
    place = torch.arange(ids.shape[1], device=ids.device) - starts.gather(
        -1, ids.gather(-1, order).clamp(min=0)
    )
    is_sampled = torch.zeros_like(ids, dtype=torch.bool).scatter(-1, order, place % SAMPLED == 0)
    sampled = ids.where(is_sampled, -1)
    blocks = cut_into_blocks(sampled, count)
    rows = [gather_blocks(tokens.flatten(0, 1), blocks) for tokens in (key, value)]
    products = (rows[0] * blocks.real[..., None]).mT @ rows[1]  # (B H, R, D, D)
    sums = sum_blocks(products, blocks, count).transpose(1, 2)  # of (N, D, M, D)
    ones = torch.ones_like(key[..., :1])
    members = sum_groups(ones.flatten(0, 1)[None], sampled[None], count)[1]
    covariance = sums / members.clamp(min=1)[..., None, None]
    return covariance.unflatten(0, key.shape[:2])


def _times_matrix_of_group(delta: Tensor, matrices: Tensor, group_ids: Tensor) -> Tensor:
    """J^T delta of every query, with the matrix of its group.

    Args:
        delta: (B, H, L, D).
        matrices: (B, H, G, D, D).
        group_ids: (B, H, L) int64.

    Returns:
        (B, H, L, D).
    """
    groups = matrices.shape[2]
    ids = group_ids.flatten(0, 1)
    blocks = cut_into_blocks(ids, groups)
    rows = gather_blocks(delta.flatten(0, 1), blocks)  # (B H, R, T, D)
    heads = torch.arange(len(ids), device=ids.device)[:, None]
    products = rows @ matrices.flatten(0, 1)[heads, blocks.cluster]
    target = blocks.rows.where(blocks.real, ids.shape[1]).flatten(1)[..., None]
    # The last row is of no query.
    found = delta.new_zeros(len(ids), ids.shape[1] + 1, delta.shape[-1])
    products = products.flatten(1, 2)
    found = found.scatter(1, target.expand_as(products), products)
    return found[:, :-1].unflatten(0, delta.shape[:2])
