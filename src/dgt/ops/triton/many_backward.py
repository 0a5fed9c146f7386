# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Gradients of attention inside each group for many tokens, without P in memory.

With S = scale Q K^T, P = exp(S - logsum), Y = P V and delta = rowsum(dY * Y) (which equals rowsum(dP * P)):

    dP = dY V^T        dS = P * (dP - delta)        dQ = scale dS K        dK = scale dS^T Q        dV = P^T dY

Weights are computed again from the saved log-sum-exp. dQ goes tile by tile as the forward pass does. For dK and dV a
program takes a block of the selected keys of one group, and all queries of that group; a key that several groups chose
then sums their partials through the inverse index. Partials live in a workspace of a few heads at a time.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import head_base, load_rows, multiply, store_rows
from dgt.ops.triton.inverse import gather, invert
from dgt.ops.triton.launch import launch, new_rows, rows_of, strides_of, turns
from dgt.ops.triton.many_tokens import load_ids, tiling
from dgt.ops.triton.sorting import Segments, count_slots, find_segment, find_tile


@triton.jit
def query_gradient(
    grad, query, key, value, output, key_ids, order, ends, logsum, delta, grad_query,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, rb, rh, rl,
    heads, queries, keys, groups, width, slots, scale_log2, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and its delta for the other kernel."""
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    group, first, end = find_tile(ends, head, slot, groups, T, GP)
    if group > groups:
        return
    place = first + tl.arange(0, T)
    present = place < end
    rows = tl.load(order + head.to(tl.int64) * queries + place, mask=present, other=0)
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    dy = load_rows(head_base(grad, head, heads, gb, gh), rows, gl, present, D, DP)
    y = load_rows(head_base(output, head, heads, ob, oh), rows, ol, present, D, DP)
    mean = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * queries + rows, mean, mask=present)
    logs = tl.load(logsum + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
    key_rows, value_rows = head_base(key, head, heads, kb, kh), head_base(value, head, heads, vb, vh)
    result = tl.zeros([T, DP], tl.float32)
    for start in range(0, tl.where(group < groups, width, 0), N):
        ids, exist = load_ids(key_ids, head * groups + group, start, width, keys, N)
        k = load_rows(key_rows, ids, kl, exist, D, DP)
        v = load_rows(value_rows, ids, vl, exist, D, DP)
        score = multiply(q, tl.trans(k)) * scale_log2 - logs[:, None]
        weight = tl.exp2(tl.where(exist[None, :], score, float("-inf")))
        slope = weight * (multiply(dy, tl.trans(v)) - mean[:, None])
        result += multiply(slope.to(k.dtype), k)
    store_rows(head_base(grad_query, head, heads, rb, rh), rows, rl, present, result * scale, D, DP)


@triton.jit
def key_gradients(
    grad, query, key, value, key_ids, order, ends, logsum, delta, partial_key, partial_value,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl,
    heads, queries, keys, groups, width, first_head, blocks, scale_log2, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Partial dK and dV of one block of the selected keys of a group."""
    pid = tl.program_id(0)
    block, group, nth = pid % blocks, pid // blocks % groups, pid // blocks // groups
    head = first_head + nth
    begin, end = find_segment(ends, head, group, groups)
    ids, exist = load_ids(key_ids, head * groups + group, block * N, width, keys, N)
    k = load_rows(head_base(key, head, heads, kb, kh), ids, kl, exist, D, DP)
    v = load_rows(head_base(value, head, heads, vb, vh), ids, vl, exist, D, DP)
    query_rows, grad_rows = head_base(query, head, heads, qb, qh), head_base(grad, head, heads, gb, gh)
    dk = tl.zeros([N, DP], tl.float32)
    dv = tl.zeros([N, DP], tl.float32)
    for start in range(begin, end, T):
        place = start + tl.arange(0, T)
        present = place < end
        rows = tl.load(order + head.to(tl.int64) * queries + place, mask=present, other=0)
        q = load_rows(query_rows, rows, ql, present, D, DP)
        dy = load_rows(grad_rows, rows, gl, present, D, DP)
        logs = tl.load(logsum + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
        mean = tl.load(delta + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
        score = multiply(k, tl.trans(q)) * scale_log2 - logs[None, :]
        weight = tl.exp2(tl.where(exist[:, None] & present[None, :], score, float("-inf")))
        dv += multiply(weight.to(dy.dtype), dy)
        slope = weight * (multiply(v, tl.trans(dy)) - mean[None, :])
        dk += multiply(slope.to(q.dtype), q)
    place = block * N + tl.arange(0, N)
    base = (nth.to(tl.int64) * groups + group) * width * D
    store_rows(partial_key + base, place, D, place < width, dk * scale, D, DP)
    store_rows(partial_value + base, place, D, place < width, dv, D, DP)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsum: Tensor,
    segments: Segments, key_ids: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dQ, dK and dV; arguments as in :func:`dgt.ops.triton.many_tokens.attend` and what it returned."""
    grad, query, key, value, output = (rows_of(t) for t in (grad, query, key, value, output))
    key_ids = key_ids.contiguous()
    batch, heads, queries, channels = query.shape
    groups, width = key_ids.shape[2:]
    grad_query, grad_key, grad_value = new_rows(query), new_rows(key), new_rows(value)
    delta = torch.empty_like(logsum)
    options = tiling(query, groups, width)
    slots = count_slots(queries, groups, options["T"])
    shape = (heads, queries, key.shape[2], groups, width)
    scales = (scale * math.log2(math.e), scale)
    strides = [number for t in (grad, query, key, value) for number in strides_of(t)]
    launch(
        query_gradient, batch * heads * slots,
        grad, query, key, value, output, key_ids, segments.order, segments.ends, logsum, delta, grad_query,
        *strides, *strides_of(output), *strides_of(grad_query), *shape, slots, *scales, **options,
    )  # fmt: skip
    del options["GP"]
    inverse = invert(key_ids, key.shape[2])
    blocks = triton.cdiv(width, options["N"])
    for first, count in turns(batch * heads, 8 * groups * width * channels):
        exact: dict[str, Any] = {"dtype": torch.float32, "device": key.device}
        partials = [torch.empty((count, groups * width, channels), **exact) for _ in range(2)]
        launch(
            key_gradients, count * groups * blocks,
            grad, query, key, value, key_ids, segments.order, segments.ends, logsum, delta, *partials,
            *strides, *shape, first, blocks, *scales, **options,
        )  # fmt: skip
        gather(inverse, partials, [grad_key, grad_value], first)
    return grad_query, grad_key, grad_value
