# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Residual keys: what a group did not select, summed up in one pass over the keys, and the gradients of that.

One program sums up one cluster of keys for T groups of a head; keys are read in the order of their
clusters. Equations in :mod:`dgt.ops.residual_keys`.

For the gradients, whose formulas are in docs/residual_keys.md, a program takes a block of members (dk,
dv), or T groups (dt), and computes the weights of members again.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.gradients import new_gradients, split_gradients
from dgt.ops.residual_keys import WithResidualKeys, append_residual_keys, sort_by_cluster
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


@triton.jit
def load_gradients(
    sums, rest_key, rest_value, rest_bias, grad_rest_key, grad_rest_value, grad_rest_bias,
    own, row, exist, scale_log2, scale, narrow: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Of some groups: m, e, dv' and db, the log-sum-exps of their members in base 2, and e.k' + dv'.v' - db."""
    number = tl.maximum(tl.load(sums + own * (D + 1) + D, mask=exist, other=1.0), 1.0)
    q = (load_rows(sums, own, D + 1, exist, D, DP) / number[:, None]).to(narrow)
    k = load_rows(rest_key, row, D, exist, D, DP).to(tl.float32)
    v = load_rows(rest_value, row, D, exist, D, DP).to(tl.float32)
    db = tl.load(grad_rest_bias + row, mask=exist, other=0.0)
    mean = q.to(tl.float32)
    e = load_rows(grad_rest_key, row, D, exist, D, DP).to(tl.float32)
    e = (e - mean * (db * scale)[:, None]).to(narrow)
    dy = load_rows(grad_rest_value, row, D, exist, D, DP).to(narrow)
    delta = tl.sum(e.to(tl.float32) * k + dy.to(tl.float32) * v, 1) - db
    bias = tl.load(rest_bias + row, mask=exist, other=float("-inf"))
    logs = bias * 1.4426950408889634 + tl.sum(mean * k, 1) * scale_log2
    # It sums up nothing: all weights become zero.
    return q, e, dy, db, tl.where(bias == float("-inf"), float("inf"), logs), delta


@triton.jit
def member_gradients(
    key, value, bits, sums, order, ends, rest_key, rest_value, rest_bias,
    grad_rest_key, grad_rest_value, grad_rest_bias, grad_key, grad_value, scale_log2, scale,
    kb, kh, kl, vb, vh, vl, gb, gh, gl, heads, keys, groups, words, clusters, slices,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add to dK and dV of every ``slices``-th block of a cluster's keys; nobody else writes these."""
    pid = tl.program_id(0)
    piece, cluster, head = pid % slices, pid // slices % clusters, pid // slices // clusters
    key_rows = head_base(key, head, heads, kb, kh)
    value_rows = head_base(value, head, heads, vb, vh)
    key_target = head_base(grad_key, head, heads, gb, gh)
    value_target = head_base(grad_value, head, heads, gb, gh)
    bits += head.to(tl.int64) * keys * words
    order += head.to(tl.int64) * keys
    ends += head.to(tl.int64) * clusters + cluster
    begin = tl.load(ends - 1, mask=cluster > 0, other=0)
    end = tl.load(ends)
    for start in range(begin + piece * N, end, slices * N):
        place = start + tl.arange(0, N)
        inside = place < end
        place = tl.load(order + place, mask=inside, other=0)
        k = load_rows(key_rows, place, kl, inside, D, DP)
        v = load_rows(value_rows, place, vl, inside, D, DP)
        dk, dv = tl.zeros([N, DP], tl.float32), tl.zeros([N, DP], tl.float32)
        for first in range(0, groups, T):
            ids = first + tl.arange(0, T)
            exist, own = ids < groups, head.to(tl.int64) * groups + ids
            q, e, dy, _, logs, delta = load_gradients(
                sums, rest_key, rest_value, rest_bias, grad_rest_key, grad_rest_value,
                grad_rest_bias, own, own * clusters + cluster, exist, scale_log2, scale, k.dtype,
                D, DP,
            )  # fmt: skip
            word = tl.load(bits + place.to(tl.int64) * words + first // 32, mask=inside, other=-1)
            chosen = (word[:, None] & (1 << (ids % 32))[None, :]) != 0
            weight = tl.exp2(multiply(k, tl.trans(q)) * scale_log2 - logs[None, :])
            weight = tl.where(chosen, 0.0, weight)
            slope = multiply(k, tl.trans(e)) + multiply(v, tl.trans(dy)) - delta[None, :]
            slope = (weight * slope * scale).to(k.dtype)
            weight = weight.to(k.dtype)
            dk += multiply(weight, e) + multiply(slope, q)
            dv += multiply(weight, dy)
        dk += load_rows(key_target, place, gl, inside, D, DP).to(tl.float32)
        dv += load_rows(value_target, place, gl, inside, D, DP).to(tl.float32)
        store_rows(key_target, place, gl, inside, dk, D, DP)
        store_rows(value_target, place, gl, inside, dv, D, DP)


@triton.jit
def mean_gradients(
    key, value, bits, sums, order, ends, rest_key, rest_value, rest_bias,
    grad_rest_key, grad_rest_value, grad_rest_bias, grad_mean, scale_log2, scale,
    kb, kh, kl, vb, vh, vl, heads, keys, groups, words, clusters, parts,
    D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dt of T groups, from one cluster of keys."""
    pid = tl.program_id(0)
    first = pid % parts * T
    cluster = pid // parts % clusters
    head = pid // parts // clusters
    ids = first + tl.arange(0, T)
    exist, own = ids < groups, head.to(tl.int64) * groups + ids
    row = own * clusters + cluster
    q, e, dy, db, logs, delta = load_gradients(
        sums, rest_key, rest_value, rest_bias, grad_rest_key, grad_rest_value, grad_rest_bias,
        own, row, exist, scale_log2, scale, key.dtype.element_ty, D, DP,
    )  # fmt: skip
    key_rows = head_base(key, head, heads, kb, kh)
    value_rows = head_base(value, head, heads, vb, vh)
    bits += head.to(tl.int64) * keys * words + first // 32
    order += head.to(tl.int64) * keys
    ends += head.to(tl.int64) * clusters + cluster
    begin = tl.load(ends - 1, mask=cluster > 0, other=0)
    end = tl.load(ends)
    total = tl.zeros([T, DP], tl.float32)
    for start in range(begin, end, N):
        place = start + tl.arange(0, N)
        inside = place < end
        place = tl.load(order + place, mask=inside, other=0)
        k = load_rows(key_rows, place, kl, inside, D, DP)
        v = load_rows(value_rows, place, vl, inside, D, DP)
        word = tl.load(bits + place.to(tl.int64) * words, mask=inside, other=-1)
        chosen = (word[None, :] & (1 << (ids % 32))[:, None]) != 0
        weight = tl.exp2(multiply(q, tl.trans(k)) * scale_log2 - logs[:, None])
        slope = multiply(e, tl.trans(k)) + multiply(dy, tl.trans(v)) - delta[:, None]
        slope = tl.where(chosen, 0.0, weight * slope)
        total += multiply(slope.to(k.dtype), k)
    total -= db[:, None] * load_rows(rest_key, row, D, exist, D, DP).to(tl.float32)
    store_rows(grad_mean, row, D, exist, total, D, DP)


class Members(NamedTuple):
    """What groups may sum up, and how."""

    sums: Tensor
    """(B, H, G, D + 1) float32: sums of the queries of every group, and how many they are."""
    bits: Tensor
    """(B H, S, W) int32: the groups that selected a key (:func:`dgt.ops.triton.inverse.mark`)."""
    order: Tensor
    """(B H, S) int32: keys in the order of their clusters, those of none last."""
    ends: Tensor
    """(B H, M) int32: where in it the clusters end."""
    block: int
    """Keys that a program takes at a time."""


def find_members(
    query: Tensor,
    key: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    key_cluster_ids: Tensor | None,
    num_clusters: int,
) -> Members:
    """Find what every group may sum up; without ids all keys are one cluster."""
    batch, heads, keys, _ = key.shape
    if key_cluster_ids is None:
        number = torch.arange(keys, dtype=torch.int32, device=key.device)
        order = number.expand(batch * heads, keys).contiguous()
        ends = number.new_full((batch * heads, 1), keys)
    else:
        places = sort_by_cluster(key_cluster_ids.flatten(0, 1), num_clusters)
        order, ends = places.order.to(torch.int32), places.ends.to(torch.int32)
    (layout,) = layouts_of(key)
    return Members(
        sum_queries(query, group_ids, key_ids.shape[2], unit=False).sum(2),
        mark(lists_of(key_ids, keys), batch * heads, keys),
        order,
        ends,
        min(block_of(layout), power_of_two(keys // num_clusters)),
    )


def sum_up(
    members: Members, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return k' and v', (B, H, G, M, D) of the keys' type, and float32 b, (B, H, G, M), -inf where
    nothing was left out.
    """
    layouts = layouts_of(key, value)
    batch, heads, keys, channels = key.shape
    groups, clusters = members.sums.shape[2], members.ends.shape[1]
    shape = (batch, heads, groups, clusters)
    rest_key, rest_value = (key.new_empty((*shape, channels)) for _ in range(2))
    bias = key.new_empty(shape, dtype=torch.float32)
    parts = ceil_div(groups, GROUPS_AT_ONCE)
    plan = plan_launch(
        sum_up_unselected, batch * heads * clusters * parts, *strides_of(*layouts), heads,
        keys, groups, members.bits.shape[2], clusters, parts, D=channels, DP=power_of_two(channels),
        T=GROUPS_AT_ONCE, N=members.block, num_warps=4, num_stages=2,
    )  # fmt: skip
    launch(
        plan, key, value, members.bits, members.sums, members.order, members.ends, rest_key,
        rest_value, bias, base_two(scale),
    )  # fmt: skip
    return rest_key, rest_value, bias * math.log(2)


def summarize_clusters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_cluster_ids: Tensor | None,
    num_clusters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum up the keys of every cluster that a group did not select.

    Arguments as in :func:`dgt.ops.residual_keys.summarize_clusters`; without ``key_cluster_ids`` all
    keys are one cluster.

    Returns k', v' and b as :func:`sum_up`.
    """
    key, value = rows_of(key), rows_of(value)
    members = find_members(query, key, group_ids, key_ids, key_cluster_ids, num_clusters)
    return sum_up(members, key, value, scale)


def views_of_summaries(kept: Tensor, key: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of :func:`dgt.ops.cpu.interface.new_residual` that stand for k', v' and b.

    Args:
        kept: of M residual keys of every group.
        key: (B, H, S, D).
        groups: G.
    """
    batch, heads, _, channels = key.shape
    count = kept.numel() // (2 * channels + 1)
    pairs, biases = kept.split([2 * channels * count, count])
    shape = (batch, heads, groups, count // (batch * heads * groups))
    rest_key, rest_value = pairs.view(*shape, 2, channels).unbind(4)
    return rest_key, rest_value, biases.view(shape)


def append_summaries(
    key: Tensor, value: Tensor, key_ids: Tensor, rest: tuple[Tensor, Tensor, Tensor]
) -> WithResidualKeys:
    """Append k' and v' of every group, with biases b that may be -inf, to keys and lists."""
    rest_key, rest_value, bias = rest
    empty = bias.isneginf()
    return append_residual_keys(
        key, value, key_ids, (rest_key, rest_value, bias.masked_fill(empty, 0.0), empty)
    )


def summaries_backward(
    in_more: tuple[Tensor, Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rest: tuple[Tensor, Tensor, Tensor],
    *,
    group_ids: Tensor,
    key_ids: Tensor,
    key_cluster_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the gradients of query, key and value as :func:`dgt.ops.gradients.new_gradients`.

    Args:
        in_more: those of queries, and of keys, values and biases with the residual ones behind them.
        query: (B, H, L, D).
        key, value: (B, H, S, D).
        rest: k', v' and b, as :func:`sum_up` returned them.
        group_ids, key_ids, key_cluster_ids, scale: as in :func:`summarize_clusters`.
    """
    key, value = rows_of(key), rows_of(value)
    rest_key, rest_value, rest_bias = rest
    batch, heads, keys, channels = key.shape
    groups, clusters = rest_bias.shape[2:]
    members = find_members(query, key, group_ids, key_ids, key_cluster_ids, clusters)
    in_query, *of_keys, in_biases = in_more
    of_rest = [found[:, :, keys:].contiguous() for found in (*of_keys, in_biases)]
    grads = new_gradients(query, key)
    grad_query, grad_key, grad_value = split_gradients(grads, query.shape, key.shape)
    for target, found in zip((grad_key, grad_value), of_keys, strict=True):
        target.copy_(found[:, :, :keys])
    given = (
        key, value, members.bits, members.sums, members.order, members.ends,
        rest_key, rest_value, rest_bias, *of_rest,
    )  # fmt: skip
    layouts, scales = layouts_of(key, value), (base_two(scale), scale)
    sizes = {
        "D": channels, "DP": power_of_two(channels), "T": GROUPS_AT_ONCE, "N": members.block,
        "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
    numbers = (heads, keys, groups, members.bits.shape[2], clusters)
    slices = ceil_div(ceil_div(keys, clusters), members.block)
    of_members = plan_launch(
        member_gradients, batch * heads * clusters * slices,
        *strides_of(*layouts, *layouts_of(grad_key)), *numbers, slices, **sizes,
    )  # fmt: skip
    launch(of_members, *given, grad_key, grad_value, *scales)
    parts = ceil_div(groups, GROUPS_AT_ONCE)
    of_means = plan_launch(
        mean_gradients, batch * heads * clusters * parts, *strides_of(*layouts), *numbers, parts,
        **sizes,
    )  # fmt: skip
    in_means = rest_bias.new_empty((batch, heads, groups, clusters, channels))
    launch(of_means, *given, in_means, *scales)
    each = in_means.sum(3) * (scale / members.sums[..., -1:].clamp(min=1))
    # Queries of no group take the zeros behind those of all groups.
    each = F.pad(each, (0, 0, 0, 1)).to(query.dtype)
    rows = group_ids.where((group_ids >= 0) & (group_ids < groups), groups)
    torch.add(in_query, each.gather(2, rows[..., None].expand_as(query)), out=grad_query)
    return grads
