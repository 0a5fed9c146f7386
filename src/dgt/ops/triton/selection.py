# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The top-k keys of every group, chosen on chip (Eq. 1): a bound, then a choice above it.

How: docs/kernels.md. Ties go to the lowest index; no row of scores is ever sorted, or in memory.
Where more candidates reach the bound than have room (many keys that tie), :func:`list_in_turns`
keeps the best of them: any k is right.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.blocks import MOST_BLOCKS, KeyPlan, plan_marks, warps_for
from dgt.ops.triton.common import (
    expand,
    head_base,
    load_rows,
    popcount,
)
from dgt.ops.triton.inverse import fill, padded_length
from dgt.ops.triton.launch import (
    Buffers,
    LaunchPlan,
    launch,
    plan_buffers,
    plan_launch,
    power_of_two,
    strides_of,
)
from dgt.ops.triton.search import choose_row, keep_best

LEAST_ROOM = 512  # candidates


@triton.jit
def score_rows(rows, ids, present, center, stride, D: tl.constexpr, DP: tl.constexpr):
    """Scores of some keys for one centroid, in float32; -inf where a key is not present."""
    tile = load_rows(rows, ids, stride, present, D, DP).to(tl.float32)
    score = tl.sum(tile * center[None, :], 1)
    return tl.where(present & (score == score), score, float("-inf"))


@triton.jit
def score_listed(
    rows, center, found, scores, begin, end, stride,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Score the listed keys from place ``begin`` on and before ``end``, N at a time."""
    for first in range(begin, end, N):
        place = first + tl.arange(0, N)
        present = place < end
        ids = tl.load(found + place, mask=present, other=0)
        tl.store(
            scores + place, score_rows(rows, ids, present, center, stride, D, DP), mask=present
        )


@triton.jit
def pick_all(best, key_ids, lists, counts, words, width, padded, N: tl.constexpr):
    """Choose the ``width`` best of a row of N scores, one a key; without lists, bits tell which.

    Ids are written where there is room for them.
    """
    row = tl.program_id(0).to(tl.int64)
    ids, lane = tl.arange(0, N), tl.arange(0, 32)[None, :]
    # Dealt out to threads as ids are written, or all of it would be moved between them.
    score = tl.load(tl.max_contiguous(best + row * N + ids, 1))
    chosen = choose_row(tl.where(score == score, score, float("-inf")), width)
    word = tl.sum(tl.reshape(tl.where(chosen, 1 << (ids % 32), 0), [N // 32, 32]), 1)
    if words is not None:
        tl.store(words + row * (N // 32) + tl.arange(0, N // 32), word)
    number = popcount(word)
    place = (tl.cumsum(number, 0) - number)[:, None] + popcount(word[:, None] & ((1 << lane) - 1))
    place, count = tl.reshape(place, [N]), tl.sum(number, 0)
    if lists is not None:
        lists += row * padded
        tl.store(lists + place, ids, mask=chosen)
        tl.store(counts + row, count)
        fill(lists, count, padded, 0)
    if key_ids is not None:
        key_ids += row * width
        tl.store(key_ids + place, ids.to(tl.int64), mask=chosen)
        fill(key_ids, count, width, -1)


@triton.jit
def list_in_turns(
    rows, words, center, found, scores, stride, pitch, width, room,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, REFILL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """List and score the marked keys; when the room could run out, only the best so far stay."""
    total = 0
    for first in range(0, pitch, REFILL):
        if total + 32 * REFILL > room:
            total = keep_best(found, scores, total, width, KEEP)
        which = first + tl.arange(0, REFILL)
        after = expand(
            tl.load(words + which, mask=which < pitch, other=0), first, found, total, room, REFILL
        )
        tl.debug_barrier()  # what some threads listed, others read
        score_listed(rows, center, found, scores, total, after, stride, D, DP, N)
        tl.debug_barrier()
        total = after
    return total


@triton.jit
def pick_best(
    key, centroids, words, found, scores, key_ids, lists, counts,
    kb, kh, kl, heads, tokens, groups, pitch, width, padded, room,
    D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    REFILL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Choose the ``width`` best of a row of candidates, given as bits; ids where there is room for them.

    Up to ``room`` of them are listed at once.

    Up to C, as nearly always, are held in registers, and more are read KEEP at a time. ``width + 32
    * REFILL`` or ``tokens`` must not exceed ``room``.
    """
    row = tl.program_id(0).to(tl.int64)
    head, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    rows = head_base(key, head, heads, kb, kh)
    channel = tl.arange(0, DP)
    centroids += ((head % heads) * groups + group).to(tl.int64) * D
    center = tl.load(centroids + channel, mask=channel < D, other=0.0)
    words, found, scores = words + row * pitch, found + row * room, scores + row * room
    lists += row * padded
    if key_ids is not None:
        key_ids += row * width
    total = 0
    for first in range(0, pitch, W):
        which = first + tl.arange(0, W)
        total = expand(
            tl.load(words + which, mask=which < pitch, other=0), first, found, total, room, W
        )
    tl.debug_barrier()  # what some threads listed, others read
    if total <= room:
        score_listed(rows, center, found, scores, 0, total, kl, D, DP, N)
        tl.debug_barrier()
    else:
        total = list_in_turns(
            rows, words, center, found, scores, kl, pitch, width, room, D, DP, N, REFILL, KEEP
        )
    if total <= C:
        place = tl.arange(0, C)
        score = tl.load(scores + place, mask=place < total, other=float("-inf"))
        ids = tl.load(found + place, mask=place < total, other=0)
        chosen = choose_row(score, width)
        count = tl.sum(chosen.to(tl.int32), 0)
        tl.debug_barrier()  # all have read before any writes
        tl.store(found + tl.cumsum(chosen.to(tl.int32), 0) - 1, ids, mask=chosen)
        tl.debug_barrier()
    else:
        count = keep_best(found, scores, total, width, KEEP)
    # Not from the registers of the choice: two types of ids would need two layouts of them, and
    # there are too few registers for both.
    for begin in range(0, count, KEEP):
        place = begin + tl.arange(0, KEEP)
        ids = tl.load(found + place, mask=place < count, other=0)
        if key_ids is not None:
            tl.store(key_ids + place, ids.to(tl.int64), mask=place < count)
        tl.store(lists + place, ids, mask=place < count)
    tl.store(counts + row, count)
    fill(lists, count, padded, 0)
    if key_ids is not None:
        fill(key_ids, count, width, -1)


class Room(NamedTuple):
    """Memory for the candidates of a row, and how a program deals with them."""

    listed: int
    """So many are listed at once."""
    held: int
    """So many are held in registers."""
    refill: int
    """Words of bits that are listed between two looks at the room that is left."""


def room_for(width: int, tokens: int) -> Room:
    """Return how many candidates are listed for ``width`` chosen keys: 4 k, above k 1024 at least 2
    k.
    """
    every = power_of_two(tokens, 32)
    listed = min(power_of_two(4 * width if width <= 1024 else 2 * width, LEAST_ROOM), every)
    held = min(power_of_two(width + width // 2 + 64), listed, MOST_BLOCKS)
    spare = max(listed - width, 32) // 32  # words whose bits fit beside the best so far
    return Room(listed, held, min(1 << (spare.bit_length() - 1), 256))


class ChoicePlan(NamedTuple):
    """How keys are chosen when the maxima of their blocks are known."""

    width: int
    """K, keys of a list."""
    mark: LaunchPlan | None
    """None where every key has its own block, which leaves no candidates to find."""
    pick: LaunchPlan
    candidates: Buffers
    """Their bits, ids and scores."""


def plan_choice(keys: KeyPlan, top_k: int) -> ChoicePlan:
    """Plan the choice of each group's keys."""
    heads, tokens, channels = keys.key.shape[1:]
    width = min(top_k, tokens)
    if tokens <= keys.blocks:
        pick = plan_pick_all(keys, width, padded_length(width))
        return ChoicePlan(width, None, pick, plan_buffers((), ()))
    room, padded = room_for(width, tokens), power_of_two(channels)
    warps = warps_for(room.held)
    pick = plan_launch(
        pick_best, keys.rows, *strides_of(keys.key), heads, tokens, keys.groups, keys.pitch, width,
        padded_length(width), room.listed, D=channels, DP=padded,
        W=min(power_of_two(keys.pitch), 256), C=room.held, N=max(16, 2048 // padded),
        REFILL=room.refill, KEEP=min(room.held, 64 * warps), num_warps=warps,
    )  # fmt: skip
    listed = keys.rows * room.listed
    candidates = plan_buffers((keys.words, listed), (listed,))
    return ChoicePlan(width, plan_marks(keys), pick, candidates)


def plan_pick_all(keys: KeyPlan, width: int, length: int) -> LaunchPlan:
    """Plan the choice where every key has its own block; ``length`` is that of a list, or of bits.

    Given are maxima, ids, then lists and counts, or bits.
    """
    return plan_launch(
        pick_all, keys.rows, width, length, N=keys.blocks, num_warps=warps_for(keys.blocks)
    )


def choose(
    plan: ChoicePlan,
    key: Tensor,
    centroids: Tensor,
    key_mask: Tensor | None,
    best: Tensor,
    bounds: Tensor,
    key_ids: Tensor | None,
    ids: Tensor,
    counts: Tensor,
) -> None:
    """Write the lists of all groups and, where somebody asks for them, (B, H, G, K) int64 ids."""
    if plan.mark is None:
        launch(plan.pick, best, key_ids, ids, counts, None)
        return
    words, found, scores = plan.candidates.new(key)
    launch(plan.mark, key, centroids, key_mask, bounds, words)
    launch(plan.pick, key, centroids, words, found, scores, key_ids, ids, counts)
