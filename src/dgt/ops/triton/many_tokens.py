# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention inside each group for many tokens, forward (Eq. 2).

A program takes a tile of queries of one group, gathers the group's keys and values by index straight into on-chip
memory, block by block, and keeps a running softmax. The weights P never leave the chip; the log-sum-exp (base 2) of
every query is all that the backward pass needs besides the output.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import head_base, load_rows, multiply, store_rows
from dgt.ops.triton.launch import block_of, launch, new_rows, power_of_two, rows_of, strides_of
from dgt.ops.triton.sorting import Segments, count_slots, find_tile, tile_size


@triton.jit
def load_ids(key_ids, row, first, width, keys, N: tl.constexpr):
    """Key ids ``first`` to ``first + N`` of a row (head, group), and which of them exist."""
    place = first + tl.arange(0, N)
    ids = tl.load(key_ids + row.to(tl.int64) * width + place, mask=place < width, other=-1)
    return ids, (ids >= 0) & (ids < keys)


@triton.jit
def running_softmax(score, top, total):
    """One step of the running softmax, base 2: weights, the factor on what came before, new maximum and sum."""
    new_top = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
    weight = tl.exp2(score - safe[:, None])
    shrink = tl.exp2(top - safe)
    return weight, shrink, new_top, total * shrink + tl.sum(weight, 1)


@triton.jit
def finish_softmax(result, top, total):
    """The weighted mean and the log-sum-exp; zero where a row has seen no key."""
    some = total > 0
    safe = tl.where(some, total, 1.0)
    return result / safe[:, None], tl.where(some, top + tl.log2(safe), 0.0)


@triton.jit
def attend_tiles(
    query, key, value, key_ids, order, ends, output, logsum,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, heads, queries, keys, groups, width, slots, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """One tile of queries; ``scale`` contains log2(e)."""
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    group, first, end = find_tile(ends, head, slot, groups, T, GP)
    if group > groups:
        return
    place = first + tl.arange(0, T)
    present = place < end
    rows = tl.load(order + head.to(tl.int64) * queries + place, mask=present, other=0)
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    key_rows, value_rows = head_base(key, head, heads, kb, kh), head_base(value, head, heads, vb, vh)
    top = tl.full([T], float("-inf"), tl.float32)
    total = tl.zeros([T], tl.float32)
    result = tl.zeros([T, DP], tl.float32)
    for start in range(0, tl.where(group < groups, width, 0), N):
        ids, exist = load_ids(key_ids, head * groups + group, start, width, keys, N)
        score = multiply(q, tl.trans(load_rows(key_rows, ids, kl, exist, D, DP))) * scale
        score = tl.where(exist[None, :], score, float("-inf"))
        weight, shrink, top, total = running_softmax(score, top, total)
        v = load_rows(value_rows, ids, vl, exist, D, DP)
        result = result * shrink[:, None] + multiply(weight.to(v.dtype), v)
    result, logs = finish_softmax(result, top, total)
    store_rows(head_base(output, head, heads, ob, oh), rows, ol, present, result, D, DP)
    tl.store(logsum + head.to(tl.int64) * queries + rows, logs, mask=present)


def tiling(query: Tensor, groups: int, width: int) -> dict[str, int]:
    """Sizes of the tiles of queries and blocks of keys, and how a program runs them."""
    block = block_of(query)
    return {
        "D": query.shape[3],
        "DP": power_of_two(query.shape[3]),
        "T": min(block, tile_size(query.shape[2], groups)),
        "N": min(block, power_of_two(width)),
        "GP": power_of_two(groups + 1),
        "num_warps": 4,
        "num_stages": 2,
    }


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, key_ids: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend inside each group; ``(output, logsum)``: (B, H, L, D) of the query's type, float32 (B, H, L)."""
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    batch, heads, queries, _ = query.shape
    groups, width = key_ids.shape[2:]
    output = new_rows(query)
    logsum = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    options = tiling(query, groups, width)
    slots = count_slots(queries, groups, options["T"])
    launch(
        attend_tiles, batch * heads * slots,
        query, key, value, key_ids.contiguous(), segments.order, segments.ends, output, logsum,
        *strides_of(query), *strides_of(key), *strides_of(value), *strides_of(output),
        heads, queries, key.shape[2], groups, width, slots, scale * math.log2(math.e), **options,
    )  # fmt: skip
    return output, logsum
