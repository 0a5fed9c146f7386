# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention inside groups for many tokens: forward (Eq. 2) and gradients.

A program takes a tile of queries of one group and its keys block by block, gathered by the group's
list, which is padded with an id that exists; for dK and dV a block of keys and a run of the queries
that see them. A key sums the partial gradients of the groups that chose it through the inverse
index. The formulas are in docs/kernels.md.
"""

import functools
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
from dgt.ops.triton.grouping import Segments, count_slots, find_segment, tile_size
from dgt.ops.triton.inverse import PAD, Lists, invert, plan_gather
from dgt.ops.triton.launch import (
    MOST_PLANS,
    Attended,
    LaunchPlan,
    Layout,
    block_of,
    ceil_div,
    launch,
    layout_of_new_rows,
    layouts_of,
    new_rows,
    plan_launch,
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
    query, key, value, lists, counts, order, tiles, output, logsum, biases, scale,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, heads, queries, groups, keys, padded, slots,
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
    scale_log2, scale, gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, rb, rh, rl,
    heads, queries, groups, padded, slots,
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
    further_key, further_value, scale_log2, scale, first_head,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl,
    heads, queries, groups, padded, run, further, blocks,
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
    partial, further_partial, counts, ends, first_head,
    heads_at_once, groups, padded, run, further, blocks,
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


def tiling(query: Layout, groups: int) -> Tiling:
    """Return the sizes for (B, H, L, D) queries."""
    return Tiling(tile_size(query.shape[2], groups), min(block_of(query), PAD))


def run_length(queries: int, tile: int) -> int:
    """Return the queries of a group that a program of dK and dV takes, whole tiles."""
    return max(LEAST_RUN // tile, ceil_div(ceil_div(queries, MOST_RUNS), tile)) * tile


@functools.lru_cache(MOST_PLANS)
def plan_attention(
    query: Layout, key: Layout, value: Layout, groups: int, padded: int
) -> LaunchPlan:
    """Plan :func:`attend` by lists that are ``padded`` to this length."""
    batch, heads, queries, channels = query.shape
    sizes, slots = tiling(query, groups), count_slots(queries, groups)
    return plan_launch(
        attend_tiles, batch * heads * slots,
        *strides_of(query, key, value, layout_of_new_rows(query)), heads, queries, groups,
        key.shape[2], padded, slots, D=channels, DP=power_of_two(channels), T=sizes.queries,
        N=sizes.keys, num_warps=4, num_stages=2,
    )  # fmt: skip


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, lists: Lists, scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend inside each group: (B, H, L, D) of the query's type, and float32 (B, H, L) sums.

    ``key_bias``, (B, H, M), is added to the scores of a key; it has no gradient.
    """
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    plan = plan_attention(*layouts_of(query, key, value), lists.groups, lists.length)
    output = new_rows(query)
    logsum = query.new_empty(query.shape[:3], dtype=torch.float32)
    # Added to scores before they are scaled.
    biases = None if key_bias is None else (key_bias.float() / abs(scale or 1e-30)).contiguous()
    launch(
        plan, query, key, value, lists.ids, lists.counts, segments.order, segments.tiles, output,
        logsum, biases, base_two(scale),
    )  # fmt: skip
    return output, logsum


class Turn(NamedTuple):
    """How some heads sum the gradients of their keys."""

    partials: tuple[int, int, int, int]
    """Float32 numbers of dK and dV of every group, and of further runs of heavy groups."""
    keys: LaunchPlan
    add: LaunchPlan | None
    """None where no group can have further runs."""
    gather: LaunchPlan


class GradientPlan(NamedTuple):
    """How the gradients of :func:`attend` are found."""

    query: LaunchPlan
    turns: tuple[tuple[int, Turn], ...]
    """First heads, each with what is done for some heads from it on."""
    partials: int
    """Float32 numbers of the largest turn."""


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
    padded: int,
) -> GradientPlan:
    """Plan :func:`backward`; dV lies as dK does."""
    batch, heads, queries, channels = query.shape
    sizes, slots = tiling(query, groups), count_slots(queries, groups)
    of_query = plan_launch(
        query_gradient, batch * heads * slots,
        *strides_of(grad, query, key, value, output, grad_query), heads, queries, groups, padded,
        slots, D=channels, DP=power_of_two(channels), T=sizes.queries, N=sizes.keys, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    tile = min(tile_size(queries, groups), block_of(query))
    run = run_length(queries, tile)
    further, blocks = queries // run, ceil_div(padded, sizes.keys)
    columns = {
        "D": channels, "DP": power_of_two(channels), "N": sizes.keys, "GC": power_of_two(groups),
        "num_warps": 4, "num_stages": 1,
    }  # fmt: skip

    def plan_turn(count: int) -> Turn:
        row, more = count * groups * padded * channels, count * further * padded * channels
        of_keys = plan_launch(
            key_gradients, count * blocks * (groups + further),
            *strides_of(grad, query, key, value), heads, queries, groups, padded, run, further,
            blocks, T=tile, **columns,
        )  # fmt: skip
        add = plan_launch(
            add_runs, 2 * count * groups * blocks, count, groups, padded, run, further, blocks,
            **columns,
        )  # fmt: skip
        sum_up = plan_gather(grad_key, groups * padded, count, 2)
        return Turn((row, row, more, more), of_keys, add if further else None, sum_up)

    runs = list(turns(batch * heads, 8 * (groups + further) * padded * channels))
    turn_of = {count: plan_turn(count) for count in {count for _, count in runs}}
    planned = tuple((first, turn_of[count]) for first, count in runs)
    return GradientPlan(of_query, planned, max(sum(turn.partials) for turn in turn_of.values()))


def backward(
    grad: Tensor, attended: Attended, segments: Segments, lists: Lists, scale: float
) -> Tensor:
    """Return dQ, dK and dV as :func:`dgt.ops.gradients.new_gradients`; other arguments as in :func:`attend`.

    dK and dV are partial sums of each group first, in float32, for some heads at a time.
    """
    grad, attended = rows_of(grad), attended.in_rows()
    query, key, value, output, logsum = attended
    grads, delta = new_gradients(query, key), torch.empty_like(logsum)
    grad_query, grad_key, grad_value = split_gradients(grads, query.shape, key.shape)
    layouts = layouts_of(grad, query, key, value, output, grad_query, grad_key)
    plan = plan_gradients(*layouts, lists.groups, lists.length)
    scales = (base_two(scale), scale)
    launch(
        plan.query, grad, query, key, value, output, lists.ids, lists.counts, segments.order,
        segments.tiles, logsum, delta, grad_query, *scales,
    )  # fmt: skip
    ends, entries = invert(lists, query.shape[0] * query.shape[1], key.shape[2])
    partials = delta.new_empty(plan.partials)
    for first, turn in plan.turns:
        of_groups = partials[: sum(turn.partials)].split_with_sizes(turn.partials)
        launch(
            turn.keys, grad, query, key, value, lists.ids, lists.counts, segments.order,
            segments.ends, logsum, delta, *of_groups, *scales, first,
        )  # fmt: skip
        if turn.add is not None:
            launch(turn.add, partials, of_groups[2], lists.counts, segments.ends, first)
        launch(turn.gather, partials, ends, entries, grad_key, grad_value, first)
    return grads
