# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention inside groups for many tokens: forward (Eq. 2) and gradients.

A program takes a tile of queries of one group and its keys block by block, gathered by the group's
list, which is padded with an id that exists; for dK and dV a block of keys and a run of the queries
that see them. A key sums the partial gradients of the groups that chose it through the inverse
index. The formulas are in docs/kernels.md.
"""

import functools
import math
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
def load_logsum(logsum, own, present):
    """Log-sum-exps of some queries, infinite where one is absent or sees no key: its weights become zero."""
    logs = tl.load(logsum + own, mask=present, other=float("inf"))
    return tl.where(logs == float("-inf"), float("inf"), logs)


@triton.jit
def query_gradient(
    grad, query, key, value, output, lists, counts, order, tiles, logsum, biases, grad_logsum,
    delta, grad_query, scale_log2, scale,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, rb, rh, rl,
    heads, queries, groups, keys, padded, slots,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and its delta for the other kernel; ``biases`` contain log2(e)."""
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
    own = head.to(tl.int64) * queries + rows
    if grad_logsum is not None:
        mean -= tl.load(grad_logsum + own, mask=present, other=0.0)
    tl.store(delta + own, mean, mask=present)
    logs = load_logsum(logsum, own, present)
    key_rows = head_base(key, head, heads, kb, kh)
    value_rows = head_base(value, head, heads, vb, vh)
    listed = lists + (head * groups + group).to(tl.int64) * padded
    result = tl.zeros([T, DP], tl.float32)
    if biases is not None:
        biases += head.to(tl.int64) * keys
    for start in range(0, count, N):
        place = start + tl.arange(0, N)
        ids = tl.where(place < count, tl.load(listed + place), tl.load(listed))
        k, v = load_listed(key_rows, ids, kl, D, DP), load_listed(value_rows, ids, vl, D, DP)
        score = multiply(q, tl.trans(k)) * scale_log2 - logs[:, None]
        if biases is not None:
            score += tl.load(biases + ids)[None, :]
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
    grad, query, key, value, lists, counts, order, ends, logsum, biases, delta,
    partial_key, partial_value, further_key, further_value, partial_bias, further_bias,
    scale_log2, scale, first_head,
    gb, gh, gl, qb, qh, ql, kb, kh, kl, vb, vh, vl,
    heads, queries, groups, keys, padded, run, further, blocks,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, GC: tl.constexpr,
):  # fmt: skip
    """Partial dK and dV of one block of the selected keys of a group, from one run of its queries.

    With ``biases`` also the gradients of these.

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
    if biases is not None:
        bias = tl.load(biases + head.to(tl.int64) * keys + ids)
        db = tl.zeros([N], tl.float32)
    for start in range(begin, end, T):
        at = start + tl.arange(0, T)
        present = at < end
        rows = tl.load(order + head.to(tl.int64) * queries + at, mask=present, other=0)
        q = load_rows(query_rows, rows, ql, present, D, DP)
        dy = load_rows(grad_rows, rows, gl, present, D, DP)
        logs = load_logsum(logsum, head.to(tl.int64) * queries + rows, present)
        mean = tl.load(delta + head.to(tl.int64) * queries + rows, mask=present, other=0.0)
        score = multiply(k, tl.trans(q)) * scale_log2 - logs[None, :]
        if biases is not None:
            score += bias[:, None]
        weight = tl.exp2(score)
        dv += multiply(weight.to(dy.dtype), dy)
        slope = weight * (multiply(v, tl.trans(dy)) - mean[None, :])
        dk += multiply(slope.to(q.dtype), q)
        if biases is not None:
            db += tl.sum(slope, 1)
    base = (nth.to(tl.int64) * groups + unit) * padded
    one, two = partial_key, partial_value
    if unit >= groups:
        base = (nth.to(tl.int64) * further + unit - groups) * padded
        one, two = further_key, further_value
    store_rows(one + base * D, place, D, place >= 0, dk * scale, D, DP)
    store_rows(two + base * D, place, D, place >= 0, dv, D, DP)
    if biases is not None:
        three = partial_bias
        if unit >= groups:
            three = further_bias
        tl.store(three + base + place, db)


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

    ``key_bias``, (B, H, M), is added to the scores of a key.
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


class Sums(NamedTuple):
    """How some heads add up the partial gradients of groups."""

    add: LaunchPlan | None
    """Further runs to the first; None where no group can have any."""
    gather: LaunchPlan


class Turn(NamedTuple):
    """How some heads sum the gradients of their keys."""

    partials: tuple[int, ...]
    """Float32 numbers of dK and dV of every group, and of further runs of heavy groups; the same of biases."""
    keys: LaunchPlan
    of_keys: Sums
    """Of dK and dV."""
    of_biases: Sums | None
    """None where there are no biases."""


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
    has_bias: bool,
) -> GradientPlan:
    """Plan :func:`backward`; dV lies as dK does."""
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    sizes, slots = tiling(query, groups), count_slots(queries, groups)
    of_query = plan_launch(
        query_gradient, batch * heads * slots,
        *strides_of(grad, query, key, value, output, grad_query), heads, queries, groups, keys,
        padded, slots, D=channels, DP=power_of_two(channels), T=sizes.queries, N=sizes.keys,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    most = 64 if channels <= 32 else 32  # with more, registers spill
    tile = min(tile_size(queries, groups), block_of(query), most)
    run = run_length(queries, tile)
    further, blocks = queries // run, ceil_div(padded, sizes.keys)
    columns = {
        "N": sizes.keys, "GC": power_of_two(groups), "num_warps": 4, "num_stages": 1,
    }  # fmt: skip

    def plan_sums(target: Layout, count: int, targets: int) -> Sums:
        width = target.shape[3]
        add = plan_launch(
            add_runs, targets * count * groups * blocks, count, groups, padded, run, further,
            blocks, D=width, DP=power_of_two(width), **columns,
        )  # fmt: skip
        return Sums(add if further else None, plan_gather(target, groups * padded, count, targets))

    def plan_turn(count: int) -> Turn:
        row, more = count * groups * padded, count * further * padded
        partials = [row * channels, row * channels, more * channels, more * channels]
        of_keys = plan_launch(
            key_gradients, count * blocks * (groups + further),
            *strides_of(grad, query, key, value), heads, queries, groups, keys, padded, run,
            further, blocks, D=channels, DP=power_of_two(channels), T=tile, **columns,
        )  # fmt: skip
        of_biases = None
        if has_bias:
            partials += [row, more]
            numbers = Layout((batch, heads, keys, 1), (heads * keys, keys, 1), torch.float32)
            of_biases = plan_sums(numbers, count, 1)
        return Turn(tuple(partials), of_keys, plan_sums(grad_key, count, 2), of_biases)

    runs = list(turns(batch * heads, 8 * (groups + further) * padded * channels))
    turn_of = {count: plan_turn(count) for count in {count for _, count in runs}}
    planned = tuple((first, turn_of[count]) for first, count in runs)
    return GradientPlan(of_query, planned, max(sum(turn.partials) for turn in turn_of.values()))


def backward(
    grad: Tensor,
    attended: Attended,
    segments: Segments,
    lists: Lists,
    scale: float,
    key_bias: Tensor | None = None,
    grad_logsumexp: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dQ, dK and dV as :func:`dgt.ops.gradients.new_gradients`, and float32 gradients of ``key_bias``.

    Those of ``key_bias`` are empty where it is None; ``grad_logsumexp``, (B, H, L), is the gradient of
    natural log-sum-exps. Other arguments as in :func:`attend`.

    dK and dV are partial sums of each group first, in float32, for some heads at a time.
    """
    grad, attended = rows_of(grad), attended.in_rows()
    query, key, value, output, logsum = attended
    grads, delta = new_gradients(query, key), torch.empty_like(logsum)
    grad_query, grad_key, grad_value = split_gradients(grads, query.shape, key.shape)
    layouts = layouts_of(grad, query, key, value, output, grad_query, grad_key)
    plan = plan_gradients(*layouts, lists.groups, lists.length, key_bias is not None)
    scales = (base_two(scale), scale)
    biases, grad_biases = None, logsum.new_empty(0)
    if key_bias is not None:
        biases = (key_bias.float() * math.log2(math.e)).contiguous()
        grad_biases = torch.empty_like(biases)
    if grad_logsumexp is not None:
        grad_logsumexp = grad_logsumexp.float().contiguous()
    launch(
        plan.query, grad, query, key, value, output, lists.ids, lists.counts, segments.order,
        segments.tiles, logsum, biases, grad_logsumexp, delta, grad_query, *scales,
    )  # fmt: skip
    ends, entries = invert(lists, query.shape[0] * query.shape[1], key.shape[2])
    partials = delta.new_empty(plan.partials)
    for first, turn in plan.turns:
        parts = partials[: sum(turn.partials)].split_with_sizes(turn.partials)
        of_keys, of_biases = parts[:4], parts[4:] or (None, None)
        launch(
            turn.keys, grad, query, key, value, lists.ids, lists.counts, segments.order,
            segments.ends, logsum, biases, delta, *of_keys, *of_biases, *scales, first,
        )  # fmt: skip
        if turn.of_keys.add is not None:
            launch(turn.of_keys.add, partials, of_keys[2], lists.counts, segments.ends, first)
        launch(turn.of_keys.gather, partials, ends, entries, grad_key, grad_value, first)
        if turn.of_biases is None:
            continue
        if turn.of_biases.add is not None:
            launch(turn.of_biases.add, *of_biases, lists.counts, segments.ends, first)
        launch(turn.of_biases.gather, of_biases[0], ends, entries, grad_biases, grad_biases, first)
    return grads, grad_biases
