# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The four group-wise matrix products of the paper's appendix as kernels, which keep P (L x k) in memory.

Forms 1 and 2 take a tile of queries of one group, forms 3 and 4 a block of the selected keys of one group. Keys and
values are read in place, as in the paper. Unlike there, a tile never straddles two groups, and keys that several groups
chose sum their parts through the inverse index instead of racing for one address.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import head_base, load_rows, multiply, store_rows
from dgt.ops.triton.gathered import tiling
from dgt.ops.triton.inverse import Lists, gather, invert
from dgt.ops.triton.launch import launch, rows_of, strides_of, turns
from dgt.ops.triton.sorting import Segments, find_segment


@triton.jit
def load_ids(key_ids, row, first, width, keys, N: tl.constexpr):
    """Key ids ``first`` to ``first + N`` of a row (head, group), and which of them exist."""
    place = first + tl.arange(0, N)
    ids = tl.load(key_ids + row.to(tl.int64) * width + place, mask=place < width, other=-1)
    return ids, (ids >= 0) & (ids < keys)


@triton.jit
def load_tile(tiles, order, head, slot, slots, queries, T: tl.constexpr):
    """Group of a tile (-1 if it is unused), its queries, and which of T there are."""
    row = tiles + (head.to(tl.int64) * slots + slot) * 4
    group, place = tl.load(row), tl.load(row + 1) + tl.arange(0, T)
    present = place < tl.load(row + 2)
    return group, tl.load(order + head.to(tl.int64) * queries + place, mask=present, other=0), present


@triton.jit
def rows_times_keys(
    rows, keys, key_ids, order, tiles, weights,
    qb, qh, ql, kb, kh, kl, heads, queries, count, groups, width, slots, blocks, fill,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Form 1: P[i, p] = rows[i] . keys[key_ids[group[i], p]]; ``fill`` where there is no such key."""
    pid = tl.program_id(0)
    block, slot, head = pid % blocks, pid // blocks % slots, pid // blocks // slots
    group, row, present = load_tile(tiles, order, head, slot, slots, queries, T)
    if group < 0:
        return
    q = load_rows(head_base(rows, head, heads, qb, qh), row, ql, present, D, DP)
    limit = tl.where(group < groups, width, 0)
    column = block * N + tl.arange(0, N)
    ids = tl.load(
        key_ids + (head * groups + group).to(tl.int64) * width + column, mask=column < limit, other=-1
    )  # fmt: skip
    exist = (ids >= 0) & (ids < count)
    k = load_rows(head_base(keys, head, heads, kb, kh), ids, kl, exist, D, DP)
    score = tl.where(exist[None, :], multiply(q, tl.trans(k)), fill)
    address = weights + (head.to(tl.int64) * queries + row)[:, None] * width + column[None, :]
    tl.store(address, score.to(weights.dtype.element_ty), mask=present[:, None] & (column < width)[None, :])


@triton.jit
def weights_times_values(
    weights, values, key_ids, order, tiles, result,
    vb, vh, vl, ob, oh, ol, heads, queries, count, groups, width, slots,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Form 2: Y[i] = sum over p of P[i, p] values[key_ids[group[i], p]]."""
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    group, row, present = load_tile(tiles, order, head, slot, slots, queries, T)
    if group < 0:
        return
    value_rows = head_base(values, head, heads, vb, vh)
    address = weights + (head.to(tl.int64) * queries + row)[:, None] * width
    total = tl.zeros([T, DP], tl.float32)
    for start in range(0, tl.where(group < groups, width, 0), N):
        ids, exist = load_ids(key_ids, head * groups + group, start, width, count, N)
        column = start + tl.arange(0, N)
        weight = tl.load(address + column[None, :], mask=present[:, None] & exist[None, :], other=0.0)
        total += multiply(weight, load_rows(value_rows, ids, vl, exist, D, DP))
    store_rows(head_base(result, head, heads, ob, oh), row, ol, present, total, D, DP)


@triton.jit
def columns_times_rows(
    weights, rows, order, ends, partial,
    rb, rh, rl, heads, queries, groups, width, first_head, blocks,
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


def rows_by_keys(rows: Tensor, keys: Tensor, segments: Segments, key_ids: Tensor, fill: float) -> Tensor:
    """Form 1; (B, H, L, D) rows and (B, H, M, D) keys to (B, H, L, K), ``fill`` in places without a key."""
    rows, keys, key_ids = rows_of(rows), rows_of(keys), key_ids.contiguous()
    batch, heads, queries, _ = rows.shape
    groups, width = key_ids.shape[2:]
    weights = rows.new_empty(batch, heads, queries, width)
    options = tiling(rows, groups)
    slots, blocks = segments.tiles.shape[1], triton.cdiv(width, options["N"])
    launch(
        rows_times_keys, batch * heads * slots * blocks,
        rows, keys, key_ids, segments.order, segments.tiles, weights, *strides_of(rows), *strides_of(keys),
        heads, queries, keys.shape[2], groups, width, slots, blocks, float(fill), **options,
    )  # fmt: skip
    return weights


def weights_by_rows(weights: Tensor, values: Tensor, segments: Segments, key_ids: Tensor) -> Tensor:
    """Form 2; (B, H, L, K) weights and (B, H, M, D) values to (B, H, L, D)."""
    weights, values, key_ids = weights.contiguous(), rows_of(values), key_ids.contiguous()
    batch, heads, queries, width = weights.shape
    groups = key_ids.shape[2]
    result = values.new_empty(batch, heads, queries, values.shape[3])
    options = tiling(result, groups)
    slots = segments.tiles.shape[1]
    launch(
        weights_times_values, batch * heads * slots,
        weights, values, key_ids, segments.order, segments.tiles, result, *strides_of(values), *strides_of(result),
        heads, queries, values.shape[2], groups, width, slots, **options,
    )  # fmt: skip
    return result


def weights_by_columns(weights: Tensor, rows: Tensor, segments: Segments, key_ids: Tensor, tokens: int) -> Tensor:
    """Forms 3 and 4; (B, H, L, K) weights and (B, H, L, D) rows to (B, H, M, D) with M = ``tokens``."""
    weights, rows, key_ids = weights.contiguous(), rows_of(rows), key_ids.contiguous()
    batch, heads, queries, channels = rows.shape
    groups, width = key_ids.shape[2:]
    result = rows.new_empty(batch, heads, tokens, channels)
    options = tiling(rows, groups)
    blocks = triton.cdiv(width, options["N"])
    lists = Lists(key_ids.flatten(0, 1).contiguous(), None)
    inverse = invert(lists, tokens)
    for first, number in turns(batch * heads, 4 * groups * width * channels):
        exact: dict[str, Any] = {"dtype": torch.float32, "device": rows.device}
        partial = torch.empty((number, groups * width, channels), **exact)
        launch(
            columns_times_rows, number * groups * blocks,
            weights, rows, segments.order, segments.ends, partial, *strides_of(rows),
            heads, queries, groups, width, first, blocks, **options,
        )  # fmt: skip
        gather(inverse, [partial], [result], first)
    return result
