# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The four group-wise matrix products of the paper's appendix, with P (L x k) in memory.

Forms 1 and 2 take a tile of queries of one group, forms 3 and 4 a block of the selected keys of one
group. Keys and values are read in place, as in the paper. Unlike there, a tile never straddles two
groups, and keys that several groups chose sum their parts through the inverse index instead of
racing for one address.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import head_base, load_rows, multiply, store_rows
from dgt.ops.triton.gathered import load_tile, tiling
from dgt.ops.triton.grouping import Segments, count_slots, find_segment
from dgt.ops.triton.inverse import Lists, invert, plan_gather
from dgt.ops.triton.launch import (
    ceil_div,
    launch,
    layouts_of,
    plan_launch,
    power_of_two,
    rows_of,
    strides_of,
    turns,
)


@triton.jit
def product_of_tile(
    rows, weights, keys, key_ids, order, tiles, fill,
    rb, rh, rl, kb, kh, kl, heads, queries, count, groups, width, slots,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Form 1, P[i, p] = rows[i] . keys[ids[p]]; or form 2, rows[i] = sum P[i, p] keys[ids[p]].

    Where there is no such key, P is ``fill``.

    ``ids`` are those of the group of query i; a tile holds queries of one group.
    """
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    group, some, row, present = load_tile(tiles, None, order, head, slot, slots, queries, groups, T)
    if group < 0:
        return
    row_base, key_base = head_base(rows, head, heads, rb, rh), head_base(keys, head, heads, kb, kh)
    if FORM == 1:
        left = load_rows(row_base, row, rl, present, D, DP)
    total = tl.zeros([T, DP], tl.float32)
    for start in range(0, width, N):
        column = start + tl.arange(0, N)
        ids = key_ids + (head * groups + group).to(tl.int64) * width + column
        ids = tl.load(ids, mask=column < width * some, other=-1)
        exist = (ids >= 0) & (ids < count)
        k = load_rows(key_base, ids, kl, exist, D, DP)
        address = weights + (head.to(tl.int64) * queries + row)[:, None] * width + column[None, :]
        inside = present[:, None] & (column < width)[None, :]
        if FORM == 1:
            score = tl.where(exist[None, :], multiply(left, tl.trans(k)), fill)
            tl.store(address, score.to(weights.dtype.element_ty), mask=inside)
        else:
            total += multiply(tl.load(address, mask=inside & exist[None, :], other=0.0), k)
    if FORM == 2:
        store_rows(row_base, row, rl, present, total, D, DP)


@triton.jit
def columns_times_rows(
    weights, rows, order, ends, partial, first_head,
    rb, rh, rl, heads, queries, groups, width, blocks,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Forms 3 and 4: for every place p of a group, the sum over its queries of P[i, p] rows[i]."""
    pid = tl.program_id(0)
    block, group, nth = pid % blocks, pid // blocks % groups, pid // blocks // groups
    head = first_head + nth
    begin, end = find_segment(ends, head, group, groups)
    row_base = head_base(rows, head, heads, rb, rh)
    column = block * N + tl.arange(0, N)
    total = tl.zeros([N, DP], tl.float32)
    for start in range(begin, end, T):
        place = start + tl.arange(0, T)
        present = place < end
        row = tl.load(order + head.to(tl.int64) * queries + place, mask=present, other=0)
        address = weights + (head.to(tl.int64) * queries + row)[:, None] * width + column[None, :]
        weight = tl.load(address, mask=present[:, None] & (column < width)[None, :], other=0.0)
        total += multiply(tl.trans(weight), load_rows(row_base, row, rl, present, D, DP))
    base = partial + (nth.to(tl.int64) * groups + group) * width * D
    store_rows(base, column, D, column < width, total, D, DP)


def by_rows(
    form: int, left: Tensor, keys: Tensor, segments: Segments, key_ids: Tensor, fill: float = 0.0
) -> Tensor:
    """Form 1 or 2.

    Form 1 maps (B, H, L, D) and (B, H, M, D) to (B, H, L, K), form 2 (B, H, L, K) and (B, H, M, D)
    to (B, H, L, D).
    """
    keys, key_ids = rows_of(keys), key_ids.contiguous()
    batch, heads, queries, _ = left.shape
    groups, width = key_ids.shape[2:]
    result = left.new_empty(batch, heads, queries, width if form == 1 else keys.shape[3])
    rows, weights = (rows_of(left), result) if form == 1 else (result, left.contiguous())
    channels, layouts = rows.shape[3], layouts_of(rows, keys)
    slots, sizes = count_slots(queries, groups), tiling(layouts[0], groups)
    plan = plan_launch(
        product_of_tile, batch * heads * slots, *strides_of(*layouts), heads,
        queries, keys.shape[2], groups, width, slots, D=channels, DP=power_of_two(channels),
        T=sizes.queries, N=sizes.keys, FORM=form, num_warps=4,
    )  # fmt: skip
    launch(plan, rows, weights, keys, key_ids, segments.order, segments.tiles, float(fill))
    return result


def by_columns(
    weights: Tensor, rows: Tensor, segments: Segments, key_ids: Tensor, tokens: int
) -> Tensor:
    """Form 4, and 3 transposed.

    It maps (B, H, L, K) weights and (B, H, L, D) rows to (B, H, M, D) with M = ``tokens``.
    """
    weights = weights.contiguous()
    rows = rows_of(rows)
    key_ids = key_ids.contiguous()
    batch, heads, queries, channels = rows.shape
    groups, width = key_ids.shape[2:]
    result = rows.new_empty(batch, heads, tokens, channels)
    layout, target = layouts_of(rows, result)
    sizes = tiling(layout, groups)
    blocks = ceil_div(width, sizes.keys)
    lists = Lists(key_ids, segments.ends.new_full((batch * heads * groups,), width), groups, width)
    inverse = invert(lists, batch * heads, tokens)
    for first, number in turns(batch * heads, 4 * groups * width * channels):
        partial = rows.new_empty(number * groups * width * channels, dtype=torch.float32)
        multiply_columns = plan_launch(
            columns_times_rows, number * groups * blocks, *strides_of(layout), heads, queries,
            groups, width, blocks, D=channels, DP=power_of_two(channels), T=sizes.queries,
            N=sizes.keys, num_warps=4,
        )  # fmt: skip
        launch(multiply_columns, weights, rows, segments.order, segments.ends, partial, first)
        add_up = plan_gather(target, groups * width, number, 1)
        launch(add_up, partial, *inverse, result, result, first)
        del partial  # so that the next turn's takes its place
    return result
