# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The keys of every group as lists, and their inverse, which sums without float atomics.

A key finds the partial gradients of the groups that chose it through the index, in ascending order
of group, and adds them up: the same bits in every run. docs/kernels.md describes how it is built.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import head_base, load_rows, popcount, store_rows
from dgt.ops.triton.launch import ceil_div, launch, power_of_two, strides_of

BLOCK = 512
PAD = 64  # lists are a multiple of this long


class Lists(NamedTuple):
    """The keys of every group as kernels read them: no empty place before the last key."""

    ids: Tensor
    """(B H, G, P) int32, P a multiple of 64; behind the last key 0, an id that exists."""
    counts: Tensor
    """(B H, G) int32: how many. Few tokens have none, and bits in the place of ids."""


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
    batch, heads, groups, width = key_ids.shape
    padded = ceil_div(width, PAD) * PAD
    ids = key_ids.new_empty((batch * heads, groups, padded), dtype=torch.int32)
    counts = key_ids.new_empty((batch * heads, groups), dtype=torch.int32)
    launch(
        list_row, batch * heads * groups, key_ids.contiguous(), ids, counts, keys, width, padded,
        N=min(power_of_two(width, 32), BLOCK), num_warps=1,
    )  # fmt: skip
    return Lists(ids, counts)


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
    partial, ends, entries, one, two, ab, ah, al, heads, keys, size, first_head, count, tiles,
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


def mark(lists: Lists, keys: int) -> Tensor:
    """Tell which groups chose each of M keys: int32 (B H, M, W).

    A bit a group; the last word holds how many.
    """
    heads, groups, width = lists.ids.shape
    words, blocks = ceil_div(groups, 32) + 1, ceil_div(groups * width, BLOCK)
    bits = torch.zeros((heads, keys, words), dtype=torch.int32, device=lists.ids.device)
    shape = (keys, groups, width, words, blocks)
    launch(mark_keys, heads * blocks, *lists, bits, *shape, N=BLOCK, num_warps=4)
    return bits


def invert(lists: Lists, keys: int) -> tuple[Tensor, Tensor]:
    """Return ``(ends, entries)``: the entries, ``group P + place``, that chose each of M keys.

    Lists are int32 (B H, G P), ascending, one after the other; ``ends`` int32 (B H, M).
    """
    bits, (heads, groups, width) = mark(lists, keys), lists.ids.shape
    ends = bits[..., -1].cumsum(-1, dtype=torch.int32)
    entries = bits.new_empty((heads, groups * width))
    blocks = ceil_div(groups * width, BLOCK)
    shape = (keys, groups, width, bits.shape[2], blocks)
    launch(fill_entries, heads * blocks, *lists, bits, ends, entries, *shape, N=BLOCK, num_warps=4)
    return ends, entries


def gather(
    inverse: tuple[Tensor, Tensor], partials: Tensor, targets: list[Tensor], first: int
) -> None:
    """Sum (heads, G P, D) partials over groups into (B, H, M, D) targets.

    One or two at once, for the heads from ``first`` on.
    """
    (pairs, count, size, channels), target = partials.shape, targets[0]
    size_of_tile = min(64, 4096 // power_of_two(channels))
    tiles = ceil_div(target.shape[2], size_of_tile)
    launch(
        gather_partials, pairs * count * tiles, partials, *inverse, target, targets[-1],
        *strides_of(target), target.shape[1], target.shape[2], size, first, count, tiles,
        D=channels, DP=power_of_two(channels), N=size_of_tile, num_warps=4,
    )  # fmt: skip
