# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The top-k keys of every group, chosen on chip (Eq. 1): a bound, the few keys above it, the choice among these.

The keys of a head are dealt out to N >= 2 k blocks, key j to block j mod N, and a first kernel finds the best score of
every group in every block. The k-th largest of these N is reached by at least k keys, and by few more: a bound
(:func:`bound_row`). A second kernel scores all keys again and keeps one bit a group for those that reach it
(:func:`mark_candidates`). A third scores these candidates once more, exactly, and chooses (:func:`pick_best`); ties go
to the lowest index. Every score is made twice on the matrix units; no row of scores is ever sorted, or in memory.
Where more candidates tie with the bound than have room, :func:`pick_best` searches all of them; any k is right.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import (
    EMPTY,
    HIGHEST,
    choose_row,
    exact_left,
    expand,
    fill_row,
    guess,
    head_base,
    load_rows,
    narrow_down,
    pack_columns,
    rank_of,
    score_of,
    split_centers,
    store_best,
)
from dgt.ops.triton.inverse import Lists, new_lists
from dgt.ops.triton.launch import Launch, block_of, launch, power_of_two, strides_of

LEAST_BLOCKS = 256  # so that few tokens have one for each
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

    The search ends as soon as the bound is passed by few more maxima than there must be.
    """
    ranks = rank_of(tl.load(best + row.to(tl.int64) * N + tl.arange(0, N)))
    real = tl.sum((ranks > EMPTY).to(tl.int32), 0)
    low = tl.min(tl.where(ranks > EMPTY, ranks, HIGHEST), 0)
    low = tl.where(real >= width, low, LOWEST)
    high = tl.where(real > width, tl.max(ranks, 0), low)
    least, most, step = 0, real, 0
    while low < high:
        middle = guess(low, high, least, most, width + width // 32, step)
        reach = tl.sum((ranks >= middle).to(tl.int32), 0)
        low, high, least, most = narrow_down(low, high, least, most, middle, reach, width)
        high = tl.where((reach >= width) & (reach <= width + width // 16), low, high)
        step += 1
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
def pick_all(best, key_ids, lists, counts, words, width, padded, N: tl.constexpr):
    """Choose the ``width`` best of a row of N scores, one a key; without lists, bits tell which."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, N)
    ranks = rank_of(tl.load(best + row * N + place))
    total = tl.sum((ranks > EMPTY).to(tl.int32), 0)
    count = tl.minimum(total, width)
    key_ids += row * width
    if lists is not None:
        lists += row * padded
        tl.store(counts + row, count)
    chosen = choose_row(key_ids, lists, place, ranks, total, count)
    fill_row(key_ids, lists, count, width, padded)
    if words is not None:
        word = tl.sum(tl.reshape(tl.where(chosen, 1 << (place % 32), 0), [N // 32, 32]), 1)
        tl.store(words + row * (N // 32) + tl.arange(0, N // 32), word)


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
    centroids += ((head % heads) * groups + group).to(tl.int64) * D
    center = tl.load(centroids + channel, mask=channel < D, other=0.0)
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
        low, high, least, most, step = HIGHEST, EMPTY, 0, total, 0
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
            low, high, least, most = narrow_down(low, high, least, most, middle, reach, count)
            middle = guess(low, high, least, most, count, step)
            step += 1
        ties, taken = 0, 0
        for begin in range(0, tokens, N):
            rank = rank_marked(rows, words, center, begin, kl, pitch, D, DP, N)
            keys = begin + tl.arange(0, N)
            ties, taken, _ = store_best(key_ids, lists, keys, rank, high, count - least, ties, taken)
    fill_row(key_ids, lists, count, width, padded)


def plan(key: Tensor, groups: int, top_k: int) -> Launch:
    """Prepare the search for block maxima, float32 (B H, G, N)."""
    batch, heads, tokens, _ = key.shape
    blocks = min(power_of_two(tokens, 32), power_of_two(2 * min(top_k, tokens), LEAST_BLOCKS), MOST_BLOCKS)
    wide = block_of(key) == 64
    size, at_once = min(blocks, 128 if wide else 32), min(64 if wide else 16, power_of_two(groups))
    parts, slices = triton.cdiv(groups, at_once), blocks // size
    best = torch.empty((batch * heads, groups, blocks), dtype=torch.float32, device=key.device)
    arguments = (key, best, *strides_of(key), parts, slices)
    return Launch(None, batch * heads * parts * slices, arguments, {"KT": size, "KG": at_once, "N": blocks}, best)


def pick(keys: Launch, like: Tensor, width: int, listed: bool) -> tuple[Tensor, Lists]:
    """Choose from all scores, where there are no more keys than blocks; see :func:`finish`."""
    best, (rows, groups, blocks) = keys.result, keys.result.shape
    key_ids = best.new_empty((*like.shape[:2], groups, width), dtype=torch.int64)
    words = best.new_empty((rows, groups, blocks // 32), dtype=torch.int32)
    lists = new_lists(rows, groups, width, best.device) if listed else Lists(words, None)
    made, padded = ((*lists, None), lists.ids.shape[2]) if listed else ((None, None, words), width)
    launch(pick_all, rows * groups, best, key_ids, *made, width, padded, N=blocks, num_warps=warps_for(blocks))
    return key_ids, lists


def finish(
    key: Tensor, centroids: Tensor, key_mask: Tensor | None, width: int, keys: Launch, bound: Tensor
) -> tuple[Tensor, Lists]:
    """Mark and pick, when the bounds of all rows are known; ``(key_ids, lists)``."""
    batch, heads, tokens, channels = key.shape
    rows, groups = keys.result.shape[:2]
    size, at_once, parts = keys.options["KT"], keys.options["KG"], keys.arguments[5]
    options = {"D": channels, "DP": power_of_two(channels)}
    pitch = triton.cdiv(tokens, 32)
    words = torch.empty((rows, groups, pitch), dtype=torch.int32, device=key.device)
    pieces = max(1, min(triton.cdiv(tokens, size), triton.cdiv(1056, rows * parts)))
    span = triton.cdiv(triton.cdiv(tokens, pieces), size) * size
    slices = triton.cdiv(tokens, span)
    launch(
        mark_candidates, rows * parts * slices, key, centroids, key_mask, bound, words, *strides_of(key), heads,
        tokens, groups, parts, slices, span, pitch, **options, T=size, GP=at_once, MASKED=key_mask is not None,
        num_warps=4,
    )  # fmt: skip
    room = min(power_of_two(width + width // 2 + 64), power_of_two(tokens, 32), MOST_BLOCKS)
    found = words.new_empty((2, rows * groups, room))
    lists = new_lists(rows, groups, width, key.device)
    key_ids = torch.empty((batch, heads, groups, width), dtype=torch.int64, device=key.device)
    launch(
        pick_best, rows * groups, key, centroids, words, *found, key_ids, *lists, *strides_of(key), heads, tokens,
        groups, pitch, width, lists.ids.shape[2], **options,
        W=min(power_of_two(pitch), 256), C=room, N=max(16, 2048 // options["DP"]), num_warps=warps_for(room),
    )  # fmt: skip
    return key_ids, lists


def warps_for(numbers: int) -> int:
    """Warps of a program that holds so many numbers: up to 16 in a thread."""
    return min(8, max(1, numbers // 512))
