# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention inside groups for many tokens: forward (Eq. 2) and gradients.

A program takes a tile of queries of one group and its keys block by block, gathered by the group's
list, which is padded with an id that exists; for dK and dV a block of keys and a run of the queries
that see them. A key sums the partial gradients of the groups that chose it through the inverse
index. The formulas are in docs/kernels.md.
"""

from typing import NamedTuple

import torch
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
from dgt.ops.triton.grouping import Segments, find_segment, tile_size
from dgt.ops.triton.inverse import PAD, Lists, gather, invert
from dgt.ops.triton.launch import (
    Attended,
    block_of,
    ceil_div,
    launch,
    new_rows,
    power_of_two,
    rows_of,
    strides_of,
    turns,
)

MOST_RUNS = 16  # into which the queries of a head would be cut if they all were of one group
LEAST_RUN = 1024  # queries: with fewer tokens nothing is cut, which saves launches


@triton.jit
def load_tile(tiles, counts, order, head, slot, slots, queries, groups, T: tl.constexpr):
    """Group of a tile, its number of keys, its queries, and which of T exist.

    The group is -1 if the tile is unused.
    """
    row = tiles + (head.to(tl.int64) * slots + slot) * 3
    group = tl.load(row)
    first = tl.load(row + 1)
    end = tl.load(row + 2)
    listed = tl.minimum(tl.maximum(group, 0), groups - 1)  # the queries of no group see nothing
    count = tl.where(
        group == listed, tl.load(counts + head * groups + listed) if counts is not None else 1, 0
    )
    place = first + tl.arange(0, T)
    present = place < end
    rows = tl.load(order + head.to(tl.int64) * queries + place, mask=present, other=0)
    return group, count, rows, present


@triton.jit
def load_listed(base, ids, stride, D: tl.constexpr, DP: tl.constexpr):
    """(N, DP) rows by ids that all exist: unmasked, but for padded channels."""
    channel = tl.arange(0, DP)[None, :]
    address = base + ids.to(tl.int64)[:, None] * stride + channel
    return (
        tl.load(address)
        if D == DP
        else tl.load(address, mask=(ids >= 0)[:, None] & (channel < D), other=0.0)
    )


@triton.jit
def attend_tiles(
    query, key, value, lists, counts, order, tiles, output, logsum, biases, qb, qh, ql, kb, kh, kl,
    vb, vh, vl, ob, oh, ol, heads, queries, groups, keys, padded, slots, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend for one tile of queries; ``scale`` contains log2(e)."""
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    group, count, rows, present = load_tile(
        tiles, counts, order, head, slot, slots, queries, groups, T
    )
    if group < 0:
        return
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    if scale < 0:
        q, scale = -q, -scale
    key_rows = head_base(key, head, heads, kb, kh)
    value_rows = head_base(value, head, heads, vb, vh)
    listed = lists + (head * groups + group).to(tl.int64) * padded
    top = tl.full([T], LOWEST, tl.float32)
    total = tl.zeros([T], tl.float32)
    result = tl.zeros([T, DP], tl.float32)
    if biases is not None:
        biases += head.to(tl.int64) * keys
    full = count // N * N
    for LAST in tl.static_range(2):  # the last block is masked, and apart
        begin, end = full * LAST, full + (count - full) * LAST
        for start in tl.range(begin, end, N, num_stages=1 if LAST else None):
            ids = tl.load(listed + start + tl.arange(0, N))
            score = multiply(q, tl.trans(load_listed(key_rows, ids, kl, D, DP)))
            if biases is not None:
                score += tl.load(biases + ids)[None, :]
            if LAST:
                score = tl.where((start + tl.arange(0, N) < count)[None, :], score, float("-inf"))
            weight, shrink, top, total = running_softmax(score, scale, top, total)
            v = load_listed(value_rows, ids, vl, D, DP)
            if LAST:  # behind the list: a weight of zero times infinity would be NaN
                v = tl.where((start + tl.arange(0, N) < count)[:, None], v, 0.0).to(v.dtype)
            result = result * shrink[:, None] + multiply(weight.to(v.dtype), v)
    result, logs = finish_softmax(result, top, total)
    store_rows(head_base(output, head, heads, ob, oh), rows, ol, present, result, D, DP)
    tl.store(logsum + head.to(tl.int64) * queries + rows, logs, mask=present)


@triton.jit
def query_gradient(
    grad, query, key, value, output, lists, counts, order, tiles, logsum, delta, grad_query,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, rb, rh, rl,
    heads, queries, groups, padded, slots, scale_log2, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and its delta for the other kernel."""
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    group, count, rows, present = load_tile(
        tiles, counts, order, head, slot, slots, queries, groups, T
    )
    if group < 0:
        return
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    dy = load_rows(head_base(grad, head, heads, gb, gh), rows, gl, present, D, DP)
    y = load_rows(head_base(output, head, heads, ob, oh), rows, ol, present, D, DP)
    mean = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * queries + rows, mean, mask=present)
    logs = tl.load(logsum + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
    key_rows = head_base(key, head, heads, kb, kh)
    value_rows = head_base(value, head, heads, vb, vh)
    listed = lists + (head * groups + group).to(tl.int64) * padded
    result = tl.zeros([T, DP], tl.float32)
    for start in range(0, count, N):
        place = start + tl.arange(0, N)
        ids = tl.where(place < count, tl.load(listed + place), tl.load(listed))
        k, v = load_listed(key_rows, ids, kl, D, DP), load_listed(value_rows, ids, vl, D, DP)
        score = multiply(q, tl.trans(k)) * scale_log2 - logs[:, None]
        weight = tl.where((place < count)[None, :], tl.exp2(score), 0.0)
        slope = weight * (multiply(dy, tl.trans(v)) - mean[:, None])
        result += multiply(slope.to(k.dtype), k)
    store_rows(head_base(grad_query, head, heads, rb, rh), rows, rl, present, result * scale, D, DP)


@triton.jit
def further_runs(ends, head, groups, run, GC: tl.constexpr):
    """Of every group, how many runs of queries it has after its first; numbers of the groups."""
    ids = tl.arange(0, GC)
    row = ends + head.to(tl.int64) * (groups + 1) + ids
    end = tl.load(row, mask=ids < groups, other=0)
    start = tl.load(row - 1, mask=(ids > 0) & (ids < groups), other=0)
    return tl.maximum(end - start - 1, 0) // run, ids


@triton.jit
def key_gradients(
    grad, query, key, value, lists, counts, order, ends, logsum, delta, partial_key, partial_value,
    further_key, further_value, gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl,
    heads, queries, groups, padded, run, further, first_head, blocks, scale_log2, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, GC: tl.constexpr,
):  # fmt: skip
    """Partial dK and dV of one block of the selected keys of a group, from one run of its queries.

    The first ``groups`` programs of a block take the first run of each group, ``further`` more
    those that are left of heavy groups. Rows beyond the group's keys are filled with values
    that are never read; absent queries are zero, and so is what they add.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    unit = pid // blocks % (groups + further)
    nth = pid // blocks // (groups + further)
    head = first_head + nth
    group, which = unit, 0
    if unit >= groups:
        runs, ids = further_runs(ends, head, groups, run, GC)
        group = tl.sum((tl.cumsum(runs, 0) <= unit - groups).to(tl.int32), 0)
        if group >= groups:
            return
        which = unit - groups - tl.sum(tl.where(ids < group, runs, 0), 0) + 1
    if block * N >= tl.load(counts + head * groups + group):
        return
    begin, end = find_segment(ends, head, group, groups)
    begin += which * run
    end = tl.minimum(end, begin + run)
    place = block * N + tl.arange(0, N)
    ids = tl.load(lists + (head * groups + group).to(tl.int64) * padded + place)
    k = load_listed(head_base(key, head, heads, kb, kh), ids, kl, D, DP)
    v = load_listed(head_base(value, head, heads, vb, vh), ids, vl, D, DP)
    query_rows = head_base(query, head, heads, qb, qh)
    grad_rows = head_base(grad, head, heads, gb, gh)
    dk = tl.zeros([N, DP], tl.float32)
    dv = tl.zeros([N, DP], tl.float32)
    for start in range(begin, end, T):
        at = start + tl.arange(0, T)
        present = at < end
        rows = tl.load(order + head.to(tl.int64) * queries + at, mask=present, other=0)
        q = load_rows(query_rows, rows, ql, present, D, DP)
        dy = load_rows(grad_rows, rows, gl, present, D, DP)
        logs = tl.load(logsum + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
        mean = tl.load(delta + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
        weight = tl.exp2(multiply(k, tl.trans(q)) * scale_log2 - logs[None, :])
        dv += multiply(weight.to(dy.dtype), dy)
        slope = weight * (multiply(v, tl.trans(dy)) - mean[None, :])
        dk += multiply(slope.to(q.dtype), q)
    base = (nth.to(tl.int64) * groups + unit) * padded * D
    one, two = partial_key + base, partial_value + base
    if unit >= groups:
        base = (nth.to(tl.int64) * further + unit - groups) * padded * D
        one, two = further_key + base, further_value + base
    store_rows(one, place, D, place >= 0, dk * scale, D, DP)
    store_rows(two, place, D, place >= 0, dv, D, DP)


@triton.jit
def add_runs(
    partial, further_partial, counts, ends, heads_at_once, groups, padded, run, further, first_head,
    blocks,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, GC: tl.constexpr,
):  # fmt: skip
    """Add the further runs of a heavy group to its first, in their order, for one block of keys."""
    pid = tl.program_id(0)
    block, group, nth = pid % blocks, pid // blocks % groups, pid // blocks // groups
    head = first_head + nth % heads_at_once
    runs, ids = further_runs(ends, head, groups, run, GC)
    own = tl.sum(tl.where(ids == group, runs, 0), 0)
    if (own == 0) | (block * N >= tl.load(counts + head * groups + group)):
        return
    first = tl.sum(tl.where(ids < group, runs, 0), 0)
    place = block * N + tl.arange(0, N)
    inside = place < padded
    target = partial + (nth.to(tl.int64) * groups + group) * padded * D
    total = load_rows(target, place, D, inside, D, DP)
    for which in range(own):
        source = further_partial + (nth.to(tl.int64) * further + first + which) * padded * D
        total += load_rows(source, place, D, inside, D, DP)
    store_rows(target, place, D, inside, total, D, DP)


class Tiling(NamedTuple):
    """Sizes of the tiles of queries and blocks of keys."""

    queries: int
    keys: int


def tiling(query: Tensor, groups: int) -> Tiling:
    """Return the sizes for (B, H, L, D) queries."""
    return Tiling(tile_size(query.shape[2], groups), min(block_of(query), PAD))


def run_length(queries: int, tile: int) -> int:
    """Return the queries of a group that a program of dK and dV takes, whole tiles."""
    return max(LEAST_RUN // tile, ceil_div(ceil_div(queries, MOST_RUNS), tile)) * tile


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, lists: Lists, scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend inside each group: (B, H, L, D) of the query's type, and float32 (B, H, L) sums.

    ``key_bias``, (B, H, M), is added to the scores of a key; it has no gradient.
    """
    query = rows_of(query)
    key = rows_of(key)
    value = rows_of(value)
    batch, heads, queries, channels = query.shape
    groups, padded = lists.ids.shape[1:]
    output = new_rows(query)
    logsum = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    # Added to scores before they are scaled.
    biases = None if key_bias is None else (key_bias.float() / abs(scale or 1e-30)).contiguous()
    sizes, slots = tiling(query, groups), segments.tiles.shape[1]
    launch(
        attend_tiles, batch * heads * slots, query, key, value, *lists, segments.order,
        segments.tiles, output, logsum, biases,
        *strides_of(query, key, value, output), heads, queries, groups, key.shape[2], padded, slots,
        base_two(scale), D=channels, DP=power_of_two(channels), T=sizes.queries, N=sizes.keys,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return output, logsum


def backward(
    grad: Tensor, attended: Attended, segments: Segments, lists: Lists, scale: float
) -> Tensor:
    """Return dQ, dK and dV as :func:`dgt.ops.gradients.new_gradients`; other arguments as in :func:`attend`."""
    grad, attended = rows_of(grad), attended.in_rows()
    query, key, value, output, logsum = attended
    batch, heads, queries, channels = query.shape
    groups, padded = lists.ids.shape[1:]
    grads, delta = new_gradients(query, key), torch.empty_like(logsum)
    grad_query, *of_keys = split_gradients(grads, query.shape, key.shape)
    sizes, slots = tiling(query, groups), segments.tiles.shape[1]
    launch(
        query_gradient, batch * heads * slots,
        grad, query, key, value, output, *lists, segments.order, segments.tiles, logsum, delta,
        grad_query, *strides_of(grad, query, key, value, output, grad_query), heads, queries,
        groups, padded, slots, base_two(scale), scale, D=channels, DP=power_of_two(channels),
        T=sizes.queries, N=sizes.keys, num_warps=4, num_stages=2,
    )  # fmt: skip
    add_key_gradients(grad, attended, delta, segments, lists, scale, of_keys)
    return grads


def add_key_gradients(
    grad: Tensor,
    attended: Attended,
    delta: Tensor,
    segments: Segments,
    lists: Lists,
    scale: float,
    to: list[Tensor],
) -> None:
    """Write dK and dV, by partial sums of each group, in float32, for some heads at a time."""
    query, key, value, _, logsum = attended
    batch, heads, queries, channels = query.shape
    groups, padded = lists.ids.shape[1:]
    size, tile = tiling(query, groups).keys, min(tile_size(queries, groups), block_of(query))
    run = run_length(queries, tile)
    further, blocks = queries // run, ceil_div(padded, size)
    columns = {"D": channels, "DP": power_of_two(channels), "N": size, "GC": power_of_two(groups)}
    inverse = invert(lists, key.shape[2])
    for first, count in turns(batch * heads, 8 * (groups + further) * padded * channels):
        partial = delta.new_empty((2, count, groups * padded, channels))
        more = delta.new_empty((2, count, further * padded, channels))
        launch(
            key_gradients, count * blocks * (groups + further), grad, query, key, value, *lists,
            segments.order, segments.ends, logsum, delta, *partial, *more,
            *strides_of(grad, query, key, value), heads, queries, groups, padded, run, further,
            first, blocks, base_two(scale), scale, T=tile, **columns, num_warps=4, num_stages=1,
        )  # fmt: skip
        if further:
            launch(
                add_runs, 2 * count * groups * blocks, partial, more, lists.counts, segments.ends,
                count, groups, padded, run, further, first, blocks, **columns, num_warps=4,
                num_stages=1,
            )  # fmt: skip
        gather(inverse, partial, to, first)
        del partial, more  # so that the next turn's take their place
