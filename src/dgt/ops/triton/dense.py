# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention for few tokens, dense under a mask: forward (Eq. 2) and gradients.

With up to 256 tokens gathering would cost more than it saves. The mask is int32 ``words`` (B H, G, W): query i sees key
j if bit ``j % 32`` of word ``j // 32`` of its group is set. The formulas of the gradients are those of
:mod:`dgt.ops.triton.gathered`; every query and every key is written by one program: nothing is summed between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import LOWEST, head_base, load_rows, multiply, store_rows
from dgt.ops.triton.gathered import finish_softmax, running_softmax
from dgt.ops.triton.launch import at_most, base_two, block_of, launch, new_rows, power_of_two, rows_of, strides_of

MOST_TOKENS = 256
MOST_AT_ONCE = 32  # keys of a block: one word


def fits(query: Tensor, key: Tensor) -> bool:
    """Tell whether (B, H, L, D) tensors have so few tokens that dense attention under a mask is the way."""
    return query.shape[2] == key.shape[2] <= MOST_TOKENS


@triton.jit
def load_groups(group_ids, words, head, rows, queries, groups, W: tl.constexpr):
    """Where the words of the groups of some queries lie, and which queries have a group."""
    group = tl.load(group_ids + head.to(tl.int64) * queries + rows, mask=rows < queries, other=-1)
    return words + (head.to(tl.int64) * groups + group) * W, (group >= 0) & (group < groups)


@triton.jit
def sees(words, real, start, N: tl.constexpr):
    """(T, N) whether queries with these words see keys ``start`` and on, a multiple of N, which is at most 32."""
    word = tl.load(words + start // 32, mask=real, other=0) >> (start % 32)
    return (word[:, None] & (1 << tl.arange(0, N))[None, :]) != 0


@triton.jit
def attend_densely(
    query, key, value, group_ids, words, output, logsum,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, heads, queries, keys, groups, tiles, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A tile of queries of a head whose groups and words are known; ``scale`` contains log2(e)."""
    head, rows = tl.program_id(0) // tiles, tl.program_id(0) % tiles * T + tl.arange(0, T)
    present = rows < queries
    own, real = load_groups(group_ids, words, head, rows, queries, groups, W)
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    if scale < 0:
        q, scale = -q, -scale
    key_rows, value_rows = head_base(key, head, heads, kb, kh), head_base(value, head, heads, vb, vh)
    top = tl.full([T], LOWEST, tl.float32)
    total = tl.zeros([T], tl.float32)
    result = tl.zeros([T, DP], tl.float32)
    for start in range(0, keys, N):
        place = start + tl.arange(0, N)
        k = load_rows(key_rows, place, kl, place < keys, D, DP)
        v = load_rows(value_rows, place, vl, place < keys, D, DP)
        score = tl.where(sees(own, real, start, N), multiply(q, tl.trans(k)), float("-inf"))
        weight, shrink, top, total = running_softmax(score, scale, top, total)
        result = result * shrink[:, None] + multiply(weight.to(v.dtype), v)
    result, logs = finish_softmax(result, top, total)
    store_rows(head_base(output, head, heads, ob, oh), rows, ol, present, result, D, DP)
    tl.store(logsum + head.to(tl.int64) * queries + rows, logs, mask=present)


@triton.jit
def dense_query_gradient(
    grad, query, key, value, output, group_ids, words, logsum, delta, grad_query,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, rb, rh, rl,
    heads, queries, keys, groups, tiles, scale_log2, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, and its delta."""
    head, rows = tl.program_id(0) // tiles, tl.program_id(0) % tiles * T + tl.arange(0, T)
    present = rows < queries
    own, real = load_groups(group_ids, words, head, rows, queries, groups, W)
    logs = tl.load(logsum + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    dy = load_rows(head_base(grad, head, heads, gb, gh), rows, gl, present, D, DP)
    y = load_rows(head_base(output, head, heads, ob, oh), rows, ol, present, D, DP)
    mean = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * queries + rows, mean, mask=present)
    key_rows, value_rows = head_base(key, head, heads, kb, kh), head_base(value, head, heads, vb, vh)
    result = tl.zeros([T, DP], tl.float32)
    for start in range(0, keys, N):
        place = start + tl.arange(0, N)
        k = load_rows(key_rows, place, kl, place < keys, D, DP)
        v = load_rows(value_rows, place, vl, place < keys, D, DP)
        score = multiply(q, tl.trans(k)) * scale_log2 - logs[:, None]
        weight = tl.exp2(tl.where(sees(own, real, start, N), score, float("-inf")))
        slope = weight * (multiply(dy, tl.trans(v)) - mean[:, None])
        result += multiply(slope.to(k.dtype), k)
    store_rows(head_base(grad_query, head, heads, rb, rh), rows, rl, present, result * scale, D, DP)


@triton.jit
def dense_key_gradients(
    grad, query, key, value, group_ids, words, logsum, delta, grad_key, grad_value,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl, ab, ah, al, cb, ch, cl,
    heads, queries, keys, groups, tiles, scale_log2, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys."""
    head, block = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    place = block * N + tl.arange(0, N)
    inside = place < keys
    k = load_rows(head_base(key, head, heads, kb, kh), place, kl, inside, D, DP)
    v = load_rows(head_base(value, head, heads, vb, vh), place, vl, inside, D, DP)
    query_rows, grad_rows = head_base(query, head, heads, qb, qh), head_base(grad, head, heads, gb, gh)
    dk = tl.zeros([N, DP], tl.float32)
    dv = tl.zeros([N, DP], tl.float32)
    for start in range(0, queries, T):
        rows = start + tl.arange(0, T)
        present = rows < queries
        own, real = load_groups(group_ids, words, head, rows, queries, groups, W)
        logs = tl.load(logsum + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
        q = load_rows(query_rows, rows, ql, present, D, DP)
        dy = load_rows(grad_rows, rows, gl, present, D, DP)
        mean = tl.load(delta + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
        score = multiply(k, tl.trans(q)) * scale_log2 - logs[None, :]
        weight = tl.exp2(tl.where(tl.trans(sees(own, real, block * N, N)), score, float("-inf")))
        dv += multiply(weight.to(dy.dtype), dy)
        slope = weight * (multiply(v, tl.trans(dy)) - mean[None, :])
        dk += multiply(slope.to(q.dtype), q)
    store_rows(head_base(grad_key, head, heads, ab, ah), place, al, inside, dk * scale, D, DP)
    store_rows(head_base(grad_value, head, heads, cb, ch), place, cl, inside, dv, D, DP)


def attend(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, words: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend inside given groups, densely under the mask; ``(output, logsum)``, for heads that :func:`fits`."""
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    batch, heads, queries, channels = query.shape
    keys, (groups, count) = key.shape[2], words.shape[1:]
    output = new_rows(query)
    logsum = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    block = block_of(query)
    size = min(block, power_of_two(queries))
    tiles = triton.cdiv(queries, size)
    launch(
        attend_densely, batch * heads * tiles,
        query, key, value, group_ids.contiguous(), words, output, logsum,
        *strides_of(query, key, value, output),
        heads, queries, keys, groups, tiles, base_two(scale),
        D=channels, DP=power_of_two(channels), T=size, N=min(block, MOST_AT_ONCE), W=count,
        num_warps=4, num_stages=1, **at_most(query, 96),
    )  # fmt: skip
    return output, logsum


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsum: Tensor,
    group_ids: Tensor, words: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dQ, dK and dV for heads that :func:`fits`."""
    grad, query, key, value, output = (rows_of(t) for t in (grad, query, key, value, output))
    group_ids, logsum = group_ids.contiguous(), logsum.contiguous()
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    groups, count = words.shape[1:]
    grad_query, grad_key, grad_value = new_rows(query), new_rows(key), new_rows(value)
    delta = torch.empty_like(logsum)
    block = block_of(query)
    options = {"D": channels, "DP": power_of_two(channels), "W": count, "num_warps": 4}
    options |= {"T": min(block, power_of_two(queries)), "N": min(block, MOST_AT_ONCE)}
    shape, scales = (heads, queries, keys, groups), (base_two(scale), scale)
    tiles = triton.cdiv(queries, options["T"])
    launch(
        dense_query_gradient, batch * heads * tiles,
        grad, query, key, value, output, group_ids, words, logsum, delta, grad_query,
        *strides_of(grad, query, key, value, output, grad_query), *shape, tiles, *scales, **options,
    )  # fmt: skip
    tiles = triton.cdiv(keys, options["N"])
    options |= {"T": options["N"], "num_warps": 2, "num_stages": 1}
    launch(
        dense_key_gradients, batch * heads * tiles,
        grad, query, key, value, group_ids, words, logsum, delta, grad_key, grad_value,
        *strides_of(grad, query, key, value, grad_key, grad_value), *shape, tiles, *scales, **options,
    )  # fmt: skip
    return grad_query, grad_key, grad_value
