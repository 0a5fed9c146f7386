# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Searches for the k-th largest float32 score without sorting, in registers or in memory.

A guess lies between two scores in proportion to how many scores reach each; after :data:`GUESSES`
of them intervals are halved by rank, so that no search takes more than about 40 steps, whatever the
scores.
"""

import triton
import triton.language as tl

from dgt.ops.triton.common import LOWEST

GUESSES: tl.constexpr = tl.constexpr(8)  # in proportion; from then on intervals are halved


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
def count_reaching(score, least):
    """How many scores, none of them NaN, reach a finite number.

    It counts signs of differences, and no difference overflows.
    """
    below = (score - least).to(tl.uint32, bitcast=True) >> 31
    return -tl.sum(below.to(tl.int32), 0) + score.shape[0]


@triton.jit
def extremes(score):
    """How many scores are real (not NaN or -inf), their minimum, a number above their maximum."""
    low = tl.min(tl.where(score > float("-inf"), score, float("inf")), 0)
    return count_reaching(score, LOWEST), low, score_of(rank_of(tl.max(score, 0)) + 1)


@triton.jit
def halve(low, high):
    """The middle one of the floats from ``low`` to ``high``; ``low`` if none lies between."""
    one, two = rank_of(low), rank_of(high)
    return score_of((one & two) + ((one ^ two) >> 1))  # the mean without overflow


@triton.jit
def divide(low, high, least, most, count):
    """A number that about ``count`` scores reach, where ``most`` reach ``low``, ``least`` ``high``.

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
    """``(low, high, least, most)``: ``most`` >= ``count`` scores reach ``low``, or all.

    More reach it only if they are tied.

    The others reach ``high``: ``least``, fewer than ``count``. First by proportion, and if that
    takes long by halves.
    """
    most, low, high = extremes(score)
    least, step = 0, 0
    while (most > count) & (step < GUESSES):
        middle = divide(low, high, least, most, count)
        low, high, least, most = narrow_down(
            low, high, least, most, middle, count_reaching(score, middle), count
        )
        step += 1
    middle = halve(low, high)
    while (most > count) & (middle > low):
        low, high, least, most = narrow_down(
            low, high, least, most, middle, count_reaching(score, middle), count
        )
        middle = halve(low, high)
    return low, high, least, most


@triton.jit
def choose_row(score, count):
    """Which scores of a row are the ``count`` largest, ties to the lowest place.

    All that are real, if those are fewer.
    """
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
def find_threshold_of_list(scores, total, count, N: tl.constexpr):
    """As :func:`find_threshold`, for a list in memory that is read N numbers at a time."""
    low, high, real = float("inf"), float("-inf"), 0
    for begin in range(0, total, N):
        place = begin + tl.arange(0, N)
        score = tl.load(scores + place, mask=place < total, other=float("-inf"))
        number, lowest, above = extremes(score)
        low, high, real = tl.minimum(low, lowest), tl.maximum(high, above), real + number
    least, most, step = 0, real, 0
    middle = score_of(rank_of(low) + 1)  # where many tie with the lowest, it is the threshold
    while (most > count) & (middle > low):
        reach = 0
        for begin in range(0, total, N):
            place = begin + tl.arange(0, N)
            reach += count_reaching(
                tl.load(scores + place, mask=place < total, other=float("-inf")), middle
            )
        low, high, least, most = narrow_down(low, high, least, most, middle, reach, count)
        step += 1
        middle = divide(low, high, least, most, count)
        middle = tl.where((middle > low) & (step < GUESSES), middle, halve(low, high))
    return low, high, least, most


@triton.jit
def keep_best(found, scores, total, count, N: tl.constexpr):
    """Shorten a list to its ``count`` best, in order, ties to the first.

    Return how many are left.
    """
    low, high, least, _ = find_threshold_of_list(scores, total, count, N)
    ties, kept = 0, 0
    for begin in range(0, total, N):
        place = begin + tl.arange(0, N)
        score = tl.load(scores + place, mask=place < total, other=float("-inf"))
        ids = tl.load(found + place, mask=place < total, other=0)
        level = (score >= low) & (score < high)
        levels = ties + tl.cumsum(level.to(tl.int32), 0)
        chosen = (score >= high) | (level & (levels <= count - least))
        target = kept + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.debug_barrier()  # all have read before any writes: places before the next N
        tl.store(found + target, ids, mask=chosen)
        tl.store(scores + target, score, mask=chosen)
        ties, kept = ties + tl.sum(level.to(tl.int32), 0), kept + tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()
    return kept
