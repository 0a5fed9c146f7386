# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Queries in the order of their groups, by a counting sort, so that a tile of queries never straddles two groups.

The G groups of a head are followed by one more, number G, of queries that belong to none (padding). Tiles get their
programs without the host knowing how many there are: a head has at most ceil(L / T) + G of them, and a program that
finds itself beyond the last one leaves.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.launch import launch, power_of_two

RUN = 128  # queries of one program of the sort
AT_ONCE = 64  # groups it looks at in a turn


class Segments(NamedTuple):
    """The queries of every head in the order of their groups."""

    order: Tensor
    """(B H, L) int32: queries, group after group, ascending within a group."""
    ends: Tensor
    """(B H, G + 1) int32: where the segment of a group ends in ``order``; the last is that of no group."""


@triton.jit
def load_groups(group_ids, head, place, tokens, groups):
    """Groups of some queries; ``groups`` for those of none, one more for places beyond the last query."""
    group = tl.load(group_ids + head.to(tl.int64) * tokens + place, mask=place < tokens, other=0).to(tl.int32)
    group = tl.where((group < 0) | (group >= groups), groups, group)
    return tl.where(place < tokens, group, groups + 1)


@triton.jit
def count_groups(group_ids, counts, tokens, groups, runs, T: tl.constexpr, GP: tl.constexpr):
    """Count the members of every group in a run of T queries; ``counts`` is (B H, G + 1, runs)."""
    head, run = tl.program_id(0) // runs, tl.program_id(0) % runs
    group = load_groups(group_ids, head, run * T + tl.arange(0, T), tokens, groups)
    for first in range(0, groups + 1, GP):
        ids = first + tl.arange(0, GP)
        count = tl.sum((group[:, None] == ids[None, :]).to(tl.int32), 0)
        tl.store(counts + (head.to(tl.int64) * (groups + 1) + ids) * runs + run, count, mask=ids <= groups)


@triton.jit
def place_queries(group_ids, sums, order, tokens, groups, runs, T: tl.constexpr, GP: tl.constexpr):
    """Write a run of T queries to their places; ``sums`` are the running sums of the counts over groups and runs."""
    head, run = tl.program_id(0) // runs, tl.program_id(0) % runs
    query = run * T + tl.arange(0, T)
    group = load_groups(group_ids, head, query, tokens, groups)
    place = tl.zeros([T], tl.int32)
    for first in range(0, groups + 1, GP):
        ids = first + tl.arange(0, GP)
        member = (group[:, None] == ids[None, :]).to(tl.int32)
        end = tl.load(sums + (head.to(tl.int64) * (groups + 1) + ids) * runs + run, mask=ids <= groups, other=0)
        start = end - tl.sum(member, 0)
        place += tl.sum(member * (tl.cumsum(member, 0) - 1 + start[None, :]), 1)
    tl.store(order + head.to(tl.int64) * tokens + place, query, mask=query < tokens)


@triton.jit
def find_segment(ends, head, group, groups):
    """Where the segment of a group starts and ends."""
    row = ends + head.to(tl.int64) * (groups + 1)
    start = tl.load(row + group - 1, mask=group > 0, other=0)
    return start, tl.load(row + group)


@triton.jit
def find_tile(ends, head, slot, groups, T: tl.constexpr, GP: tl.constexpr):
    """Group, first place and end of the ``slot``-th tile of a head; the group is above ``groups`` if there is none."""
    ids = tl.arange(0, GP)
    row = ends + head.to(tl.int64) * (groups + 1) + ids
    end = tl.load(row, mask=ids <= groups, other=0)
    start = tl.load(row - 1, mask=(ids > 0) & (ids <= groups), other=0)
    tiles = tl.where(ids <= groups, (end - start + T - 1) // T, 0)
    before = tl.cumsum(tiles, 0) <= slot
    group = tl.sum((before & (ids <= groups)).to(tl.int32), 0)
    nth = slot - tl.sum(tl.where(before, tiles, 0), 0)
    first = tl.sum(tl.where(ids == group, start + nth * T, 0), 0)
    return group, first, tl.sum(tl.where(ids == group, end, 0), 0)


def sort_queries(group_ids: Tensor, groups: int) -> Segments:
    """Sort (B, H, L) queries by group; ids outside 0 to G - 1 belong to none."""
    heads, tokens = group_ids.shape[0] * group_ids.shape[1], group_ids.shape[2]
    group_ids = group_ids.contiguous()
    size = min(power_of_two(tokens), RUN)
    runs = triton.cdiv(tokens, size)
    counts = torch.empty((heads, (groups + 1) * runs), dtype=torch.int32, device=group_ids.device)
    order = torch.empty((heads, tokens), dtype=torch.int32, device=group_ids.device)
    shape = (tokens, groups, runs)
    options = {"T": size, "GP": min(power_of_two(groups + 1), AT_ONCE), "num_warps": 4}
    launch(count_groups, heads * runs, group_ids, counts, *shape, **options)
    sums = counts.cumsum(-1, dtype=torch.int32)
    launch(place_queries, heads * runs, group_ids, sums, order, *shape, **options)
    return Segments(order, sums.view(heads, groups + 1, runs)[..., -1].contiguous())


def tile_size(queries: int, groups: int) -> int:
    """Queries in a tile: about the mean size of a group, from 16 to 64."""
    return min(64, power_of_two(queries // groups))


def count_slots(queries: int, groups: int, size: int) -> int:
    """Upper bound of the number of tiles of a head, padding included."""
    return triton.cdiv(queries, size) + min(groups, queries)
