# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The top-k keys of every group, chosen on chip (Eq. 1).

A program scores a chunk of keys for up to 16 groups, keeps the ranks in registers and bisects for the k-th largest. Few
tokens are one chunk. Many are a tournament: every chunk hands on its own k best, in ascending order, and these compete
again in chunks until one is left; since order is kept all along, ties still go to the lowest index. Where k is too
large for rounds to shrink the field, every step of the bisection streams over all keys once more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import EMPTY, choose, exact_left, head_base, load_rows, rank_of, store_chosen
from dgt.ops.triton.launch import launch, power_of_two, rows_of, strides_of, turns

PROGRAM = 8192  # ranks of a program of 8 warps: 32 in every thread, more would spill
CHUNK_BYTES = 64 << 10  # of keys in on-chip memory
ROUND = 2048  # candidates of a group in one program of a later round


@triton.jit
def rank_keys(
    key, centroids, key_mask, head, first, begin, stride_b, stride_h, stride_l, heads, tokens, groups,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(R, N) ranks of keys ``begin`` to ``begin + N`` of a head for groups ``first`` to ``first + R``."""
    ids, place = first + tl.arange(0, R), begin + tl.arange(0, N)
    centers = load_rows(centroids + (head % heads).to(tl.int64) * groups * D, ids, D, ids < groups, D, DP)
    rows = load_rows(head_base(key, head, heads, stride_b, stride_h), place, stride_l, place < tokens, D, DP)
    real = place < tokens
    if MASKED:
        real &= tl.load(key_mask + (head // heads).to(tl.int64) * tokens + place, mask=real, other=0) != 0
    return tl.where(real[None, :] & (ids < groups)[:, None], rank_of(exact_left(centers, tl.trans(rows))), EMPTY)


@triton.jit
def select_from_keys(
    key, centroids, key_mask, chosen_ids, chosen_ranks,
    stride_b, stride_h, stride_l, heads, tokens, groups, first_head, chunks, blocks, width,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """First round: choose the ``width`` best keys of one chunk for R groups."""
    pid = tl.program_id(0)
    chunk, block, nth = pid % chunks, pid // chunks % blocks, pid // chunks // blocks
    ids, begin = block * R + tl.arange(0, R), chunk * N
    ranks = rank_keys(
        key, centroids, key_mask, first_head + nth, block * R, begin,
        stride_b, stride_h, stride_l, heads, tokens, groups, D, DP, R, N, MASKED,
    )  # fmt: skip
    chosen, place, count = choose(ranks, width)
    numbers = tl.broadcast_to((begin + tl.arange(0, N))[None, :], (R, N))
    stride = chunks * width  # a row holds the lists of all chunks side by side
    start = (nth.to(tl.int64) * groups + block * R) * stride + chunk * width
    store_chosen(chosen_ids + start, stride, width, numbers, chosen, place, count, ids < groups, R, N)
    if RANKS:
        store_chosen(chosen_ranks + start, stride, width, ranks, chosen, place, count, ids < groups, R, N)


@triton.jit
def select_again(
    candidate_ids, candidate_ranks, chosen_ids, chosen_ranks, rows, field, chunks, width,
    R: tl.constexpr, N: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A later round: choose the ``width`` best of one chunk of a ``field`` of candidates, for R rows (head, group)."""
    pid = tl.program_id(0)
    chunk, row = pid % chunks, pid // chunks * R + tl.arange(0, R)
    place_in = chunk * N + tl.arange(0, N)
    address = row.to(tl.int64)[:, None] * field + place_in[None, :]
    inside = (row < rows)[:, None] & (place_in < field)[None, :]
    numbers = tl.load(candidate_ids + address, mask=inside, other=-1)
    ranks = tl.load(candidate_ranks + address, mask=inside & (numbers >= 0), other=EMPTY)
    chosen, place, count = choose(ranks, width)
    stride = chunks * width
    start = (pid // chunks * R).to(tl.int64) * stride + chunk * width
    store_chosen(chosen_ids + start, stride, width, numbers, chosen, place, count, row < rows, R, N)
    if RANKS:
        store_chosen(chosen_ranks + start, stride, width, ranks, chosen, place, count, row < rows, R, N)


@triton.jit
def select_streaming(
    key, centroids, key_mask, chosen_ids,
    stride_b, stride_h, stride_l, heads, tokens, groups, blocks, width,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Any number of keys and any k: bisect as :func:`threshold_of` does, scoring all keys anew in every step."""
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    ids = block * R + tl.arange(0, R)
    real = tl.zeros([R], tl.int32)
    high = tl.full([R], EMPTY, tl.int32)
    low = tl.full([R], 2147483647, tl.int32)
    for begin in range(0, tokens, N):
        ranks = rank_keys(
            key, centroids, key_mask, head, block * R, begin,
            stride_b, stride_h, stride_l, heads, tokens, groups, D, DP, R, N, MASKED,
        )  # fmt: skip
        real += tl.sum((ranks > EMPTY).to(tl.int32), 1)
        high = tl.maximum(high, tl.max(ranks, 1))
        low = tl.minimum(low, tl.min(tl.where(ranks == EMPTY, 2147483647, ranks), 1))
    count = tl.minimum(real, width)
    while tl.max((low < high).to(tl.int32), 0) > 0:
        middle = (low | high) - ((low ^ high) >> 1)
        reach = tl.zeros([R], tl.int32)
        for begin in range(0, tokens, N):
            ranks = rank_keys(
                key, centroids, key_mask, head, block * R, begin,
                stride_b, stride_h, stride_l, heads, tokens, groups, D, DP, R, N, MASKED,
            )  # fmt: skip
            reach += tl.sum((ranks >= middle[:, None]).to(tl.int32), 1)
        low = tl.where(reach >= count, middle, low)
        high = tl.where(reach > count, high, tl.where(reach == count, middle, middle - 1))
    above = tl.zeros([R], tl.int32)
    for begin in range(0, tokens, N):
        ranks = rank_keys(
            key, centroids, key_mask, head, block * R, begin,
            stride_b, stride_h, stride_l, heads, tokens, groups, D, DP, R, N, MASKED,
        )  # fmt: skip
        above += tl.sum((ranks > high[:, None]).to(tl.int32), 1)
    room = count - above
    taken = tl.zeros([R], tl.int32)
    base = chosen_ids + (head.to(tl.int64) * groups + ids)[:, None] * width
    present = (ids < groups)[:, None]
    for begin in range(0, tokens, N):
        ranks = rank_keys(
            key, centroids, key_mask, head, block * R, begin,
            stride_b, stride_h, stride_l, heads, tokens, groups, D, DP, R, N, MASKED,
        )  # fmt: skip
        level = (ranks == high[:, None]) & (ranks > EMPTY)
        chosen = (ranks > high[:, None]) | (level & (tl.cumsum(level.to(tl.int32), 1) <= room[:, None]))
        room -= tl.minimum(tl.sum(level.to(tl.int32), 1), room)
        place = taken[:, None] + tl.cumsum(chosen.to(tl.int32), 1) - 1
        numbers = tl.broadcast_to((begin + tl.arange(0, N))[None, :], (R, N)).to(tl.int64)
        tl.store(base + place, numbers, mask=chosen & present)
        taken += tl.sum(chosen.to(tl.int32), 1)
    for begin in range(0, width, N):
        column = begin + tl.arange(0, N)[None, :]
        rest = (column >= taken[:, None]) & (column < width) & present
        tl.store(base + column, tl.full([R, N], -1, tl.int64), mask=rest)


def select(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Select the ``top_k`` keys of every group; shapes and contract as in :func:`dgt.select_keys`."""
    key = rows_of(key)
    batch, heads, tokens, channels = key.shape
    groups = centroids.shape[1]
    width = min(top_k, tokens)
    key_ids = torch.empty((batch, heads, groups, width), dtype=torch.int64, device=key.device)
    tensors = (key, centroids.float().contiguous(), key_mask if key_mask is None else key_mask.contiguous())
    shape = (*strides_of(key), heads, tokens, groups)
    padded = power_of_two(channels)
    constants = {"D": channels, "DP": padded, "MASKED": key_mask is not None}
    chunk = min(power_of_two(tokens), 1024, CHUNK_BYTES // (padded * key.element_size()))
    chunks = triton.cdiv(tokens, chunk)
    if chunks > 1 and 2 * width > chunk:
        blocks = triton.cdiv(groups, 16)
        launch(
            select_streaming, batch * heads * blocks, *tensors, key_ids, *shape, blocks, width,
            R=16, N=64, num_warps=8, **constants,
        )  # fmt: skip
        return key_ids
    blocks = triton.cdiv(groups, _rows(chunk))
    for first, count in turns(batch * heads, 8 * groups * chunks * width if chunks > 1 else 0):
        last = key_ids.view(-1, groups, width)[first : first + count]
        ids, ranks = _lists(last, chunks, width)
        launch(
            select_from_keys, count * blocks * chunks, *tensors, ids, ranks, *shape, first, chunks, blocks, width,
            R=_rows(chunk), N=chunk, RANKS=chunks > 1, num_warps=8 if padded > 64 else _warps(chunk), **constants,
        )  # fmt: skip
        _play_rounds(ids, ranks, last, count * groups, chunks * width, width)
    return key_ids


def _rows(chunk: int) -> int:
    """Groups of a program that holds a chunk of each."""
    return min(16, PROGRAM // chunk)


def _warps(chunk: int) -> int:
    """Warps of such a program."""
    return 8 if _rows(chunk) * chunk == PROGRAM else 4


def _lists(last: Tensor, chunks: int, width: int) -> tuple[Tensor, Tensor]:
    """Buffers for the ids and ranks that ``chunks`` chunks choose; the final ids if there is but one chunk."""
    if chunks == 1:
        return last, last
    ids = torch.empty((last.shape[0] * last.shape[1], chunks * width), dtype=torch.int32, device=last.device)
    return ids, torch.empty_like(ids)


def _play_rounds(ids: Tensor, ranks: Tensor, last: Tensor, rows: int, field: int, width: int) -> None:
    """Let (rows, field) candidates compete until ``last`` holds the ``width`` best of every row."""
    while field > width:
        chunk = min(power_of_two(field), ROUND)
        chunks = triton.cdiv(field, chunk)
        next_ids, next_ranks = _lists(last, chunks, width)
        launch(
            select_again, triton.cdiv(rows, _rows(chunk)) * chunks,
            ids, ranks, next_ids, next_ranks, rows, field, chunks, width,
            R=_rows(chunk), N=chunk, RANKS=chunks > 1, num_warps=_warps(chunk),
        )  # fmt: skip
        ids, ranks, field = next_ids, next_ranks, chunks * width
