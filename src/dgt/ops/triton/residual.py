# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Residual keys: what a group did not select, summed up in one pass over the keys.

One program sums up one cluster of keys for T groups of a head; keys are read in the order of their
clusters. Equations in :mod:`dgt.ops.residual_keys`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.residual_keys import sort_by_cluster
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
from dgt.ops.triton.inverse import lists_of, mark
from dgt.ops.triton.launch import (
    block_of,
    ceil_div,
    launch,
    layouts_of,
    plan_launch,
    power_of_two,
    rows_of,
    strides_of,
)

GROUPS_AT_ONCE = 16  # few, so that few heads fill the chip


@triton.jit
def sum_up_unselected(
    key, value, bits, sums, order, ends, rest_key, rest_value, rest_bias, scale,
    kb, kh, kl, vb, vh, vl, heads, keys, groups, words, clusters, parts,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """k', v' and b of T groups and one cluster; ``scale`` contains log2(e), and so does b."""
    pid = tl.program_id(0)
    first = pid % parts * T
    cluster = pid // parts % clusters
    head = pid // parts // clusters
    ids = first + tl.arange(0, T)
    exist, own = ids < groups, head.to(tl.int64) * groups + ids
    number = tl.maximum(tl.load(sums + own * (D + 1) + D, mask=exist, other=1.0), 1.0)
    q = (load_rows(sums, own, D + 1, exist, D, DP) / number[:, None]).to(key.dtype.element_ty)
    if scale < 0:
        q, scale = -q, -scale
    key_rows = head_base(key, head, heads, kb, kh)
    value_rows = head_base(value, head, heads, vb, vh)
    bits += head.to(tl.int64) * keys * words + first // 32
    order += head.to(tl.int64) * keys
    ends += head.to(tl.int64) * clusters + cluster
    begin = tl.load(ends - 1, mask=cluster > 0, other=0)
    end = tl.load(ends)
    top, total = tl.full([T], LOWEST, tl.float32), tl.zeros([T], tl.float32)
    mean_key, mean_value = tl.zeros([T, DP], tl.float32), tl.zeros([T, DP], tl.float32)
    for start in range(begin, end, N):
        place = start + tl.arange(0, N)
        inside = place < end
        place = tl.load(order + place, mask=inside, other=0)
        k = load_rows(key_rows, place, kl, inside, D, DP)
        v = load_rows(value_rows, place, vl, inside, D, DP)
        word = tl.load(bits + place.to(tl.int64) * words, mask=inside, other=-1)
        chosen = (word[None, :] & (1 << (ids % 32))[:, None]) != 0
        score = tl.where(chosen, float("-inf"), multiply(q, tl.trans(k)))
        weight, shrink, top, total = running_softmax(score, scale, top, total)
        mean_key = mean_key * shrink[:, None] + multiply(weight.to(k.dtype), k)
        mean_value = mean_value * shrink[:, None] + multiply(weight.to(v.dtype), v)
    mean_key, logs = finish_softmax(mean_key, top, total)
    mean_value, _ = finish_softmax(mean_value, top, total)
    own = own * clusters + cluster
    store_rows(rest_key, own, D, exist, mean_key, D, DP)
    store_rows(rest_value, own, D, exist, mean_value, D, DP)
    # of k' as it is stored: at the mean query, the rounding of k' then changes nothing
    kept = mean_key.to(rest_key.dtype.element_ty).to(tl.float32)
    tl.store(rest_bias + own, logs - tl.sum(q.to(tl.float32) * kept, 1) * scale, mask=exist)


def summarize_clusters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_cluster_ids: Tensor,
    num_clusters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum up the keys of every cluster that a group did not select.

    Arguments as in :func:`dgt.ops.residual_keys.summarize_clusters`.

    Returns k' and v', (B, H, G, M, D) of the keys' type, and float32 b, (B, H, G, M), -inf where
    nothing was left out.
    """
    sums = sum_queries(query, group_ids, key_ids.shape[2], unit=False).sum(2)
    heads_of_all, keys = key.shape[0] * key.shape[1], key.shape[2]
    bits = mark(lists_of(key_ids, keys), heads_of_all, keys)
    places = sort_by_cluster(key_cluster_ids.flatten(0, 1), num_clusters)
    order, ends = places.order.to(torch.int32), places.ends.to(torch.int32)
    key, value = rows_of(key), rows_of(value)
    layouts = layouts_of(key, value)
    batch, heads, tokens, channels = key.shape
    groups = sums.shape[2]
    size = min(block_of(layouts[0]), power_of_two(tokens // num_clusters))
    shape = (batch, heads, groups, num_clusters)
    rest_key, rest_value = (key.new_empty((*shape, channels)) for _ in range(2))
    bias = key.new_empty(shape, dtype=torch.float32)
    parts = ceil_div(groups, GROUPS_AT_ONCE)
    plan = plan_launch(
        sum_up_unselected, batch * heads * num_clusters * parts, *strides_of(*layouts), heads,
        tokens, groups, bits.shape[2], num_clusters, parts, D=channels, DP=power_of_two(channels),
        T=GROUPS_AT_ONCE, N=size, num_warps=4, num_stages=2,
    )  # fmt: skip
    launch(plan, key, value, bits, sums, order, ends, rest_key, rest_value, bias, base_two(scale))
    return rest_key, rest_value, bias * math.log(2)
