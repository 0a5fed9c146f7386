# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Queries in the order of their groups, and a list of tiles of queries, none of which straddles two groups.

The G groups of a head are followed by one more, number G, of queries that belong to none (padding). The members of a
group come as bits (:mod:`dgt.ops.triton.grouping`): one program writes out those of one group, and its tiles. The host
never knows how many tiles there are: a head has at most ceil(L / T) + G of them, and the list is as long.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import expand, head_base, load_rows
from dgt.ops.triton.grouping import Members, group_tokens, plan
from dgt.ops.triton.launch import launch, power_of_two, rows_of, strides_of

LARGEST_TILE = 64


class Segments(NamedTuple):
    """The queries of every head in the order of their groups."""

    order: Tensor
    """(B H, L) int32: queries, group after group, ascending within a group."""
    ends: Tensor
    """(B H, G + 1) int32: where the segment of a group ends in ``order``; the last is that of no group."""
    tiles: Tensor
    """(B H, slots, 4) int32: group (-1: unused), first place and end in ``order`` of every tile, and 0."""


@triton.jit
def place_group(
    words, counts, order, ends, tiles, pid, tokens, groups, runs, pitch, slots,
    T: tl.constexpr, GC: tl.constexpr, RC: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Write the queries of one group of a head to their places, where they end, and their tiles of T."""
    head, group = pid // (groups + 1), pid % (groups + 1)
    ids = tl.arange(0, GC)
    total = tl.zeros([GC], tl.int32)
    for first in range(0, runs, RC):
        run = first + tl.arange(0, RC)[:, None]
        row = counts + (head.to(tl.int64) * runs + run) * (groups + 1) + ids[None, :]
        total += tl.sum(tl.load(row, mask=(run < runs) & (ids <= groups)[None, :], other=0), 0)
    needed = (total + T - 1) // T
    start, size = tl.sum(tl.where(ids < group, total, 0), 0), tl.sum(tl.where(ids == group, total, 0), 0)
    slot, own = tl.sum(tl.where(ids < group, needed, 0), 0), (size + T - 1) // T
    tl.store(ends + head.to(tl.int64) * (groups + 1) + group, start + size)
    end = tl.where(group == groups, slots - slot, own)  # the last group also marks what is left of the list
    for first in range(0, end, 32):
        nth = first + tl.arange(0, 32)
        row = tiles + (head.to(tl.int64) * slots + slot + nth) * 4
        tl.store(row, tl.where(nth < own, group, -1), mask=nth < end)
        tl.store(row + 1, start + nth * T, mask=nth < end)
        tl.store(row + 3, nth * 0, mask=nth < end)
        tl.store(row + 2, tl.minimum(start + nth * T + T, start + size), mask=nth < end)
    place = start
    for first in range(0, pitch, WP):
        which = first + tl.arange(0, WP)
        address = words + (head.to(tl.int64) * (groups + 1) + group) * pitch + which
        word = tl.load(address, mask=which < pitch, other=0)
        place = expand(word, first, order + head.to(tl.int64) * tokens, place, tokens, WP)


@triton.jit
def place_queries(
    words, counts, order, ends, tiles, tokens, groups, runs, pitch, slots,
    T: tl.constexpr, GC: tl.constexpr, RC: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """:func:`place_group` alone."""
    pid = tl.program_id(0)
    place_group(words, counts, order, ends, tiles, pid, tokens, groups, runs, pitch, slots, T, GC, RC, WP)


@triton.jit
def find_segment(ends, head, group, groups):
    """Where the segment of a group starts and ends."""
    row = ends + head.to(tl.int64) * (groups + 1)
    start = tl.load(row + group - 1, mask=group > 0, other=0)
    return start, tl.load(row + group)


class Placing(NamedTuple):
    """How a launch of :func:`place_group` is cut."""

    programs: int
    arguments: tuple[object, ...]
    options: dict[str, object]
    segments: Segments


def plan_places(members: Members, tokens: int) -> Placing:
    """Make room for the order and the tiles of queries whose groups are known as bits."""
    words = members.words
    heads, groups, pitch = words.shape[0], words.shape[1] - 1, words.shape[2]
    size = tile_size(tokens, groups)
    slots = count_slots(tokens, groups, size)
    integers = {"dtype": torch.int32, "device": words.device}
    segments = Segments(
        torch.empty((heads, tokens), **integers),
        torch.empty((heads, groups + 1), **integers),
        torch.empty((heads, slots, 4), **integers),
    )
    arguments = (words, members.counts, *segments, tokens, groups, members.counts.shape[1], pitch, slots)
    columns = power_of_two(groups + 1)
    options = {"T": size, "GC": columns, "RC": max(1, min(8, 512 // columns)), "WP": min(power_of_two(pitch), 512)}
    return Placing(heads * (groups + 1), arguments, options, segments)


def warps_of(tokens: int) -> int:
    """Warps of a program that goes through the bits of so many tokens."""
    return 1 if tokens <= 8192 else 2 if tokens <= 32768 else 4


def sort_queries(group_ids: Tensor, groups: int) -> Segments:
    """Sort (B, H, L) queries by group; ids outside 0 to G - 1 belong to none."""
    group_ids = group_ids.contiguous()
    like = group_ids.new_empty((), dtype=torch.float16).expand(*group_ids.shape, 1)
    cut = plan(like, like.new_empty((1, groups, 1)), None, group_ids, given=True, sort=True)
    assert cut.members is not None
    launch(group_tokens, cut.programs, *cut.arguments, **cut.options, num_warps=4)
    places = plan_places(cut.members, group_ids.shape[2])
    warps = warps_of(group_ids.shape[2])
    launch(place_queries, places.programs, *places.arguments, **places.options, num_warps=warps)
    return places.segments


def tile_size(queries: int, groups: int) -> int:
    """Queries in a tile: about the mean size of a group, from 16 to 64. By comparisons, so that it can be traced."""
    mean = queries // groups
    return LARGEST_TILE if mean > 32 else 32 if mean > 16 else 16


def count_slots(queries: int, groups: int, size: int) -> int:
    """Upper bound of the number of tiles of a head, padding included."""
    return -(-queries // size) + torch.sym_min(groups, queries)


@triton.jit
def sum_members(
    query, order, ends, sums, counts, qb, qh, ql, heads, queries, groups,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Sum the unit queries of one group of a head, in their order, and count them."""
    head, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    begin, end = find_segment(ends, head, group, groups)
    rows = head_base(query, head, heads, qb, qh)
    total = tl.zeros([N, DP], tl.float32)
    for start in range(begin, end, N):
        place = start + tl.arange(0, N)
        ids = tl.load(order + head.to(tl.int64) * queries + place, mask=place < end, other=0)
        wide = load_rows(rows, ids, ql, place < end, D, DP).to(tl.float32)
        total += wide / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), 1e-12)[:, None]
    channel = tl.arange(0, DP)
    tl.store(sums + tl.program_id(0).to(tl.int64) * D + channel, tl.sum(total, 0), mask=channel < D)
    tl.store(counts + tl.program_id(0), (end - begin).to(tl.float32))


def group_statistics(query: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Sum the unit queries of every group over the batch, and count them (Eq. 3), in a fixed order.

    Returns:
        ``(sums, counts)``: float32 (H, G, D) and (H, G).
    """
    query = rows_of(query)
    batch, heads, queries, channels = query.shape
    groups = segments.ends.shape[1] - 1
    sums = torch.empty((batch, heads, groups, channels), dtype=torch.float32, device=query.device)
    counts = torch.empty((batch, heads, groups), dtype=torch.float32, device=query.device)
    padded = power_of_two(channels)
    launch(
        sum_members, batch * heads * groups, query, segments.order, segments.ends, sums, counts, *strides_of(query),
        heads, queries, groups, D=channels, DP=padded, N=max(16, 1024 // padded), num_warps=1,
    )  # fmt: skip
    return sums.sum(0), counts.sum(0)
