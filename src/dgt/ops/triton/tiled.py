# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention inside each group: forward (Eq. 2), with or without a remainder, and gradients.

A program takes a tile of queries and their keys block by block; for dK and dV a block of keys and all queries that may
see them. Many tokens: queries are of one group, and keys gathered by its list, which is padded with an id that exists;
a key sums the partials of the groups that chose it through the inverse index. FEW tokens, up to 256, would lose more by
gathering than they save: all are read in their order, and query i sees key j if bit ``j % 32`` of word ``j // 32`` of
its group is set; FEW is the number of these words, otherwise 0. The formulas are in docs/kernels.md.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import LOWEST, head_base, load_rows, multiply, store_rows
from dgt.ops.triton.grouping import Segments, find_segment, sum_queries, tile_size
from dgt.ops.triton.inverse import PAD, Lists, gather, invert, mark
from dgt.ops.triton.launch import at_most, block_of, launch, new_rows, power_of_two, rows_of, strides_of, turns

MOST_TOKENS = 256


def are_few(query: Tensor, key: Tensor) -> bool:
    """Tell whether (B, H, L, D) tensors have so few tokens that dense attention under a mask is the way."""
    return query.shape[2] == key.shape[2] <= MOST_TOKENS


@triton.jit
def load_tile(tiles, counts, order, head, slot, slots, queries, keys, groups, T: tl.constexpr, FEW: tl.constexpr):
    """Group of a tile (-1 if it is unused), how many keys it sees, its queries, and which of T there are."""
    if FEW:
        rows = slot * T + tl.arange(0, T)
        group, count, present = 0, keys, rows < queries
    else:
        row = tiles + (head.to(tl.int64) * slots + slot) * 4
        group, first, end = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        listed = tl.minimum(tl.maximum(group, 0), groups - 1)  # the queries of no group see nothing
        count = tl.where(group == listed, tl.load(counts + head * groups + listed) if counts is not None else 1, 0)
        place = first + tl.arange(0, T)
        present = place < end
        rows = tl.load(order + head.to(tl.int64) * queries + place, mask=present, other=0)
    return group, count, rows, present


@triton.jit
def find_list(lists, tiles, head, group, rows, queries, groups, padded, FEW: tl.constexpr):
    """Where the list of a group begins; FEW: the words of the groups of some queries, and which queries have any."""
    if FEW:
        group = tl.load(tiles + head.to(tl.int64) * queries + rows, mask=rows < queries, other=-1)
        row = lists + (head.to(tl.int64) * groups + group) * FEW
    else:
        row = lists + (head * groups + group).to(tl.int64) * padded
    return row, (group >= 0) & (group < groups)


@triton.jit
def sees(row, real, start, count, N: tl.constexpr, FEW: tl.constexpr):
    """Whether queries see keys ``start`` and on, a multiple of N, in FEW tokens at most 32: (T, N) or (1, N)."""
    if FEW:
        word = tl.load(row + start // 32, mask=real, other=0) >> (start % 32)
        seen = (word[:, None] & (1 << tl.arange(0, N))[None, :]) != 0
    else:
        seen = (start + tl.arange(0, N) < count)[None, :]
    return seen


@triton.jit
def load_keys(base, ids, stride, keys, D: tl.constexpr, DP: tl.constexpr, FEW: tl.constexpr):
    """(N, DP) rows by ids; of a list all exist."""
    return load_rows(base, ids, stride, ids < keys, D, DP) if FEW or D < DP else tl.load(
        base + ids.to(tl.int64)[:, None] * stride + tl.arange(0, DP)[None, :]
    )  # fmt: skip


@triton.jit
def running_softmax(score, scale, top, total):
    """One step of the running softmax, base 2: weights, the factor on what came before, new maximum and sum.

    ``scale`` is positive, and ``top`` begins with LOWEST, which keeps rows that have seen no key yet apart from NaN.
    """
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return weight, shrink, new_top, total * shrink + tl.sum(weight, 1)


@triton.jit
def finish_softmax(result, top, total):
    """The weighted mean and the log-sum-exp; zero and minus infinity where a row has seen no key."""
    safe = tl.where(total > 0, total, 1.0)
    return result * (1.0 / safe)[:, None], tl.where(total > 0, top + tl.log2(safe), float("-inf"))


@triton.jit
def attend_tiles(
    query, key, value, lists, counts, order, tiles, output, logsum, biases, rest_key, rest_value, rest_bias,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, heads, queries, keys, groups, padded, slots, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """One tile of queries, ``scale`` contains log2(e); with a remainder, the running softmax starts from that key."""
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    group, count, rows, present = load_tile(tiles, counts, order, head, slot, slots, queries, keys, groups, T, FEW)
    if group < 0:
        return
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    if scale < 0:
        q, scale = -q, -scale
    key_rows, value_rows = head_base(key, head, heads, kb, kh), head_base(value, head, heads, vb, vh)
    row, real = find_list(lists, tiles, head, group, rows, queries, groups, padded, FEW)
    top = tl.full([T], LOWEST, tl.float32)
    total = tl.zeros([T], tl.float32)
    result = tl.zeros([T, DP], tl.float32)
    if biases is not None:
        biases += head.to(tl.int64) * keys
    if rest_key is not None:
        own = (head * groups + tl.minimum(group, groups - 1)).to(tl.int64)
        bias = tl.where(group < groups, tl.load(rest_bias + own), float("-inf"))
        channel = tl.arange(0, DP)
        rest = tl.load(rest_key + own * D + channel, mask=channel < D, other=0.0)
        top = tl.maximum(top, tl.sum(q.to(tl.float32) * rest[None, :], 1) * scale + bias)
        total += tl.where(bias > float("-inf"), 1.0, 0.0)
        rest = tl.load(rest_value + own * D + channel, mask=channel < D, other=0.0)
        result += tl.where(bias > float("-inf"), rest, 0.0)[None, :]
    full = 0 if FEW else count // N * N
    for LAST in tl.static_range(1 if FEW else 0, 2):  # the last block of many is masked, and apart
        for start in tl.range(full * LAST, full + (count - full) * LAST, N, num_stages=1 if LAST else None):
            ids = start + tl.arange(0, N) if FEW else tl.load(row + start + tl.arange(0, N))
            k = load_keys(key_rows, ids, kl, keys, D, DP, FEW)
            if FEW:  # at once, and of many later: so each was faster
                v, seen = load_keys(value_rows, ids, vl, keys, D, DP, FEW), sees(row, real, start, count, N, FEW)
            score = multiply(q, tl.trans(k))
            if biases is not None:
                score += tl.load(biases + ids)[None, :]
            if LAST:
                seen = seen if FEW else sees(row, real, start, count, N, FEW)
                score = tl.where(seen, score, float("-inf"))
            weight, shrink, top, total = running_softmax(score, scale, top, total)
            if not FEW:
                v = load_keys(value_rows, ids, vl, keys, D, DP, FEW)
            result = result * shrink[:, None] + multiply(weight.to(v.dtype), v)
    result, logs = finish_softmax(result, top, total)
    store_rows(head_base(output, head, heads, ob, oh), rows, ol, present, result, D, DP)
    tl.store(logsum + head.to(tl.int64) * queries + rows, logs, mask=present)


@triton.jit
def query_gradient(
    grad, query, key, value, output, lists, counts, order, tiles, logsum, delta, grad_query,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, rb, rh, rl,
    heads, queries, keys, groups, padded, slots, scale_log2, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and its delta for the other kernel."""
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    group, count, rows, present = load_tile(tiles, counts, order, head, slot, slots, queries, keys, groups, T, FEW)
    if group < 0:
        return
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    dy = load_rows(head_base(grad, head, heads, gb, gh), rows, gl, present, D, DP)
    y = load_rows(head_base(output, head, heads, ob, oh), rows, ol, present, D, DP)
    mean = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * queries + rows, mean, mask=present)
    logs = tl.load(logsum + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
    key_rows, value_rows = head_base(key, head, heads, kb, kh), head_base(value, head, heads, vb, vh)
    row, real = find_list(lists, tiles, head, group, rows, queries, groups, padded, FEW)
    result = tl.zeros([T, DP], tl.float32)
    for start in range(0, count, N):
        ids = start + tl.arange(0, N) if FEW else tl.load(row + start + tl.arange(0, N))
        k, v = load_keys(key_rows, ids, kl, keys, D, DP, FEW), load_keys(value_rows, ids, vl, keys, D, DP, FEW)
        seen, score = sees(row, real, start, count, N, FEW), multiply(q, tl.trans(k)) * scale_log2 - logs[:, None]
        weight = tl.where(seen, tl.exp2(score), 0.0)
        slope = weight * (multiply(dy, tl.trans(v)) - mean[:, None])
        result += multiply(slope.to(k.dtype), k)
    store_rows(head_base(grad_query, head, heads, rb, rh), rows, rl, present, result * scale, D, DP)


@triton.jit
def key_gradients(
    grad, query, key, value, lists, counts, order, ends, group_ids, logsum, delta, grad_key, grad_value,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol,
    heads, queries, keys, groups, padded, first_head, blocks, scale_log2, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Partial dK and dV of one block of the selected keys of a group; FEW: all of a block of keys.

    Rows beyond the group's keys are filled with what nobody reads; absent queries are zero, and so is what they add.
    """
    block, nth = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    place = block * N + tl.arange(0, N)
    if FEW:
        head, begin, end, ids, width = nth, 0, queries, place, ol
        one, two = head_base(grad_key, head, heads, ob, oh), head_base(grad_value, head, heads, ob, oh)
    else:
        group, nth = nth % groups, nth // groups
        head, width = first_head + nth, D
        if block * N >= tl.load(counts + head * groups + group):
            return
        begin, end = find_segment(ends, head, group, groups)
        ids = tl.load(lists + (head * groups + group).to(tl.int64) * padded + place)
        base = (nth.to(tl.int64) * groups + group) * padded * D
        one, two = grad_key + base, grad_value + base
    k = load_keys(head_base(key, head, heads, kb, kh), ids, kl, keys, D, DP, FEW)
    v = load_keys(head_base(value, head, heads, vb, vh), ids, vl, keys, D, DP, FEW)
    query_rows, grad_rows = head_base(query, head, heads, qb, qh), head_base(grad, head, heads, gb, gh)
    dk = tl.zeros([N, DP], tl.float32)
    dv = tl.zeros([N, DP], tl.float32)
    for start in range(begin, end, T):
        at = start + tl.arange(0, T)
        present = at < end
        rows = at if FEW else tl.load(order + head.to(tl.int64) * queries + at, mask=present, other=0)
        if FEW:
            words, real = find_list(lists, group_ids, head, 0, rows, queries, groups, padded, FEW)
        q = load_rows(query_rows, rows, ql, present, D, DP)
        dy = load_rows(grad_rows, rows, gl, present, D, DP)
        logs = tl.load(logsum + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
        mean = tl.load(delta + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
        score = multiply(k, tl.trans(q)) * scale_log2 - logs[None, :]
        if FEW:
            score = tl.where(tl.trans(sees(words, real, block * N, keys, N, FEW)), score, float("-inf"))
        weight = tl.exp2(score)
        dv += multiply(weight.to(dy.dtype), dy)
        slope = weight * (multiply(v, tl.trans(dy)) - mean[None, :])
        dk += multiply(slope.to(q.dtype), q)
    store_rows(one, place, width, place < keys if FEW else place >= 0, dk * scale, D, DP)
    store_rows(two, place, width, place < keys if FEW else place >= 0, dv, D, DP)


@triton.jit
def sum_up_rest(
    key, value, key_mask, bits, sums, rest_key, rest_value, rest_bias,
    kb, kh, kl, vb, vh, vl, heads, keys, groups, words, parts, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """k', v' and b of T groups of a head, few so that few heads fill the chip; ``scale`` contains log2(e), and so b."""
    head, first = tl.program_id(0) // parts, tl.program_id(0) % parts * T
    ids = first + tl.arange(0, T)
    exist, own = ids < groups, head.to(tl.int64) * groups + ids
    number = tl.maximum(tl.load(sums + own * (D + 1) + D, mask=exist, other=1.0), 1.0)
    q = (load_rows(sums, own, D + 1, exist, D, DP) / number[:, None]).to(key.dtype.element_ty)
    if scale < 0:
        q, scale = -q, -scale
    key_rows, value_rows = head_base(key, head, heads, kb, kh), head_base(value, head, heads, vb, vh)
    top, total = tl.full([T], LOWEST, tl.float32), tl.zeros([T], tl.float32)
    mean_key, mean_value = tl.zeros([T, DP], tl.float32), tl.zeros([T, DP], tl.float32)
    for start in range(0, keys, N):
        place = start + tl.arange(0, N)
        inside = place < keys
        k = load_rows(key_rows, place, kl, inside, D, DP)
        v = load_rows(value_rows, place, vl, inside, D, DP)
        word = tl.load(bits + (head.to(tl.int64) * keys + place) * words + first // 32, mask=inside, other=-1)
        if MASKED:
            real = tl.load(key_mask + (head // heads).to(tl.int64) * keys + place, mask=inside, other=0)
            word = tl.where(real != 0, word, -1)
        chosen = (word[None, :] & (1 << (ids % 32))[:, None]) != 0
        score = tl.where(chosen, float("-inf"), multiply(q, tl.trans(k)))
        weight, shrink, top, total = running_softmax(score, scale, top, total)
        mean_key = mean_key * shrink[:, None] + multiply(weight.to(k.dtype), k)
        mean_value = mean_value * shrink[:, None] + multiply(weight.to(v.dtype), v)
    mean_key, logs = finish_softmax(mean_key, top, total)
    mean_value, _ = finish_softmax(mean_value, top, total)
    store_rows(rest_key, own, D, exist, mean_key, D, DP)
    store_rows(rest_value, own, D, exist, mean_value, D, DP)
    tl.store(rest_bias + own, logs - tl.sum(q.to(tl.float32) * mean_key, 1) * scale, mask=exist)


def base_two(scale: float) -> float:
    """Return the factor that makes scores exponents of two; never zero, which minus infinity must survive."""
    return (scale or 1e-30) * math.log2(math.e)


def tiling(query: Tensor, groups: int, few: bool = False) -> dict[str, int]:
    """Sizes of the tiles of queries and blocks of keys, and how a program runs them."""
    block, tokens = block_of(query), query.shape[2]
    sizes = (min(block, power_of_two(tokens)), min(block, 32)) if few else (tile_size(tokens, groups), min(block, PAD))
    return {"D": query.shape[3], "DP": power_of_two(query.shape[3]), "T": sizes[0], "N": sizes[1], "num_warps": 4}


def attend(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, segments: Segments, lists: Lists, scale: float,
    key_bias: Tensor | None = None, rest: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend inside each group; ``(output, logsum)``: (B, H, L, D) of the query's type, float32 (B, H, L).

    Without segments tokens are few. ``key_bias``, (B, H, M), is added to the scores of a key; ``rest`` is a key more of
    every group, of :func:`summarize`. Neither has a gradient.
    """
    query, key, value, few = rows_of(query), rows_of(key), rows_of(value), not len(segments.order)
    batch, heads, queries, _ = query.shape
    groups, padded = lists.ids.shape[1:]
    output = new_rows(query)
    logsum = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    options = tiling(query, groups, few)
    options |= {"FEW": padded, "num_stages": 1, **at_most(query, 96)} if few else {"FEW": 0, "num_stages": 3}
    tiles = group_ids.contiguous() if few else segments.tiles
    slots = triton.cdiv(queries, options["T"]) if few else tiles.shape[1]
    biases = None if key_bias is None else (key_bias.float() / abs(scale or 1e-30)).contiguous()  # of scores unscaled
    launch(
        attend_tiles, batch * heads * slots, query, key, value, *lists, segments.order, tiles, output, logsum,
        biases, *(rest or (None,) * 3), *strides_of(query, key, value, output), heads, queries,
        key.shape[2], groups, padded, slots, base_two(scale), **options,
    )  # fmt: skip
    return output, logsum


def summarize(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, lists: Lists, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum up for every group the real keys that are not in its list.

    Returns float32 k' and v', (B, H, G, D), and b for exponents of two, (B, H, G), -inf where nothing was left out.
    """
    key, value, bits = rows_of(key), rows_of(value), mark(lists, key.shape[2])
    groups = lists.ids.shape[1]
    sums = sum_queries(query, group_ids, groups, unit=False).sum(2)
    parts, like = triton.cdiv(groups, 16), sums[..., :-1]
    rest = [like.new_empty(shape) for shape in (like.shape, like.shape, like.shape[:3])]
    launch(
        sum_up_rest, key.shape[0] * key.shape[1] * parts, key, value,
        key_mask if key_mask is None else key_mask.contiguous(), bits, sums, *rest, *strides_of(key, value),
        *key.shape[1:3], groups, bits.shape[2], parts, base_two(scale), D=key.shape[3],
        DP=power_of_two(key.shape[3]), T=16, N=2 * block_of(key), MASKED=key_mask is not None, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return rest[0], rest[1], rest[2]


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsum: Tensor,
    group_ids: Tensor, segments: Segments, lists: Lists, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dQ, dK and dV; arguments as in :func:`attend` and what it returned."""
    grad, query, key, value, output = (rows_of(t) for t in (grad, query, key, value, output))
    group_ids, logsum, few = group_ids.contiguous(), logsum.contiguous(), not len(segments.order)
    batch, heads, queries, channels = query.shape
    groups, padded = lists.ids.shape[1:]
    grad_query, grad_key, grad_value = new_rows(query), new_rows(key), new_rows(value)
    delta = torch.empty_like(logsum)
    options = tiling(query, groups, few) | {"FEW": padded if few else 0, "num_stages": 3 if few else 2}
    tiles = group_ids if few else segments.tiles
    slots = triton.cdiv(queries, options["T"]) if few else tiles.shape[1]
    shape, scales = (heads, queries, key.shape[2], groups, padded), (base_two(scale), scale)
    launch(
        query_gradient, batch * heads * slots,
        grad, query, key, value, output, *lists, segments.order, tiles, logsum, delta, grad_query,
        *strides_of(grad, query, key, value, output, grad_query), *shape, slots, *scales, **options,
    )  # fmt: skip
    options["T"] = min(options["T"], options["N"] if few else block_of(query))
    options |= {"num_warps": 2, "num_stages": 1} if few else {}
    blocks = triton.cdiv(key.shape[2] if few else padded, options["N"])
    runs = [(0, batch * heads)] if few else turns(batch * heads, 8 * groups * padded * channels)
    inverse: Any = None if few else invert(lists, key.shape[2])
    for first, count in runs:
        like = (2, count, groups * padded, channels)
        made: Any = (grad_key, grad_value) if few else torch.empty(like, dtype=torch.float32, device=key.device)
        launch(
            key_gradients, count * blocks * (1 if few else groups), grad, query, key, value, *lists, segments.order,
            segments.ends, group_ids, logsum, delta, *made, *strides_of(grad, query, key, value, grad_key), *shape,
            first, blocks, *scales, **options,
        )  # fmt: skip
        if not few:
            gather(inverse, made, [grad_key, grad_value], first)
    return grad_query, grad_key, grad_value
