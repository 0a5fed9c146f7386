# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The remainder: one key a group that sums up all keys it did not choose, in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import (
    LOWEST,
    base_two,
    finish_softmax,
    head_base,
    load_rows,
    multiply,
    running_softmax,
    store_rows,
)
from dgt.ops.triton.grouping import sum_queries
from dgt.ops.triton.inverse import Lists, mark
from dgt.ops.triton.launch import block_of, launch, power_of_two, rows_of, strides_of


@triton.jit
def sum_up_rest(
    key, value, key_mask, bits, sums, rest_key, rest_value, rest_bias,
    kb, kh, kl, vb, vh, vl, heads, keys, groups, words, parts, scale,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """k', v' and b of T groups of a head; ``scale`` contains log2(e), and so does b.

    T is small, so that few heads fill the chip.
    """
    head, first = tl.program_id(0) // parts, tl.program_id(0) % parts * T
    ids = first + tl.arange(0, T)
    exist, own = ids < groups, head.to(tl.int64) * groups + ids
    number = tl.maximum(tl.load(sums + own * (D + 1) + D, mask=exist, other=1.0), 1.0)
    q = (load_rows(sums, own, D + 1, exist, D, DP) / number[:, None]).to(key.dtype.element_ty)
    if scale < 0:
        q, scale = -q, -scale
    key_rows = head_base(key, head, heads, kb, kh)
    value_rows = head_base(value, head, heads, vb, vh)
    top, total = tl.full([T], LOWEST, tl.float32), tl.zeros([T], tl.float32)
    mean_key, mean_value = tl.zeros([T, DP], tl.float32), tl.zeros([T, DP], tl.float32)
    for start in range(0, keys, N):
        place = start + tl.arange(0, N)
        inside = place < keys
        k = load_rows(key_rows, place, kl, inside, D, DP)
        v = load_rows(value_rows, place, vl, inside, D, DP)
        word = tl.load(
            bits + (head.to(tl.int64) * keys + place) * words + first // 32, mask=inside, other=-1
        )
        if MASKED:
            real = tl.load(
                key_mask + (head // heads).to(tl.int64) * keys + place, mask=inside, other=0
            )
            word = tl.where(real != 0, word, -1)
        chosen = (word[None, :] & (1 << (ids % 32))[:, None]) != 0
        score = tl.where(chosen, float("-inf"), multiply(q, tl.trans(k)))
        weight, shrink, top, total = running_softmax(score, scale, top, total)
        mean_key = mean_key * shrink[:, None] + multiply(weight.to(k.dtype), k)
        mean_value = mean_value * shrink[:, None] + multiply(weight.to(v.dtype), v)
    mean_key, logs = finish_softmax(mean_key, top, total)
    mean_value, _ = finish_softmax(mean_value, top, total)
    store_rows(rest_key, own, D, exist, mean_key, D, DP)
    store_rows(rest_value, own, D, exist, mean_value, D, DP)
    tl.store(rest_bias + own, logs - tl.sum(q.to(tl.float32) * mean_key, 1) * scale, mask=exist)


def summarize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    lists: Lists,
    scale: float,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum up for every group the real keys that are not in its list.

    Returns float32 k' and v', (B, H, G, D), and b for exponents of two, (B, H, G), -inf where
    nothing was left out.
    """
    key, value = rows_of(key), rows_of(value)
    bits = mark(lists, key.shape[2])
    groups = lists.ids.shape[1]
    sums = sum_queries(query, group_ids, groups, unit=False).sum(2)
    parts, like = triton.cdiv(groups, 16), sums[..., :-1]
    rest = [like.new_empty(shape) for shape in (like.shape, like.shape, like.shape[:3])]
    launch(
        sum_up_rest, key.shape[0] * key.shape[1] * parts, key, value,
        key_mask if key_mask is None else key_mask.contiguous(), bits, sums, *rest,
        *strides_of(key, value), *key.shape[1:3], groups, bits.shape[2], parts, base_two(scale),
        D=key.shape[3], DP=power_of_two(key.shape[3]), T=16, N=2 * block_of(key),
        MASKED=key_mask is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return rest[0], rest[1], rest[2]
