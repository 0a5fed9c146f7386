"""Other approximations of a trained model's attention: short lists of keys, windows, merging, groups.

Each function takes one captured attention and its own settings, and returns (1, H, L, D). Class and
register tokens attend to everything, and everything attends to them, whatever a method does with
patches. ``engine`` computes dense attention over a shorter list of keys: "torch" is PyTorch's,
"native" is this project's kernel. The faster one counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import dgt
from studies.captured_attention import EXACT, Captured

ENGINES: dict[str, Callable[..., Tensor]] = {"torch": EXACT, "native": dgt.dense_attention}


def dense(call: Captured, engine: str) -> Tensor:
    """All keys: exact."""
    return ENGINES[engine](call.query, call.key, call.value)


def over_few_keys(call: Captured, key: Tensor, value: Tensor, bias: Tensor, engine: str) -> Tensor:
    """Attention of all patches over the prefix and a few keys (1, H, N, D), with a bias (1, H or 1, N)."""
    seen_key = torch.cat([call.key[:, :, : call.prefix], key], dim=2)
    seen_value = torch.cat([call.value[:, :, : call.prefix], value], dim=2)
    seen_bias = F.pad(bias, (call.prefix, 0))[:, :, None]
    patches = ENGINES[engine](
        call.query[:, :, call.prefix :], seen_key, seen_value, attn_mask=seen_bias
    )
    return with_prefix(call, patches)


def with_prefix(call: Captured, patches: Tensor) -> Tensor:
    """The outputs of the prefix, which attends to all keys, followed by those of the patches."""
    if call.prefix == 0:
        return patches
    first = EXACT(call.query[:, :, : call.prefix], call.key, call.value)
    return torch.cat([first, patches], dim=2)


def as_map(call: Captured, tokens: Tensor) -> Tensor:
    """(1, H, L, D) without the prefix as maps (H, D, rows, columns)."""
    return tokens[0, :, call.prefix :].mT.unflatten(-1, call.grid)


def pooled(call: Captured, factor: list[int], engine: str) -> Tensor:
    """Means of keys and values over rectangles, weighted by their numbers of members."""
    key, value = (
        F.avg_pool2d(as_map(call, part), factor, ceil_mode=True).flatten(2).mT[None]
        for part in (call.key, call.value)
    )
    ones = torch.ones(1, 1, *call.grid)
    counts = F.avg_pool2d(ones, factor, ceil_mode=True, divisor_override=1)
    return over_few_keys(call, key, value, counts.flatten(2).log(), engine)


def strided(call: Captured, step: list[int], mean: bool, engine: str) -> Tensor:
    """Every ``step``-th key, down and to the right, which represents those around it.

    With ``mean`` it represents only itself, and one more key, the mean of all others, represents
    these (AVGGT).
    """
    maps = [as_map(call, part) for part in (call.key, call.value)]
    key, value = (part[:, :, :: step[0], :: step[1]].flatten(2).mT[None] for part in maps)
    count, number = math.prod(call.grid), key.shape[2]
    if not mean:
        bias = torch.full((1, 1, number), math.log(count / number))
        return over_few_keys(call, key, value, bias, engine)
    sums = [part.flatten(2).sum(-1)[None, :, None] for part in maps]
    rest = [
        (total - some.sum(2, keepdim=True)) / (count - number)
        for total, some in zip(sums, (key, value), strict=True)
    ]
    bias = torch.zeros(1, 1, number + 1)
    bias[..., -1] = math.log(count - number)
    keys, values = torch.cat([key, rest[0]], dim=2), torch.cat([value, rest[1]], dim=2)
    return over_few_keys(call, keys, values, bias, engine)


def merge_map(key: Tensor, keep: int) -> Tensor:
    """ToMe's bipartite matching (Bolya et al., 2023): merge each of (L, D) into one of ``keep`` tokens.

    In each round, every other token merges with its most similar token, most similar pairs first.
    """
    joined = torch.arange(len(key))
    while len(key) > keep:
        unit = F.normalize(key, dim=-1)
        likeness, target = (unit[::2] @ unit[1::2].T).max(-1)
        count = min(len(likeness), len(key) - keep)
        order = likeness.argsort(descending=True)
        stays = order[count:].sort().values
        place = torch.empty(len(key), dtype=torch.long)
        place[1::2] = torch.arange(len(unit[1::2])) + len(stays)
        place[2 * stays] = torch.arange(len(stays))
        goes = order[:count]
        place[2 * goes] = place[2 * target[goes] + 1]
        joined = place[joined]
        key = mean_by(key, place, len(key) - count)[0]
    return joined


def mean_by(tokens: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Means (count, D) of the rows of (L, D) with the same id, and their numbers of rows."""
    numbers = torch.bincount(ids, minlength=count)
    sums = tokens.new_zeros(count, tokens.shape[1]).index_add_(0, ids, tokens)
    return sums / numbers[:, None].clamp(min=1), numbers


def merged(call: Captured, share: float, queries: bool, engine: str) -> Tensor:
    """ToMe: merge patches with similar keys down to a share; each is weighted by its number of members.

    All heads merge the same patches. With ``queries``, queries are merged as well, and their
    outputs are copied to all members.
    """
    patches = [part[0, :, call.prefix :].transpose(0, 1) for part in call[:3]]  # (L, H, D) each
    heads, channels = patches[1].shape[1:]
    keep = max(1, round(share * len(patches[1])))
    ids = merge_map(patches[1].mean(1), keep)
    query, key, value = (
        mean_by(part.reshape(len(part), -1), ids, keep)[0].view(keep, heads, channels)
        for part in patches
    )
    bias = torch.bincount(ids, minlength=keep).log()[None, None].to(key.dtype)
    key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    if not queries:
        return over_few_keys(call, key, value, bias, engine)
    few = torch.cat([call.query[:, :, : call.prefix], query.transpose(0, 1)[None]], dim=2)
    found = over_few_keys(call._replace(query=few), key, value, bias, engine)
    return with_prefix(call, found[:, :, call.prefix :][:, :, ids])


def windows(call: Captured, side: int, engine: str) -> Tensor:
    """Windows of ``side`` x ``side`` patches, padded at the lower and right edge, as in ViTDet."""
    rows, columns = (math.ceil(length / side) for length in call.grid)
    pad = (0, columns * side - call.grid[1], 0, rows * side - call.grid[0])

    def cut(tokens: Tensor) -> Tensor:
        """Maps (H, D, rows, columns) to windows (windows, H, side * side, D)."""
        parts = F.pad(tokens, pad).unflatten(3, (columns, side)).unflatten(2, (rows, side))
        return parts.permute(2, 4, 0, 3, 5, 1).flatten(3, 4).flatten(0, 1)

    query, key, value = (cut(as_map(call, part)) for part in call[:3])
    shape = (len(query), -1, -1, -1)
    before = [part[:, :, : call.prefix].expand(shape) for part in (call.key, call.value)]
    key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
    mask = None
    if any(pad):
        inside = cut(torch.ones(1, 1, *call.grid))[..., 0]  # (windows, 1, side * side)
        hidden = torch.where(inside > 0, 0.0, -torch.inf)
        mask = F.pad(hidden, (call.prefix, 0))[:, :, None]
    found = ENGINES[engine](query.contiguous(), key, value, attn_mask=mask)
    back = found.unflatten(2, (side, side)).unflatten(0, (rows, columns))
    back = back.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)  # (H, rows, columns, D)
    patches = back[:, : call.grid[0], : call.grid[1]].flatten(1, 2)[None]
    return with_prefix(call, patches)


def single_residual_key(call: Captured, groups: int, keys: int) -> Tensor:
    """Groups with centroids from the image itself, the best keys of each, and one residual key."""
    patches = call.query[:, :, call.prefix :]
    places = torch.arange(groups) * patches.shape[2] // groups
    seeds = F.normalize(patches[0, :, places], dim=-1)
    centroids = dgt.find_centroids(patches, seeds, steps=3)
    return dgt.dynamic_group_attention(
        call.query,
        call.key,
        call.value,
        centroids,
        keys,
        num_prefix_tokens=call.prefix,
        residual_keys=1,
    ).output


def residual_keys(
    call: Captured, groups: int, residual: int, keys: int, first_order: bool = False
) -> Tensor:
    """Groups of queries, the best keys of each, and several residual keys:
    `dgt.clustered_attention`.
    """
    return dgt.clustered_attention(
        call.query,
        call.key,
        call.value,
        num_groups=groups,
        top_k=keys,
        residual_keys=residual,
        num_prefix_tokens=call.prefix,
        first_order=first_order,
    )
