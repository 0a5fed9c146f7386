# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The inverse of the selection, from keys to the groups that chose them: sums over groups without atomics on floats.

Each group leaves a partial gradient for each of its K keys. A key finds its partials through the index, in ascending
order of group, and adds them up: the same bits in every run. First, every key gets a bit per group (by ``atomic_or``,
whose order does not matter); then the number of bits below a group's own is its place among the partials of that key.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import head_base, popcount, row_addresses, row_mask, store_rows
from dgt.ops.triton.launch import launch, power_of_two, strides_of

BLOCK = 512


class Inverse(NamedTuple):
    """For every key the list of the (group, place) pairs that chose it."""

    ends: Tensor
    """(B H, M) int32: where the list of a key ends in ``entries``."""
    entries: Tensor
    """(B H, G K) int32: ``group K + place``, ascending within a list."""


@triton.jit
def load_entry(key_ids, head, block, keys, groups, width, N: tl.constexpr):
    """Entries ``block N`` and on of a head: their number, group, key, and whether there is one."""
    entry = block * N + tl.arange(0, N)
    ids = tl.load(key_ids + head.to(tl.int64) * groups * width + entry, mask=entry < groups * width, other=-1)
    return entry, entry // width, ids, (ids >= 0) & (ids < keys)


@triton.jit
def mark_keys(key_ids, bits, keys, groups, width, words, blocks, N: tl.constexpr):
    """Set the bit of every group in the (B H, M, words) int32 words of the keys it chose."""
    head = tl.program_id(0) // blocks
    _, group, ids, exist = load_entry(key_ids, head, tl.program_id(0) % blocks, keys, groups, width, N)
    word = (head.to(tl.int64) * keys + ids) * words + group // 32
    tl.atomic_or(bits + word, (1 << (group % 32)).to(tl.int32), mask=exist, sem="relaxed")


@triton.jit
def count_marks(bits, counts, total, words, N: tl.constexpr):
    """Count the bits of every key."""
    key = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    count = tl.zeros([N], tl.int32)
    for word in range(words):
        count += popcount(tl.load(bits + key * words + word, mask=key < total, other=0))
    tl.store(counts + key, count, mask=key < total)


@triton.jit
def fill_entries(key_ids, bits, ends, entries, keys, groups, width, words, blocks, N: tl.constexpr):
    """Write every entry to its place in the list of its key: after those of all lower groups."""
    head = tl.program_id(0) // blocks
    entry, group, ids, exist = load_entry(key_ids, head, tl.program_id(0) % blocks, keys, groups, width, N)
    key = head.to(tl.int64) * keys + ids
    above = tl.zeros([N], tl.int32)  # chosen by this group or a higher one
    for word in range(words):
        bit = tl.minimum(tl.maximum(group - word * 32, 0), 32)
        below = tl.where(bit == 32, -1, (1 << (bit % 32)) - 1)
        above += popcount(tl.load(bits + key * words + word, mask=exist, other=0) & ~below)
    place = tl.load(ends + key, mask=exist, other=0) - above
    tl.store(entries + head.to(tl.int64) * groups * width + place, entry, mask=exist)


@triton.jit
def gather_partials(
    partial_one, partial_two, ends, entries, one, two,
    ab, ah, al, cb, ch, cl, heads, keys, size, first_head, tiles,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Add up the partials of every key of some heads; partials are (heads, G K, D) float32."""
    nth, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head = first_head + nth
    key = tile * N + tl.arange(0, N)
    inside = key < keys
    row = head.to(tl.int64) * keys + key
    end = tl.load(ends + row, mask=inside, other=0)
    start = tl.load(ends + row - 1, mask=inside & (key > 0), other=0)
    total_one = tl.zeros([N, DP], tl.float32)
    total_two = tl.zeros([N, DP], tl.float32)
    for step in range(tl.max(end - start, 0)):
        more = start + step < end
        entry = tl.load(entries + head.to(tl.int64) * size + start + step, mask=more, other=0)
        mask = row_mask(more, D, DP)
        place = nth.to(tl.int64) * size + entry
        total_one += tl.load(row_addresses(partial_one, place, D, DP), mask=mask, other=0.0)
        if BOTH:
            total_two += tl.load(row_addresses(partial_two, place, D, DP), mask=mask, other=0.0)
    store_rows(head_base(one, head, heads, ab, ah), key, al, inside, total_one, D, DP)
    if BOTH:
        store_rows(head_base(two, head, heads, cb, ch), key, cl, inside, total_two, D, DP)


def mark(key_ids: Tensor, keys: int) -> Tensor:
    """Return (B H, M, ceil(G / 32)) int32: for each of M keys one bit per group that chose it."""
    batch, heads, groups, width = key_ids.shape
    words, blocks = triton.cdiv(groups, 32), triton.cdiv(groups * width, BLOCK)
    bits = torch.zeros((batch * heads, keys, words), dtype=torch.int32, device=key_ids.device)
    launch(mark_keys, batch * heads * blocks, key_ids, bits, keys, groups, width, words, blocks, N=BLOCK, num_warps=4)
    return bits


def invert(key_ids: Tensor, keys: int) -> Inverse:
    """Return the inverse of a (B, H, G, K) selection among ``keys`` keys."""
    key_ids = key_ids.contiguous()
    batch, heads, groups, width = key_ids.shape
    bits = mark(key_ids, keys)
    words, blocks = bits.shape[2], triton.cdiv(groups * width, BLOCK)
    total = batch * heads * keys
    counts = torch.empty((batch * heads, keys), dtype=torch.int32, device=key_ids.device)
    launch(count_marks, triton.cdiv(total, BLOCK), bits, counts, total, words, N=BLOCK, num_warps=4)
    ends = counts.cumsum(-1, dtype=torch.int32)
    entries = torch.empty((batch * heads, groups * width), dtype=torch.int32, device=key_ids.device)
    launch(
        fill_entries, batch * heads * blocks, key_ids, bits, ends, entries, keys, groups, width, words, blocks,
        N=BLOCK, num_warps=4,
    )  # fmt: skip
    return Inverse(ends, entries)


def gather(inverse: Inverse, partials: list[Tensor], targets: list[Tensor], first: int) -> None:
    """Sum one or two (heads, G K, D) partials over groups into (B, H, M, D) targets, for heads from ``first`` on."""
    target = targets[0]
    count, size, channels = partials[0].shape
    size_of_tile = min(64, 4096 // power_of_two(channels))
    tiles = triton.cdiv(target.shape[2], size_of_tile)
    launch(
        gather_partials, count * tiles, partials[0], partials[-1], inverse.ends, inverse.entries, target, targets[-1],
        *strides_of(target), *strides_of(targets[-1]), target.shape[1], target.shape[2], size, first, tiles,
        D=channels, DP=power_of_two(channels), N=size_of_tile, BOTH=len(partials) == 2, num_warps=4,
    )  # fmt: skip
