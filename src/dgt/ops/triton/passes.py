# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Grouping, sorting and selecting in few launches, and of few tokens attending: independent kernels share one.

Each pass is planned once for all tensors that lie in memory alike; then it is its launches, one after
the other. What a launch leaves to the next lies in buffers that share an allocation.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton import dense, grouping
from dgt.ops.triton.blocks import (
    KeyPlan,
    best_of_blocks,
    block_turn,
    bound_row,
    plan_keys,
    warps_for,
)
from dgt.ops.triton.common import base_two
from dgt.ops.triton.grouping import QueryPlan, Segments, plan_queries, tile_size
from dgt.ops.triton.inverse import Lists, padded_length
from dgt.ops.triton.launch import (
    MOST_PLANS,
    Buffers,
    LaunchPlan,
    Layout,
    launch,
    layouts_of,
    new_rows,
    plan_buffers,
    plan_launch,
    power_of_two,
    rows_of,
    strides_of,
)
from dgt.ops.triton.selection import ChoicePlan, choose, plan_choice, plan_pick_all


@triton.jit
def score_tokens(
    query, key, centroids, query_mask, key_mask, group_ids, best, words, counts,
    qb, qh, ql, kb, kh, kl, heads, tokens, groups, runs, run, pitch, parts, slices, first,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr,
    ONE: tl.constexpr, GIVEN: tl.constexpr, SORT: tl.constexpr,
    KT: tl.constexpr, KG: tl.constexpr, N: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Groups of queries and, from program ``first`` on, block maxima of keys."""
    pid = tl.program_id(0)
    if pid < first:
        grouping.group_run(
            query, centroids, query_mask, group_ids, words, counts, pid, qb, qh, ql, heads, tokens,
            groups, runs, run, pitch, D, DP, T, GP, ONE, query_mask is not None, GIVEN, SORT,
        )  # fmt: skip
    else:
        best_of_blocks(
            key, centroids, key_mask, best, pid - first, kb, kh, kl, heads, tokens, groups, parts,
            slices, D, DP, KT, KG, N, TURN, key_mask is not None,
        )  # fmt: skip


@triton.jit
def bound_and_place(
    words, counts, order, ends, tiles, best, bound, tokens, groups, runs, pitch, slots, width, first,
    T: tl.constexpr, GC: tl.constexpr, RC: tl.constexpr, WP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Order of queries and, from program ``first`` on, bounds of the selection."""
    pid = tl.program_id(0)
    if pid < first:
        grouping.place_group(
            words,
            counts,
            order,
            ends,
            tiles,
            pid,
            tokens,
            groups,
            runs,
            pitch,
            slots,
            T,
            GC,
            RC,
            WP,
        )
    else:
        bound_row(best, bound, pid - first, width, N)


def plan_scores(queries: QueryPlan, keys: KeyPlan) -> LaunchPlan:
    """Plan to group queries and find block maxima of keys, in one launch.

    Given are queries, keys, centroids, both masks, groups, maxima and, of queries that are put in
    order, words and counts.
    """
    tokens, channels = queries.query.shape[2:]
    programs = queries.heads * queries.runs
    options = {"num_warps": 4}
    if queries.tile >= queries.run:  # one tile: there is nothing to prefetch
        options["num_stages"] = 1
    return plan_launch(
        score_tokens, programs + keys.programs, *strides_of(queries.query, keys.key),
        queries.query.shape[1], tokens, queries.groups, queries.runs, queries.run, queries.pitch,
        keys.parts, keys.slices, programs, D=channels, DP=power_of_two(channels), T=queries.tile,
        GP=queries.groups_at_once, ONE=queries.groups + queries.sort <= queries.groups_at_once,
        GIVEN=queries.given, SORT=queries.sort, KT=keys.blocks_at_once, KG=keys.groups_at_once,
        N=keys.blocks, TURN=block_turn(keys.blocks), **options,
    )  # fmt: skip


def plan_places(queries: QueryPlan, rows: int, blocks: int, width: int) -> LaunchPlan:
    """Plan to put queries in order, and to find bounds that ``width`` keys of each row reach.

    Given are words, counts, :class:`Segments`, (rows, blocks) maxima, and a bound for every row.
    """
    columns = power_of_two(queries.groups + 1)
    programs = queries.heads * (queries.groups + 1)
    warps = max(min(4, warps_for(power_of_two(queries.tokens) // 16)), warps_for(blocks))
    return plan_launch(
        bound_and_place, programs + rows, queries.tokens, queries.groups, queries.runs,
        queries.pitch, queries.slots, width, programs,
        T=tile_size(queries.tokens, queries.groups), GC=columns,
        RC=max(1, min(8, 512 // columns)), WP=min(power_of_two(queries.pitch), 512), N=blocks,
        num_warps=warps,
    )  # fmt: skip


def no_keys(query: Layout) -> KeyPlan:
    """Plan no programs at all for keys."""
    batch, heads, _, channels = query.shape
    return plan_keys(query._replace(shape=(batch, heads, 1, channels)), 1, 1)._replace(parts=0)


def no_queries(key: Layout, groups: int) -> QueryPlan:
    """Plan no programs at all for queries."""
    return plan_queries(key, groups, sort=False)._replace(heads=0)


# ---- the steps alone ----


class SortingPlan(NamedTuple):
    """How queries of given groups are put in order."""

    score: LaunchPlan
    place: LaunchPlan
    bits: Buffers
    """Words, counts, and what stands for numbers that nothing reads."""
    segments: Buffers


@functools.lru_cache(MOST_PLANS)
def plan_sorting(shape: tuple[int, ...], groups: int) -> SortingPlan:
    """Plan the order of (B, H, L) queries."""
    query = Layout((*shape, 1), (0, 0, 0), torch.float16)
    queries = plan_queries(query, groups, sort=True, given=True)
    return SortingPlan(
        plan_scores(queries, no_keys(query)),
        plan_places(queries, 0, 16, 1),
        plan_buffers((queries.words, queries.counts), (1,)),
        plan_buffers(queries.segments, ()),
    )


def sort_queries(group_ids: Tensor, groups: int) -> Segments:
    """Sort (B, H, L) queries by group; ids outside 0 to G - 1 belong to none."""
    plan = plan_sorting(group_ids.shape, groups)
    words, counts, unread = plan.bits.new(group_ids)
    tokens = group_ids.new_empty(1, dtype=torch.float16)  # neither read
    segments = Segments(*plan.segments.new(group_ids))
    launch(
        plan.score, tokens, tokens, unread, None, None, group_ids.contiguous(), unread, words,
        counts,
    )  # fmt: skip
    launch(plan.place, words, counts, *segments, unread, unread)
    return segments


@functools.lru_cache(MOST_PLANS)
def plan_grouping(query: Layout, groups: int) -> LaunchPlan:
    """Plan the groups of queries, which are not put in order."""
    return plan_scores(plan_queries(query, groups, sort=False), no_keys(query))


def group(query: Tensor, centroids: Tensor, query_mask: Tensor | None) -> Tensor:
    """Group of every query; shapes and contract as in :func:`dgt.group_queries`."""
    query = rows_of(query)
    plan = plan_grouping(*layouts_of(query), centroids.shape[1])
    group_ids = query.new_empty(query.shape[:3], dtype=torch.int64)
    launch(plan, query, query, centroids, query_mask, None, group_ids, centroids, None, None)
    return group_ids


class SelectionPlan(NamedTuple):
    """How keys are selected."""

    score: LaunchPlan
    bound: LaunchPlan
    choice: ChoicePlan
    buffers: Buffers
    """Ids and counts of the lists, maxima and bounds."""


@functools.lru_cache(MOST_PLANS)
def plan_selection(key: Layout, groups: int, top_k: int) -> SelectionPlan:
    """Plan the selection of keys without queries."""
    queries, keys = no_queries(key, groups), plan_keys(key, groups, top_k)
    choice = plan_choice(keys, top_k)
    lists = (keys.rows * padded_length(choice.width), keys.rows)
    return SelectionPlan(
        plan_scores(queries, keys),
        plan_places(queries, keys.rows, keys.blocks, choice.width),
        choice,
        plan_buffers(lists, (keys.best, keys.rows)),
    )


def select(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Keys of every group; shapes and contract as in :func:`dgt.select_keys`."""
    key, groups = rows_of(key), centroids.shape[1]
    plan = plan_selection(*layouts_of(key), groups, top_k)
    key_ids = key.new_empty((*key.shape[:2], groups, plan.choice.width), dtype=torch.int64)
    ids, counts, best, bounds = plan.buffers.new(key)
    # Without queries groups are not written, nor is an order.
    launch(plan.score, key, key, centroids, None, key_mask, key_ids, best, None, None)
    if plan.choice.mark is not None:
        launch(plan.bound, *[counts] * 5, best, bounds)
    choose(plan.choice, key, centroids, key_mask, best, bounds, key_ids, ids, counts)
    return key_ids


# ---- the steps together ----


class FewPlan(NamedTuple):
    """How few queries are grouped, their keys selected and attended to."""

    score: LaunchPlan
    pick: LaunchPlan
    attend: LaunchPlan
    width: int
    best: int
    kept: Buffers
    """Groups, bits of each group's keys, and log-sum-exps."""


@functools.lru_cache(MOST_PLANS)
def plan_few(query: Layout, key: Layout, value: Layout, groups: int, top_k: int) -> FewPlan:
    """Plan :func:`attend_to_few`."""
    queries, keys = plan_queries(query, groups, sort=False), plan_keys(key, groups, top_k)
    width, tokens = min(top_k, queries.tokens), queries.heads * queries.tokens
    return FewPlan(
        plan_scores(queries, keys),
        plan_pick_all(keys, width, keys.blocks // 32),
        dense.plan_attention(query, key, value, groups),
        width,
        keys.best,
        plan_buffers((tokens, keys.rows * keys.blocks // 32), (tokens,)),
    )


def attend_to_few(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    with_ids: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Group queries, select keys and attend to them, in three launches.

    Returns the output, its float32 log-sum-exps in base 2, ``group_ids`` and ``key_ids``; ids that
    nobody asks for are None.
    """
    groups = centroids.shape[1]
    plan = plan_few(*layouts_of(query, key, value), groups, top_k)
    group_ids, key_ids = new_ids(query, groups, plan.width) if with_ids else (None, None)
    best = query.new_empty(plan.best, dtype=torch.float32)
    unasked_ids, bits, logsum = plan.kept.new(query)
    of_queries = unasked_ids if group_ids is None else group_ids
    launch(plan.score, query, key, centroids, query_mask, key_mask, of_queries, best, None, None)
    launch(plan.pick, best, key_ids, None, None, bits)
    del best  # so that the output takes its place
    output = new_rows(query)
    launch(plan.attend, query, key, value, bits, of_queries, output, logsum, base_two(scale))
    count = query.shape[0] * query.shape[1] * query.shape[2]
    return output, logsum[:count].view(query.shape[:3]), group_ids, key_ids


class ManyPlan(NamedTuple):
    """How many queries are grouped and put in order, and their keys selected."""

    score: LaunchPlan
    place: LaunchPlan
    choice: ChoicePlan
    scratch: Buffers
    """Groups, words, counts, maxima and bounds."""
    kept: Buffers
    """:class:`Segments`, ids and counts of :class:`Lists`."""


@functools.lru_cache(MOST_PLANS)
def plan_many(query: Layout, key: Layout, groups: int, top_k: int) -> ManyPlan:
    """Plan :func:`group_and_list`."""
    queries, keys = plan_queries(query, groups, sort=True), plan_keys(key, groups, top_k)
    choice = plan_choice(keys, top_k)
    bounded, blocks = (0, 16) if choice.mark is None else (keys.rows, keys.blocks)
    lists = (keys.rows * padded_length(choice.width), keys.rows)
    return ManyPlan(
        plan_scores(queries, keys),
        plan_places(queries, bounded, blocks, choice.width),
        choice,
        plan_buffers(
            (queries.heads * queries.tokens, queries.words, queries.counts), (keys.best, keys.rows)
        ),
        plan_buffers((*queries.segments, *lists), ()),
    )


def group_and_list(
    query: Tensor,
    key: Tensor,
    centroids: Tensor,
    top_k: int,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    with_ids: bool,
) -> tuple[Tensor | None, Tensor | None, Segments, Lists]:
    """Group queries and select keys of many tokens in at most four launches.

    Returns ``(group_ids, key_ids, segments, lists)``; ids that nobody asks for are None.
    """
    groups = centroids.shape[1]
    plan = plan_many(*layouts_of(query, key), groups, top_k)
    group_ids, key_ids = new_ids(query, groups, plan.choice.width) if with_ids else (None, None)
    unasked_ids, words, counts, best, bounds = plan.scratch.new(query)
    *of_segments, ids, lengths = plan.kept.new(query)
    segments = Segments(*of_segments)
    launch(
        plan.score, query, key, centroids, query_mask, key_mask,
        unasked_ids if group_ids is None else group_ids, best, words, counts,
    )  # fmt: skip
    launch(plan.place, words, counts, *segments, best, bounds)
    choose(plan.choice, key, centroids, key_mask, best, bounds, key_ids, ids, lengths)
    lists = Lists(ids, lengths, groups, padded_length(plan.choice.width))
    return group_ids, key_ids, segments, lists


def new_ids(tokens: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor]:
    """Return empty (B, H, L) ids of groups and (B, H, G, K) ids of keys, int64."""
    batch, heads, count, _ = tokens.shape
    group_ids = tokens.new_empty((batch, heads, count), dtype=torch.int64)
    return group_ids, tokens.new_empty((batch, heads, groups, width), dtype=torch.int64)
