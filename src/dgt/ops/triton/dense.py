# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention inside groups for few tokens: dense, under a bit mask, with gradients.

Up to 256 tokens would lose more by gathering than they save. All are read in their order, and query
i sees key j if bit ``j % 32`` of word ``j // 32`` of its group is set. The formulas are in
docs/kernels.md.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.gradients import new_gradients, split_gradients
from dgt.ops.triton.common import (
    LOWEST,
    base_two,
    finish_softmax,
    head_base,
    load_rows,
    multiply,
    running_softmax,
    store_rows,
)
from dgt.ops.triton.launch import (
    MOST_PLANS,
    Attended,
    Buffers,
    LaunchPlan,
    Layout,
    block_of,
    ceil_div,
    launch,
    layout_of_new_rows,
    layouts_of,
    plan_buffers,
    plan_launch,
    power_of_two,
    rows_of,
    strides_of,
)

MOST_TOKENS = 256


def are_few(query: Tensor, key: Tensor) -> bool:
    """Tell whether (B, H, L, D) tensors are small enough for dense attention under a mask."""
    return query.shape[2] == key.shape[2] <= MOST_TOKENS


@triton.jit
def mark_row(key_ids, words, width, W: tl.constexpr, N: tl.constexpr):
    """Set the bits of the keys in the list of a group."""
    row = tl.program_id(0).to(tl.int64)
    which = tl.arange(0, W)
    bits = tl.zeros([W], tl.int32)
    for first in range(0, width, N):
        place = first + tl.arange(0, N)
        key = tl.load(key_ids + row * width + place, mask=place < width, other=-1).to(tl.int32)
        here = (key >= 0)[None, :] & ((key // 32)[None, :] == which[:, None])
        bits += tl.sum(tl.where(here, (1 << (key & 31))[None, :], 0), 1)  # no key comes twice
    tl.store(words + row * W + which, bits)


def pitch_of(tokens: int) -> int:
    """Return W, the words that hold a bit for every key."""
    return power_of_two(tokens, 32) // 32


@triton.jit
def find_words(words, group_ids, head, rows, tokens, groups, pitch):
    """Where the bits of the groups of some queries are, and which queries have any group."""
    group = tl.load(group_ids + head.to(tl.int64) * tokens + rows, mask=rows < tokens, other=-1)
    return words + (head.to(tl.int64) * groups + group) * pitch, (group >= 0) & (group < groups)


@triton.jit
def sees(row, real, start, N: tl.constexpr):
    """Whether queries see keys ``start`` and on, a multiple of N, which is at most 32: (T, N)."""
    word = tl.load(row + start // 32, mask=real, other=0) >> (start % 32)
    return (word[:, None] & (1 << tl.arange(0, N))[None, :]) != 0


@triton.jit
def finite_or_zero(rows):
    """Rows whose infinities and NaN are zero: where a slope of zero meets them, they add nothing."""
    return tl.where(rows - rows == 0, rows, 0.0)


@triton.jit
def attend_densely(
    query, key, value, words, group_ids, output, logsum, scale,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, heads, tokens, groups, pitch, tiles,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """T queries of a head; ``scale`` contains log2(e)."""
    head, rows = tl.program_id(0) // tiles, tl.program_id(0) % tiles * T + tl.arange(0, T)
    present = rows < tokens
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    given = scale
    if scale < 0:
        q, scale = -q, -scale
    key_rows = head_base(key, head, heads, kb, kh)
    value_rows = head_base(value, head, heads, vb, vh)
    row, real = find_words(words, group_ids, head, rows, tokens, groups, pitch)
    top = tl.full([T], LOWEST, tl.float32)
    total = tl.zeros([T], tl.float32)
    result = tl.zeros([T, DP], tl.float32)
    for start in tl.range(0, tokens, N, num_stages=1):
        ids = start + tl.arange(0, N)
        k = load_rows(key_rows, ids, kl, ids < tokens, D, DP)
        v = load_rows(value_rows, ids, vl, ids < tokens, D, DP)
        score = tl.where(sees(row, real, start, N), multiply(q, tl.trans(k)), float("-inf"))
        weight, shrink, top, total = running_softmax(score, scale, top, total)
        result = result * shrink[:, None] + multiply(weight.to(v.dtype), v)
    result, logs = finish_softmax(result, top, total)
    store_rows(head_base(output, head, heads, ob, oh), rows, ol, present, result, D, DP)
    tl.store(logsum + head.to(tl.int64) * tokens + rows, logs, mask=present)
    odd = tl.max(tl.max((result != result).to(tl.int32), 1), 0)
    if odd > 0:  # zero times a value that is not finite
        tl.debug_barrier()  # what some threads wrote, others read and write
        attend_key_by_key(
            query, key, value, words, group_ids, output, logsum, given, qb, qh, ql, kb, kh, kl,
            vb, vh, vl, ob, oh, ol, heads, tokens, groups, pitch, tiles, D, DP, T,
        )  # fmt: skip


@triton.jit
def attend_key_by_key(
    query, key, value, words, group_ids, output, logsum, scale,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, heads, tokens, groups, pitch, tiles,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The same sum, key by key, in which values that a query does not see are never multiplied.

    All is read again, so that :func:`attend_densely` holds nothing for a case that hardly ever
    comes.
    """
    head, rows = tl.program_id(0) // tiles, tl.program_id(0) % tiles * T + tl.arange(0, T)
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, rows < tokens, D, DP).to(
        tl.float32
    )
    key_rows = head_base(key, head, heads, kb, kh)
    value_rows = head_base(value, head, heads, vb, vh)
    row, real = find_words(words, group_ids, head, rows, tokens, groups, pitch)
    channel = tl.arange(0, DP)
    logs = tl.load(logsum + head.to(tl.int64) * tokens + rows, mask=rows < tokens, other=0.0)
    result = tl.zeros([T, DP], tl.float32)
    for nth in range(tokens):
        k = tl.load(key_rows + channel, mask=channel < D, other=0.0)
        v = tl.load(value_rows + channel, mask=channel < D, other=0.0)
        score = tl.sum(q * k.to(tl.float32)[None, :], 1)
        seen = real & (((tl.load(row + nth // 32, mask=real, other=0) >> (nth % 32)) & 1) == 1)
        weight = tl.exp2(score * scale - logs).to(v.dtype).to(tl.float32)
        result += tl.where(seen[:, None], weight[:, None] * v.to(tl.float32)[None, :], 0.0)
        key_rows += kl
        value_rows += vl
    store_rows(head_base(output, head, heads, ob, oh), rows, ol, rows < tokens, result, D, DP)


@triton.jit
def query_gradient_densely(
    grad, query, key, value, output, words, group_ids, logsum, delta, grad_query, scale_log2, scale,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, rb, rh, rl,
    heads, tokens, groups, pitch, tiles,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dQ of T queries, and their delta for the other kernel."""
    head, rows = tl.program_id(0) // tiles, tl.program_id(0) % tiles * T + tl.arange(0, T)
    present = rows < tokens
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    dy = load_rows(head_base(grad, head, heads, gb, gh), rows, gl, present, D, DP)
    y = load_rows(head_base(output, head, heads, ob, oh), rows, ol, present, D, DP)
    mean = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * tokens + rows, mean, mask=present)
    logs = tl.load(logsum + head.to(tl.int64) * tokens + rows, mask=present, other=0.0)
    key_rows = head_base(key, head, heads, kb, kh)
    value_rows = head_base(value, head, heads, vb, vh)
    row, real = find_words(words, group_ids, head, rows, tokens, groups, pitch)
    result = tl.zeros([T, DP], tl.float32)
    for start in range(0, tokens, N):
        ids = start + tl.arange(0, N)
        k = load_rows(key_rows, ids, kl, ids < tokens, D, DP)
        v = load_rows(value_rows, ids, vl, ids < tokens, D, DP)
        score = multiply(q, tl.trans(k)) * scale_log2 - logs[:, None]
        slope = tl.exp2(score) * (multiply(dy, tl.trans(v)) - mean[:, None])
        slope = tl.where(sees(row, real, start, N), slope, 0.0)
        result += multiply(slope.to(k.dtype), finite_or_zero(k))
    store_rows(head_base(grad_query, head, heads, rb, rh), rows, rl, present, result * scale, D, DP)


@triton.jit
def key_gradients_densely(
    grad, query, key, value, words, group_ids, logsum, delta, grad_key, grad_value,
    scale_log2, scale, gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol,
    heads, tokens, groups, pitch, blocks,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """All of dK and dV of one block of keys; absent queries are zero, and so is what they add."""
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    ids = block * N + tl.arange(0, N)
    k = load_rows(head_base(key, head, heads, kb, kh), ids, kl, ids < tokens, D, DP)
    v = load_rows(head_base(value, head, heads, vb, vh), ids, vl, ids < tokens, D, DP)
    query_rows = head_base(query, head, heads, qb, qh)
    grad_rows = head_base(grad, head, heads, gb, gh)
    dk = tl.zeros([N, DP], tl.float32)
    dv = tl.zeros([N, DP], tl.float32)
    for start in range(0, tokens, T):
        rows = start + tl.arange(0, T)
        present = rows < tokens
        row, real = find_words(words, group_ids, head, rows, tokens, groups, pitch)
        q = load_rows(query_rows, rows, ql, present, D, DP)
        dy = load_rows(grad_rows, rows, gl, present, D, DP)
        logs = tl.load(logsum + head.to(tl.int64) * tokens + rows, mask=present, other=0.0)
        mean = tl.load(delta + head.to(tl.int64) * tokens + rows, mask=present, other=0.0)
        score = multiply(k, tl.trans(q)) * scale_log2 - logs[None, :]
        seen = tl.trans(sees(row, real, block * N, N))
        weight = tl.exp2(tl.where(seen, score, float("-inf")))
        dv += multiply(weight.to(dy.dtype), dy)
        slope = tl.where(seen, weight * (multiply(v, tl.trans(dy)) - mean[None, :]), 0.0)
        dk += multiply(slope.to(q.dtype), q)
    store_rows(head_base(grad_key, head, heads, ob, oh), ids, ol, ids < tokens, dk * scale, D, DP)
    store_rows(head_base(grad_value, head, heads, ob, oh), ids, ol, ids < tokens, dv, D, DP)


def plan_attention(query: Layout, key: Layout, value: Layout, groups: int) -> LaunchPlan:
    """Plan attention of (B, H, L, D) queries under the bits of each group, int32 (B H, G, W).

    Given are queries, keys, values, bits, groups, the output as of ``new_rows``, float32 (B, H, L)
    log-sum-exps, and the scale in base 2.
    """
    batch, heads, tokens, channels = query.shape
    rows = block_of(query)
    tile = min(rows, power_of_two(tokens))
    tiles = ceil_div(tokens, tile)
    return plan_launch(
        attend_densely, batch * heads * tiles,
        *strides_of(query, key, value, layout_of_new_rows(query)), heads, tokens, groups,
        pitch_of(tokens), tiles, D=channels, DP=power_of_two(channels), T=tile, N=min(rows, 32),
        num_warps=4, num_stages=1,
    )  # fmt: skip


class GradientPlan(NamedTuple):
    """How the gradients of attention under bits are found."""

    mark: LaunchPlan
    query: LaunchPlan
    keys: LaunchPlan
    buffers: Buffers
    """Bits and deltas."""


@functools.lru_cache(MOST_PLANS)
def plan_gradients(
    grad: Layout,
    query: Layout,
    key: Layout,
    value: Layout,
    output: Layout,
    grad_query: Layout,
    grad_key: Layout,
    groups: int,
    width: int,
) -> GradientPlan:
    """Plan :func:`backward`; dV lies as dK does."""
    batch, heads, tokens, channels = query.shape
    rows = block_of(query)
    tile, size = min(rows, power_of_two(tokens)), min(rows, 32)
    tiles, blocks = ceil_div(tokens, tile), ceil_div(tokens, size)
    sizes = {"D": channels, "DP": power_of_two(channels), "N": size}
    of_query = plan_launch(
        query_gradient_densely, batch * heads * tiles,
        *strides_of(grad, query, key, value, output, grad_query), heads, tokens, groups,
        pitch_of(tokens), tiles, T=tile, **sizes, num_warps=4, num_stages=3,
    )  # fmt: skip
    of_keys = plan_launch(
        key_gradients_densely, batch * heads * blocks,
        *strides_of(grad, query, key, value, grad_key), heads, tokens, groups, pitch_of(tokens),
        blocks, T=min(tile, size), **sizes, num_warps=2, num_stages=1,
    )  # fmt: skip
    lists, pitch = batch * heads * groups, pitch_of(tokens)
    mark = plan_launch(
        mark_row, lists, width, W=pitch, N=min(power_of_two(width, 32), 128), num_warps=1
    )
    buffers = plan_buffers((lists * pitch,), (batch * heads * tokens,))
    return GradientPlan(mark, of_query, of_keys, buffers)


def backward(
    grad: Tensor, attended: Attended, group_ids: Tensor, key_ids: Tensor, scale: float
) -> Tensor:
    """Return dQ, dK and dV as :func:`dgt.ops.gradients.new_gradients`."""
    grad, group_ids, key_ids = rows_of(grad), group_ids.contiguous(), key_ids.contiguous()
    query, key, value, output, logsum = attended.in_rows()
    grads = new_gradients(query, key)
    grad_query, grad_key, grad_value = split_gradients(grads, query.shape, key.shape)
    layouts = layouts_of(grad, query, key, value, output, grad_query, grad_key)
    plan = plan_gradients(*layouts, *key_ids.shape[2:])
    words, delta = plan.buffers.new(grad)
    scales = (base_two(scale), scale)
    launch(plan.mark, key_ids, words)
    launch(
        plan.query, grad, query, key, value, output, words, group_ids, logsum, delta, grad_query,
        *scales,
    )  # fmt: skip
    launch(
        plan.keys, grad, query, key, value, words, group_ids, logsum, delta, grad_key, grad_value,
        *scales,
    )  # fmt: skip
    return grads
