# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Query groups, and in the same pass the centroid statistics of Eq. 3.

A program takes a run of tokens of one head. Scores exist only on chip; statistics are summed per program and then over
programs, in a fixed order, so that repeats are bit-equal.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import exact_right, head_base, load_rows, nearest, store_rows
from dgt.ops.triton.launch import block_of, launch, power_of_two, rows_of, strides_of

TILE = 64  # the most queries of a program at a time
MOST_COUNTED = 128  # groups that a program can count
MOST_SUMMED = 4096  # padded groups times padded channels, whose sums it holds in registers and on-chip memory


def can_count(groups: int, channels: int) -> bool:
    """Tell whether one program can hold the statistics of so many groups of so many channels."""
    return groups <= MOST_COUNTED and power_of_two(groups) * power_of_two(channels) <= MOST_SUMMED


@triton.jit
def assign_queries(
    query, centroids, key_mask, group_ids, sums, counts,
    stride_b, stride_h, stride_l, heads, tokens, groups, runs, run,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr,
    MASKED: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """Group ``run`` tokens of a head, tile by tile; with STATISTICS also sum and count their unit vectors by group."""
    head, nth = tl.program_id(0) // runs, tl.program_id(0) % runs
    rows = head_base(query, head, heads, stride_b, stride_h)
    centers = centroids + (head % heads).to(tl.int64) * groups * D
    total = tl.zeros([GP, DP], tl.float32)
    number = tl.zeros([GP], tl.float32)
    for start in range(nth * run, tl.minimum(nth * run + run, tokens), T):
        place = start + tl.arange(0, T)
        inside = place < tokens
        tile = load_rows(rows, place, stride_l, inside, D, DP)
        best = tl.full([T], float("-inf"), tl.float32)
        group = tl.zeros([T], tl.int32)
        for first in range(0, groups, GP):
            best, group = nearest(tile, centers, groups, first, best, group, D, DP, GP)
        if MASKED:
            real = tl.load(key_mask + (head // heads).to(tl.int64) * tokens + place, mask=inside, other=0) != 0
            group = tl.where(real, group, -1)
        tl.store(group_ids + head.to(tl.int64) * tokens + place, group.to(tl.int64), mask=inside)
        if STATISTICS:
            wide = tile.to(tl.float32)
            length = tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), 1e-12)
            member = (group[None, :] == tl.arange(0, GP)[:, None]) & inside[None, :]
            total += exact_right(member.to(tile.dtype), wide / length[:, None])
            number += tl.sum(member.to(tl.float32), 1)
    if STATISTICS:
        ids = tl.arange(0, GP)
        part = tl.program_id(0).to(tl.int64) * groups
        store_rows(sums + part * D, ids, D, ids < groups, total, D, DP)
        tl.store(counts + part + ids, number, mask=ids < groups)


def assign(
    query: Tensor, centroids: Tensor, key_mask: Tensor | None, statistics: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Group the queries and, if asked, sum their unit vectors by group (Eq. 3).

    Args:
        query: (B, H, L, D).
        centroids: (H, G, D).
        key_mask: optional bool (B, L), True where a token is real.
        statistics: whether sums and counts are wanted, where it :func:`can_count` them.

    Returns:
        ``(group_ids, sums, counts)``: (B, H, L) int64, float32 (H, G, D) and (H, G), the latter empty if not asked for.
    """
    query = rows_of(query)
    batch, heads, tokens, channels = query.shape
    groups = centroids.shape[1]
    run = tokens if tokens <= TILE else max(TILE, min(512, 1 << (tokens // 8).bit_length()))
    runs = triton.cdiv(tokens, run)
    group_ids = torch.empty((batch, heads, tokens), dtype=torch.int64, device=query.device)
    programs = batch * heads * runs if statistics else 0
    exact: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    sums, counts = torch.empty((programs, groups, channels), **exact), torch.empty((programs, groups), **exact)
    launch(
        assign_queries, batch * heads * runs,
        query, centroids.float().contiguous(), key_mask if key_mask is None else key_mask.contiguous(),
        group_ids, sums, counts, *strides_of(query), heads, tokens, groups, runs, run,
        D=channels, DP=power_of_two(channels), T=block_of(query),
        GP=power_of_two(groups) if statistics else min(power_of_two(groups), 4096 // power_of_two(channels)),
        MASKED=key_mask is not None, STATISTICS=statistics, num_warps=8,
    )  # fmt: skip
    if not statistics:
        return group_ids, sums.view(0, groups, channels), counts
    parts = (batch, heads, runs)
    return group_ids, sums.unflatten(0, parts).sum((0, 2)), counts.unflatten(0, parts).sum((0, 2))
