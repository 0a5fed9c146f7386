"""How good a selection of keys is: the share of global attention that the selected keys hold.

The paper argues that a few keys per group are enough because they hold most of the mass of global
attention. These functions measure that. They are dense, (B, H, L, L) in slices of queries, in
float32, and carry no gradient: for figures and experiments, not for training.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dgt.ops.attention import attend_with_logsumexp
from dgt.ops.checks import (
    check_choice,
    check_count,
    check_device,
    check_residual_keys,
    check_shape,
    check_tensor,
    check_tokens,
    describe,
    full_precision,
)
from dgt.ops.clusters import cluster_keys
from dgt.ops.dispatch import choose_steps
from dgt.ops.residual_keys import append_residual_keys, one_cluster, summarize_clusters

CHUNK_ELEMENTS = 1 << 24  # scores held at once


class SelectionDiagnosis(NamedTuple):
    """The result of :func:`diagnose_selection`; float32."""

    weights: Tensor
    """(B, H, L, K): attention to the keys of the group, summing to 1.

    0 at empty places and padding.
    """
    mass: Tensor
    """(B, H, L) in [0, 1]: share of global attention that those keys hold; 0 at padding."""


@torch.no_grad()
def diagnose_selection(
    query: Tensor, key: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float | None = None
) -> SelectionDiagnosis:
    """Attention weights over the selected keys, and their share of global attention.

    Args:
        query, key: (B, H, L, D) float tensors.
        group_ids: (B, H, L) int64; -1 marks padding, which is never counted as a key.
        key_ids: (B, H, G, K) int64; -1 marks an empty place.
        scale: factor on the scores; default 1 / sqrt(D).

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.
    """
    _check(query, key, group_ids, key_ids)
    weights, masses = [], []
    for scores, groups in _score_slices(query, key, group_ids, scale):
        ids = torch.take_along_dim(key_ids, groups.clamp(min=0)[..., None], dim=2)  # (B, H, l, K)
        absent = (ids < 0) | (groups < 0)[..., None]
        chosen = torch.take_along_dim(scores, ids.clamp(min=0), dim=3).masked_fill(
            absent, -torch.inf
        )
        held = chosen.logsumexp(-1, keepdim=True)
        empty = held.isneginf()
        weights.append((chosen - held).exp().masked_fill(empty, 0.0))
        share = (held - scores.logsumexp(-1, keepdim=True)).exp().masked_fill(empty, 0.0)
        masses.append(share[..., 0].clamp(max=1.0))
    return SelectionDiagnosis(torch.cat(weights, dim=2), torch.cat(masses, dim=2))


def attention_mass(
    query: Tensor, key: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float | None = None
) -> Tensor:
    """Share of every query's global softmax attention that the selected keys of its group hold.

    Arguments and errors as in :func:`diagnose_selection`; returns its (B, H, L) ``mass``.
    """
    return diagnose_selection(query, key, group_ids, key_ids, scale).mass


@torch.no_grad()
def residual_share(
    query: Tensor,
    key: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    residual_keys: int,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    num_prefix_tokens: int = 0,
) -> Tensor:
    """Share of every query's attention that goes to the residual keys of its group.

    Args:
        query: (B, H, L, D) float tensor, without queries of the prefix.
        key: (B, H, S, D) float tensor.
        group_ids: (B, H, L) int64; -1 marks padding.
        key_ids: (B, H, G, K) int64, the prefix first; -1 marks an empty place.
        residual_keys: M >= 1.
        scale: factor on the scores; default 1 / sqrt(D).
        key_mask: optional bool (B, S), True where a key is real.
        num_prefix_tokens: keys before all others that are in every list.

    Returns:
        (B, H, L) float32 in [0, 1]; 0 at padding, and where nothing was left out.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.
    """
    check_count("residual_keys", residual_keys)
    check_residual_keys(residual_keys, key.shape[2] - num_prefix_tokens)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    _, alone = attend_with_logsumexp(query, key, key, group_ids, key_ids, scale)
    if residual_keys == 1:
        clusters = one_cluster(key, key_mask)
    else:
        steps = choose_steps("auto", key)
        clusters = cluster_keys(steps, key, residual_keys, num_prefix_tokens, key_mask)
    residual = summarize_clusters(
        query,
        key,
        key,
        group_ids,
        key_ids,
        scale=scale,
        key_cluster_ids=clusters,
        residual_keys=residual_keys,
    )
    more = append_residual_keys(key, key, key_ids, residual)
    _, together = attend_with_logsumexp(
        query, more.key, more.value, group_ids, more.key_ids, scale, key_bias=more.key_bias
    )
    share = 1.0 - (alone - together).exp()
    return share.masked_fill(group_ids < 0, 0.0).clamp(0.0, 1.0).float()


@torch.no_grad()
def attention_mass_curve(
    query: Tensor,
    key: Tensor,
    centroids: Tensor,
    group_ids: Tensor,
    counts: Sequence[int],
    scale: float | None = None,
) -> Tensor:
    """Mean share of global attention that a group's best ``k`` keys hold, for several ``k``.

    Args:
        query, key: (B, H, L, D) float tensors.
        centroids: (H, G, D) float tensor, unit norm: they rank the keys, as in
            :func:`dgt.select_keys`.
        group_ids: (B, H, L) int64; -1 marks padding, which takes no part.
        counts: values of k, each from 1 to L.
        scale: factor on the scores; default 1 / sqrt(D).

    Returns:
        (B, H, len(counts)) float32, the mean over the queries that are not padding; 0 where there
        is none.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.
    """
    check_tokens("query", query, centroids)
    check_tokens("key", key, centroids)
    check_shape("key", key, "BHLD", tuple(query.shape), "query")
    check_tensor("group_ids", group_ids, "BHL", floating=False)
    check_shape("group_ids", group_ids, "BHL", tuple(query.shape[:3]), "query")
    check_device("query", query, group_ids=group_ids)
    if not isinstance(counts, Sequence):
        raise TypeError(f"counts must be a sequence of ints, got {describe(counts)}")
    for count in counts:
        check_count("counts", count)
    if not counts or max(counts) > key.shape[2]:
        raise ValueError(
            f"counts must hold at least one k, none above L = {key.shape[2]}, got {list(counts)}"
        )
    places = torch.tensor(counts, device=key.device) - 1
    with full_precision(key.device):
        ranking = torch.einsum("hgd,bhjd->bhgj", centroids.float(), key.float())
    ranking = ranking.masked_fill((group_ids < 0)[:, :, None], -torch.inf)
    order = ranking.argsort(dim=-1, descending=True, stable=True)
    total = torch.zeros(*query.shape[:2], len(counts), device=query.device)
    for scores, groups in _score_slices(query, key, group_ids, scale):
        ranked = torch.take_along_dim(order, groups.clamp(min=0)[..., None], dim=2)  # (B, H, l, L)
        share = torch.take_along_dim(scores.softmax(-1), ranked, dim=3).cumsum(-1)[..., places]
        total += share.masked_fill((groups < 0)[..., None], 0.0).sum(2)
    return (total / (group_ids >= 0).sum(-1, keepdim=True).clamp(min=1)).clamp(max=1.0)


@torch.no_grad()
def attention_mass_of_choices(
    query: Tensor,
    key: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float | None = None,
    grid: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Share of global attention on the selected keys, compared with other sets of the same size.

    Args:
        query, key, group_ids, key_ids, scale: as in :func:`diagnose_selection`. ``key_ids`` tells
            how many keys: K, or all that are not padding where an image has fewer.
        grid: rows and columns of the tokens, row by row; None leaves the window out.

    Returns:
        (B, H, L) float32 each, 0 at padding: ``selected``; ``random``, the expectation for keys
        drawn at random; ``window``, the keys in a square around the query; ``best_for_all``, the
        keys that hold most for all queries of a head together; ``best_for_group``, for the queries
        of a group together; ``best_for_query``, every query's own strongest keys.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.
    """
    _check(query, key, group_ids, key_ids)
    tokens, groups, count = key.shape[2], *key_ids.shape[2:]
    if grid is not None and grid[0] * grid[1] != tokens:
        raise ValueError(f"grid must have {tokens} cells, one per token, got {grid}")
    real = group_ids >= 0
    # Of a group's queries, together.
    looks = query.new_zeros(*query.shape[:2], groups, tokens, dtype=torch.float32)
    window: list[Tensor] = []
    best: list[Tensor] = []
    for scores, ids in _score_slices(query, key, group_ids, scale):
        weights = scores.softmax(-1).masked_fill(~(ids >= 0)[..., None], 0.0)  # (B, H, l, L)
        looks.scatter_add_(2, ids.clamp(min=0)[..., None].expand_as(weights), weights)
        best.append(weights.topk(count).values.sum(-1))
        if grid is not None:
            near = _distances(
                grid, sum(part.shape[2] for part in window), weights.shape[2], key.device
            )
            near = (
                near.masked_fill(~real[:, :, None], torch.iinfo(torch.int64).max)
                .topk(count, largest=False)
                .indices
            )
            window.append(torch.take_along_dim(weights, near, dim=3).sum(-1))
    for_groups = looks.topk(count).indices.masked_fill(key_ids < 0, -1)
    for_all = (
        looks.sum(2, keepdim=True)
        .topk(count)
        .indices.masked_fill((key_ids < 0).all(2, keepdim=True), -1)
    )
    shares = {
        "selected": attention_mass(query, key, group_ids, key_ids, scale),
        "random": ((count / real.sum(-1, keepdim=True).clamp(min=1)).clamp(max=1.0) * real).float(),
        "best_for_all": attention_mass(query, key, group_ids, for_all.expand_as(key_ids), scale),
        "best_for_group": attention_mass(query, key, group_ids, for_groups, scale),
        "best_for_query": torch.cat(best, dim=2).clamp(max=1.0),
    }
    return shares if grid is None else {**shares, "window": torch.cat(window, dim=2).clamp(max=1.0)}


def _distances(grid: tuple[int, int], start: int, count: int, device: torch.device) -> Tensor:
    """(count, L) int64: distance of every token from tokens ``start`` and on.

    The distance is in rows or columns, whichever is more.

    Ties are settled by the other of the two, then by index, so that no two tokens are equally near.
    """
    sides = [torch.arange(side, device=device) for side in grid]
    rows, columns = (axis.flatten() for axis in torch.meshgrid(sides, indexing="ij"))
    place = slice(start, start + count)
    down, across = (rows - rows[place, None]).abs(), (columns - columns[place, None]).abs()
    order = torch.maximum(down, across) * max(grid) + torch.minimum(down, across)
    return order * rows.numel() + torch.arange(rows.numel(), device=device)


def _score_slices(
    query: Tensor, key: Tensor, group_ids: Tensor, scale: float | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Slices of queries: their (B, H, l, L) scores, -inf at padding, and their (B, H, l) groups."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    batch, heads, tokens, _ = query.shape
    padding = (group_ids < 0)[:, :, None]
    step = max(1, CHUNK_ELEMENTS // (batch * heads * tokens))
    for start in range(0, tokens, step):
        with full_precision(query.device):
            scores = torch.matmul(
                query[:, :, start : start + step].float() * scale, key.float().transpose(-1, -2)
            )
        yield scores.masked_fill(padding, -torch.inf), group_ids[:, :, start : start + step]


def _check(query: Tensor, key: Tensor, group_ids: Tensor, key_ids: Tensor) -> None:
    check_tensor("query", query, "BHLD", floating=True)
    check_tensor("key", key, "BHLD", floating=True)
    check_shape("key", key, "BHLD", tuple(query.shape), "query")
    check_device("query", query, key=key)
    check_choice(query, key, group_ids, key_ids)
