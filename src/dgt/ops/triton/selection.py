# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The top-k keys of every group, chosen on chip (Eq. 1): a bound, the few keys above it, the choice among these.

How: docs/kernels.md. Ties go to the lowest index; no row of scores is ever sorted, or in memory. Where more candidates
tie with the bound than have room, :func:`pick_best` searches all of them: any k is right.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import LOWEST, exact, expand, head_base, load_rows, popcount, split_centers
from dgt.ops.triton.inverse import PAD, Lists
from dgt.ops.triton.launch import Launch, block_of, launch, power_of_two, strides_of

LEAST_BLOCKS = 256  # so that few tokens have one for each
LOWEST_RANK = tl.constexpr(-2139095040)  # of the least finite score
GUESSES: tl.constexpr = tl.constexpr(8)  # in proportion; from then on intervals are halved
MOST_BLOCKS = 4096  # block maxima of a row, which a program holds to find the bound


@triton.jit
def rank_of(score):
    """Map float32 scores, but for NaN, to int32 ranks of the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(rank):
    """The float32 score that has this rank."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack_columns(flags, R: tl.constexpr, N: tl.constexpr):
    """(R, N / 32) int32 words of (R, N) flags: bit ``c % 32`` of word ``c // 32`` is column ``c``."""
    bits = tl.where(flags, (1 << (tl.arange(0, N) % 32))[None, :], 0)
    return tl.sum(tl.reshape(bits, [R, N // 32, 32]), 2)


@triton.jit
def count_reaching(score, least):
    """How many scores, of which none is NaN, reach a finite number: by signs of differences, never an overflow's."""
    below = (score - least).to(tl.uint32, bitcast=True) >> 31
    return -tl.sum(below.to(tl.int32), 0) + score.shape[0]


@triton.jit
def extremes(score):
    """How many scores are real, the lowest of them, and a number just above the highest; NaN and -inf are not real."""
    low = tl.min(tl.where(score > float("-inf"), score, float("inf")), 0)
    return count_reaching(score, LOWEST), low, score_of(rank_of(tl.max(score, 0)) + 1)


@triton.jit
def halve(low, high):
    """The number in the middle of all that lie from ``low`` to ``high``; ``low`` itself where none is left between."""
    one, two = rank_of(low), rank_of(high)
    return score_of((one & two) + ((one ^ two) >> 1))  # the mean without overflow


@triton.jit
def divide(low, high, least, most, count):
    """A number that about ``count`` scores reach, of which ``most`` reach ``low`` and ``least`` reach ``high``.

    It lies between the two, or is ``low`` where rounding leaves none.
    """
    middle = low + (high - low) * ((most - count) / (most - least).to(tl.float32))
    return tl.where((middle > low) & (middle < high), middle, low)


@triton.jit
def narrow_down(low, high, least, most, middle, reach, count):
    """The interval of :func:`divide` when ``reach`` scores turn out to reach ``middle``."""
    enough = reach >= count
    return (
        tl.where(enough, middle, low), tl.where(enough, high, middle),
        tl.where(enough, least, reach), tl.where(enough, reach, most),
    )  # fmt: skip


@triton.jit
def find_threshold(score, count):
    """``(low, high, least, most)``: ``most`` >= ``count`` scores reach ``low``, or all; more only if they are level.

    The others reach ``high``: ``least``, fewer than ``count``. First by proportion, and if that takes long by halves.
    """
    most, low, high = extremes(score)
    least, step = 0, 0
    while (most > count) & (step < GUESSES):
        middle = divide(low, high, least, most, count)
        low, high, least, most = narrow_down(low, high, least, most, middle, count_reaching(score, middle), count)
        step += 1
    middle = halve(low, high)
    while (most > count) & (middle > low):
        low, high, least, most = narrow_down(low, high, least, most, middle, count_reaching(score, middle), count)
        middle = halve(low, high)
    return low, high, least, most


@triton.jit
def choose_row(score, count):
    """Which of the scores of a row are the ``count`` largest, ties to the lowest place; all that are real, if fewer."""
    low, high, _, most = find_threshold(score, count)
    chosen, first, last = score >= low, 0, score.shape[0]
    while most > count:  # many are level: where among them to end
        middle = (first + last) // 2
        ahead = chosen & ((score >= high) | (tl.arange(0, score.shape[0]) < middle))
        reach = tl.sum(ahead.to(tl.int32), 0)
        if reach < count:
            first = middle
        else:
            chosen, last, most = ahead, middle, reach
    return chosen


@triton.jit
def store_ids(key_ids, lists, ids, chosen, place):
    """Write the ids that are chosen to their places."""
    tl.store(key_ids + place, ids.to(tl.int64), mask=chosen)
    tl.store(lists + place, ids.to(tl.int32), mask=chosen)


@triton.jit
def fill(target, begin, end, value):
    """Write a number to the places from ``begin`` on and before ``end``."""
    for first in range(begin, end, 32):
        place = first + tl.arange(0, 32)
        tl.store(target + place, tl.zeros([32], target.dtype.element_ty) + value, mask=place < end)


@triton.jit
def score_keys(
    center, rows, key_mask, head, heads, begin, stride, tokens,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(GP, T) scores of keys ``begin`` and on, and which of these are real; TAIL: some may lie beyond the last."""
    place = begin + tl.arange(0, T)
    inside = place < tokens if TAIL else place >= 0
    across = tl.trans(load_rows(rows, place, stride, inside, D, DP))
    score = exact(center, (across, across, across))
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
    center = split_centers(centers, ids, groups, key.dtype.element_ty, D, DP)
    rows = head_base(key, head, heads, kb, kh)
    result = tl.full([GP, T], float("-inf"), tl.float32)
    full = tl.maximum(tokens - piece * T - T + N, 0) // N  # passes without an end in them
    for TAIL in tl.static_range(2):
        for nth in tl.range(full * TAIL, full + TAIL, num_stages=1 if TAIL else None):
            score, inside = score_keys(
                center, rows, key_mask, head, heads, nth * N + piece * T, kl, tokens,
                D, DP, T, TAIL == 1, MASKED,
            )  # fmt: skip
            result = tl.maximum(result, tl.where(inside[None, :], score, float("-inf")) if MASKED or TAIL else score)
    column = piece * T + tl.arange(0, T)[None, :]
    row = best + (head.to(tl.int64) * groups + ids)[:, None] * N
    tl.store(row + column, result, mask=(ids < groups)[:, None] & (column < N))


@triton.jit
def bound_row(best, bound, row, width, N: tl.constexpr):
    """A score that the ``width`` best keys of a row reach, from N block maxima; any, if fewer blocks are real."""
    score = tl.load(best + row.to(tl.int64) * N + tl.arange(0, N))
    score = tl.where(score == score, score, float("-inf"))
    low, _, _, most = find_threshold(score, width)
    low = tl.where(most >= width, low, LOWEST)
    low = score_of(tl.maximum(rank_of(low), LOWEST_RANK + 16) - 16)  # should the second kernel round otherwise
    tl.store(bound + row, tl.where(most > 0, low, float("inf")))


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
    center = split_centers(centers, ids, groups, key.dtype.element_ty, D, DP)
    rows = head_base(key, head, heads, kb, kh)
    row = head.to(tl.int64) * groups + ids
    least = tl.load(bound + row, mask=ids < groups, other=float("inf"))[:, None]
    for begin in range(piece * span, tl.minimum(piece * span + span, tokens), T):
        score, inside = score_keys(
            center, rows, key_mask, head, heads, begin, kl, tokens, D, DP, T, True, MASKED
        )  # fmt: skip
        real = tl.sum(tl.reshape(tl.where(inside, 1 << (tl.arange(0, T) % 32), 0), [T // 32, 32]), 1)
        word = pack_columns(score >= least, GP, T) & real[None, :]
        which = begin // 32 + tl.arange(0, T // 32)[None, :]
        tl.store(words + row[:, None] * pitch + which, word, mask=(ids < groups)[:, None] & (which < pitch))


@triton.jit
def score_rows(rows, ids, present, center, stride, D: tl.constexpr, DP: tl.constexpr):
    """Scores of some keys for one centroid, in float32; minus infinity where a key is not present."""
    tile = load_rows(rows, ids, stride, present, D, DP).to(tl.float32)
    score = tl.sum(tile * center[None, :], 1)
    return tl.where(present & (score == score), score, float("-inf"))


@triton.jit
def score_marked(rows, words, center, begin, stride, pitch, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr):
    """Scores of the marked among keys ``begin`` to ``begin + N``; minus infinity for the others."""
    key = begin + tl.arange(0, N)
    word = tl.load(words + key // 32, mask=key // 32 < pitch, other=0)
    return score_rows(rows, key, (word >> (key % 32)) & 1 == 1, center, stride, D, DP)


@triton.jit
def pick_all(best, key_ids, lists, counts, words, width, padded, N: tl.constexpr):
    """Choose the ``width`` best of a row of N scores, one a key; without lists, bits tell which."""
    row = tl.program_id(0).to(tl.int64)
    key_ids += row * width
    ids, lane = tl.arange(0, N), tl.arange(0, 32)[None, :]
    score = tl.load(tl.max_contiguous(best + row * N + ids, 1))  # dealt out to threads as ids are written
    chosen = choose_row(tl.where(score == score, score, float("-inf")), width)
    word = tl.sum(tl.reshape(tl.where(chosen, 1 << (ids % 32), 0), [N // 32, 32]), 1)
    if words is not None:
        tl.store(words + row * (N // 32) + tl.arange(0, N // 32), word)
    number = popcount(word)
    place = (tl.cumsum(number, 0) - number)[:, None] + popcount(word[:, None] & ((1 << lane) - 1))
    place, count = tl.reshape(place, [N]), tl.sum(number, 0)
    tl.store(key_ids + place, ids.to(tl.int64), mask=chosen)
    if lists is not None:
        lists += row * padded
        tl.store(lists + place, ids, mask=chosen)
        tl.store(counts + row, count)
        fill(lists, count, padded, 0)
    fill(key_ids, count, width, -1)


@triton.jit
def pick_best(
    key, centroids, words, found, scores, key_ids, lists, counts,
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
    words, found, scores = words + row * pitch, found + row * C, scores + row * C
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
            tl.store(scores + place, score_rows(rows, ids, place < total, center, kl, D, DP), mask=place < total)
        tl.debug_barrier()
        place = tl.arange(0, C)
        score = tl.load(scores + place, mask=place < total, other=float("-inf"))
        ids = tl.load(found + place, mask=place < total, other=0)
        chosen = choose_row(score, count)
        store_ids(key_ids, lists, ids, chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1)
    else:
        low, high, least, most, step = float("inf"), float("-inf"), 0, total, 0
        for begin in range(0, tokens, N):
            _, lowest, above = extremes(score_marked(rows, words, center, begin, kl, pitch, D, DP, N))
            low, high = tl.minimum(low, lowest), tl.maximum(high, above)
        middle = score_of(rank_of(low) + 1)  # where many tie with the bound, it is the threshold
        while (most > count) & (middle > low):
            reach = 0
            for begin in range(0, tokens, N):
                reach += count_reaching(score_marked(rows, words, center, begin, kl, pitch, D, DP, N), middle)
            low, high, least, most = narrow_down(low, high, least, most, middle, reach, count)
            step += 1
            middle = divide(low, high, least, most, count)
            middle = tl.where((middle > low) & (step < GUESSES), middle, halve(low, high))
        ties, taken = 0, 0
        for begin in range(0, tokens, N):
            score = score_marked(rows, words, center, begin, kl, pitch, D, DP, N)
            level = (score >= low) & (score < high)
            levels = ties + tl.cumsum(level.to(tl.int32), 0)
            chosen = (score >= high) | (level & (levels <= count - least))
            place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
            store_ids(key_ids, lists, begin + tl.arange(0, N), chosen, place)
            ties, taken = ties + tl.sum(level.to(tl.int32), 0), taken + tl.sum(chosen.to(tl.int32), 0)
    fill(lists, count, padded, 0)
    fill(key_ids, count, width, -1)


def plan(key: Tensor, groups: int, top_k: int) -> Launch:
    """Prepare the search for block maxima, float32 (B H, G, N)."""
    batch, heads, tokens, _ = key.shape
    blocks = min(power_of_two(tokens, 32), power_of_two(2 * min(top_k, tokens), LEAST_BLOCKS), MOST_BLOCKS)
    wide = block_of(key) == 64
    size = min(blocks, 32 if not wide else 128 if tokens > blocks else 64)
    at_once = min(64 if wide else 16, power_of_two(groups))
    parts, slices = triton.cdiv(groups, at_once), blocks // size
    best = torch.empty((batch * heads, groups, blocks), dtype=torch.float32, device=key.device)
    arguments = (key, best, *strides_of(key), parts, slices)
    return Launch(None, batch * heads * parts * slices, arguments, {"KT": size, "KG": at_once, "N": blocks}, best)


def finish(
    key: Tensor, centroids: Tensor, key_mask: Tensor | None, width: int, keys: Launch, low: Tensor | None, listed: bool
) -> tuple[Tensor, Lists]:
    """Choose, from all scores or by the bounds of all rows; ``(key_ids, lists)``, bits instead where not listed."""
    batch, heads, tokens, channels = key.shape
    rows, groups, blocks = keys.result.shape
    key_ids = torch.empty((batch, heads, groups, width), dtype=torch.int64, device=key.device)
    length = triton.cdiv(width, PAD) * PAD if listed else blocks // 32
    ids = key_ids.new_empty((rows, groups, length), dtype=torch.int32)
    lists = Lists(ids, ids.new_empty((rows, groups) if listed else 0))
    if low is None:
        made, warps = (*lists, None) if listed else (None, None, lists.ids), warps_for(blocks)
        launch(pick_all, rows * groups, keys.result, key_ids, *made, width, length, N=blocks, num_warps=warps)
        return key_ids, lists
    size, at_once, parts = keys.options["KT"], keys.options["KG"], keys.arguments[5]
    options = {"D": channels, "DP": power_of_two(channels)}
    pitch = triton.cdiv(tokens, 32)
    words = torch.empty((rows, groups, pitch), dtype=torch.int32, device=key.device)
    pieces = max(1, min(triton.cdiv(tokens, size), triton.cdiv(1056, rows * parts)))
    span = triton.cdiv(triton.cdiv(tokens, pieces), size) * size
    slices = triton.cdiv(tokens, span)
    launch(
        mark_candidates, rows * parts * slices, key, centroids, key_mask, low, words, *strides_of(key), heads,
        tokens, groups, parts, slices, span, pitch, **options, T=size, GP=at_once, MASKED=key_mask is not None,
        num_warps=4,
    )  # fmt: skip
    room = min(power_of_two(width + width // 2 + 64), power_of_two(tokens, 32), MOST_BLOCKS)
    found, scores = words.new_empty((rows * groups, room)), keys.result.new_empty((rows * groups, room))
    launch(
        pick_best, rows * groups, key, centroids, words, found, scores, key_ids, *lists, *strides_of(key), heads,
        tokens, groups, pitch, width, length, **options,
        W=min(power_of_two(pitch), 256), C=room, N=max(16, 2048 // options["DP"]), num_warps=warps_for(room),
    )  # fmt: skip
    return key_ids, lists


def warps_for(numbers: int) -> int:
    """Warps of a program that holds so many numbers: up to 16 in a thread."""
    return min(8, max(1, numbers // 512))
