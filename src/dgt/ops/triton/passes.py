# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Grouping, sorting and selecting in few launches: independent kernels share one."""

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton import grouping, selection
from dgt.ops.triton.blocks import KeyPlan, best_of_blocks, block_turn, bound_row, plan, warps_for
from dgt.ops.triton.grouping import OrderPlan, QueryPlan, Segments, no_segments, tile_size
from dgt.ops.triton.inverse import Lists
from dgt.ops.triton.launch import launch, power_of_two, rows_of, strides_of


@triton.jit
def score_tokens(
    query, centroids, query_mask, key_mask, group_ids, words, counts, qb, qh, ql, heads, tokens, groups,
    runs, run, pitch, key, best, kb, kh, kl, parts, slices, first,
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
    words, counts, order, ends, tiles, tokens, groups, runs, pitch, slots, best, bound, width,
    first, T: tl.constexpr, GC: tl.constexpr, RC: tl.constexpr, WP: tl.constexpr, N: tl.constexpr,
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


def score(queries: QueryPlan, keys: KeyPlan, key_mask: Tensor | None) -> None:
    """Group queries and find block maxima of keys, in one launch."""
    channels = queries.query.shape[3]
    options = {"num_warps": 4}
    if queries.tile >= queries.run:  # one tile: there is nothing to prefetch
        options["num_stages"] = 1
    heads = queries.query.shape[1]
    tokens = queries.query.shape[2]
    groups = queries.centroids.shape[1]
    launch(
        score_tokens, queries.programs + keys.programs,
        queries.query, queries.centroids, queries.mask, key_mask, queries.group_ids, queries.words,
        queries.counts, *strides_of(queries.query), heads, tokens, groups,
        queries.runs, queries.run, queries.words.shape[2], keys.key, keys.best,
        *strides_of(keys.key), keys.parts, keys.slices, queries.programs, D=channels,
        DP=power_of_two(channels), T=queries.tile, GP=queries.groups_at_once,
        ONE=groups + queries.sort <= queries.groups_at_once, GIVEN=queries.given,
        SORT=queries.sort, KT=keys.blocks_at_once, KG=keys.groups_at_once, N=keys.blocks,
        TURN=block_turn(keys.blocks), **options,
    )  # fmt: skip


def bound_and_order(places: OrderPlan, best: Tensor, width: int) -> Tensor:
    """Place queries, and find the selection's bounds from (B H, G, N) block maxima.

    Returns float32 (B H G).
    """
    groups, pitch = places.words.shape[1] - 1, places.words.shape[2]
    rows, blocks = best.shape[0] * best.shape[1], best.shape[2]
    columns = power_of_two(groups + 1)
    found = torch.empty(rows, dtype=torch.float32, device=best.device)
    warps = max(min(4, warps_for(power_of_two(places.tokens) // 16)), warps_for(blocks))
    launch(
        bound_and_place, places.programs + rows, places.words, places.counts, *places.segments,
        places.tokens, groups, places.counts.shape[1], pitch, places.segments.tiles.shape[1], best,
        found, width, places.programs, T=tile_size(places.tokens, groups), GC=columns,
        RC=max(1, min(8, 512 // columns)), WP=min(power_of_two(pitch), 512), N=blocks,
        num_warps=warps,
    )  # fmt: skip
    return found


def bound(best: Tensor, width: int) -> Tensor:
    """Find the bounds of the selection of (B H, G, N) block maxima: float32 (B H G)."""
    integers = torch.empty((1, 2, 1), dtype=torch.int32, device=best.device)
    nothing = OrderPlan(integers[:0], integers, Segments(integers, integers, integers), 1)
    return bound_and_order(nothing, best, width)


def order(places: OrderPlan) -> None:
    """Place queries."""
    bound_and_order(
        places, torch.empty((0, 1, 16), dtype=torch.float32, device=places.words.device), 1
    )


def sort_queries(group_ids: Tensor, groups: int) -> Segments:
    """Sort (B, H, L) queries by group; ids outside 0 to G - 1 belong to none."""
    like = torch.empty((), dtype=torch.float16, device=group_ids.device).expand(*group_ids.shape, 1)
    queries = grouping.plan_groups(
        like, like.new_empty((1, groups, 1)), None, True, group_ids.contiguous()
    )
    score(queries, no_keys(like), None)
    places = grouping.plan_order(queries)
    order(places)
    return places.segments


def group(query: Tensor, centroids: Tensor, query_mask: Tensor | None) -> Tensor:
    """Group of every query; shapes and contract as in :func:`dgt.group_queries`."""
    queries = grouping.plan_groups(query, centroids, query_mask, sort=False)
    score(queries, no_keys(queries.query), None)
    return queries.group_ids


def no_keys(like: Tensor) -> KeyPlan:
    """No programs at all for keys."""
    return plan(like[:, :, :1], 1, 1)._replace(parts=0)


def select(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Keys of every group; shapes and contract as in :func:`dgt.select_keys`."""
    key, width = rows_of(key), min(top_k, key.shape[2])
    key_mask = None if key_mask is None else key_mask.contiguous()
    queries = grouping.plan_groups(key, centroids, None, sort=False)._replace(heads=0)
    keys = plan(key, centroids.shape[1], top_k)
    score(queries, keys, key_mask)
    if key.shape[2] <= keys.blocks:
        return cast(Tensor, selection.choose_from_all(keys, width, listed=True, with_ids=True)[0])
    return selection.choose_by_bounds(
        keys, queries.centroids, key_mask, width, bound(keys.best, width)
    )[0]


def group_and_select(
    query: Tensor,
    key: Tensor,
    centroids: Tensor,
    top_k: int,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    many: bool,
    with_ids: bool,
) -> tuple[Tensor, Segments, Tensor | None, Lists]:
    """Group queries and select keys in at most four launches.

    Returns ``(group_ids, segments, key_ids, lists)``.

    Unless there are ``many`` tokens there are no segments, and bits take the place of the lists'
    ids. Key ids that nobody asked for are None, where every key has its own block.
    """
    key, width = rows_of(key), min(top_k, key.shape[2])
    key_mask = None if key_mask is None else key_mask.contiguous()
    queries = grouping.plan_groups(query, centroids, query_mask, sort=many)
    keys = plan(key, centroids.shape[1], top_k)
    score(queries, keys, key_mask)
    if not many:
        chosen = selection.choose_from_all(keys, width, listed=False, with_ids=with_ids)
        return queries.group_ids, no_segments(queries.words), *chosen
    places = grouping.plan_order(queries)
    if key.shape[2] <= keys.blocks:
        order(places)
        chosen = selection.choose_from_all(keys, width, listed=True, with_ids=with_ids)
    else:
        bounds = bound_and_order(places, keys.best, width)
        chosen = selection.choose_by_bounds(keys, queries.centroids, key_mask, width, bounds)
    return queries.group_ids, places.segments, *chosen
