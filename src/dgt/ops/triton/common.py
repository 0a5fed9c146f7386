# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Pieces that several kernels share: rows by index, exact products, and the choice of the largest of a row.

Letters as in :mod:`dgt.ops`; a *head* is one of B * H. Addresses are 64-bit, sums are float32. Kernels take tensors as
pointer and strides (batch, head, token); channels lie one after the other. ``D`` channels are padded to ``DP``, the
next power of two of at least 16.
"""

import triton
import triton.language as tl

EMPTY: tl.constexpr = tl.constexpr(-2147483648)  # ranks below every real score


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
def exact_left(wide, narrow):
    """``wide @ narrow`` to float32 accuracy, with ``wide`` float32 and ``narrow`` of the model's type.

    Scores that choose groups and keys must not depend on the model's precision. A float32 number is the sum of three
    bfloat16 or float16 numbers, whose products with ``narrow`` are exact in the matrix units' float32 accumulators:
    three fast products instead of one slow one.
    """
    if narrow.dtype == tl.float32:
        return multiply(wide, narrow)
    first, second, third = split(wide, narrow.dtype)
    low = shrink(tl.dot(third, narrow), narrow.dtype)
    return tl.dot(first, narrow, shrink(tl.dot(second, narrow, low), narrow.dtype))


@triton.jit
def exact_right(narrow, wide):
    """``narrow @ wide`` to float32 accuracy; see :func:`exact_left`."""
    if narrow.dtype == tl.float32:
        return multiply(narrow, wide)
    first, second, third = split(wide, narrow.dtype)
    low = shrink(tl.dot(narrow, third), narrow.dtype)
    return tl.dot(narrow, first, shrink(tl.dot(narrow, second, low), narrow.dtype))


@triton.jit
def rank_of(score):
    """Map float32 scores to int32 ranks of the same order; minus infinity and NaN, like padding, are never chosen."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals 0
    return tl.where((score == float("-inf")) | (score != score), EMPTY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def threshold_of(ranks, count):
    """Find, for every row of (R, N) ranks, a threshold that exactly its ``count`` largest reach, or ties with them.

    A bisection over the ranks themselves: at most 32 steps, and most rows are done when a middle happens to fall
    between the last chosen and the first left out, after some 15.
    """
    high = tl.max(ranks, 1)
    low = tl.min(tl.where(ranks == EMPTY, high[:, None], ranks), 1)
    while tl.max((low < high).to(tl.int32), 0) > 0:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        reach = tl.sum((ranks >= middle[:, None]).to(tl.int32), 1)
        low = tl.where(reach >= count, middle, low)
        high = tl.where(reach > count, high, tl.where(reach == count, middle, middle - 1))
    return high


@triton.jit
def choose(ranks, top_k):
    """Choose the ``top_k`` largest of every row of (R, N) ranks, N <= 32768, ties to the lowest index.

    Returns (R, N) whether chosen, (R, N) the place of a chosen one in ascending order of index, (R,) how many.
    """
    real = ranks > EMPTY
    count = tl.minimum(tl.sum(real.to(tl.int32), 1), top_k)
    threshold = threshold_of(ranks, count)
    above = real & (ranks > threshold[:, None])
    level = real & (ranks == threshold[:, None])
    room = (count - tl.sum(above.to(tl.int32), 1))[:, None]  # for ties
    seen = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), 1)  # two running counts in one
    levels = seen >> 16
    chosen = above | (level & (levels <= room))
    return chosen, (seen & 0xFFFF) + tl.minimum(levels, room) - 1, count


@triton.jit
def store_chosen(base, stride, width, numbers, chosen, place, count, present, R: tl.constexpr, N: tl.constexpr):
    """Write the chosen of (R, N) ``numbers`` to ``width`` places of rows ``stride`` apart, -1 into places left over."""
    rows = tl.arange(0, R)[:, None] * stride
    tl.store(base + rows + place, numbers.to(base.dtype.element_ty), mask=chosen & present[:, None])
    columns = tl.arange(0, N)[None, :]
    rest = (columns >= count[:, None]) & (columns < width) & present[:, None]
    tl.store(base + rows + columns, tl.full([R, N], -1, base.dtype.element_ty), mask=rest)


@triton.jit
def popcount(word):
    """Number of set bits of int32 words."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + ((word >> 4) & 0x0F0F0F0F)) & 0x0F0F0F0F
    return ((word + (word >> 8) + (word >> 16) + (word >> 24)) & 0x3F).to(tl.int32)


@triton.jit
def nearest(tokens, centroids, groups, first, best, group, D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr):
    """Let groups ``first`` to ``first + GP`` compete for (R, DP) tokens; ``best`` and ``group`` hold who leads."""
    ids = first + tl.arange(0, GP)
    score = exact_right(tokens, tl.trans(load_rows(centroids, ids, D, ids < groups, D, DP)))
    score = tl.where((ids < groups)[None, :], score, float("-inf"))
    value, place = tl.max(score, 1), tl.argmax(score, 1, tie_break_left=True)
    return tl.maximum(best, value), tl.where(value > best, first + place, group)
