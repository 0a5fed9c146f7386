# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The top-k keys of every group, chosen on chip (Eq. 1): a bound, the few keys above it, the choice among these.

How: docs/kernels.md. Ties go to the lowest index; no row of scores is ever sorted, or in memory. Where more candidates
reach the bound than have room (many keys that tie), :func:`list_in_turns` keeps the best of them: any k is right.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import LOWEST, exact, expand, head_base, load_rows, popcount, split_centers
from dgt.ops.triton.inverse import PAD, Lists
from dgt.ops.triton.launch import at_most, block_of, launch, power_of_two, strides_of
from dgt.ops.triton.search import choose_row, find_threshold, keep_best, rank_of, score_of

LEAST_BLOCKS = 256  # so that few tokens have one for each
MOST_BLOCKS = 4096  # block maxima of a row, which a program holds to find the bound
GOLDEN = 0.618034  # the part of a turn whose multiples keep farthest from one another, however many there are
LEAST_ROOM = 512  # candidates
LOWEST_RANK = tl.constexpr(-2139095040)  # of the least finite score
SLACK = tl.constexpr(2.0**-20)  # of the largest score of a row: 16 times the rounding of float32


@triton.jit
def pack_columns(flags, R: tl.constexpr, N: tl.constexpr):
    """(R, N / 32) int32 words of (R, N) flags: bit ``c % 32`` of word ``c // 32`` is column ``c``."""
    bits = tl.where(flags, (1 << (tl.arange(0, N) % 32))[None, :], 0)
    return tl.sum(tl.reshape(bits, [R, N // 32, 32]), 2)


@triton.jit
def store_ids(key_ids, lists, ids, chosen, place):
    """Write the ids that are chosen to their places."""
    tl.store(key_ids + place, ids.to(tl.int64), mask=chosen)
    tl.store(lists + place, ids.to(tl.int32), mask=chosen)


@triton.jit
def fill(target, begin, end, value):
    """Write a number to the places from ``begin`` on and before ``end``."""
    for first in range(begin, end, 32):
        place = first + tl.arange(0, 32)
        tl.store(target + place, tl.zeros([32], target.dtype.element_ty) + value, mask=place < end)


@triton.jit
def score_keys(
    center, rows, key_mask, head, heads, place, stride, tokens,
    D: tl.constexpr, DP: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(GP, T) scores of T keys, and which of these are real; TAIL: some places may lie beyond the last key."""
    inside = place < tokens if TAIL else place >= 0
    across = tl.trans(load_rows(rows, place, stride, inside, D, DP))
    score = exact(center, (across, across, across))
    if MASKED:
        inside &= tl.load(key_mask + (head // heads).to(tl.int64) * tokens + place, mask=inside, other=0) != 0
    return score, inside


@triton.jit
def best_of_blocks(
    key, centroids, key_mask, best, pid, kb, kh, kl, heads, tokens, groups, parts, slices,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr, N: tl.constexpr, TURN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The best scores of GP groups in T of the N blocks of a head's keys, dealt out by :func:`block_of_key`."""
    head, part, piece = pid // slices // parts, pid // slices % parts, pid % slices
    ids = part * GP + tl.arange(0, GP)
    centers = centroids + (head % heads).to(tl.int64) * groups * D
    center = split_centers(centers, ids, groups, key.dtype.element_ty, D, DP)
    rows = head_base(key, head, heads, kb, kh)
    result = tl.full([GP, T], float("-inf"), tl.float32)
    block = piece * T + tl.arange(0, T)
    full, passes = tokens // N, tl.cdiv(tokens, N)  # the last pass is apart where keys end in it
    for TAIL in tl.static_range(2):
        for nth in tl.range(full * TAIL, full + (passes - full) * TAIL, num_stages=1 if TAIL else None):
            place = nth * N + ((block - (nth * (nth + 1) >> 1) * TURN) & (N - 1))
            score, inside = score_keys(
                center, rows, key_mask, head, heads, place, kl, tokens, D, DP, TAIL == 1, MASKED
            )  # fmt: skip
            result = tl.maximum(result, tl.where(inside[None, :], score, float("-inf")) if MASKED or TAIL else score)
    row = best + (head.to(tl.int64) * groups + ids)[:, None] * N
    tl.store(row + block[None, :], result, mask=(ids < groups)[:, None] & (block < N)[None, :])


@triton.jit
def bound_row(best, bound, row, width, N: tl.constexpr):
    """A score that the ``width`` best keys of a row reach, from N block maxima; any, if fewer blocks are real."""
    score = tl.load(best + row.to(tl.int64) * N + tl.arange(0, N))
    score = tl.where(score == score, score, float("-inf"))
    low, _, _, most = find_threshold(score, width)
    low = tl.where(most >= width, low, LOWEST)
    # Should the second kernel round otherwise: 16 steps of float32 lower, and near zero, where such steps are tiny
    # beside the terms that cancelled, by so many of the largest score's.
    size = tl.abs(score)
    largest = tl.max(tl.where(size < float("inf"), size, 0.0), 0)
    step_lower = score_of(tl.maximum(rank_of(low), LOWEST_RANK + 16) - 16)
    low = tl.maximum(tl.minimum(step_lower, low - largest * SLACK), LOWEST)
    tl.store(bound + row, tl.where(most > 0, low, float("inf")))


@triton.jit
def mark_candidates(
    key, centroids, key_mask, bound, words, kb, kh, kl, heads, tokens, groups, parts, slices, span, pitch,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """For ``span`` keys of a head and GP groups one bit each: whether the score reaches the group's bound."""
    pid = tl.program_id(0)
    head, part, piece = pid // slices // parts, pid // slices % parts, pid % slices
    ids = part * GP + tl.arange(0, GP)
    centers = centroids + (head % heads).to(tl.int64) * groups * D
    center = split_centers(centers, ids, groups, key.dtype.element_ty, D, DP)
    rows = head_base(key, head, heads, kb, kh)
    row = head.to(tl.int64) * groups + ids
    least = tl.load(bound + row, mask=ids < groups, other=float("inf"))[:, None]
    for begin in range(piece * span, tl.minimum(piece * span + span, tokens), T):
        place = begin + tl.arange(0, T)
        score, inside = score_keys(center, rows, key_mask, head, heads, place, kl, tokens, D, DP, True, MASKED)
        real = tl.sum(tl.reshape(tl.where(inside, 1 << (tl.arange(0, T) % 32), 0), [T // 32, 32]), 1)
        word = pack_columns(score >= least, GP, T) & real[None, :]
        which = begin // 32 + tl.arange(0, T // 32)[None, :]
        tl.store(words + row[:, None] * pitch + which, word, mask=(ids < groups)[:, None] & (which < pitch))


@triton.jit
def score_rows(rows, ids, present, center, stride, D: tl.constexpr, DP: tl.constexpr):
    """Scores of some keys for one centroid, in float32; minus infinity where a key is not present."""
    tile = load_rows(rows, ids, stride, present, D, DP).to(tl.float32)
    score = tl.sum(tile * center[None, :], 1)
    return tl.where(present & (score == score), score, float("-inf"))


@triton.jit
def score_listed(
    rows, center, found, scores, begin, end, stride, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr
):
    """Score the listed keys from place ``begin`` on and before ``end``, N at a time."""
    for first in range(begin, end, N):
        place = first + tl.arange(0, N)
        present = place < end
        ids = tl.load(found + place, mask=present, other=0)
        tl.store(scores + place, score_rows(rows, ids, present, center, stride, D, DP), mask=present)


@triton.jit
def pick_all(best, key_ids, lists, counts, words, width, padded, N: tl.constexpr):
    """Choose the ``width`` best of a row of N scores, one a key; without lists, bits tell which."""
    row = tl.program_id(0).to(tl.int64)
    key_ids += row * width
    ids, lane = tl.arange(0, N), tl.arange(0, 32)[None, :]
    score = tl.load(tl.max_contiguous(best + row * N + ids, 1))  # dealt out to threads as ids are written
    chosen = choose_row(tl.where(score == score, score, float("-inf")), width)
    word = tl.sum(tl.reshape(tl.where(chosen, 1 << (ids % 32), 0), [N // 32, 32]), 1)
    if words is not None:
        tl.store(words + row * (N // 32) + tl.arange(0, N // 32), word)
    number = popcount(word)
    place = (tl.cumsum(number, 0) - number)[:, None] + popcount(word[:, None] & ((1 << lane) - 1))
    place, count = tl.reshape(place, [N]), tl.sum(number, 0)
    tl.store(key_ids + place, ids.to(tl.int64), mask=chosen)
    if lists is not None:
        lists += row * padded
        tl.store(lists + place, ids, mask=chosen)
        tl.store(counts + row, count)
        fill(lists, count, padded, 0)
    fill(key_ids, count, width, -1)


@triton.jit
def list_in_turns(
    rows, words, center, found, scores, stride, pitch, width, room,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, REFILL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """List and score the marked keys, however many: when the room could run out, only the best so far stay."""
    total = 0
    for first in range(0, pitch, REFILL):
        if total + 32 * REFILL > room:
            total = keep_best(found, scores, total, width, KEEP)
        which = first + tl.arange(0, REFILL)
        after = expand(tl.load(words + which, mask=which < pitch, other=0), first, found, total, room, REFILL)
        tl.debug_barrier()  # what some threads listed, others read
        score_listed(rows, center, found, scores, total, after, stride, D, DP, N)
        tl.debug_barrier()
        total = after
    return total


@triton.jit
def pick_best(
    key, centroids, words, found, scores, key_ids, lists, counts,
    kb, kh, kl, heads, tokens, groups, pitch, width, padded, room,
    D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr, REFILL: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Choose the ``width`` best of a row of candidates, which are bits; up to ``room`` of them are listed at once.

    Up to C, as nearly always, are held in registers, and more are read KEEP at a time. ``width + 32 * REFILL`` or
    ``tokens`` must not exceed ``room``.
    """
    row = tl.program_id(0).to(tl.int64)
    head, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    rows = head_base(key, head, heads, kb, kh)
    channel = tl.arange(0, DP)
    centroids += ((head % heads) * groups + group).to(tl.int64) * D
    center = tl.load(centroids + channel, mask=channel < D, other=0.0)
    words, found, scores = words + row * pitch, found + row * room, scores + row * room
    key_ids, lists = key_ids + row * width, lists + row * padded
    total = 0
    for first in range(0, pitch, W):
        which = first + tl.arange(0, W)
        total = expand(tl.load(words + which, mask=which < pitch, other=0), first, found, total, room, W)
    tl.debug_barrier()  # what some threads listed, others read
    if total <= room:
        score_listed(rows, center, found, scores, 0, total, kl, D, DP, N)
        tl.debug_barrier()
    else:
        total = list_in_turns(rows, words, center, found, scores, kl, pitch, width, room, D, DP, N, REFILL, KEEP)
    if total <= C:
        place = tl.arange(0, C)
        score = tl.load(scores + place, mask=place < total, other=float("-inf"))
        ids = tl.load(found + place, mask=place < total, other=0)
        chosen = choose_row(score, width)
        store_ids(key_ids, lists, ids, chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1)
        count = tl.sum(chosen.to(tl.int32), 0)
    else:
        count = keep_best(found, scores, total, width, KEEP)
        for begin in range(0, count, KEEP):
            place = begin + tl.arange(0, KEEP)
            ids = tl.load(found + place, mask=place < count, other=0)
            store_ids(key_ids, lists, ids, place < count, place)
    tl.store(counts + row, count)
    fill(lists, count, padded, 0)
    fill(key_ids, count, width, -1)


class KeyPlan(NamedTuple):
    """How the block maxima of all keys are found, and where they go."""

    key: Tensor
    """(B, H, L, D), channels one after the other."""
    best: Tensor
    """(B H, G, N) float32, N blocks: the maxima."""
    blocks_at_once: int
    """Blocks of a program."""
    groups_at_once: int
    """Groups of a program."""
    parts: int
    """Programs that share the groups of a head."""
    slices: int
    """Programs that share the blocks of a head."""

    @property
    def blocks(self) -> int:
        """N."""
        return self.best.shape[2]

    @property
    def programs(self) -> int:
        """Programs of all heads."""
        return self.best.shape[0] * self.parts * self.slices


class Room(NamedTuple):
    """Memory for the candidates of a row, and how a program deals with them."""

    listed: int
    """So many are listed at once."""
    held: int
    """So many are held in registers."""
    refill: int
    """Words of bits that are listed between two looks at the room that is left."""


def block_turn(blocks: int) -> int:
    """Return R, an odd number: from pass p - 1 to pass p blocks turn by ``p R``; see :func:`block_of_key`."""
    return int(blocks * GOLDEN) | 1


def block_of_key(places: Tensor, blocks: int) -> Tensor:
    """Return the block of every key, N a power of two: ``(j + p (p + 1) / 2 R) mod N`` with the pass ``p = j // N``.

    Without turns, a column of an image whose width divides N would fall into few blocks, and its keys, which are alike,
    would hide one another there. Turns that grow with the passes fall into step with no width.
    """
    passes = places // blocks
    return (places + passes * (passes + 1) // 2 * block_turn(blocks)) % blocks


def room_for(width: int, tokens: int) -> Room:
    """Return how many candidates of a row with ``width`` chosen keys are listed: 4 k, and above k 1024 at least 2 k."""
    every = power_of_two(tokens, 32)
    listed = min(power_of_two(4 * width if width <= 1024 else 2 * width, LEAST_ROOM), every)
    held = min(power_of_two(width + width // 2 + 64), listed, MOST_BLOCKS)
    spare = max(listed - width, 32) // 32  # words whose bits fit beside the best so far
    return Room(listed, held, min(1 << (spare.bit_length() - 1), 256))


def plan(key: Tensor, groups: int, top_k: int) -> KeyPlan:
    """Prepare the search for block maxima."""
    batch, heads, tokens, _ = key.shape
    blocks = min(power_of_two(tokens, 32), power_of_two(2 * min(top_k, tokens), LEAST_BLOCKS), MOST_BLOCKS)
    wide = block_of(key) == 64
    size = 32
    if wide:
        size = min(blocks, 128 if tokens > blocks else 64)
    at_once = min(64 if wide else 16, power_of_two(groups))
    best = torch.empty((batch * heads, groups, blocks), dtype=torch.float32, device=key.device)
    return KeyPlan(key, best, size, at_once, triton.cdiv(groups, at_once), blocks // size)


def choose_from_all(plan: KeyPlan, width: int, listed: bool) -> tuple[Tensor, Lists]:
    """Choose where every key has a block of its own; ``(key_ids, lists)``, bits instead where not listed."""
    batch, heads, _, _ = plan.key.shape
    rows, groups, blocks = plan.best.shape
    key_ids = torch.empty((batch, heads, groups, width), dtype=torch.int64, device=plan.key.device)
    length = triton.cdiv(width, PAD) * PAD if listed else blocks // 32
    ids = key_ids.new_empty((rows, groups, length), dtype=torch.int32)
    counts = ids.new_empty((rows, groups) if listed else 0)
    launch(
        pick_all, rows * groups, plan.best, key_ids, ids if listed else None, counts if listed else None,
        None if listed else ids, width, length, N=blocks, num_warps=warps_for(blocks),
    )  # fmt: skip
    return key_ids, Lists(ids, counts)


def choose_by_bounds(
    plan: KeyPlan, centroids: Tensor, key_mask: Tensor | None, width: int, bounds: Tensor
) -> tuple[Tensor, Lists]:
    """Choose among the keys that reach the bounds of all rows, float32 (B H G); ``(key_ids, lists)``."""
    batch, heads, tokens, channels = plan.key.shape
    rows, groups, _ = plan.best.shape
    key_ids = torch.empty((batch, heads, groups, width), dtype=torch.int64, device=plan.key.device)
    length = triton.cdiv(width, PAD) * PAD
    lists = Lists(
        key_ids.new_empty((rows, groups, length), dtype=torch.int32),
        key_ids.new_empty((rows, groups), dtype=torch.int32),
    )
    words = mark(plan, centroids, key_mask, bounds)
    room, padded = room_for(width, tokens), power_of_two(channels)
    warps = warps_for(room.held)
    found = words.new_empty((rows * groups, room.listed))
    scores = plan.best.new_empty((rows * groups, room.listed))
    launch(
        pick_best, rows * groups, plan.key, centroids, words, found, scores, key_ids, *lists, *strides_of(plan.key),
        heads, tokens, groups, words.shape[2], width, length, room.listed, D=channels, DP=padded,
        W=min(power_of_two(words.shape[2]), 256), C=room.held, N=max(16, 2048 // padded), REFILL=room.refill,
        KEEP=min(room.held, 64 * warps), num_warps=warps,
        **at_most(plan.key, 88),
    )  # fmt: skip
    return key_ids, lists


def mark(plan: KeyPlan, centroids: Tensor, key_mask: Tensor | None, bounds: Tensor) -> Tensor:
    """Tell which keys reach the bounds, a bit each: int32 (B H, G, W)."""
    heads, tokens, channels = plan.key.shape[1:]
    rows, groups, _ = plan.best.shape
    size, parts = plan.blocks_at_once, plan.parts
    words = bounds.new_empty((rows, groups, triton.cdiv(tokens, 32)), dtype=torch.int32)
    pieces = max(1, min(triton.cdiv(tokens, size), triton.cdiv(1056, rows * parts)))
    span = triton.cdiv(triton.cdiv(tokens, pieces), size) * size
    slices = triton.cdiv(tokens, span)
    launch(
        mark_candidates, rows * parts * slices, plan.key, centroids, key_mask, bounds, words, *strides_of(plan.key),
        heads, tokens, groups, parts, slices, span, words.shape[2], D=channels, DP=power_of_two(channels), T=size,
        GP=plan.groups_at_once, MASKED=key_mask is not None, num_warps=4,
    )  # fmt: skip
    return words


def warps_for(numbers: int) -> int:
    """Warps of a program that holds so many numbers: up to 16 in a thread."""
    return min(8, max(1, numbers // 512))
