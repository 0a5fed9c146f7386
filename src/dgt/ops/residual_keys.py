"""What the selected keys leave out, as M more keys of every group: one for each cluster of keys.

Let U be the keys of a cluster that a group did not select. Softmax attention needs two things of them, for every query
q of the group: the logarithm of their mass, ``Z(q) = log sum_{j in U} exp(s q.k_j)``, and their mean value. Around the
group's mean query m, with ``p = softmax_{j in U}(s m.k_j)``,

    Z(q) = Z(m) + s (q - m).k' + O(|q - m|^2),    k' = sum_j p_j k_j,    v' = sum_j p_j v_j,

for ``s k'`` is the gradient of Z at m. To first order what is left out is therefore *a key like any other*: k', with
the value v' and the constant ``b = Z(m) - s m.k'`` added to its score. Attention over the selected keys and these is
exact where nothing is left out (k = L), where a group's queries are equal, and where the keys of a cluster are. With
M = 1 all keys are one cluster. Cost: three products of (G, S, D) a head, whatever M, and M keys more in every list.

Keys are sorted by cluster and cut into blocks of at most T keys of one cluster each. A head has at most
``M + (S - M) // T`` of them, whatever its clusters, so no shape depends on data.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dgt.ops.checks import full_precision, wide_type

SCORE_ELEMENTS = {"cpu": 1 << 24}  # scores of groups with keys that are held at once
SCORE_ELEMENTS_ELSEWHERE = 1 << 25  # which keep an accelerator busy
# The score of a key that no residual key sums up; finite, so that no row can become NaN.
HIDDEN = -1e30
LEAST_BLOCK = 8  # keys


class WithResidualKeys(NamedTuple):
    """Arguments of :func:`dgt.attend` in which every group has M keys more."""

    key: Tensor
    """(B, H, S + G M, D): the keys, then k' of every group."""
    value: Tensor
    """(B, H, S + G M, D): the values, then v'."""
    key_ids: Tensor
    """(B, H, G, K + M) int64: last in every list its group's own k', -1 where nothing was left out."""
    key_bias: Tensor
    """(B, H, S + G M): what is added to the score of a key, zeros and then b."""


def append_residual_keys(
    key: Tensor,
    value: Tensor,
    key_ids: Tensor,
    residual: tuple[Tensor, Tensor, Tensor, Tensor],
) -> WithResidualKeys:
    """Append residual keys to the keys, and to the list of their group.

    Args:
        key, value: (B, H, S, D).
        key_ids: (B, H, G, K) int64.
        residual: from :func:`summarize_clusters`.
    """
    more_keys, more_values, bias, empty = residual
    groups, each = bias.shape[2:]
    tokens = key.shape[2]
    numbers = torch.arange(tokens, tokens + groups * each, device=key.device)
    ids = numbers.view(groups, each).where(~empty, -1)
    return WithResidualKeys(
        torch.cat([key, more_keys.to(key.dtype).flatten(2, 3)], dim=2),
        torch.cat([value, more_values.to(value.dtype).flatten(2, 3)], dim=2),
        torch.cat([key_ids, ids], dim=-1),
        torch.cat([bias.new_zeros(key.shape[:3]), bias.flatten(2)], dim=-1),
    )


def attend_to_residual_keys(
    steps: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    *,
    scale: float,
    key_cluster_ids: Tensor | None,
    residual_keys: int,
) -> Tensor:
    """Attend inside groups, (B, H, L, D), to M residual keys as well, by a backend's steps one after the other.

    Without ``key_cluster_ids`` all keys are one cluster.
    """
    if key_cluster_ids is None:
        key_cluster_ids = one_cluster(key, None)
    residual = steps.summarize_clusters(
        query,
        key,
        value,
        group_ids,
        key_ids,
        scale=scale,
        key_cluster_ids=key_cluster_ids,
        residual_keys=residual_keys,
    )
    more = append_residual_keys(key, value, key_ids, residual)
    output: Tensor = steps.attend(
        query, more.key, more.value, group_ids, more.key_ids, scale, key_bias=more.key_bias
    )
    return output


def one_cluster(key: Tensor, key_mask: Tensor | None) -> Tensor:
    """(B, H, S) int64 clusters of M = 1: 0, and -1 where a (B, S) mask hides a key."""
    if key_mask is None:
        return torch.zeros(key.shape[:3], dtype=torch.int64, device=key.device)
    return key_mask[:, None].expand(key.shape[:3]).long() - 1


def summarize_clusters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    *,
    scale: float,
    key_cluster_ids: Tensor,
    residual_keys: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum up, for every group and cluster, the keys that the group did not select; differentiable.

    Args:
        query: (B, H, L, D).
        key, value: (B, H, S, D).
        group_ids: (B, H, L) int64, -1 for queries of no group.
        key_ids: (B, H, G, K) int64, -1 for an empty place.
        scale: factor on the scores.
        key_cluster_ids: (B, H, S) int64; a key of cluster -1 is part of no residual key.
        residual_keys: M.

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
        blocks = cut_into_blocks(key_cluster_ids.flatten(0, 1), residual_keys)
        runs = _runs(mean.shape[0], groups, blocks.rows.shape, scores_at_once(query.device))
        lists = key_ids.flatten(0, 1)
        parts = []
        for heads_of_run, groups_of_runs in runs:
            own = Blocks(*(tensor[heads_of_run] for tensor in blocks))
            operands = k[heads_of_run], v[heads_of_run], own, residual_keys
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


class Blocks(NamedTuple):
    """Keys sorted by cluster, in R blocks of T places, for N heads."""

    rows: Tensor
    """(N, R, T) int64: which key stands in a place."""
    real: Tensor
    """(N, R, T) bool: whether one does."""
    cluster: Tensor
    """(N, R) int64: whose members they are."""


def cut_into_blocks(clusters: Tensor, count: int) -> Blocks:
    """Sort the keys of (N, S) clusters, -1 for none, and cut each cluster into blocks."""
    heads, keys = clusters.shape
    if count == 1:  # all keys are one block, in their own order
        rows = torch.arange(keys, device=clusters.device).expand(heads, 1, keys)
        return Blocks(rows, (clusters == 0)[:, None], clusters.new_zeros(heads, 1))
    size = max(LEAST_BLOCK, keys // count)
    most = count + (keys - count) // size
    order, starts, ends = sort_by_cluster(clusters, count)
    pieces = (ends - starts + size - 1) // size
    last = pieces.cumsum(-1)
    places = torch.arange(most, device=clusters.device).expand(heads, most).contiguous()
    # Blocks left over are of no keys.
    cluster = torch.searchsorted(last, places, right=True).clamp(max=count - 1)
    begin = starts.gather(-1, cluster) + (places - (last - pieces).gather(-1, cluster)) * size
    place = begin[..., None] + torch.arange(size, device=clusters.device)
    real = place < ends.gather(-1, cluster)[..., None]
    rows = order.gather(-1, place.clamp(max=keys - 1).flatten(1)).view(place.shape)
    return Blocks(rows, real, cluster)


def _runs(heads: int, groups: int, shape: torch.Size, most: int) -> list[tuple[slice, list[slice]]]:
    """Runs of heads, each with the runs of its groups; at most so many scores are held together."""
    places = shape[1] * shape[2]
    heads_at_once = max(1, min(heads, most // (groups * places)))
    groups_at_once = max(1, min(groups, most // (heads_at_once * places)))
    of_groups = [slice(first, first + groups_at_once) for first in range(0, groups, groups_at_once)]
    return [
        (slice(first, first + heads_at_once), of_groups) for first in range(0, heads, heads_at_once)
    ]


def gather_blocks(tokens: Tensor, blocks: Blocks) -> Tensor:
    """The (N, S, D) tokens in the places of the blocks, (N, R, T, D)."""
    if blocks.rows.shape[1] == 1:
        return tokens[:, None]
    rows = blocks.rows.flatten(1)[..., None].expand(-1, -1, tokens.shape[2])
    return tokens.gather(1, rows).view(*blocks.rows.shape, -1)


def _summarize(
    mean: Tensor,
    lists: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Blocks,
    count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k' and v' (N, G, M, D), b and whether no member is left (N, G, M), of N heads with their s m (N, G, D)."""
    heads, groups, _ = mean.shape
    keys = key.shape[1]
    key, value = gather_blocks(key, blocks), gather_blocks(value, blocks)
    chosen = torch.zeros(heads, groups, keys + 1, dtype=torch.bool, device=mean.device)
    # The last column takes the empty places.
    chosen = chosen.scatter(-1, lists.remainder(keys + 1), True)
    chosen = chosen[..., :-1]
    if blocks.rows.shape[1] > 1:
        chosen = chosen.gather(-1, blocks.rows.flatten(1)[:, None].expand(-1, groups, -1))
    hidden = chosen | ~blocks.real.flatten(1)[:, None]
    hidden = hidden.view(heads, groups, *blocks.rows.shape[1:])
    score = torch.bmm(mean, key.flatten(1, 2).mT).view(hidden.shape).masked_fill(hidden, HIDDEN)
    of_block = blocks.cluster[:, None].expand(-1, groups, -1)
    most = score.new_full((heads, groups, count), HIDDEN)
    most = most.scatter_reduce(-1, of_block, score.detach().amax(-1), "amax")
    weight = (score - most.gather(-1, of_block)[..., None]).exp().masked_fill(hidden, 0.0)
    mass = score.new_zeros(most.shape).scatter_add(-1, of_block, weight.sum(-1))
    empty = mass == 0
    mass = mass.masked_fill(empty, 1.0)
    weight = weight.transpose(1, 2)  # (N, R, G, T)
    rest_key = sum_blocks(weight @ key, blocks, count) / mass[..., None]
    rest_value = sum_blocks(weight @ value, blocks, count) / mass[..., None]
    bias = mass.log() + most - (mean[:, :, None] * rest_key).sum(-1)
    return rest_key, rest_value, bias.masked_fill(empty, 0.0), empty


def sum_blocks(sums: Tensor, blocks: Blocks, count: int) -> Tensor:
    """Add up the (N, R, G, D) sums of blocks by cluster: (N, G, M, D)."""
    heads, _, groups, channels = sums.shape
    first = torch.arange(0, heads * count, count, device=sums.device)[:, None]
    clusters = sums.new_zeros(heads * count, groups, channels)
    clusters = clusters.index_add(0, (blocks.cluster + first).flatten(), sums.flatten(0, 1))
    return clusters.view(heads, count, groups, channels).transpose(1, 2)


def scores_at_once(device: torch.device) -> int:
    """Return how many scores of groups with keys are held at once on a device."""
    return SCORE_ELEMENTS.get(device.type, SCORE_ELEMENTS_ELSEWHERE)


def run_part(
    step: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], *arguments: Any, alone: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run a step on one part of the heads or groups, so that the scores of no two parts are held at once.

    Gradients would keep those of all parts: they compute them again, unless the part is the whole.
    """
    if alone or not torch.is_grad_enabled():
        return step(*arguments)
    return checkpoint(step, *arguments, use_reentrant=False, preserve_rng_state=False)


def sum_groups(tokens: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sum the (B, H, L, D) tokens of every group over batch and tokens, (H, G, D), and count them, (H, G)."""
    heads, channels = tokens.shape[1], tokens.shape[3]
    # Padding is sent to one extra group, which is cut off again: no data-dependent shape.
    slots = num_groups + 1
    first = torch.arange(heads, device=tokens.device)[None, :, None] * slots
    slot = (torch.where(group_ids < 0, num_groups, group_ids) + first).flatten()
    sums = tokens.new_zeros(heads * slots, channels).index_add(0, slot, tokens.flatten(0, 2))
    counts = tokens.new_zeros(heads * slots).index_add(0, slot, tokens.new_ones(()).expand_as(slot))
    return sums.view(heads, slots, channels)[:, :num_groups], counts.view(heads, slots)[
        :, :num_groups
    ]
