# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Few tokens: one program does grouping, selection and attention of a whole head (Eqs. 1-2).

With up to 256 tokens a head fits on chip, and gathering would cost more than it saves: queries attend densely under a
mask, also where groups and keys are given or heads are too wide for one program. The mask takes two words per key, one
bit for each of at most 64 groups: query i sees key j if bit ``group[i]`` of ``words[j]`` is set.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import (
    EMPTY,
    choose,
    exact_left,
    head_base,
    load_rows,
    multiply,
    nearest,
    rank_of,
    store_chosen,
    store_rows,
)  # fmt: skip
from dgt.ops.triton.inverse import mark
from dgt.ops.triton.launch import block_of, launch, new_rows, power_of_two, rows_of, strides_of
from dgt.ops.triton.many_tokens import finish_softmax, running_softmax

MOST_TOKENS = 256
MOST_GROUPS = 64


def fits(query: Tensor, key: Tensor, groups: int) -> bool:
    """Tell whether the heads of (B, H, L, D) tensors are so small that dense attention under a mask is the way."""
    return query.shape[2] <= MOST_TOKENS and key.shape[2] <= MOST_TOKENS and groups <= MOST_GROUPS


def fits_on_chip(query: Tensor, groups: int) -> bool:
    """Tell whether one program can hold all of a head, besides: 256 keys and values take up to 64 KB."""
    return fits(query, query, groups) and power_of_two(query.shape[3]) * query.element_size() <= 128


@triton.jit
def sees(low, high, group):
    """(T, N) whether queries of these groups see keys with these words; no group (-1) sees none."""
    word = tl.where((group < 32)[:, None], low[None, :], high[None, :])
    return (((word >> (tl.maximum(group, 0) % 32)[:, None]) & 1) == 1) & (group >= 0)[:, None]


@triton.jit
def whole_head(
    query, key, value, centroids, key_mask, output, logsum, group_ids, key_ids,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, heads, tokens, groups, width, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, R: tl.constexpr, GP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Group, select and attend for one head of at most N tokens; ``scale`` contains log2(e)."""
    head = tl.program_id(0)
    place = tl.arange(0, N)
    real = place < tokens
    k = load_rows(head_base(key, head, heads, kb, kh), place, kl, real, D, DP)
    mask_row = (head // heads).to(tl.int64) * tokens
    if MASKED:
        real &= tl.load(key_mask + mask_row + place, mask=real, other=0) != 0
    centers = centroids + (head % heads).to(tl.int64) * groups * D
    low = tl.zeros([N], tl.int32)
    high = tl.zeros([N], tl.int32)
    for first in range(0, groups, R):
        ids = first + tl.arange(0, R)
        score = exact_left(load_rows(centers, ids, D, ids < groups, D, DP), tl.trans(k))
        ranks = tl.where(real[None, :] & (ids < groups)[:, None], rank_of(score), EMPTY)
        chosen, order, count = choose(ranks, width)
        numbers = tl.broadcast_to(place[None, :], (R, N))
        row = key_ids + (head.to(tl.int64) * groups + first) * width
        store_chosen(row, width, width, numbers, chosen, order, count, ids < groups, R, N)
        word = tl.sum(tl.where(chosen, (1 << (ids % 32))[:, None], 0), 0)
        low |= tl.where(first < 32, word, 0)
        high |= tl.where(first < 32, 0, word)
    query_rows = head_base(query, head, heads, qb, qh)
    output_rows = head_base(output, head, heads, ob, oh)
    v = load_rows(head_base(value, head, heads, vb, vh), place, vl, place < tokens, D, DP)
    for start in range(0, tokens, T):
        rows = start + tl.arange(0, T)
        present = rows < tokens
        q = load_rows(query_rows, rows, ql, present, D, DP)
        best = tl.full([T], float("-inf"), tl.float32)
        best, group = nearest(q, centers, groups, 0, best, tl.zeros([T], tl.int32), D, DP, GP)
        if MASKED:
            there = tl.load(key_mask + mask_row + rows, mask=present, other=0) != 0
            group = tl.where(there, group, -1)
        tl.store(group_ids + head.to(tl.int64) * tokens + rows, group.to(tl.int64), mask=present)
        score = tl.where(sees(low, high, group), multiply(q, tl.trans(k)) * scale, float("-inf"))
        top = tl.full([T], float("-inf"), tl.float32)
        weight, _, top, total = running_softmax(score, top, tl.zeros([T], tl.float32))
        result, logs = finish_softmax(multiply(weight.to(v.dtype), v), top, total)
        store_rows(output_rows, rows, ol, present, result, D, DP)
        tl.store(logsum + head.to(tl.int64) * tokens + rows, logs, mask=present)


@triton.jit
def load_words(bits, head, place, keys, WORDS: tl.constexpr):
    """The two words of some keys; the second is not read where groups need but one."""
    row = bits + (head.to(tl.int64) * keys + place) * WORDS
    low = tl.load(row, mask=place < keys, other=0)
    return low, tl.load(row + WORDS - 1, mask=place < keys, other=0)


@triton.jit
def attend_densely(
    query, key, value, group_ids, bits, output, logsum,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, heads, queries, keys, tiles, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A tile of queries of a head whose groups and words are known; ``scale`` contains log2(e)."""
    head, rows = tl.program_id(0) // tiles, tl.program_id(0) % tiles * T + tl.arange(0, T)
    present = rows < queries
    group = tl.load(group_ids + head.to(tl.int64) * queries + rows, mask=present, other=-1).to(tl.int32)
    q = load_rows(head_base(query, head, heads, qb, qh), rows, ql, present, D, DP)
    key_rows, value_rows = head_base(key, head, heads, kb, kh), head_base(value, head, heads, vb, vh)
    top = tl.full([T], float("-inf"), tl.float32)
    total = tl.zeros([T], tl.float32)
    result = tl.zeros([T, DP], tl.float32)
    for start in range(0, keys, N):
        place = start + tl.arange(0, N)
        low, high = load_words(bits, head, place, keys, WORDS)
        score = multiply(q, tl.trans(load_rows(key_rows, place, kl, place < keys, D, DP))) * scale
        score = tl.where(sees(low, high, group), score, float("-inf"))
        weight, shrink, top, total = running_softmax(score, top, total)
        v = load_rows(value_rows, place, vl, place < keys, D, DP)
        result = result * shrink[:, None] + multiply(weight.to(v.dtype), v)
    result, logs = finish_softmax(result, top, total)
    store_rows(head_base(output, head, heads, ob, oh), rows, ol, present, result, D, DP)
    tl.store(logsum + head.to(tl.int64) * queries + rows, logs, mask=present)


def attend(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend inside given groups, densely under the mask; ``(output, logsum)``, for heads that :func:`fits`."""
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    bits = mark(key_ids.contiguous(), keys)
    output = new_rows(query)
    logsum = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    block = block_of(query)
    size = min(block, power_of_two(queries))
    tiles = triton.cdiv(queries, size)
    launch(
        attend_densely, batch * heads * tiles,
        query, key, value, group_ids.contiguous(), bits, output, logsum,
        *strides_of(query), *strides_of(key), *strides_of(value), *strides_of(output),
        heads, queries, keys, tiles, scale * math.log2(math.e),
        D=channels, DP=power_of_two(channels), T=size, N=min(block, power_of_two(keys)), WORDS=bits.shape[2],
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return output, logsum


def attention(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the whole operator on heads that fit on chip; ``(output, logsum, group_ids, key_ids)``."""
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    batch, heads, tokens, channels = query.shape
    groups, width = centroids.shape[1], min(top_k, tokens)
    where = query.device
    output = new_rows(query)
    logsum = torch.empty((batch, heads, tokens), dtype=torch.float32, device=where)
    group_ids = torch.empty((batch, heads, tokens), dtype=torch.int64, device=where)
    key_ids = torch.empty((batch, heads, groups, width), dtype=torch.int64, device=where)
    padded = power_of_two(tokens)
    launch(
        whole_head, batch * heads,
        query, key, value, centroids.float().contiguous(), key_mask if key_mask is None else key_mask.contiguous(),
        output, logsum, group_ids, key_ids,
        *strides_of(query), *strides_of(key), *strides_of(value), *strides_of(output),
        heads, tokens, groups, width, scale * math.log2(math.e),
        D=channels, DP=power_of_two(channels), T=16, N=padded, R=16, GP=power_of_two(groups),
        MASKED=key_mask is not None, num_warps=8 if padded > 64 else 4, num_stages=1,
    )  # fmt: skip
    return output, logsum, group_ids, key_ids
