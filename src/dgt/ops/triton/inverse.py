# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The keys of every group as lists, and their inverse, which sums without float atomics.

A key finds the partial gradients of the groups that chose it through the index, in ascending order
of group, and adds them up: the same bits in every run. docs/kernels.md describes how it is built.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import head_base, load_rows, popcount, store_rows
from dgt.ops.triton.launch import (
    MOST_PLANS,
    Buffers,
    LaunchPlan,
    Layout,
    ceil_div,
    launch,
    plan_buffers,
    plan_launch,
    power_of_two,
    strides_of,
)

BLOCK = 512
PAD = 64  # lists are a multiple of this long


class Lists(NamedTuple):
    """The keys of every group as kernels read them: no empty place before the last key."""

    ids: Tensor
    """(B H, G, P) int32, one after the other; behind the last key 0, an id that exists."""
    counts: Tensor
    """(B H, G) int32: how many."""
    groups: int
    """G."""
    length: int
    """P."""


def padded_length(width: int) -> int:
    """Return P of lists of at most ``width`` keys, a multiple of 64."""
    return ceil_div(width, PAD) * PAD


@triton.jit
def fill(target, begin, end, value):
    """Write a number to the places from ``begin`` on and before ``end``."""
    for first in range(begin, end, 32):
        place = first + tl.arange(0, 32)
        tl.store(target + place, tl.zeros([32], target.dtype.element_ty) + value, mask=place < end)


@triton.jit
def list_row(key_ids, ids, counts, keys, width, padded, N: tl.constexpr):
    """List the keys of a group that exist, in the order of a caller's list."""
    row = tl.program_id(0).to(tl.int64)
    key_ids += row * width
    ids += row * padded
    count = 0
    for first in range(0, width, N):
        place = first + tl.arange(0, N)
        key = tl.load(key_ids + place, mask=place < width, other=-1)
        exists = (key >= 0) & (key < keys)
        number = exists.to(tl.int32)
        tl.store(ids + count + tl.cumsum(number, 0) - 1, key.to(tl.int32), mask=exists)
        count += tl.sum(number, 0)
    tl.store(counts + row, count)
    fill(ids, count, padded, 0)


def lists_of(key_ids: Tensor, keys: int) -> Lists:
    """Lists from (B, H, G, K) ids of a caller."""
    groups, width = key_ids.shape[2:]
    plan, buffers = plan_lists(key_ids.shape, keys)
    ids, counts = buffers.new(key_ids)
    launch(plan, key_ids.contiguous(), ids, counts)
    return Lists(ids, counts, groups, padded_length(width))


@functools.lru_cache(MOST_PLANS)
def plan_lists(shape: tuple[int, ...], keys: int) -> tuple[LaunchPlan, Buffers]:
    """Plan the lists from ids of this shape: the launch, and ids and counts."""
    batch, heads, groups, width = shape
    rows, padded = batch * heads * groups, padded_length(width)
    plan = plan_launch(
        list_row, rows, keys, width, padded, N=min(power_of_two(width, 32), BLOCK), num_warps=1
    )
    return plan, plan_buffers((rows * padded, rows), ())


@triton.jit
def load_entry(ids, counts, head, block, keys, groups, width, N: tl.constexpr):
    """Entries ``block N`` and on of a head: their number, group, key, and whether there is one."""
    entry = block * N + tl.arange(0, N)
    group = entry // width
    key = tl.load(ids + head.to(tl.int64) * groups * width + entry, mask=group < groups, other=-1)
    count = tl.load(counts + head.to(tl.int64) * groups + group, mask=group < groups, other=0)
    key = tl.where(entry - group * width < count, key, -1)
    return entry, group, key, (key >= 0) & (key < keys)


@triton.jit
def mark_keys(ids, counts, bits, keys, groups, width, words, blocks, N: tl.constexpr):
    """Set the bit of every group in the words of the keys it chose; count in the last word."""
    head = tl.program_id(0) // blocks
    _, group, key, exist = load_entry(
        ids, counts, head, tl.program_id(0) % blocks, keys, groups, width, N
    )
    row = bits + (head.to(tl.int64) * keys + key) * words
    tl.atomic_or(row + group // 32, (1 << (group % 32)).to(tl.int32), mask=exist, sem="relaxed")
    tl.atomic_add(row + words - 1, 1, mask=exist, sem="relaxed")


@triton.jit
def fill_entries(
    ids, counts, bits, ends, entries, keys, groups, width, words, blocks, N: tl.constexpr
):
    """Write every entry to its place in the list of its key: after those of all lower groups."""
    head = tl.program_id(0) // blocks
    entry, group, key, exist = load_entry(
        ids, counts, head, tl.program_id(0) % blocks, keys, groups, width, N
    )
    key = head.to(tl.int64) * keys + key
    above = tl.zeros([N], tl.int32)  # chosen by this group or a higher one
    for word in range(words - 1):
        bit = tl.minimum(tl.maximum(group - word * 32, 0), 32)
        below = tl.where(bit == 32, -1, (1 << (bit % 32)) - 1)
        above += popcount(tl.load(bits + key * words + word, mask=exist, other=0) & ~below)
    place = tl.load(ends + key, mask=exist, other=0) - above
    tl.store(entries + head.to(tl.int64) * groups * width + place, entry, mask=exist)


@triton.jit
def gather_partials(
    partial, ends, entries, one, two, first_head, ab, ah, al, heads, keys, size, count, tiles,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add up the (1 or 2, count, G P, D) float32 partials of every key of ``count`` heads."""
    nth, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head = first_head + nth % count
    key = tile * N + tl.arange(0, N)
    inside = key < keys
    row = head.to(tl.int64) * keys + key
    end = tl.load(ends + row, mask=inside, other=0)
    start = tl.load(ends + row - 1, mask=inside & (key > 0), other=0)
    total = tl.zeros([N, DP], tl.float32)
    for step in range(tl.max(end - start, 0)):
        more = start + step < end
        entry = tl.load(entries + head.to(tl.int64) * size + start + step, mask=more, other=0)
        total += load_rows(partial, nth.to(tl.int64) * size + entry, D, more, D, DP)
    target = head_base(one, head, heads, ab, ah)
    if nth >= count:
        target = head_base(two, head, heads, ab, ah)
    store_rows(target, key, al, inside, total, D, DP)


class InversePlan(NamedTuple):
    """How lists are inverted."""

    bits: tuple[int, int, int]
    """B H, M, W."""
    entries: int
    mark: LaunchPlan
    fill: LaunchPlan


@functools.lru_cache(MOST_PLANS)
def plan_inverse(heads: int, groups: int, length: int, keys: int) -> InversePlan:
    """Plan the inverse of the lists of all heads."""
    words, blocks = ceil_div(groups, 32) + 1, ceil_div(groups * length, BLOCK)
    shape = (keys, groups, length, words, blocks)
    mark = plan_launch(mark_keys, heads * blocks, *shape, N=BLOCK, num_warps=4)
    fill = plan_launch(fill_entries, heads * blocks, *shape, N=BLOCK, num_warps=4)
    return InversePlan((heads, keys, words), heads * groups * length, mark, fill)


def mark(lists: Lists, heads: int, keys: int) -> Tensor:
    """Tell which groups chose each of M keys: int32 (B H, M, W).

    A bit a group; the last word holds how many.
    """
    plan = plan_inverse(heads, lists.groups, lists.length, keys)
    bits = lists.ids.new_zeros(plan.bits, dtype=torch.int32)
    launch(plan.mark, lists.ids, lists.counts, bits)
    return bits


def invert(lists: Lists, heads: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return ``(ends, entries)``: the entries, ``group P + place``, that chose each of M keys.

    Lists are int32 (B H, G P), ascending, one after the other; ``ends`` int32 (B H, M).
    """
    plan = plan_inverse(heads, lists.groups, lists.length, keys)
    bits = mark(lists, heads, keys)
    ends = bits[..., -1].cumsum(-1, dtype=torch.int32)
    entries = bits.new_empty(plan.entries)
    launch(plan.fill, lists.ids, lists.counts, bits, ends, entries)
    return ends, entries


def plan_gather(target: Layout, size: int, heads_at_once: int, targets: int) -> LaunchPlan:
    """Plan to sum (heads, G P, D) partials over groups into one or two (B, H, M, D) targets.

    Given are the partials, the inverse, the targets (the same where it is one) and the first head.
    """
    _, heads, keys, channels = target.shape
    size_of_tile = min(64, 4096 // power_of_two(channels))
    tiles = ceil_div(keys, size_of_tile)
    return plan_launch(
        gather_partials, targets * heads_at_once * tiles, *strides_of(target), heads, keys, size,
        heads_at_once, tiles, D=channels, DP=power_of_two(channels), N=size_of_tile, num_warps=4,
    )  # fmt: skip
