"""Block-sparse rivals using FlexAttention, which PyTorch compiles for CPUs: rules that select blocks.

The rules are those of SpargeAttn (Zhang et al., 2025), Sparse VideoGen 2 (Yang et al., 2025), and
SVG-EAR, in PyTorch. What helps only on GPUs (8-bit products, skipping inside a warp) is left out.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import dgt
from studies.captured_attention import Captured
from studies.rival_attentions import with_prefix

BLOCK = (128, 64)  # queries and keys per block, as in SpargeAttn
HIDDEN = -1e9
MOST_SHAPES = 64  # beyond this, FlexAttention would run uncompiled


class Blocks(NamedTuple):
    """A sequence in blocks: means (1, H, blocks, D), similarity (1, H, blocks), and members (blocks,)."""

    mean: Tensor
    likeness: Tensor
    members: Tensor


class Pieces(NamedTuple):
    """The operands: queries of patches, and all keys and values, the prefix first."""

    query: Tensor
    key: Tensor
    value: Tensor


def blocks_of(tokens: Tensor, size: int) -> Blocks:
    """Means of blocks of (1, H, L, D), and the mean cosine between members (SpargeAttn)."""
    length = tokens.shape[2]
    count = math.ceil(length / size)
    members = torch.full((count,), float(size))
    members[-1] = length - (count - 1) * size
    whole = F.pad(tokens, (0, 0, 0, count * size - length)).unflatten(2, (count, size))
    unit = F.normalize(whole, dim=-1)
    likeness = unit.sum(3).square().sum(-1) / members.square()
    return Blocks(whole.sum(3) / members[:, None], likeness, members)


def by_mass(scores: Tensor, mass: float) -> Tensor:
    """For every row, the columns with the highest softmax weights until they reach a mass."""
    weights = scores.softmax(-1)
    order = weights.sort(-1, descending=True)
    before = order.values.cumsum(-1) - order.values
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order.indices, before < mass)


def sparge_choice(pieces: Pieces, mass: float, likeness: float) -> Tensor:
    """SpargeAttn's blocks (1, H, query blocks, key blocks): by mean queries and mean keys.

    Blocks whose members are less similar than ``likeness`` are always computed.
    """
    query, key = blocks_of(pieces.query, BLOCK[0]), blocks_of(pieces.key, BLOCK[1])
    scale = pieces.query.shape[-1] ** -0.5
    scores = scale * query.mean @ key.mean.mT + key.members.log()
    unlike_query, unlike_key = query.likeness < likeness, key.likeness < likeness
    chosen = by_mass(scores.masked_fill(unlike_key[:, :, None], HIDDEN), mass)
    return chosen | unlike_query[..., None] | unlike_key[:, :, None]


def routed_choice(pieces: Pieces, share: float) -> Tensor:
    """SVG-EAR's blocks: those with the largest error of the mean key and value for the mean query."""
    query, key = blocks_of(pieces.query, BLOCK[0]), blocks_of(pieces.key, BLOCK[1])
    value = blocks_of(pieces.value, BLOCK[1]).mean
    scale, count = pieces.query.shape[-1] ** -0.5, len(key.members)
    scores = scale * query.mean @ pieces.key.mT
    highest = scores.amax(-1, keepdim=True)
    pad = count * BLOCK[1] - scores.shape[-1]
    weights = F.pad((scores - highest).exp(), (0, pad)).unflatten(-1, (count, BLOCK[1]))
    values = F.pad(pieces.value, (0, 0, 0, pad)).unflatten(2, (count, BLOCK[1]))
    right = torch.einsum("bhqcl,bhcld->bhqcd", weights, values)
    instead = key.members * (scale * query.mean @ key.mean.mT - highest).exp()
    wrong = (right - instead[..., None] * value[:, :, None]).norm(dim=-1)
    best = wrong.topk(max(1, round(share * count)), dim=-1).indices
    return torch.zeros_like(wrong, dtype=torch.bool).scatter(-1, best, True)


def order_by_clusters(tokens: Tensor, clusters: int) -> Tensor:
    """(1, H, L): an order in which tokens of the same k-means cluster are adjacent."""
    return dgt.cluster_tokens(tokens, clusters).ids.argsort(dim=-1, stable=True)


def taken(tokens: Tensor, order: Tensor) -> Tensor:
    """Tokens (1, H, L, D) in another order."""
    return tokens.gather(2, order[..., None].expand_as(tokens))


@cache
def compiled() -> Any:
    """FlexAttention, compiled for every shape it encounters."""
    options: dict[str, Any] = {
        "recompile_limit": MOST_SHAPES
    }  # missing from torch's type annotations
    return torch.compile(flex_attention, dynamic=False, **options)


def numbers_and_ids(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's format of selected blocks: their number per row, and their ids, selected first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1).int(), order.int()


def attend_to_blocks(pieces: Pieces, chosen: Tensor) -> Tensor:
    """Attention over the selected blocks; the first one, with the prefix, is always included."""
    chosen = chosen.clone()
    chosen[..., 0] = True
    found: Tensor = compiled()(*pieces, block_mask=block_mask(pieces, chosen))
    return found


def block_mask(pieces: Pieces, chosen: Tensor) -> BlockMask:
    """FlexAttention's format of selected full blocks."""

    def is_chosen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return chosen[batch, head, query // BLOCK[0], key // BLOCK[1]]

    part = torch.zeros_like(chosen)
    return BlockMask.from_kv_blocks(
        *numbers_and_ids(part),
        *numbers_and_ids(chosen),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_chosen,
        seq_lengths=(pieces.query.shape[2], pieces.key.shape[2]),
        compute_q_blocks=False,
    )


def attend_with_compensation(pieces: Pieces, chosen: Tensor) -> Tensor:
    """The same, plus the mean key and value of each other block, weighted by its number of members."""
    chosen = chosen.clone()
    chosen[..., 0] = True
    key, value = (blocks_of(part, BLOCK[1]) for part in (pieces.key, pieces.value))
    count = len(key.members)
    start = count * BLOCK[1]
    pad = (0, 0, 0, start - pieces.key.shape[2])
    keys = torch.cat([F.pad(pieces.key, pad), key.mean], dim=2)
    values = torch.cat([F.pad(pieces.value, pad), value.mean], dim=2)
    bias = torch.cat([torch.zeros(start), key.members.log()])

    def add_count(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias[key]

    longer = Pieces(pieces.query, keys, values)
    mask = compensated_mask(longer, chosen, pieces.key.shape[2])
    found: Tensor = compiled()(*longer, score_mod=add_count, block_mask=mask)
    return found


def compensated_mask(pieces: Pieces, chosen: Tensor, length: int) -> BlockMask:
    """Selected blocks of the first ``length`` keys and, after their padding, means of the other blocks."""
    count = chosen.shape[-1]
    start = count * BLOCK[1]

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = query // BLOCK[0]
        own = chosen[batch, head, row, (key // BLOCK[1]).clamp(max=count - 1)]
        instead = ~chosen[batch, head, row, (key - start).clamp(min=0)]
        return torch.where(key < start, own & (key < length), instead)

    extra = math.ceil(count / BLOCK[1])
    whole, part = F.pad(chosen, (0, extra)), F.pad(torch.zeros_like(chosen), (0, extra), value=True)
    if length < start:  # the last block has padding
        part[..., count - 1] = whole[..., count - 1]
        whole[..., count - 1] = False
    return BlockMask.from_kv_blocks(
        *numbers_and_ids(part),
        *numbers_and_ids(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_seen,
        seq_lengths=(pieces.query.shape[2], pieces.key.shape[2]),
        compute_q_blocks=False,
    )


def sparge(call: Captured, mass: float, likeness: float) -> Tensor:
    """SpargeAttn's blocks, with tokens in image order."""
    patches = call.query[:, :, call.prefix :].contiguous()
    pieces = Pieces(patches, call.key, call.value)
    found = attend_to_blocks(pieces, sparge_choice(pieces, mass, likeness))
    return with_prefix(call, found)


def clustered_pieces(call: Captured, clusters: int) -> tuple[Pieces, Tensor]:
    """Operands with the tokens of a cluster adjacent, and the order of the queries."""
    prefix = call.prefix
    query_order = order_by_clusters(call.query[:, :, prefix:], clusters)
    key_order = order_by_clusters(call.key[:, :, prefix:], 2 * clusters)
    key, value = (
        torch.cat([part[:, :, :prefix], taken(part[:, :, prefix:], key_order)], dim=2)
        for part in (call.key, call.value)
    )
    return Pieces(taken(call.query[:, :, prefix:], query_order), key, value), query_order


def put_back(found: Tensor, order: Tensor) -> Tensor:
    """Tokens in the order before :func:`taken`."""
    return torch.empty_like(found).scatter(2, order[..., None].expand_as(found), found)


def clustered_blocks(call: Captured, clusters: int, mass: float) -> Tensor:
    """Sparse VideoGen 2: tokens ordered by k-means cluster, then blocks selected by mass."""
    pieces, order = clustered_pieces(call, clusters)
    found = attend_to_blocks(pieces, sparge_choice(pieces, mass, -1.0))
    return with_prefix(call, put_back(found, order))


def compensated_blocks(call: Captured, clusters: int, share: float) -> Tensor:
    """SVG-EAR: the same order, blocks where means have the largest error, and means for the others."""
    pieces, order = clustered_pieces(call, clusters)
    found = attend_with_compensation(pieces, routed_choice(pieces, share))
    return with_prefix(call, put_back(found, order))
