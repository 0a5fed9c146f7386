"""Which keys? Selectors of k keys for an attention with fixed weights, as functions of its operands.

Each gives every query k keys, or k that represent all keys, and returns the attention over them.
    With k equal to the number of tokens, each is global attention. Those that select for every
        query score all pairs, in slices of queries: they show what a selection is worth, not what
            it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops import attend, dynamic_group_attention, group_queries
from dgt.ops.remainder import add_remainder, summarize_unselected

CHUNK_ELEMENTS = 1 << 20  # scores held at once
BLOCK = 4  # side, in tokens, of the blocks that are selected as a whole


class Operands(NamedTuple):
    """One attention call of the layer ``name``: operands (B, H, L, D), tokens on a ``grid``.

    ``grid`` has rows and columns, and tokens run row by row. ``centroids``, (H, G, D) or (B, H, G,
    D) with unit norm, are used by the selectors with groups.
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    grid: tuple[int, int]
    centroids: Tensor


def attend_by(choice: str, top_k: int, given: Operands) -> Tensor:
    """Attention (B, H, L, D) over the ``top_k`` keys of a selector, a name in ``SELECTORS``.

    Over all keys if k >= L.
    """
    batch, heads, tokens, _ = given.query.shape
    if top_k >= tokens:
        return F.scaled_dot_product_attention(
            given.query, given.key, given.value, scale=given.scale
        )
    # images become heads of a single image
    query, key, value = (tensor.flatten(0, 1)[None] for tensor in given[1:4])
    centroids = given.centroids.expand(batch, *given.centroids.shape[-3:]).flatten(0, 1)
    one = Operands(given.name, query, key, value, given.scale, given.grid, centroids)
    return SELECTORS[choice](one, top_k).view(batch, heads, tokens, -1)


def _groups(given: Operands, top_k: int, residual_keys: int = 0) -> Tensor:
    return dynamic_group_attention(
        *given[1:4], given.centroids, top_k, given.scale, residual_keys=residual_keys
    ).output


def _random_with_remainder(given: Operands, top_k: int) -> Tensor:
    """Random keys for each group, plus its residual key: the value of the residual key alone."""
    _, query, key, value, scale, _, centroids = given
    groups = group_queries(query, centroids)
    ids = torch.rand(1, *centroids.shape[:2], key.shape[2]).topk(top_k).indices.sort().values
    rest = summarize_unselected(query, key, value, groups, ids, scale, None)
    keys, values, lists, bias = add_remainder(key, value, ids, rest)
    return attend(query, keys, values, groups, lists, scale, key_bias=bias)


def _each(given: Operands, keep: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """``keep(scores, rows)`` returns which keys the queries ``rows`` see, from their (1, N, l, L) scores."""
    tokens, parts = given.key.shape[2], []
    step = max(1, CHUNK_ELEMENTS // (given.query.shape[1] * tokens))
    for rows in (slice(start, start + step) for start in range(0, tokens, step)):
        scores = given.query[:, :, rows] @ given.key.mT * given.scale
        parts.append(scores.masked_fill(~keep(scores, rows), -torch.inf).softmax(-1) @ given.value)
    return torch.cat(parts, dim=2)


def _only(scores: Tensor, ids: Tensor) -> Tensor:
    """Boolean with the shape of the scores, True at the ids along the last axis."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(
        -1, ids.expand(*scores.shape[:-1], -1), True
    )


def _random(given: Operands, top_k: int) -> Tensor:
    """Random keys: a run of a random permutation, one permutation per head with many starts."""
    tokens = given.key.shape[2]
    order, start = (
        torch.rand(given.key.shape[:3]).argsort(-1),
        torch.randint(tokens, (*given.key.shape[:3], 1)),
    )
    return _each(given, lambda _, rows: (order[:, :, None] - start[:, :, rows]) % tokens < top_k)


@cache
def nearest(grid: tuple[int, int], count: int) -> Tensor:
    """(L, count) int64: the tokens in a square around each token, with the same number at borders."""
    places = torch.cartesian_prod(*map(torch.arange, grid))
    ids = []
    for some in places.split(max(1, CHUNK_ELEMENTS // len(places))):
        offset = (some[:, None] - places).abs()
        # ties between squares are broken by the sum of both offsets
        distance = offset.amax(-1) * sum(grid) + offset.sum(-1)
        ids.append(distance.topk(count, largest=False).indices)
    return torch.cat(ids)


def _blocks(given: Operands, top_k: int) -> Tensor:
    """The best blocks of tokens for every query, by their mean keys."""
    rows, columns = given.grid
    block = (
        torch.arange(rows)[:, None] // BLOCK * columns + torch.arange(columns) // BLOCK
    ).flatten()
    block = block.unique(return_inverse=True)[1]
    member = F.one_hot(block).to(given.key.dtype)  # (L, blocks)
    score = given.query @ (given.key.mT @ (member / member.sum(0)))
    ids = score.topk(max(1, round(top_k * member.shape[1] / len(block)))).indices
    return _each(given, lambda _, part: _only(score[:, :, part], ids[:, :, part])[..., block])


def _same(given: Operands, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention of all queries to the same (1, N, k, D) keys.

    ``bias`` (1, N, 1, k) is added to the scores.
    """
    return F.scaled_dot_product_attention(
        given.query, key, value, attn_mask=bias, scale=given.scale
    )


def _chosen(given: Operands, ids: Tensor) -> Tensor:
    return _same(
        given, *(torch.take_along_dim(tensor, ids[..., None], dim=2) for tensor in given[2:4])
    )


def _best_for_all(given: Operands, top_k: int) -> Tensor:
    """The keys with the largest mean attention of all queries."""
    step = max(1, CHUNK_ELEMENTS // (given.key.shape[1] * given.key.shape[2]))
    masses = [
        (query @ given.key.mT * given.scale).softmax(-1).sum(2)
        for query in given.query.split(step, dim=2)
    ]
    return _chosen(given, torch.stack(masses).sum(0).topk(top_k).indices)


def lattice(grid: tuple[int, int], count: int) -> tuple[int, int]:
    """Rows and columns of at most ``count`` cells over a grid, as square as possible."""
    rows = min(grid[0], max(1, round(math.sqrt(count * grid[0] / grid[1]))))
    return rows, min(grid[1], max(1, count // rows))


def _strided(given: Operands, top_k: int) -> Tensor:
    """Keys at the centers of the cells of a lattice."""
    pairs = zip(lattice(given.grid, top_k), given.grid, strict=True)
    down, across = (((torch.arange(count) + 0.5) * side / count).long() for count, side in pairs)
    return _chosen(
        given, (down[:, None] * given.grid[1] + across).flatten().expand(*given.key.shape[:2], -1)
    )


def _pooled(given: Operands, top_k: int) -> Tensor:
    """Means of keys and values over the cells of a lattice."""
    maps = (tensor[0].mT.unflatten(-1, given.grid) for tensor in given[2:4])
    return _same(
        given,
        *(F.adaptive_avg_pool2d(of, lattice(given.grid, top_k)).flatten(2).mT[None] for of in maps),
    )


def _merged(given: Operands, top_k: int) -> Tensor:
    """Every other key merges with its most similar key, most similar pairs first, as in ToMe (Bolya 2023).

    This is repeated in rounds. Values are merged with their keys; a key that represents s keys
    counts s times in the softmax. Each head merges independently.
    """
    key, value = given[2:4]
    size = key.new_ones(*key.shape[:3], 1)
    while key.shape[2] > top_k:
        whole = torch.cat([key * size, value * size, size], dim=-1)
        best, to = (
            F.normalize(key[:, :, ::2], dim=-1) @ F.normalize(key[:, :, 1::2], dim=-1).mT
        ).max(-1)
        order = best.argsort(dim=-1, descending=True)[..., None]
        count = min(order.shape[2], key.shape[2] - top_k)
        joining = torch.take_along_dim(whole[:, :, ::2], order, dim=2)
        target = torch.take_along_dim(to[..., None], order[:, :, :count], dim=2).expand(
            -1, -1, -1, whole.shape[-1]
        )
        rest = whole[:, :, 1::2].scatter_add(2, target, joining[:, :, :count])
        key, value, size = torch.cat([joining[:, :, count:], rest], dim=2).split(
            [*2 * key.shape[-1:], 1], dim=-1
        )
        key, value = key / size, value / size
    return _same(given, key, value, size.mT.log())


SELECTORS: dict[str, Callable[[Operands, int], Tensor]] = {
    "groups": _groups,
    "groups, remainder": partial(_groups, residual_keys=1),
    "random, remainder": _random_with_remainder,
    "best of each query": lambda given, k: _each(
        given, lambda s, _: _only(s, s.topk(k, sorted=False).indices)
    ),
    "window": lambda given, k: _each(
        given, lambda scores, rows: _only(scores, nearest(given.grid, k)[rows])
    ),
    "random, each query": _random,
    "random, one for all": lambda given, k: _chosen(
        given, torch.rand(given.key.shape[:3]).topk(k).indices
    ),
    "best one for all": _best_for_all,
    "strided": _strided,
    "pooled": _pooled,
    "merged (ToMe)": _merged,
    "blocks": _blocks,
}
