# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Pieces that several kernels share: rows by index, exact products, and the choice of the largest of a row.

Letters as in :mod:`dgt.ops`; a *head* is one of B * H. Addresses are 64-bit, sums are float32. Kernels take tensors as
pointer and strides (batch, head, token); channels lie one after the other. ``D`` channels are padded to ``DP``, the
next power of two of at least 16.
"""

import triton
import triton.language as tl

GUESSES: tl.constexpr = tl.constexpr(8)  # in proportion; from then on intervals are halved
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # the least finite number


@triton.jit
def head_base(pointer, head, heads, stride_batch, stride_head):
    """Address of row 0 of head ``head``."""
    return pointer + (head // heads).to(tl.int64) * stride_batch + (head % heads).to(tl.int64) * stride_head


@triton.jit
def row_addresses(base, rows, stride, DP: tl.constexpr):
    """(R, DP) addresses of the channels of some rows."""
    return base + rows.to(tl.int64)[:, None] * stride + tl.arange(0, DP)[None, :]


@triton.jit
def row_mask(present, D: tl.constexpr, DP: tl.constexpr):
    """(R, DP) mask: rows that are there, channels that exist."""
    return present[:, None] & (tl.arange(0, DP) < D)[None, :]


@triton.jit
def load_rows(base, rows, stride, present, D: tl.constexpr, DP: tl.constexpr):
    """(R, DP) rows by index; zero where a row is not present, and in the padded channels."""
    return tl.load(row_addresses(base, rows, stride, DP), mask=row_mask(present, D, DP), other=0.0)


@triton.jit
def store_rows(base, rows, stride, present, values, D: tl.constexpr, DP: tl.constexpr):
    """Write (R, DP) values to rows by index, in the type of the target."""
    tl.store(row_addresses(base, rows, stride, DP), values.to(base.dtype.element_ty), mask=row_mask(present, D, DP))


@triton.jit
def multiply(left, right):
    """Matrix product with float32 accumulation; float32 inputs are multiplied exactly, never as tf32."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def split(wide, narrow: tl.constexpr):
    """Cut float32 numbers into three of type ``narrow``: their sum, once the later ones are shrunk, once and twice.

    Float16 has few exponents: what a part leaves over is grown by 2 ** 11, the bits of a part, before the next is cast.
    So the sum is off by less than 2 ** -46; numbers must be below 65504.
    """
    first = wide.to(narrow)
    rest = wide - first.to(tl.float32)
    if narrow == tl.float16:
        rest *= 2048.0
    second = rest.to(narrow)
    rest -= second.to(tl.float32)
    if narrow == tl.float16:
        rest *= 2048.0
    return first, second, rest.to(narrow)


@triton.jit
def shrink(product, narrow: tl.constexpr):
    """Undo the growth of a part of :func:`split` in its product."""
    if narrow == tl.float16:
        product *= 1 / 2048.0
    return product


@triton.jit
def split_centers(centers, ids, groups, narrow: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Centroids of some groups as three summands of :func:`split`; beyond the last group they are the last one's."""
    wide = load_rows(centers, tl.minimum(ids, groups - 1), D, ids >= 0, D, DP)
    if narrow == tl.float32:
        return wide, wide, wide
    return split(wide, narrow)


@triton.jit
def exact_left(first, second, third, narrow):
    """``wide @ narrow`` to float32 rounding, with a float32 ``wide`` given as its three summands of the model's type.

    Scores that choose groups and keys must not depend on the model's precision. The products of each summand with
    ``narrow`` are exact in the matrix units' float32 accumulators: three fast products instead of one slow one.
    """
    if narrow.dtype == tl.float32:
        return multiply(first, narrow)
    low = shrink(tl.dot(third, narrow), narrow.dtype)
    return tl.dot(first, narrow, shrink(tl.dot(second, narrow, low), narrow.dtype))


@triton.jit
def exact_right(narrow, first, second, third):
    """``narrow @ wide`` to float32 rounding; see :func:`exact_left`."""
    if narrow.dtype == tl.float32:
        return multiply(narrow, first)
    low = shrink(tl.dot(narrow, third), narrow.dtype)
    return tl.dot(narrow, first, shrink(tl.dot(narrow, second, low), narrow.dtype))


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
def popcount(word):
    """Number of set bits of int32 words, in the form that the compiler knows as one instruction."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def pack_columns(flags, R: tl.constexpr, N: tl.constexpr):
    """(R, N / 32) int32 words of (R, N) flags: bit ``c % 32`` of word ``c // 32`` is column ``c``."""
    bits = tl.where(flags, (1 << (tl.arange(0, N) % 32))[None, :], 0)
    return tl.sum(tl.reshape(bits, [R, N // 32, 32]), 2)


@triton.jit
def expand(word, first, target, place, room, W: tl.constexpr):
    """Write the numbers of the set bits of W words to ``target``, ascending, from ``place`` on and below ``room``.

    Word ``w`` holds the numbers from ``32 (first + w)`` on. Returns the place after the last.
    """
    count = popcount(word)
    where = place + tl.cumsum(count, 0) - count
    base = (first + tl.arange(0, W)) * 32
    while tl.max((word != 0).to(tl.int32), 0) > 0:
        lowest = (word & (0 - word)).to(tl.uint32, bitcast=True)
        bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        tl.store(target + where, base + bit, mask=(word != 0) & (where < room))
        word = word & (word - 1)
        where += 1
    return place + tl.sum(count, 0)


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
