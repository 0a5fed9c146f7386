# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Pieces that several kernels share: rows by index, exact products, running softmax, set bits.

Letters as in :mod:`dgt.ops`; a *head* is one of B * H. Addresses are 64-bit, sums are float32.
Kernels take tensors as pointer and strides (batch, head, token); channels lie one after the other.
``D`` channels are padded to ``DP``, the next power of two of at least 16.
"""

import math

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # the least finite number


@triton.jit
def head_base(pointer, head, heads, stride_batch, stride_head):
    """Address of row 0 of head ``head``."""
    return (
        pointer
        + (head // heads).to(tl.int64) * stride_batch
        + (head % heads).to(tl.int64) * stride_head
    )


@triton.jit
def load_rows(base, rows, stride, present, D: tl.constexpr, DP: tl.constexpr):
    """(R, DP) rows by index; zero where a row is not present, and in the padded channels."""
    channel = tl.arange(0, DP)[None, :]
    address = base + rows.to(tl.int64)[:, None] * stride + channel
    return tl.load(address, mask=present[:, None] & (channel < D), other=0.0)


@triton.jit
def store_rows(base, rows, stride, present, values, D: tl.constexpr, DP: tl.constexpr):
    """Write (R, DP) values to rows by index, in the type of the target."""
    channel = tl.arange(0, DP)[None, :]
    address = base + rows.to(tl.int64)[:, None] * stride + channel
    tl.store(address, values.to(base.dtype.element_ty), mask=present[:, None] & (channel < D))


@triton.jit
def multiply(left, right):
    """Matrix product with float32 accumulation; float32 inputs are never rounded to tf32."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def split(wide, narrow: tl.constexpr):
    """Split float32 numbers into three summands of type ``narrow``.

    The later ones of float16 are scaled by 2 ** 11 each.
    """
    grow: tl.constexpr = 2048.0 if narrow == tl.float16 else 1.0
    first = wide.to(narrow)
    rest = (wide - first.to(tl.float32)) * grow
    second = rest.to(narrow)
    return first, second, ((rest - second.to(tl.float32)) * grow).to(narrow)


@triton.jit
def split_centers(centers, ids, groups, narrow: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Centroids of some groups as three summands of :func:`split`.

    Beyond the last group they are those of the last one.
    """
    return split(load_rows(centers, tl.minimum(ids, groups - 1), D, ids >= 0, D, DP), narrow)


@triton.jit
def exact(left, right):
    """``left @ right`` to float32 rounding, from summands.

    One operand is the same tensor three times, the other the summands of :func:`split`.

    The products of each summand are exact in the matrix units' float32 accumulators.
    """
    narrow: tl.constexpr = left[0].dtype
    if narrow == tl.float32:
        return multiply(left[0], right[0])
    shrink: tl.constexpr = 1 / 2048.0 if narrow == tl.float16 else 1.0
    low = tl.dot(left[2], right[2]) * shrink
    return tl.dot(left[0], right[0], tl.dot(left[1], right[1], low) * shrink)


@triton.jit
def popcount(word):
    """Number of set bits of int32 words, in the form that the compiler knows as one instruction."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def expand(word, first, target, place, room, W: tl.constexpr):
    """Write the positions of the set bits of W words to ``target``, ascending.

    Writes go from ``place`` on and stay below ``room``.

    Word ``w`` holds the numbers from ``32 (first + w)`` on. Returns the place after the last.
    """
    count = popcount(word)
    where = place + tl.cumsum(count, 0) - count
    base = (first + tl.arange(0, W)) * 32
    for _ in range(tl.max(count, 0)):  # counted beforehand: no turn waits for the other threads
        lowest = (word & (0 - word)).to(tl.uint32, bitcast=True)
        bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        tl.store(target + where, base + bit, mask=(word != 0) & (where < room))
        word = word & (word - 1)
        where += 1
    return place + tl.sum(count, 0)


@triton.jit
def running_softmax(score, scale, top, total):
    """One step of the running softmax, base 2.

    Returns the weights, the factor on what came before, the new maximum and the new sum.

    ``scale`` is positive, and ``top`` begins with LOWEST, which keeps rows that have seen no key
    yet apart from NaN.
    """
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return weight, shrink, new_top, total * shrink + tl.sum(weight, 1)


@triton.jit
def finish_softmax(result, top, total):
    """The weighted mean and the log-sum-exp; zero and -inf where a row has seen no key."""
    safe = tl.where(total > 0, total, 1.0)
    return result * (1.0 / safe)[:, None], tl.where(total > 0, top + tl.log2(safe), float("-inf"))


def base_two(scale: float) -> float:
    """Return the factor that makes scores exponents of two.

    It is never zero, so that minus infinity times it stays minus infinity.
    """
    return (scale or 1e-30) * math.log2(math.e)
