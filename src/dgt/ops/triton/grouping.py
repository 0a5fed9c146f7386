# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Query groups, queries in the order of their groups, tiles of them, and the statistics of Eq. 3.

A program takes a run of tokens of one head against all centroids. What is left of it is one bit a
query for its group, or for number G, that of no group (padding). A second program writes out the
queries of one group, and its tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import (
    exact,
    expand,
    head_base,
    load_rows,
    multiply,
    split,
    split_centers,
)
from dgt.ops.triton.launch import (
    Layout,
    block_of,
    ceil_div,
    launch,
    layouts_of,
    plan_launch,
    power_of_two,
    rows_of,
    strides_of,
)

MOST_AT_ONCE = 64  # groups whose scores a program holds
FAR = tl.constexpr(1 << 30)  # above every group
TILE = 128  # queries that a program takes at a time, at most


class Segments(NamedTuple):
    """The queries of every head in the order of their groups; int32, one after the other."""

    order: Tensor
    """(B H, L): queries, group after group, ascending within a group."""
    ends: Tensor
    """(B H, G + 1): where a group's segment ends in ``order``; the last is of no group."""
    tiles: Tensor
    """(B H, slots, 3): group (-1: unused), first place and end in ``order``."""


@triton.jit
def nearest(score, ids):
    """The largest of every row of scores, and the lowest id that has it."""
    best = tl.max(score, 1)
    return best, tl.min(tl.where(score == best[:, None], ids[None, :], FAR), 1)


@triton.jit
def nearest_group(
    tile, center, centers, groups,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Groups of T tokens; ``center`` are the first GP centroids, of :func:`split_centers`."""
    ids = tl.arange(0, GP)
    best, group = tl.full([T], float("-inf"), tl.float32), tl.full([T], FAR, tl.int32)
    for begin in range(0, 1 if ONE else groups, GP):
        if not ONE:
            center = split_centers(centers, begin + ids, groups, tile.dtype, D, DP)
        across = tl.trans(center[0]), tl.trans(center[1]), tl.trans(center[2])
        top, which = nearest(exact((tile, tile, tile), across), begin + ids)
        group, best = tl.where(top > best, which, group), tl.maximum(best, top)
    return tl.minimum(group, groups - 1)


@triton.jit
def pack_columns(flags, R: tl.constexpr, N: tl.constexpr):
    """Pack (R, N) flags into (R, N / 32) int32: ``c`` is bit ``c % 32`` of word ``c // 32``."""
    bits = tl.where(flags, (1 << (tl.arange(0, N) % 32))[None, :], 0)
    return tl.sum(tl.reshape(bits, [R, N // 32, 32]), 2)


@triton.jit
def group_run(
    query, centroids, query_mask, group_ids, words, counts, pid,
    qb, qh, ql, heads, tokens, groups, runs, run, pitch,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr,
    ONE: tl.constexpr, MASKED: tl.constexpr, GIVEN: tl.constexpr, SORT: tl.constexpr,
):  # fmt: skip
    """Group a run of tokens of a head.

    GIVEN: read their groups. SORT: write the members of groups as bits, and their counts.

    ONE: all groups, and that of none, are among GP; otherwise a run is one tile of T.
    """
    head, nth = pid // runs, pid % runs
    rows = head_base(query, head, heads, qb, qh)
    centers, ids = centroids + (head % heads).to(tl.int64) * groups * D, tl.arange(0, GP)
    narrow: tl.constexpr = query.dtype.element_ty
    if not GIVEN:
        center = split_centers(centers, ids, groups, narrow, D, DP)
    total, row_of_counts = tl.zeros([GP], tl.int32), (head.to(tl.int64) * runs + nth) * (groups + 1)
    for start in range(nth * run, tl.minimum(nth * run + run, tokens), T):
        place = start + tl.arange(0, T)
        inside = place < tokens
        address = group_ids + head.to(tl.int64) * tokens + place
        if GIVEN:
            group = tl.load(address, mask=inside, other=-1)
            group = tl.where((group < 0) | (group >= groups), groups, group).to(tl.int32)
        else:
            tile = load_rows(rows, place, ql, inside, D, DP)
            group = nearest_group(tile, center, centers, groups, D, DP, T, GP, ONE)
            if MASKED:
                real = tl.load(
                    query_mask + (head // heads).to(tl.int64) * tokens + place,
                    mask=inside,
                    other=0,
                )
                group = tl.where(real != 0, group, groups)
            own = tl.where(group == groups, -1, group)
            tl.store(address, own.to(group_ids.dtype.element_ty), mask=inside)
        if SORT:
            group = tl.where(inside, group, FAR)  # in no group's bits
            for begin in range(0, groups + 1, GP):
                member = (begin + ids)[:, None] == group[None, :]
                number = tl.sum(member.to(tl.int32), 1)
                row = words + (head.to(tl.int64) * (groups + 1) + begin + ids)[:, None] * pitch
                which = start // 32 + tl.arange(0, T // 32)[None, :]
                present = (begin + ids <= groups)[:, None] & (which < pitch)
                tl.store(row + which, pack_columns(member, GP, T), mask=present)
                if ONE:
                    total += number
                else:
                    tl.store(
                        counts + (row_of_counts + begin + ids), number, mask=begin + ids <= groups
                    )
    if ONE and SORT:
        tl.store(counts + (row_of_counts + ids), total, mask=ids <= groups)


@triton.jit
def place_group(
    words, counts, order, ends, tiles, pid, tokens, groups, runs, pitch, slots,
    T: tl.constexpr, GC: tl.constexpr, RC: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Write the queries of a group of a head in order, where they end, and their tiles of T."""
    head, group = pid // (groups + 1), pid % (groups + 1)
    ids = tl.arange(0, GC)
    total = tl.zeros([GC], tl.int32)
    for first in range(0, runs, RC):
        run = first + tl.arange(0, RC)[:, None]
        row = counts + (head.to(tl.int64) * runs + run) * (groups + 1) + ids[None, :]
        total += tl.sum(tl.load(row, mask=(run < runs) & (ids <= groups)[None, :], other=0), 0)
    needed = (total + T - 1) // T
    start = tl.sum(tl.where(ids < group, total, 0), 0)
    size = tl.sum(tl.where(ids == group, total, 0), 0)
    slot, own = tl.sum(tl.where(ids < group, needed, 0), 0), (size + T - 1) // T
    tl.store(ends + head.to(tl.int64) * (groups + 1) + group, start + size)
    # The last group also marks what is left of the list.
    end = tl.where(group == groups, slots - slot, own)
    for first in range(0, end, 32):
        nth = first + tl.arange(0, 32)
        row = tiles + (head.to(tl.int64) * slots + slot + nth) * 3
        tl.store(row, tl.where(nth < own, group, -1), mask=nth < end)
        tl.store(row + 1, start + nth * T, mask=nth < end)
        tl.store(row + 2, tl.minimum(start + nth * T + T, start + size), mask=nth < end)
    place = start
    for first in range(0, pitch, WP):
        which = first + tl.arange(0, WP)
        address = words + (head.to(tl.int64) * (groups + 1) + group) * pitch + which
        word = tl.load(address, mask=which < pitch, other=0)
        place = expand(word, first, order + head.to(tl.int64) * tokens, place, tokens, WP)


@triton.jit
def find_segment(ends, head, group, groups):
    """Where the segment of a group starts and ends."""
    row = ends + head.to(tl.int64) * (groups + 1)
    start = tl.load(row + group - 1, mask=group > 0, other=0)
    return start, tl.load(row + group)


class QueryPlan(NamedTuple):
    """How queries are grouped, by runs of each head, and put in order."""

    query: Layout
    """Of (B, H, L, D) queries."""
    groups: int
    run: int
    """Queries of a program."""
    runs: int
    """Programs of a head."""
    tile: int
    """Queries that a program takes at a time."""
    groups_at_once: int
    """Groups whose scores a program holds."""
    pitch: int
    """W, words that hold a bit for every query of a head."""
    slots: int
    """Tiles of a head in :class:`Segments`, at most."""
    given: bool
    """Whether groups are only read."""
    sort: bool
    """Whether queries are put in order."""
    heads: int
    """Heads of all images that are grouped: B H, or none."""

    @property
    def tokens(self) -> int:
        """L."""
        return self.query.shape[2]

    @property
    def words(self) -> int:
        """(B H, G + 1, W) int32: bit ``i % 32`` of ``[:, g, i // 32]`` if query i is in group g."""
        return self.heads * (self.groups + 1) * self.pitch

    @property
    def counts(self) -> int:
        """(B H, runs, G + 1) int32: how many queries of every run are in a group."""
        return self.heads * self.runs * (self.groups + 1)

    @property
    def segments(self) -> tuple[int, int, int]:
        """Numbers in :class:`Segments`."""
        heads = self.heads
        return heads * self.tokens, heads * (self.groups + 1), heads * self.slots * 3


def plan_queries(query: Layout, groups: int, sort: bool, given: bool = False) -> QueryPlan:
    """Plan the grouping of (B, H, L, D) queries; groups that are given are only read."""
    batch, heads, tokens, _ = query.shape
    wide = block_of(query) == 64
    size = min(power_of_two(tokens, 32), TILE if wide else 32)
    at_once = min(power_of_two(groups + sort, 16), MOST_AT_ONCE if wide else 16)
    run = size
    if groups + sort <= at_once:
        run = max(size, min(512, power_of_two(tokens) // 8))
    return QueryPlan(
        query,
        groups,
        run,
        ceil_div(tokens, run),
        size,
        at_once,
        ceil_div(tokens, 32),
        count_slots(tokens, groups),
        given,
        sort,
        batch * heads,
    )


def count_slots(queries: int, groups: int) -> int:
    """Return the tiles of a head, at most: each group may end with one that is not full."""
    return ceil_div(queries, tile_size(queries, groups)) + min(groups, queries)


def tile_size(queries: int, groups: int) -> int:
    """Queries in a tile: about the mean size of a group, from 16 to 64."""
    return min(power_of_two(queries // groups), 64)


@triton.jit
def sum_run(
    query, group_ids, sums, qb, qh, ql, heads, tokens, groups, runs, run,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Sum the tokens of every group in a run of a head, and count them in column D.

    One-hot rows times tokens.

    UNIT: every token is cut to unit length. Products with zeros and ones are exact, and sums have a
    fixed order.
    """
    head = tl.program_id(0) // runs
    first = tl.program_id(0) % runs * run
    rows, channel = head_base(query, head, heads, qb, qh), tl.arange(0, DP)[None, :]
    for begin in range(0, groups, GP):
        ids = begin + tl.arange(0, GP)
        total, number = tl.zeros([GP, DP], tl.float32), tl.zeros([GP, T], tl.int32)
        for start in range(first, tl.minimum(first + run, tokens), T):
            place = start + tl.arange(0, T)
            group = tl.load(
                group_ids + head.to(tl.int64) * tokens + place, mask=place < tokens, other=-1
            )
            member = ids[:, None] == group.to(tl.int32)[None, :]
            number += member.to(tl.int32)
            tile = load_rows(rows, place, ql, place < tokens, D, DP)
            one_hot = member.to(tile.dtype)
            if UNIT:
                wide = tile.to(tl.float32)
                wide *= (1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), 1e-12))[:, None]
                total += exact((one_hot, one_hot, one_hot), split(wide, tile.dtype))
            else:
                total += multiply(one_hot, tile)
        row = sums + (tl.program_id(0).to(tl.int64) * groups + ids)[:, None] * (D + 1)
        tl.store(row + channel, total, mask=(ids < groups)[:, None] & (channel < D))
        tl.store(row + D, tl.sum(number, 1).to(tl.float32)[:, None], mask=(ids < groups)[:, None])


def sum_queries(query: Tensor, group_ids: Tensor, groups: int, unit: bool) -> Tensor:
    """Sum and count the queries of every group, as they are or at ``unit`` norm.

    Returns float32 (B, H, runs, G, D + 1).
    """
    query = rows_of(query)
    (layout,) = layouts_of(query)
    batch, heads, tokens, channels = query.shape
    size = min(32, block_of(layout))
    run = min(512, ceil_div(tokens, size) * size)
    runs = ceil_div(tokens, run)
    sums = torch.empty(
        (batch, heads, runs, groups, channels + 1), dtype=torch.float32, device=query.device
    )
    plan = plan_launch(
        sum_run, batch * heads * runs, *strides_of(layout), heads, tokens, groups, runs, run,
        D=channels, DP=power_of_two(channels), T=size, GP=min(2 * size, power_of_two(groups)),
        UNIT=unit, num_warps=4, num_stages=1,
    )  # fmt: skip
    launch(plan, query, group_ids.contiguous(), sums)
    return sums
