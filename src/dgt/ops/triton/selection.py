# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The top-k keys of every group, chosen on chip (Eq. 1): a bound, the few keys above it, the choice among these.

The keys of a head are dealt out to N >= 2 k blocks, key j to block j mod N, and a first kernel finds the best score of
every group in every block. The k-th largest of these N is reached by at least k keys, and by few more: a bound
(:func:`bound_row`). A second kernel scores all keys again and keeps one bit a group for those that reach it
(:func:`mark_candidates`). A third scores these candidates once more, exactly, and chooses (:func:`pick_best`); ties go
to the lowest index. Every score is made twice on the matrix units; no row of scores is ever sorted, or in memory.
Where more candidates tie with the bound than have room, :func:`pick_best` bisects over them; any k is right.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton import grouping, sorting
from dgt.ops.triton.common import (
    EMPTY,
    HIGHEST,
    choose_row,
    exact_left,
    expand,
    fill_row,
    head_base,
    load_rows,
    middle_of,
    pack_columns,
    rank_of,
    score_of,
    split_centers,
    store_best,
)
from dgt.ops.triton.inverse import Lists, new_lists
from dgt.ops.triton.launch import block_of, launch, power_of_two, rows_of, strides_of

MOST_BLOCKS = 4096  # block maxima of a row, which a program holds to find the bound
LOWEST = tl.constexpr(-2139095040)  # the rank of the least finite score


@triton.jit
def score_keys(
    first, second, third, rows, key_mask, head, heads, begin, stride, tokens,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(GP, T) scores of keys ``begin`` and on, and which of these are real; TAIL: some may lie beyond the last."""
    place = begin + tl.arange(0, T)
    inside = place < tokens if TAIL else place >= 0
    score = exact_left(first, second, third, tl.trans(load_rows(rows, place, stride, inside, D, DP)))
    if MASKED:
        inside &= tl.load(key_mask + (head // heads).to(tl.int64) * tokens + place, mask=inside, other=0) != 0
    return score, inside


@triton.jit
def best_of_blocks(
    key, centroids, key_mask, best, pid, kb, kh, kl, heads, tokens, groups, parts, slices,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The best scores of GP groups in T of the N blocks of a head's keys."""
    head, part, piece = pid // slices // parts, pid // slices % parts, pid % slices
    ids = part * GP + tl.arange(0, GP)
    centers = centroids + (head % heads).to(tl.int64) * groups * D
    first, second, third = split_centers(centers, ids, groups, key.dtype.element_ty, D, DP)
    rows = head_base(key, head, heads, kb, kh)
    result = tl.full([GP, T], float("-inf"), tl.float32)
    full = tl.maximum(tokens - piece * T - T + N, 0) // N  # passes without an end in them
    for nth in range(full):
        score, inside = score_keys(
            first, second, third, rows, key_mask, head, heads, nth * N + piece * T, kl, tokens, D, DP, T, False, MASKED
        )  # fmt: skip
        result = tl.maximum(result, tl.where(inside[None, :], score, float("-inf")) if MASKED else score)
    score, inside = score_keys(
        first, second, third, rows, key_mask, head, heads, full * N + piece * T, kl, tokens, D, DP, T, True, MASKED
    )  # fmt: skip
    result = tl.maximum(result, tl.where(inside[None, :], score, float("-inf")))
    column = piece * T + tl.arange(0, T)[None, :]
    row = best + (head.to(tl.int64) * groups + ids)[:, None] * N
    tl.store(row + column, result, mask=(ids < groups)[:, None] & (column < N))


@triton.jit
def bound_row(best, bound, row, width, N: tl.constexpr):
    """A score that the ``width`` best keys of a row reach, from N block maxima; any, if fewer blocks are real.

    The bisection ends as soon as the bound is passed by few more maxima than there must be.
    """
    ranks = rank_of(tl.load(best + row.to(tl.int64) * N + tl.arange(0, N)))
    real = tl.sum((ranks > EMPTY).to(tl.int32), 0)
    low = tl.min(tl.where(ranks > EMPTY, ranks, HIGHEST), 0)
    low = tl.where(real >= width, low, LOWEST)
    high = tl.where(real > width, tl.max(ranks, 0), low)
    while low < high:
        middle = middle_of(low, high)
        reach = tl.sum((ranks >= middle).to(tl.int32), 0)
        enough = reach >= width
        low = tl.where(enough, middle, low)
        high = tl.where(enough, tl.where(reach <= width + width // 16, middle, high), middle - 1)
    low = tl.maximum(low, LOWEST + 16) - 16  # should the second kernel round otherwise
    tl.store(bound + row, tl.where(real > 0, score_of(low), float("inf")))


@triton.jit
def mark_candidates(
    key, centroids, key_mask, bound, words, kb, kh, kl, heads, tokens, groups, parts, slices, span, pitch,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """For ``span`` keys of a head and GP groups one bit each: whether the score reaches the group's bound."""
    pid = tl.program_id(0)
    head, part, piece = pid // slices // parts, pid // slices % parts, pid % slices
    ids = part * GP + tl.arange(0, GP)
    centers = centroids + (head % heads).to(tl.int64) * groups * D
    first, second, third = split_centers(centers, ids, groups, key.dtype.element_ty, D, DP)
    rows = head_base(key, head, heads, kb, kh)
    row = head.to(tl.int64) * groups + ids
    least = tl.load(bound + row, mask=ids < groups, other=float("inf"))[:, None]
    for begin in range(piece * span, tl.minimum(piece * span + span, tokens), T):
        score, inside = score_keys(
            first, second, third, rows, key_mask, head, heads, begin, kl, tokens, D, DP, T, True, MASKED
        )  # fmt: skip
        real = tl.sum(tl.reshape(tl.where(inside, 1 << (tl.arange(0, T) % 32), 0), [T // 32, 32]), 1)
        word = pack_columns(score >= least, GP, T) & real[None, :]
        which = begin // 32 + tl.arange(0, T // 32)[None, :]
        tl.store(words + row[:, None] * pitch + which, word, mask=(ids < groups)[:, None] & (which < pitch))


@triton.jit
def rank_rows(rows, ids, present, center, stride, D: tl.constexpr, DP: tl.constexpr):
    """Ranks of some keys for one centroid, in float32; EMPTY where a key is not present."""
    tile = load_rows(rows, ids, stride, present, D, DP).to(tl.float32)
    return tl.where(present, rank_of(tl.sum(tile * center[None, :], 1)), EMPTY)


@triton.jit
def rank_marked(rows, words, center, begin, stride, pitch, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr):
    """Ranks of the marked among keys ``begin`` to ``begin + N``; EMPTY for the others."""
    key = begin + tl.arange(0, N)
    word = tl.load(words + key // 32, mask=key // 32 < pitch, other=0)
    return rank_rows(rows, key, (word >> (key % 32)) & 1 == 1, center, stride, D, DP)


@triton.jit
def pick_all(best, key_ids, lists, counts, width, padded, N: tl.constexpr):
    """Choose the ``width`` best of a row of N scores, one a key."""
    row = tl.program_id(0).to(tl.int64)
    ranks = rank_of(tl.load(best + row * N + tl.arange(0, N)))
    total = tl.sum((ranks > EMPTY).to(tl.int32), 0)
    count = tl.minimum(total, width)
    tl.store(counts + row, count)
    key_ids, lists = key_ids + row * width, lists + row * padded
    choose_row(key_ids, lists, tl.arange(0, N), ranks, total, count)
    fill_row(key_ids, lists, count, width, padded)


@triton.jit
def pick_best(
    key, centroids, words, found, ranks, key_ids, lists, counts,
    kb, kh, kl, heads, tokens, groups, pitch, width, padded,
    D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Choose the ``width`` best of a row of candidates, which are bits; up to C of them are listed first."""
    row = tl.program_id(0).to(tl.int64)
    head, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    rows = head_base(key, head, heads, kb, kh)
    channel = tl.arange(0, DP)
    center = tl.load(
        centroids + ((head % heads) * groups + group).to(tl.int64) * D + channel, mask=channel < D, other=0.0
    )  # fmt: skip
    words, found, ranks = words + row * pitch, found + row * C, ranks + row * C
    key_ids, lists = key_ids + row * width, lists + row * padded
    total = 0
    for first in range(0, pitch, W):
        which = first + tl.arange(0, W)
        total = expand(tl.load(words + which, mask=which < pitch, other=0), first, found, total, C, W)
    count = tl.minimum(total, width)
    tl.store(counts + row, count)
    tl.debug_barrier()  # what some threads listed, others read
    if total <= C:
        for begin in range(0, total, N):
            place = begin + tl.arange(0, N)
            ids = tl.load(found + place, mask=place < total, other=0)
            tl.store(ranks + place, rank_rows(rows, ids, place < total, center, kl, D, DP), mask=place < total)
        tl.debug_barrier()
        place = tl.arange(0, C)
        rank = tl.load(ranks + place, mask=place < total, other=EMPTY)
        ids = tl.load(found + place, mask=place < total, other=0)
        choose_row(key_ids, lists, ids, rank, total, count)
    else:
        low, high = HIGHEST, EMPTY
        for begin in range(0, tokens, N):
            rank = rank_marked(rows, words, center, begin, kl, pitch, D, DP, N)
            low = tl.minimum(low, tl.min(tl.where(rank > EMPTY, rank, HIGHEST), 0))
            high = tl.maximum(high, tl.max(rank, 0))
        middle = low + 1  # where many tie with the bound, it is the threshold
        while low < high:
            reach = 0
            for begin in range(0, tokens, N):
                rank = rank_marked(rows, words, center, begin, kl, pitch, D, DP, N)
                reach += tl.sum((rank >= middle).to(tl.int32), 0)
            low = tl.where(reach >= count, middle, low)
            high = tl.where(reach > count, high, tl.where(reach == count, middle, middle - 1))
            middle = middle_of(low, high)
        above = 0
        for begin in range(0, tokens, N):
            rank = rank_marked(rows, words, center, begin, kl, pitch, D, DP, N)
            above += tl.sum((rank > high).to(tl.int32), 0)
        ties, taken = 0, 0
        for begin in range(0, tokens, N):
            rank = rank_marked(rows, words, center, begin, kl, pitch, D, DP, N)
            ties, taken = store_best(
                key_ids, lists, begin + tl.arange(0, N), rank, high, count - above, ties, taken
            )  # fmt: skip
    fill_row(key_ids, lists, count, width, padded)


class Selecting(NamedTuple):
    """How the launches of a selection are cut: of the first the programs, arguments and options; then the rest."""

    programs: int
    arguments: tuple[object, ...]
    options: dict[str, object]
    best: Tensor
    width: int


def plan(key: Tensor, centroids: Tensor, top_k: int, key_mask: Tensor | None) -> Selecting:
    """Cut the search for block maxima; ``centroids`` float32 and contiguous, ``key_mask`` contiguous."""
    key = rows_of(key)
    batch, heads, tokens, channels = key.shape
    groups, width = centroids.shape[1], min(top_k, tokens)
    blocks = max(32, min(power_of_two(tokens, 32), power_of_two(2 * width), MOST_BLOCKS))
    narrow = block_of(key)
    size, at_once = min(blocks, 128 if narrow == 64 else 32), min(64 if narrow == 64 else 16, power_of_two(groups))
    parts, slices = triton.cdiv(groups, at_once), blocks // size
    best = torch.empty((batch * heads, groups, blocks), dtype=torch.float32, device=key.device)
    arguments = (key, centroids, key_mask, best, *strides_of(key), heads, tokens, groups, parts, slices)
    options = {"D": channels, "DP": power_of_two(channels), "T": size, "GP": at_once, "N": blocks}
    options |= {"MASKED": key_mask is not None}
    return Selecting(batch * heads * parts * slices, arguments, options, best, width)


def finish(cut: Selecting, bound: Tensor) -> tuple[Tensor, Lists]:
    """Mark and pick, when the bounds of all rows are known; ``(key_ids, lists)``."""
    key, centroids, key_mask, _, *strides, heads, tokens, groups, parts, _ = cut.arguments
    options = {name: value for name, value in cut.options.items() if name != "N"}
    all_heads, size, pitch = cut.best.shape[0], options["T"], triton.cdiv(tokens, 32)
    integers = {"dtype": torch.int32, "device": key.device}
    words = torch.empty((all_heads, groups, pitch), **integers)
    pieces = max(1, min(triton.cdiv(tokens, size), triton.cdiv(1056, all_heads * parts)))
    span = triton.cdiv(triton.cdiv(tokens, pieces), size) * size
    slices = triton.cdiv(tokens, span)
    launch(
        mark_candidates, all_heads * parts * slices, key, centroids, key_mask, bound, words, *strides, heads, tokens,
        groups, parts, slices, span, pitch, **options, num_warps=4,
    )  # fmt: skip
    room = min(power_of_two(cut.width + cut.width // 2 + 64), power_of_two(tokens, 32), MOST_BLOCKS)
    found = torch.empty((2, all_heads * groups, room), **integers)
    lists = new_lists(all_heads, groups, cut.width, key.device)
    key_ids = _new_ids(cut)
    launch(
        pick_best, all_heads * groups, key, centroids, words, *found, key_ids, *lists, *strides, heads, tokens,
        groups, pitch, cut.width, lists.ids.shape[2], D=options["D"], DP=options["DP"],
        W=min(power_of_two(pitch), 256), C=room, N=max(16, 2048 // options["DP"]), num_warps=warps_for(room),
    )  # fmt: skip
    return key_ids, lists


def warps_for(numbers: int) -> int:
    """Warps of a program that holds so many numbers: up to 16 in a thread."""
    return min(8, max(1, numbers // 512))


@triton.jit
def score_tokens(
    query, centroids, key_mask, group_ids, words, counts, qb, qh, ql, heads, tokens, groups, runs, run, pitch,
    key, best, kb, kh, kl, parts, slices, first,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr,
    ONE: tl.constexpr, MASKED: tl.constexpr, GIVEN: tl.constexpr, SORT: tl.constexpr,
    KT: tl.constexpr, KG: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The two kernels that score tokens in one launch: from program ``first`` on, block maxima of keys."""
    pid = tl.program_id(0)
    if pid < first:
        grouping.group_run(
            query, centroids, key_mask, group_ids, words, counts, pid, qb, qh, ql, heads, tokens, groups, runs, run,
            pitch, D, DP, T, GP, ONE, MASKED, GIVEN, SORT,
        )  # fmt: skip
    else:
        best_of_blocks(
            key, centroids, key_mask, best, pid - first, kb, kh, kl, heads, tokens, groups, parts, slices,
            D, DP, KT, KG, N, MASKED,
        )  # fmt: skip


@triton.jit
def bound_and_place(
    words, counts, order, ends, tiles, tokens, groups, runs, pitch, slots, best, bound, width, first,
    T: tl.constexpr, GC: tl.constexpr, RC: tl.constexpr, WP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The two kernels on rows in one launch: from program ``first`` on, bounds of the selection."""
    pid = tl.program_id(0)
    if pid < first:
        sorting.place_group(words, counts, order, ends, tiles, pid, tokens, groups, runs, pitch, slots, T, GC, RC, WP)
    else:
        bound_row(best, bound, pid - first, width, N)


def pick(cut: Selecting) -> tuple[Tensor, Lists]:
    """Choose from all scores, where there are no more keys than blocks; ``(key_ids, lists)``."""
    heads, groups, blocks = cut.best.shape
    lists, key_ids = new_lists(heads, groups, cut.width, cut.best.device), _new_ids(cut)
    launch(
        pick_all, heads * groups, cut.best, key_ids, *lists, cut.width, lists.ids.shape[2],
        N=blocks, num_warps=warps_for(blocks),
    )  # fmt: skip
    return key_ids, lists


def _new_ids(cut: Selecting) -> Tensor:
    """Room for the ids."""
    key, groups = cut.arguments[0], cut.best.shape[1]
    return torch.empty((*key.shape[:2], groups, cut.width), dtype=torch.int64, device=key.device)


def select(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> tuple[Tensor, Lists]:
    """Select the ``top_k`` keys of every group; contract as in :func:`dgt.select_keys`, and the lists."""
    mask = key_mask if key_mask is None else key_mask.contiguous()
    centroids = centroids.float().contiguous()
    cut = plan(key, centroids, top_k, mask)
    nothing = grouping.plan(key[:, :, :0], centroids, mask, torch.empty_like(cut.best, dtype=torch.int64), False, False)
    _score(nothing, cut)
    return pick(cut) if key.shape[2] <= cut.best.shape[2] else finish(cut, _bound(None, cut))


def _score(runs: grouping.Grouping, cut: Selecting) -> None:
    """Group queries, if there are any, and find block maxima of keys."""
    key, _, _, best, *strides, _, tokens, _, parts, slices = cut.arguments
    arguments = list(runs.arguments)
    arguments[10] = tokens  # of keys, where there are no queries
    launch(
        score_tokens, runs.programs + cut.programs, *arguments, key, best, *strides, parts, slices, runs.programs,
        **runs.options, KT=cut.options["T"], KG=cut.options["GP"], N=cut.options["N"], num_warps=4,
    )  # fmt: skip


def _bound(places: sorting.Placing | None, cut: Selecting) -> Tensor:
    """Place queries, if there are any, and find the bounds of the selection."""
    heads, groups, blocks = cut.best.shape
    bound = torch.empty(heads * groups, dtype=torch.float32, device=cut.best.device)
    programs, arguments = (places.programs, places.arguments) if places else (0, (bound,) * 5 + (1,) * 5)
    options = places.options if places else {"T": 16, "GC": 16, "RC": 1, "WP": 32}
    warps = max(sorting.warps_of(cut.arguments[8]) if places else 1, warps_for(blocks))
    launch(
        bound_and_place, programs + heads * groups, *arguments, cut.best, bound, cut.width, programs,
        **options, N=blocks, num_warps=warps,
    )  # fmt: skip
    return bound


def group_and_select(
    query: Tensor, key: Tensor, centroids: Tensor, top_k: int, key_mask: Tensor | None, sort: bool
) -> tuple[Tensor, sorting.Segments | None, Tensor, Lists]:
    """Group, sort if asked and select, in at most four launches; ``(group_ids, segments, key_ids, lists)``."""
    centroids, mask = centroids.float().contiguous(), key_mask if key_mask is None else key_mask.contiguous()
    group_ids = torch.empty(query.shape[:3], dtype=torch.int64, device=query.device)
    runs = grouping.plan(query, centroids, mask, group_ids, given=False, sort=sort)
    cut = plan(key, centroids, top_k, mask)
    _score(runs, cut)
    places = sorting.plan_places(runs.members, query.shape[2]) if runs.members else None
    if key.shape[2] <= cut.best.shape[2]:
        if places:
            launch(
                sorting.place_queries, places.programs, *places.arguments, **places.options,
                num_warps=sorting.warps_of(query.shape[2]),
            )  # fmt: skip
        chosen = pick(cut)
    else:
        chosen = finish(cut, _bound(places, cut))
    return group_ids, places and places.segments, *chosen
