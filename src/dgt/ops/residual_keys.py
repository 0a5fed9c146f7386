"""What the selected keys leave out, as M more keys of every group: one for each cluster of keys.

This is :mod:`dgt.ops.remainder` once a cluster. For group g with the mean query m, scale s and the members U of cluster
c that g did not select,

    Z = sum_{j in U} exp(s m.k_j),    k' = sum_j exp(s m.k_j) k_j / Z,    v' = sum_j exp(s m.k_j) v_j / Z,

and every query q of the group attends to k' with the value v' and the constant ``b = log Z - s m.k'`` on its score.
That is exact for q = m, and first order in q - m with the spread of the keys *within a cluster* in place of that of all
keys. Cost: three products of (G, S, D) a head, as with one cluster, and M keys more in every list.

Keys are sorted by cluster and cut into blocks of at most T keys of one cluster each. A head has at most
``M + S // T`` of them, whatever its clusters, so no shape depends on data.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dgt.ops.checks import full_precision, wide_type
from dgt.ops.remainder import HIDDEN, run_part, scores_at_once, sum_groups

LEAST_BLOCK = 8  # keys


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
    """Sum up, for every group and cluster, the keys that the group did not select; differentiable.

    Args:
        query: (B, H, L, D).
        key, value: (B, H, S, D).
        group_ids: (B, H, L) int64, -1 for queries of no group.
        key_ids: (B, H, G, K) int64, -1 for an empty place.
        scale: factor on the scores.
        key_cluster_ids: (B, H, S) int64; a key of cluster -1 is part of no residual key.
        num_clusters: M.

    Returns:
        (B, H, G, M, D) k' and v', (B, H, G, M) b, in float32 (of float64 in float64), and bool (B, H, G, M), True where
        a cluster has no members left; the others are finite there, and of no meaning.
    """
    batch, heads, groups, _ = key_ids.shape
    with full_precision(query.device):
        q, k, v = (
            tensor.flatten(0, 1).to(wide_type(query.dtype)) for tensor in (query, key, value)
        )
        sums, counts = sum_groups(q[None], group_ids.flatten(0, 1)[None], groups)
        mean = sums / counts.clamp(min=1)[..., None] * scale  # s m, (B H, G, D)
        blocks = _cut_into_blocks(key_cluster_ids.flatten(0, 1), num_clusters)
        runs = _runs(len(mean), groups, blocks.rows.shape, scores_at_once(query.device))
        lists = key_ids.flatten(0, 1)
        parts = []
        for heads_of_run, groups_of_runs in runs:
            own = _Blocks(*(tensor[heads_of_run] for tensor in blocks))
            operands = k[heads_of_run], v[heads_of_run], own, num_clusters
            found = [
                run_part(
                    _summarize,
                    mean[heads_of_run, some],
                    lists[heads_of_run, some],
                    *operands,
                    alone=len(runs) == len(groups_of_runs) == 1,
                )
                for some in groups_of_runs
            ]
            parts.append([torch.cat(part, 1) for part in zip(*found, strict=True)])
    whole = (torch.cat(part).unflatten(0, (batch, heads)) for part in zip(*parts, strict=True))
    rest_key, rest_value, bias, empty = whole
    return rest_key, rest_value, bias, empty


class ClusterOrder(NamedTuple):
    """Keys in the order of their clusters; those of no cluster come last."""

    order: Tensor
    """(N, S) int64: which key stands in a place."""
    starts: Tensor
    """(N, M) int64: the first place of every cluster."""
    ends: Tensor
    """(N, M) int64: the place after its last."""


def sort_by_cluster(clusters: Tensor, count: int) -> ClusterOrder:
    """Sort the keys of (N, S) int64 clusters, -1 for none, with shapes that do not depend on them."""
    ordered, order = clusters.where(clusters >= 0, count).sort(stable=True)
    numbers = torch.arange(count, device=clusters.device).expand(len(clusters), count).contiguous()
    starts = torch.searchsorted(ordered, numbers)
    ends = torch.searchsorted(ordered, numbers, right=True)
    return ClusterOrder(order, starts, ends)


class _Blocks(NamedTuple):
    """Keys sorted by cluster, in R blocks of T places, for N heads."""

    rows: Tensor
    """(N, R, T) int64: which key stands in a place."""
    real: Tensor
    """(N, R, T) bool: whether one does."""
    cluster: Tensor
    """(N, R) int64: whose members they are."""


def _cut_into_blocks(clusters: Tensor, count: int) -> _Blocks:
    """Sort the keys of (N, S) clusters, -1 for none, and cut each cluster into blocks."""
    heads, keys = clusters.shape
    size = max(LEAST_BLOCK, keys // count)
    most = count + keys // size
    order, starts, ends = sort_by_cluster(clusters, count)
    pieces = (ends - starts + size - 1) // size
    last = pieces.cumsum(-1)
    places = torch.arange(most, device=clusters.device).expand(heads, most).contiguous()
    cluster = torch.searchsorted(last, places, right=True).clamp(
        max=count - 1
    )  # blocks left over are of no keys
    begin = starts.gather(-1, cluster) + (places - (last - pieces).gather(-1, cluster)) * size
    place = begin[..., None] + torch.arange(size, device=clusters.device)
    real = place < ends.gather(-1, cluster)[..., None]
    rows = order.gather(-1, place.clamp(max=keys - 1).flatten(1)).view(place.shape)
    return _Blocks(rows, real, cluster)


def _runs(heads: int, groups: int, shape: torch.Size, most: int) -> list[tuple[slice, list[slice]]]:
    """Runs of heads, each with the runs of its groups; at most so many scores are held together."""
    places = shape[1] * shape[2]
    heads_at_once = max(1, min(heads, most // (groups * places)))
    groups_at_once = max(1, min(groups, most // (heads_at_once * places)))
    of_groups = [slice(first, first + groups_at_once) for first in range(0, groups, groups_at_once)]
    return [
        (slice(first, first + heads_at_once), of_groups) for first in range(0, heads, heads_at_once)
    ]


def _gather(tokens: Tensor, blocks: _Blocks) -> Tensor:
    """The (N, S, D) tokens in the places of the blocks, (N, R, T, D)."""
    rows = blocks.rows.flatten(1)[..., None].expand(-1, -1, tokens.shape[2])
    return tokens.gather(1, rows).view(*blocks.rows.shape, -1)


def _summarize(
    mean: Tensor,
    lists: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: _Blocks,
    count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k' and v' (N, G, M, D), b and whether no member is left (N, G, M), of N heads with their s m (N, G, D)."""
    heads, groups, _ = mean.shape
    keys = key.shape[1]
    key, value = _gather(key, blocks), _gather(value, blocks)
    chosen = torch.zeros(heads, groups, keys + 1, dtype=torch.bool, device=mean.device)
    chosen = chosen.scatter(
        -1, lists.remainder(keys + 1), True
    )  # the last column takes the empty places
    rows = blocks.rows.flatten(1)[:, None].expand(-1, groups, -1)
    hidden = (chosen.gather(-1, rows) | ~blocks.real.flatten(1)[:, None]).view(
        heads, groups, *blocks.rows.shape[1:]
    )
    score = torch.bmm(mean, key.flatten(1, 2).mT).view(hidden.shape).masked_fill(hidden, HIDDEN)
    of_block = blocks.cluster[:, None].expand(-1, groups, -1)
    most = score.new_full((heads, groups, count), HIDDEN)
    most = most.scatter_reduce(-1, of_block, score.detach().amax(-1), "amax")
    weight = (score - most.gather(-1, of_block)[..., None]).exp().masked_fill(hidden, 0.0)
    mass = score.new_zeros(most.shape).scatter_add(-1, of_block, weight.sum(-1))
    empty = mass == 0
    mass = mass.masked_fill(empty, 1.0)
    weight = weight.transpose(1, 2)  # (N, R, G, T)
    rest_key = _sum_blocks(weight @ key, blocks, count) / mass[..., None]
    rest_value = _sum_blocks(weight @ value, blocks, count) / mass[..., None]
    bias = mass.log() + most - (mean[:, :, None] * rest_key).sum(-1)
    return rest_key, rest_value, bias.masked_fill(empty, 0.0), empty


def _sum_blocks(sums: Tensor, blocks: _Blocks, count: int) -> Tensor:
    """Add up the (N, R, G, D) sums of blocks by cluster: (N, G, M, D)."""
    heads, _, groups, channels = sums.shape
    first = torch.arange(0, heads * count, count, device=sums.device)[:, None]
    clusters = sums.new_zeros(heads * count, groups, channels)
    clusters = clusters.index_add(0, (blocks.cluster + first).flatten(), sums.flatten(0, 1))
    return clusters.view(heads, count, groups, channels).transpose(1, 2)
