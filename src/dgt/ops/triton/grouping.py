# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Query groups, on chip, and for every group the set of its queries as bits, which is all that sorting them needs.

A program takes a run of tokens of one head against all centroids, which it splits once. Scores exist only on chip.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import exact_right, head_base, load_rows, split_centers
from dgt.ops.triton.launch import block_of, launch, power_of_two, rows_of, strides_of

MOST_AT_ONCE = 64  # groups whose scores a program holds
FAR = tl.constexpr(1 << 30)  # above every group
TILE = 128  # the most queries of a program at a time, whose bits fill half of the rows of :func:`packers`


class Members(NamedTuple):
    """Which queries every group has; group G is of those that belong to none."""

    words: Tensor
    """(B H, G + 1, W) int32: bit ``i % 32`` of word ``i // 32`` is query i."""
    counts: Tensor
    """(B H, runs, G + 1) int32: how many of every run of queries."""


@triton.jit
def nearest(score, ids):
    """The largest of every row of scores, and the lowest id that has it."""
    best = tl.max(score, 1)
    return best, tl.min(tl.where(score == best[:, None], ids[None, :], FAR), 1)


@triton.jit
def packers(T: tl.constexpr):
    """(T, 16) float16 matrix by which (R, T) flags times it are 16 bits of each row a column, and the sum in the last.

    Sums of powers of two up to 2 ** 15 are exact on the matrix units, which have nothing else to do meanwhile.
    """
    token, column = tl.arange(0, T)[:, None], tl.arange(0, 16)[None, :]
    exponent = tl.where(column == 15, 0, token % 16) + 15  # in the bits of a float16
    bits = tl.where((column == 15) | (token // 16 == column), exponent << 10, 0)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def group_run(
    query, centroids, key_mask, group_ids, words, counts, pid,
    qb, qh, ql, heads, tokens, groups, runs, run, pitch,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr,
    ONE: tl.constexpr, MASKED: tl.constexpr, GIVEN: tl.constexpr, SORT: tl.constexpr,
):  # fmt: skip
    """Group a run of tokens of a head (GIVEN: read their groups); SORT: write members as bits, and counts.

    ONE: all groups, and that of none, are among GP; otherwise a run is one tile of T.
    """
    head, nth = pid // runs, pid % runs
    rows = head_base(query, head, heads, qb, qh)
    centers, ids = centroids + (head % heads).to(tl.int64) * groups * D, tl.arange(0, GP)
    narrow: tl.constexpr = query.dtype.element_ty
    if ONE and not GIVEN:
        first, second, third = split_centers(centers, ids, groups, narrow, D, DP)
    total, row_of_counts = tl.zeros([GP], tl.int32), (head.to(tl.int64) * runs + nth) * (groups + 1)
    pack, half = packers(T), tl.arange(0, 16)[None, :]
    for start in range(nth * run, tl.minimum(nth * run + run, tokens), T):
        place = start + tl.arange(0, T)
        inside = place < tokens
        address = group_ids + head.to(tl.int64) * tokens + place
        if GIVEN:
            group = tl.load(address, mask=inside, other=-1)
            group = tl.where((group < 0) | (group >= groups), groups, group).to(tl.int32)
        else:
            tile = load_rows(rows, place, ql, inside, D, DP)
            if ONE:
                _, group = nearest(exact_right(tile, tl.trans(first), tl.trans(second), tl.trans(third)), ids)
            else:
                best = tl.full([T], float("-inf"), tl.float32)
                group = tl.full([T], FAR, tl.int32)
                for begin in range(0, groups, GP):
                    one, two, three = split_centers(centers, begin + ids, groups, narrow, D, DP)
                    score = exact_right(tile, tl.trans(one), tl.trans(two), tl.trans(three))
                    top, which = nearest(score, begin + ids)
                    group = tl.where(top > best, which, group)
                    best = tl.maximum(best, top)
            group = tl.minimum(group, groups - 1)
            if MASKED:
                real = tl.load(key_mask + (head // heads).to(tl.int64) * tokens + place, mask=inside, other=0)
                group = tl.where(real != 0, group, groups)
            tl.store(address, tl.where(group == groups, -1, group).to(tl.int64), mask=inside)
        if SORT:
            group = tl.where(inside, group, FAR)  # in no group's bits
            for begin in range(0, groups + 1, GP):
                member = ((begin + ids)[:, None] == group[None, :]).to(tl.float16)
                packed = tl.dot(member, pack).to(tl.int32)
                number = tl.sum(tl.where(half == 15, packed, 0), 1)
                row = words + (head.to(tl.int64) * (groups + 1) + begin + ids)[:, None] * pitch
                which = start // 16 + half
                present = (begin + ids <= groups)[:, None] & (half < T // 16) & (which < pitch)
                tl.store(row + which, packed.to(tl.int16), mask=present)
                if ONE:
                    total += number
                else:
                    tl.store(counts + (row_of_counts + begin + ids), number, mask=begin + ids <= groups)
    if ONE and SORT:
        tl.store(counts + (row_of_counts + ids), total, mask=ids <= groups)


@triton.jit
def group_tokens(
    query, centroids, key_mask, group_ids, words, counts, qb, qh, ql, heads, tokens, groups, runs, run, pitch,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr,
    ONE: tl.constexpr, MASKED: tl.constexpr, GIVEN: tl.constexpr, SORT: tl.constexpr,
):  # fmt: skip
    """:func:`group_run` alone."""
    group_run(
        query, centroids, key_mask, group_ids, words, counts, tl.program_id(0),
        qb, qh, ql, heads, tokens, groups, runs, run, pitch, D, DP, T, GP, ONE, MASKED, GIVEN, SORT,
    )  # fmt: skip


class Grouping(NamedTuple):
    """How a launch of :func:`group_run` is cut."""

    programs: int
    arguments: tuple[object, ...]
    options: dict[str, object]
    members: Members | None


def plan(
    query: Tensor, centroids: Tensor, key_mask: Tensor | None, group_ids: Tensor, given: bool, sort: bool
) -> Grouping:
    """Cut (B, H, L, D) queries into runs, and make room for what is written about them.

    Args:
        query: (B, H, L, D).
        centroids: float32 (H, G, D), contiguous.
        key_mask: optional bool (B, L), contiguous.
        group_ids: contiguous int64 (B, H, L): written, or read if they are given.
        given: whether they are.
        sort: whether the members of every group are wanted.
    """
    query = rows_of(query)
    batch, heads, tokens, channels = query.shape
    groups = centroids.shape[1]
    size = min(power_of_two(tokens, 32), TILE if block_of(query) == 64 else 32)
    at_once = min(power_of_two(groups + sort, 16), MOST_AT_ONCE if block_of(query) == 64 else 16)
    one = groups + sort <= at_once
    run = max(size, min(512, power_of_two(tokens) // 8)) if one else size
    runs, pitch = triton.cdiv(tokens, run), triton.cdiv(tokens, 32)
    members = None
    if sort:
        integers = {"dtype": torch.int32, "device": query.device}
        words = torch.empty((batch * heads, groups + 1, pitch), **integers)
        members = Members(words, torch.empty((batch * heads, runs, groups + 1), **integers))
    arguments = (
        query, centroids, key_mask, group_ids,
        *((members.words.view(torch.int16), members.counts) if members else (group_ids, group_ids)),
        *strides_of(query), heads, tokens, groups, runs, run, 2 * pitch,
    )  # fmt: skip
    options = {"D": channels, "DP": power_of_two(channels), "T": size, "GP": at_once, "ONE": one}
    options |= {"MASKED": key_mask is not None, "GIVEN": given, "SORT": sort}
    return Grouping(batch * heads * runs, arguments, options, members)


def assign(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Group of every query; shapes and contract as in :func:`dgt.group_queries`."""
    group_ids = torch.empty(query.shape[:3], dtype=torch.int64, device=query.device)
    mask = key_mask if key_mask is None else key_mask.contiguous()
    cut = plan(query, centroids.float().contiguous(), mask, group_ids, given=False, sort=False)
    launch(group_tokens, cut.programs, *cut.arguments, **cut.options, num_warps=4)
    return group_ids
