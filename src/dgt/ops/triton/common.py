# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Pieces that several kernels share: rows by index, exact products, and the choice of the largest of a row.

Letters as in :mod:`dgt.ops`; a *head* is one of B * H. Addresses are 64-bit, sums are float32. Kernels take tensors as
pointer and strides (batch, head, token); channels lie one after the other. ``D`` channels are padded to ``DP``, the
next power of two of at least 16.
"""

import triton
import triton.language as tl

EMPTY: tl.constexpr = tl.constexpr(-2147483648)  # ranks below every real score
HIGHEST: tl.constexpr = tl.constexpr(2147483647)


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
    """Map float32 scores to int32 ranks of the same order; minus infinity and NaN, like padding, are never chosen."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals 0
    return tl.where((score == float("-inf")) | (score != score), EMPTY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def score_of(rank):
    """The float32 score that has this rank."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def popcount(word):
    """Number of set bits of int32 words."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + ((word >> 4) & 0x0F0F0F0F)) & 0x0F0F0F0F
    return ((word + (word >> 8) + (word >> 16) + (word >> 24)) & 0x3F).to(tl.int32)


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
def guess(low, high, least, most, count, step):
    """A rank above ``low`` and not above ``high`` that about ``count`` numbers reach.

    ``most`` reach ``low`` and ``least`` lie above ``high``. Every third guess halves the interval, so that it closes.
    """
    share = (most - count) / (most - least).to(tl.float32)
    between = rank_of(score_of(low) + (score_of(high) - score_of(low)) * share)
    between = tl.minimum(tl.maximum(between, low + 1), high)
    return tl.where(step % 3 == 2, (low | high) - ((low ^ high) >> 1), between)  # the mean without overflow


@triton.jit
def narrow_down(low, high, least, most, middle, reach, count):
    """The interval of :func:`guess` when ``reach`` numbers turn out to reach ``middle``; empty if that is ``count``."""
    return (
        tl.where(reach >= count, middle, low), tl.where(reach > count, high, middle - 1),
        tl.where(reach > count, least, reach), tl.where(reach >= count, reach, most),
    )  # fmt: skip


@triton.jit
def store_best(key_ids, lists, ids, ranks, high, room, ties, taken):
    """Write the chosen of some candidates: all above ``high``, and those level with it while there is room."""
    level = (ranks == high) & (ranks > EMPTY)
    above = ranks > high
    seen = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), 0)
    levels = ties + (seen >> 16)
    chosen = above | (level & (levels <= room))
    place = taken + (seen & 0xFFFF) + tl.minimum(levels, room) - tl.minimum(ties, room) - 1
    tl.store(key_ids + place, ids.to(tl.int64), mask=chosen)
    if lists is not None:
        tl.store(lists + place, ids.to(tl.int32), mask=chosen)
    return ties + tl.sum(level.to(tl.int32), 0), taken + tl.sum(chosen.to(tl.int32), 0), chosen


@triton.jit
def choose_row(key_ids, lists, ids, ranks, total, count):
    """Choose the ``count`` largest of the ``total`` ranks that are not EMPTY, and write their ids; which they are."""
    high = tl.where(total > count, tl.max(ranks, 0), EMPTY)
    low = tl.min(tl.where(ranks > EMPTY, ranks, HIGHEST), 0)
    least, most, step = 0, total, 0
    while low < high:
        middle = guess(low, high, least, most, count, step)
        reach = tl.sum((ranks >= middle).to(tl.int32), 0)
        low, high, least, most = narrow_down(low, high, least, most, middle, reach, count)
        step += 1
    _, _, chosen = store_best(key_ids, lists, ids, ranks, high, count - least, 0, 0)
    return chosen


@triton.jit
def fill_row(key_ids, lists, count, width, padded):
    """Write -1 and 0 to the places after the last id."""
    for begin in range(count, padded, 64):
        place = begin + tl.arange(0, 64)
        tl.store(key_ids + place, tl.full([64], -1, tl.int64), mask=place < width)
        if lists is not None:
            tl.store(lists + place, tl.zeros([64], tl.int32), mask=place < padded)
