# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Block maxima of the scores of keys, a bound for every row, and the keys that reach it, as bits.

The first part of the selection (Eq. 1); :mod:`dgt.ops.triton.selection` chooses among these keys.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import LOWEST, exact, head_base, load_rows, split_centers
from dgt.ops.triton.grouping import pack_columns
from dgt.ops.triton.launch import (
    LaunchPlan,
    Layout,
    block_of,
    ceil_div,
    plan_launch,
    power_of_two,
    strides_of,
)
from dgt.ops.triton.search import find_threshold, rank_of, score_of

LEAST_BLOCKS = 256  # so that few tokens have one for each
MOST_BLOCKS = 4096  # block maxima of a row, which a program holds to find the bound
# The part of a turn whose multiples keep farthest from one another, however many there are.
GOLDEN = 0.618034
LOWEST_RANK = tl.constexpr(-2139095040)  # of the least finite score
SLACK = tl.constexpr(2.0**-20)  # of the largest score of a row: 16 times the rounding of float32


@triton.jit
def score_keys(
    center, rows, key_mask, head, heads, place, stride, tokens,
    D: tl.constexpr, DP: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(GP, T) scores of T keys, and which keys are real; TAIL: some lie beyond the last key."""
    inside = place < tokens if TAIL else place >= 0
    across = tl.trans(load_rows(rows, place, stride, inside, D, DP))
    score = exact(center, (across, across, across))
    if MASKED:
        mask_row = key_mask + (head // heads).to(tl.int64) * tokens
        inside &= tl.load(mask_row + place, mask=inside, other=0) != 0
    return score, inside


@triton.jit
def best_of_blocks(
    key, centroids, key_mask, best, pid, kb, kh, kl, heads, tokens, groups, parts, slices,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr, N: tl.constexpr,
    TURN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Best scores of GP groups in T of a head's N blocks of keys (:func:`block_of_key`)."""
    head, part, piece = pid // slices // parts, pid // slices % parts, pid % slices
    ids = part * GP + tl.arange(0, GP)
    centers = centroids + (head % heads).to(tl.int64) * groups * D
    center = split_centers(centers, ids, groups, key.dtype.element_ty, D, DP)
    rows = head_base(key, head, heads, kb, kh)
    result = tl.full([GP, T], float("-inf"), tl.float32)
    block = piece * T + tl.arange(0, T)
    full, passes = tokens // N, tl.cdiv(tokens, N)  # the last pass is apart where keys end in it
    for TAIL in tl.static_range(2):
        begin, end = full * TAIL, full + (passes - full) * TAIL
        for nth in tl.range(begin, end, num_stages=1 if TAIL else None):
            place = nth * N + ((block - (nth * (nth + 1) >> 1) * TURN) & (N - 1))
            score, inside = score_keys(
                center, rows, key_mask, head, heads, place, kl, tokens, D, DP, TAIL == 1, MASKED
            )  # fmt: skip
            if MASKED or TAIL:
                score = tl.where(inside[None, :], score, float("-inf"))
            result = tl.maximum(result, score)
    row = best + (head.to(tl.int64) * groups + ids)[:, None] * N
    tl.store(row + block[None, :], result, mask=(ids < groups)[:, None] & (block < N)[None, :])


@triton.jit
def bound_row(best, bound, row, width, N: tl.constexpr):
    """A score that a row's ``width`` best keys reach, from N block maxima.

    Any score, if fewer blocks are real.
    """
    score = tl.load(best + row.to(tl.int64) * N + tl.arange(0, N))
    score = tl.where(score == score, score, float("-inf"))
    low, _, _, most = find_threshold(score, width)
    low = tl.where(most >= width, low, LOWEST)
    # The second kernel may round differently. The bound is lowered by 16 steps of float32, and near
    # zero, where such steps are tiny beside the terms that canceled, by 16 steps of the largest
    # score.
    size = tl.abs(score)
    largest = tl.max(tl.where(size < float("inf"), size, 0.0), 0)
    step_lower = score_of(tl.maximum(rank_of(low), LOWEST_RANK + 16) - 16)
    low = tl.maximum(tl.minimum(step_lower, low - largest * SLACK), LOWEST)
    tl.store(bound + row, tl.where(most > 0, low, float("inf")))


@triton.jit
def mark_candidates(
    key, centroids, key_mask, bound, words, kb, kh, kl, heads, tokens, groups, parts, slices, span,
    pitch,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """For ``span`` keys and GP groups one bit each: whether the score reaches the group's bound."""
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
        score, inside = score_keys(
            center, rows, key_mask, head, heads, place, kl, tokens, D, DP, True,
            key_mask is not None,
        )  # fmt: skip
        real = tl.sum(
            tl.reshape(tl.where(inside, 1 << (tl.arange(0, T) % 32), 0), [T // 32, 32]), 1
        )
        word = pack_columns(score >= least, GP, T) & real[None, :]
        which = begin // 32 + tl.arange(0, T // 32)[None, :]
        tl.store(
            words + row[:, None] * pitch + which,
            word,
            mask=(ids < groups)[:, None] & (which < pitch),
        )


class KeyPlan(NamedTuple):
    """How the block maxima of all keys are found."""

    key: Layout
    """Of (B, H, L, D) keys."""
    groups: int
    blocks: int
    """N."""
    blocks_at_once: int
    """Blocks of a program."""
    groups_at_once: int
    """Groups of a program."""
    parts: int
    """Programs that share the groups of a head."""
    slices: int
    """Programs that share the blocks of a head."""

    @property
    def heads(self) -> int:
        """B H."""
        return self.key.shape[0] * self.key.shape[1]

    @property
    def rows(self) -> int:
        """B H G."""
        return self.heads * self.groups

    @property
    def best(self) -> int:
        """(B H, G, N) float32: the maxima."""
        return self.rows * self.blocks

    @property
    def programs(self) -> int:
        """Programs of all heads."""
        return self.heads * self.parts * self.slices

    @property
    def pitch(self) -> int:
        """Words that hold a bit for every key of a head."""
        return ceil_div(self.key.shape[2], 32)

    @property
    def words(self) -> int:
        """(B H, G, pitch) int32: which keys reach the bound of their row."""
        return self.rows * self.pitch


def block_turn(blocks: int) -> int:
    """Return R, odd: from pass p - 1 to p, blocks rotate by ``p R`` (:func:`block_of_key`)."""
    return int(blocks * GOLDEN) | 1


def block_of_key(places: Tensor, blocks: int) -> Tensor:
    """Return the block of every key j: ``(j + p (p + 1) / 2 R) mod N`` in pass ``p = j // N``.

    N is a power of two.

    Without rotation, a column of an image whose width divides N would fall into few blocks, and its
    keys, which are similar, would hide one another there. Rotations that grow with the passes do
    not stay in step with any width.
    """
    passes = places // blocks
    return (places + passes * (passes + 1) // 2 * block_turn(blocks)) % blocks


def plan_keys(key: Layout, groups: int, top_k: int) -> KeyPlan:
    """Plan the search for block maxima."""
    tokens = key.shape[2]
    blocks = min(
        power_of_two(tokens, 32), power_of_two(2 * min(top_k, tokens), LEAST_BLOCKS), MOST_BLOCKS
    )
    wide = block_of(key) == 64
    size = 32
    if wide:
        size = min(blocks, 128 if tokens > blocks else 64)
    at_once = min(64 if wide else 16, power_of_two(groups))
    return KeyPlan(key, groups, blocks, size, at_once, ceil_div(groups, at_once), blocks // size)


def plan_marks(plan: KeyPlan) -> LaunchPlan:
    """Plan which keys reach the bounds, a bit each: key, centroids, mask, bounds, and the words."""
    heads, tokens, channels = plan.key.shape[1:]
    size, parts = plan.blocks_at_once, plan.parts
    programs = plan.heads * parts
    pieces = max(1, min(ceil_div(tokens, size), ceil_div(1056, programs)))
    span = ceil_div(ceil_div(tokens, pieces), size) * size
    slices = ceil_div(tokens, span)
    return plan_launch(
        mark_candidates, programs * slices, *strides_of(plan.key), heads, tokens, plan.groups,
        parts, slices, span, plan.pitch, D=channels, DP=power_of_two(channels), T=size,
        GP=plan.groups_at_once, num_warps=4,
    )  # fmt: skip


def warps_for(numbers: int) -> int:
    """Warps of a program that holds this many numbers, up to 16 in a thread."""
    return min(8, max(1, numbers // 512))
