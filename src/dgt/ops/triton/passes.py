# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Grouping, sorting and selecting in few launches: kernels that can run beside each other share one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton import grouping, selection
from dgt.ops.triton.grouping import Segments, no_segments
from dgt.ops.triton.inverse import Lists
from dgt.ops.triton.launch import Launch, at_most, launch, power_of_two, rows_of


@triton.jit
def score_tokens(
    query, centroids, key_mask, group_ids, words, counts, qb, qh, ql, heads, tokens, groups, runs, run, pitch,
    key, best, kb, kh, kl, parts, slices, first,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr,
    ONE: tl.constexpr, MASKED: tl.constexpr, GIVEN: tl.constexpr, SORT: tl.constexpr,
    KT: tl.constexpr, KG: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Groups of queries and, from program ``first`` on, block maxima of keys."""
    pid = tl.program_id(0)
    if pid < first:
        grouping.group_run(
            query, centroids, key_mask, group_ids, words, counts, pid, qb, qh, ql, heads, tokens, groups, runs, run,
            pitch, D, DP, T, GP, ONE, MASKED, GIVEN, SORT,
        )  # fmt: skip
    else:
        selection.best_of_blocks(
            key, centroids, key_mask, best, pid - first, kb, kh, kl, heads, tokens, groups, parts, slices,
            D, DP, KT, KG, N, MASKED,
        )  # fmt: skip


@triton.jit
def bound_and_place(
    words, counts, order, ends, tiles, tokens, groups, runs, pitch, slots, best, bound, width, first,
    T: tl.constexpr, GC: tl.constexpr, RC: tl.constexpr, WP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Order of queries and, from program ``first`` on, bounds of the selection."""
    pid = tl.program_id(0)
    if pid < first:
        grouping.place_group(words, counts, order, ends, tiles, pid, tokens, groups, runs, pitch, slots, T, GC, RC, WP)
    else:
        selection.bound_row(best, bound, pid - first, width, N)


def score(queries: Launch, keys: Launch) -> None:
    """Group queries and find block maxima of keys; programs of one tile have nothing to prefetch."""
    given = queries.options | keys.options
    few = {} if given["MASKED"] or given["SORT"] or given["KT"] > 64 else at_most(keys.arguments[0], 128)
    options = {"num_stages": 1, **few} if queries.options["T"] >= queries.arguments[13] else {}
    launch(
        score_tokens, queries.programs + keys.programs, *queries.arguments, *keys.arguments, queries.programs,
        **given, num_warps=4, **options, **({"maxnreg": 240} if given["D"] > 64 else {}),  # spills if left to ptxas
    )  # fmt: skip


def bound(places: Launch | None, best: Tensor | None, width: int, device: torch.device) -> Tensor:
    """Place queries and find the bounds of the selection, float32 (B H G); either may be missing."""
    best = torch.empty((0, 1, 16), dtype=torch.float32, device=device) if best is None else best
    if places is None:
        integers = torch.empty(1, dtype=torch.int32, device=device)
        places = Launch(None, 0, (integers,) * 5 + (1,) * 5, {"T": 16, "GC": 16, "RC": 1, "WP": 32}, None)
    rows, groups, blocks = best.shape
    warps = min(4, selection.warps_for(power_of_two(places.arguments[5]) // 16))
    found = torch.empty(rows * groups, dtype=torch.float32, device=device)
    launch(
        bound_and_place, places.programs + rows * groups, *places.arguments, best, found, width, places.programs,
        **places.options, N=blocks, num_warps=max(warps, selection.warps_for(blocks)),
    )  # fmt: skip
    return found


def sort_queries(group_ids: Tensor, groups: int) -> Segments:
    """Sort (B, H, L) queries by group; ids outside 0 to G - 1 belong to none."""
    like = torch.empty((), dtype=torch.float16, device=group_ids.device).expand(*group_ids.shape, 1)
    queries = grouping.plan_groups(like, like.new_empty((1, groups, 1)), None, True, group_ids.contiguous())
    score(queries, selection.plan(like[:, :, :1], 1, 1)._replace(programs=0))
    _, words, counts = queries.result
    places = grouping.plan_order(words, counts, group_ids.shape[2])
    bound(places, None, 1, group_ids.device)
    segments: Segments = places.result
    return segments


def group(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Group of every query; shapes and contract as in :func:`dgt.group_queries`."""
    queries = grouping.plan_groups(query, centroids, key_mask, sort=False)
    score(queries, selection.plan(queries.arguments[0][:, :, :1], 1, 1)._replace(programs=0))
    group_ids: Tensor = queries.result[0]
    return group_ids


def group_and_select(
    query: Tensor | None, key: Tensor, centroids: Tensor, top_k: int, key_mask: Tensor | None, many: bool
) -> tuple[Tensor, Segments, Tensor, Lists]:
    """Group queries, if there are any, and select in at most four launches: ``(group_ids, segments, key_ids, lists)``.

    Without queries there are no segments; unless there are ``many`` neither, and bits take the place of the lists' ids.
    """
    sort = many and query is not None
    key, width = rows_of(key), min(top_k, key.shape[2])
    queries = grouping.plan_groups(key if query is None else query, centroids, key_mask, sort)
    _, centroids, mask, *_ = queries.arguments
    keys = selection.plan(key, centroids.shape[1], top_k)
    score(queries._replace(programs=0) if query is None else queries, keys)
    group_ids, words, counts = queries.result
    places = grouping.plan_order(words, counts, key.shape[2]) if sort else None
    best = keys.result if key.shape[2] > keys.result.shape[2] else None
    least = bound(places, best, width, key.device) if places or best is not None else None
    chosen = selection.finish(key, centroids, mask, width, keys, None if best is None else least, many)
    return group_ids, places.result if places else no_segments(words), *chosen
