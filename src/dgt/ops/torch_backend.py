"""The steps of attention with PyTorch's own kernels: any device, no host copies, static shapes.

Nothing waits for the device and every shape follows from (B, H, L, S, D, G, k) alone, so CUDA graphs capture it and
``torch.compile`` traces it whole. Differentiable in query, key, value and key_bias. On CPUs it is the path of float64
and of machines without the native kernel; there :mod:`dgt.ops.operators` calls it.

Attention inside groups (Eq. 2) is computed in one of two ways:

- *Dense under a mask*, for few tokens: all keys of a head under a mask whose rows are picked by group.
- *Gathered*: queries are sorted by group, and groups cut into segments of at most T queries. A head has at most
  ``n + (L - n) // T`` of them, ``n = min(G, L)``, whatever its groups. Each segment attends to a copy of its group's
  keys: as one sequence of flash attention of variable lengths (half precision on CUDA; segments left over have no
  queries), or padded to T rows in ordinary attention.

Either way no shape depends on data, and what an output row holds whose query sees no key is of no meaning, but finite.
"""

import inspect
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dgt.ops.checks import (
    check_no_nan,
    full_precision,
    kernels_with_derivatives,
    wide_type,
)
from dgt.ops.lloyd import cluster_tokens
from dgt.ops.residual_keys import sum_groups, summarize_clusters

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    HAS_VARLEN = False
else:
    HAS_VARLEN = "scale" in inspect.signature(varlen_attn).parameters

__all__ = [
    "attend",
    "attend_with_logsumexp",
    "cluster_tokens",
    "group_queries",
    "group_statistics",
    "select_keys",
    "summarize_clusters",
]

BIAS_CHANNELS = 8  # more channels that carry key_bias; kernels like multiples of eight
# Tokens up to which dense attention under a mask may be quicker than gathering: with more, writing
# the mask alone takes longer than the copies of keys, and gradients would keep it.
FEW_TOKENS = 1024
MASK_ELEMENTS = 1 << 27  # of the masks of the heads that attend at once
# T of flash attention: long segments save copies of keys, and only full blocks are computed.
SEQUENCE = 1024
PADDED = 128  # T of padded attention, where every segment costs T rows
# Of a call: grids of attention kernels end at 65,535, and a segment takes two places.
MOST_SEGMENTS = 32_000
COPIED_ELEMENTS = 1 << 28  # of the copies of keys and values of the heads that attend at once
# Copies of the keys of all heads at once would cost memory there and gain nothing.
MOST_SEGMENTS_ON_CPU = 400


def group_queries(query: Tensor, centroids: Tensor, query_mask: Tensor | None) -> Tensor:
    """Assign (B, H, L, D) queries to the nearest of (H, G, D) centroids.

    Returns (B, H, L) int64, -1 at padding.
    """
    with full_precision(query.device):
        scores = query.detach().float() @ centroids.detach().float().mT  # (B, H, L, G)
    check_no_nan("query", scores)
    group_ids = scores.argmax(-1)  # of equal scores the first
    return group_ids if query_mask is None else group_ids.where(query_mask[:, None], -1)


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Select the best keys for every centroid, ties to the lowest (Eq. 1).

    Returns (B, H, G, min(k, S)) int64, ascending, then -1.
    """
    tokens = key.shape[2]
    count = min(top_k, tokens)
    with full_precision(key.device):
        scores = centroids.detach().float() @ key.detach().float().mT  # (B, H, G, S)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    check_no_nan("key", scores)
    # Descending; which of equal scores are taken is not promised.
    best, key_ids = scores.topk(count)
    level = best[..., -1:]
    # These are right; the places behind them get the first keys whose score is the level.
    above = best != level
    counter = torch.int16 if tokens < 1 << 15 else torch.int32
    number = torch.arange(1, count + 1, device=key.device, dtype=counter) - above.sum(
        -1, True, dtype=counter
    )
    on_level = (scores == level).cumsum(-1, dtype=counter)
    key_ids = torch.where(above, key_ids, torch.searchsorted(on_level, number))
    # Padding goes behind all keys.
    key_ids = key_ids.masked_fill(best.isneginf(), tokens).sort(-1).values
    return key_ids.masked_fill(key_ids == tokens, -1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every query over the keys of its group (Eq. 2).

    Returns (B, H, L, D), zero where a query sees no key.
    """
    return _attend(
        query, key, value, group_ids, key_ids, scale, key_bias=key_bias, with_sums=False
    )[0]


def attend_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and the (B, H, L) log-sum-exp of every query; -inf where it sees no key."""
    return _attend(query, key, value, group_ids, key_ids, scale, key_bias=key_bias, with_sums=True)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    """Output, and the logarithms of the sums if they are wanted (else an empty tensor)."""
    channels, dtype = query.shape[-1], query.dtype
    # Where half precision is slower, and its gradients would add up in half precision.
    if query.device.type == "cpu":
        query, key, value = (tensor.to(wide_type(dtype)) for tensor in (query, key, value))
    if scale == 0:  # by which no constant can be divided
        query, scale = query * 0.0, 1.0
    with full_precision(query.device):  # the types are the caller's
        if key_bias is not None:
            query, key, value = _append_bias(query, key, value, key_bias, scale)
        heads = Heads(*(tensor.flatten(0, 1) for tensor in (query, key, value, group_ids, key_ids)))
        output, sums = attend_in_heads(heads, scale, with_sums)
    sees = (key_ids >= 0).any(-1).gather(-1, group_ids.clamp(min=0)) & (group_ids >= 0)
    output = output.view(query.shape)[..., :channels].to(dtype).masked_fill(~sees[..., None], 0.0)
    return output, sums.view(sees.shape).masked_fill(~sees, -torch.inf) if with_sums else sums


def _append_bias(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add ``key_bias / scale`` to the scores by extra channels of query and key.

    No kernel needs to know of it.

    In half precision the constant is a sum of three numbers, which are exact together.
    """
    # A very low number stays one.
    rest = (key_bias.to(wide_type(query.dtype)) / scale).clamp(min=torch.finfo(query.dtype).min)
    parts = []
    for _ in range(1 if rest.dtype == query.dtype else 3):
        parts.append(rest.to(query.dtype))
        rest = torch.where(parts[-1].isinf(), 0.0, rest - parts[-1])
    spare = BIAS_CHANNELS - len(parts)
    ones = query.new_ones(()).expand(*query.shape[:3], len(parts))
    query = F.pad(torch.cat([query, ones], -1), (0, spare))
    key = F.pad(torch.cat([key, torch.stack(parts, -1)], -1), (0, spare))
    return query, key, F.pad(value, (0, BIAS_CHANNELS))


def group_statistics(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sum the normalized queries of every group over batch and tokens, and count them.

    Returns float32 (H, G, D) and (H, G).
    """
    with full_precision(query.device):
        return sum_groups(F.normalize(query.detach().float(), dim=-1), group_ids, num_groups)


class Heads(NamedTuple):
    """Inputs of attention, with images and heads flattened to N heads; ids may be -1."""

    query: Tensor  # (N, L, D)
    key: Tensor  # (N, S, D)
    value: Tensor  # (N, S, D)
    groups: Tensor  # (N, L)
    lists: Tensor  # (N, G, K)

    def split(self, size: int) -> Iterator["Heads"]:
        """Runs of at most ``size`` heads."""
        return map(Heads, *(tensor.split(size) for tensor in self))


def attend_in_heads(heads: Heads, scale: float, with_sums: bool) -> tuple[Tensor, Tensor]:
    """Attend from every query to the keys of its group.

    Args:
        heads: what is attended to.
        scale: factor on the scores; not 0.
        with_sums: whether the logarithms of the softmax's sums are wanted.

    Returns:
        (N, L, D), and (N, L) in float32 at least, or empty where they are not wanted.
    """
    step = _attend_dense_masked if is_dense_masked(heads) else _attend_gathered
    parts = [step(part, scale, with_sums) for part in heads.split(_heads_at_once(heads, with_sums))]
    if len(parts) == 1:
        return parts[0]
    outputs, sums = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(sums)


def is_dense_masked(heads: Heads) -> bool:
    """Tell whether dense attention under a mask is likely to beat sorting and gathering."""
    queries, keys = heads.query.shape[1], heads.key.shape[1]
    groups, places = heads.lists.shape[1:]
    return takes_mask(heads.query.device.type, queries, keys, groups + places)


def takes_mask(device: str, queries: int, keys: int, listed: int) -> bool:
    """The same by sizes.

    Args:
        device: its type.
        queries: L.
        keys: S.
        listed: G + k.
    """
    if max(queries, keys) > FEW_TOKENS:
        return False
    return device == "cuda" or queries <= 2 * listed


def _heads_at_once(heads: Heads, with_sums: bool) -> int:
    """How many heads attend in one call."""
    if is_dense_masked(heads):
        return max(1, MASK_ELEMENTS // (heads.query.shape[1] * heads.key.shape[1]))
    size = _segment_size(heads, with_sums)
    segments = _segments_of_head(heads, size)
    if heads.query.device.type == "cpu":
        return max(1, MOST_SEGMENTS_ON_CPU // segments)
    elements = 2 * heads.query.shape[2] + (size if with_sums else 0)  # of a key of a segment
    copied = segments * heads.lists.shape[2] * elements
    return max(1, min(MOST_SEGMENTS // segments, COPIED_ELEMENTS // copied))


def _attend_dense_masked(heads: Heads, scale: float, with_sums: bool) -> tuple[Tensor, Tensor]:
    """Attend to all keys of a head under an additive mask.

    Its lowest value is finite, so that no row can become NaN.
    """
    groups, tokens = heads.lists.shape[1], heads.key.shape[1]
    hidden = heads.query.new_full(
        (*heads.lists.shape[:2], tokens + 1), torch.finfo(heads.query.dtype).min
    )
    # A last column took the empty places.
    rows = hidden.scatter(-1, heads.lists.remainder(tokens + 1), 0.0)[..., :-1]
    row_of_query = _of_head(heads.groups.clamp(min=0), groups)
    mask = (
        rows.flatten(0, 1).index_select(0, row_of_query.flatten()).view(*heads.groups.shape, tokens)
    )
    odd = _find_odd(heads.key, heads.value)
    key, value = (tokens.masked_fill(odd[..., None], 0.0) for tokens in (heads.key, heads.value))
    output, sums = _softmax_attention(heads.query, key, value, mask, scale, with_sums)
    return output * _nan_where_seen(odd, heads)[..., None], sums


def _find_odd(key: Tensor, value: Tensor) -> Tensor:
    """Which of (N, S, D) keys are not finite, or have a value that is not: (N, S)."""
    return (key * 0.0 + value * 0.0).sum(-1) != 0.0  # NaN equals nothing


def _nan_where_seen(odd: Tensor, heads: Heads) -> Tensor:
    """A factor for each query (N, L): NaN where it sees an odd key, else 1.

    A mask would let every query see them, for zero times infinity is NaN.
    """
    groups = heads.lists.shape[1]
    listed = odd[:, None].expand(-1, groups, -1).gather(-1, heads.lists.clamp(min=0))
    of_group = (listed & (heads.lists >= 0)).any(-1)
    seen = of_group.gather(-1, heads.groups.clamp(min=0))
    return torch.ones_like(seen, dtype=heads.query.dtype).masked_fill(seen, torch.nan)


def _softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """Attention of P times T queries, (P, T, D), and their (P, T) log-sum-exp."""
    if not with_sums:
        operands = query[:, None], key[:, None], value[:, None]
        with kernels_with_derivatives(query, key, value):
            attended = F.scaled_dot_product_attention(
                *operands, attn_mask=mask[:, None], scale=scale
            )
        return attended[:, 0], query.new_empty(0)
    wide = wide_type(query.dtype)
    score = query.to(wide) @ key.to(wide).mT * scale + mask
    sums = score.logsumexp(-1)
    return (score.softmax(-1) @ value.to(wide)).to(query.dtype), sums


def _attend_gathered(heads: Heads, scale: float, with_sums: bool) -> tuple[Tensor, Tensor]:
    """Sorted queries, cut into segments that attend to copies of their group's keys."""
    size = _segment_size(heads, with_sums)
    segments = _cut_into_segments(heads, size)
    if _takes_varlen(heads.query, with_sums):
        return _attend_varlen(heads.query, segments, size, scale), heads.query.new_empty(0)
    return _attend_padded(heads.query, segments, size, scale, with_sums)


class _Segments(NamedTuple):
    """M segments of every head: runs of queries of one group, and that group's keys and values.

    The keys that a group has come first; in the places behind them are others, which must be
    hidden.
    """

    order: Tensor  # (N L,) rows of queries
    bounds: Tensor  # (N M + 1,) int32: where in that order segments begin
    keys: Tensor  # (N, M, K, D)
    values: Tensor  # (N, M, K, D)
    counts: Tensor  # (N, M): how many keys, 1 at least


def _cut_into_segments(heads: Heads, size: int) -> _Segments:
    """Sort queries by head and group, cut groups into segments, and gather their keys.

    Queries of no group go along with group 0; their output is hidden later. Segments left over are
    empty.
    """
    groups, tokens = heads.lists.shape[1], heads.key.shape[1]
    order, bounds, group = _sort_queries(heads, size)
    # Empty places go behind all keys.
    lists = heads.lists.where(heads.lists >= 0, tokens).sort(-1).values
    counts = (lists < tokens).sum(-1).clamp(min=1)
    # They point to the group's keys in turn, which it sees anyway, whatever they hold; with none to
    # different ones, or one row would have to add up the zeros that are their gradients.
    place = torch.arange(lists.shape[-1], device=lists.device)
    lists = lists.gather(-1, place % counts[..., None])
    lists = lists.where(lists < tokens, place % tokens)
    segment = _of_head(group, groups)  # (N, M) among N G
    rows = _of_head(lists, tokens).flatten(0, 1)[segment]  # (N, M, K)
    # Embedding's gradient adds up in float32 and in a fixed order; one table halves the sorting
    # behind it.
    pairs = F.embedding(rows, torch.cat([heads.key, heads.value], -1).flatten(0, 1))
    keys, values = pairs.split(heads.key.shape[-1], -1)
    return _Segments(order, bounds, keys, values, counts.flatten()[segment])


def _sort_queries(heads: Heads, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order of queries (N L,), bounds of segments in it (N M + 1,), and their groups (N, M)."""
    count, groups, most = len(heads.query), heads.lists.shape[1], _segments_of_head(heads, size)
    slots, order = (
        _of_head(heads.groups.clamp(min=0), groups).flatten().to(torch.int32).sort(stable=True)
    )
    slot = torch.arange(count * groups, device=slots.device, dtype=torch.int32)
    ends = torch.searchsorted(slots, slot, right=True).view(-1, groups)  # (N, G)
    starts = F.pad(ends.flatten()[:-1], (1, 0)).view(-1, groups)
    pieces = (ends - starts + size - 1) // size
    last = pieces.cumsum(-1)
    place = torch.arange(most, device=slots.device).expand(count, most).contiguous()
    group = torch.searchsorted(last, place, right=True).clamp(max=groups - 1)  # (N, M)
    begin = starts.gather(-1, group) + (place - (last - pieces).gather(-1, group)) * size
    begin = torch.minimum(begin, ends.gather(-1, group))  # left over: empty, at the end of the head
    return order, F.pad(begin.flatten(), (0, 1), value=len(order)).to(torch.int32), group


def _segment_size(heads: Heads, with_sums: bool) -> int:
    """T, the most queries of a segment."""
    return min(SEQUENCE if _takes_varlen(heads.query, with_sums) else PADDED, heads.query.shape[1])


def _segments_of_head(heads: Heads, size: int) -> int:
    """M, the most segments of a head, whatever its groups."""
    queries = heads.query.shape[1]
    some = min(heads.lists.shape[1], queries)
    return some + (queries - some) // size


def _takes_varlen(query: Tensor, with_sums: bool) -> bool:
    """Tell whether variable-length flash attention takes these queries."""
    half = (
        query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    )
    return HAS_VARLEN and query.is_cuda and half and not with_sums


def _attend_varlen(query: Tensor, segments: _Segments, size: int, scale: float) -> Tensor:
    """Run segments as sequences of variable length.

    A second sequence without queries follows each, for the keys that it must not see.
    """
    order, bounds, keys, values, counts = segments
    places, total = keys.shape[-2], keys[..., 0].numel()
    key_bounds = torch.arange(0, total, places, device=query.device, dtype=torch.int32)
    key_bounds = torch.stack(
        [key_bounds, key_bounds + counts.flatten().to(torch.int32)], -1
    ).flatten()
    key_bounds = F.pad(key_bounds, (0, 1), value=total)
    bounds = torch.cat(
        [bounds[:1], bounds[1:].repeat_interleave(2, output_size=2 * len(bounds) - 2)]
    )
    in_order = query.flatten(0, 1).index_select(0, order)
    k, v = keys.flatten(0, 2)[:, None], values.flatten(0, 2)[:, None]
    if scale < 0:  # which it does not take
        in_order, scale = -in_order, -scale
    # Sure to take sequences of length 0, forward and backward.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = varlen_attn(
            in_order[:, None], k, v, bounds, key_bounds, max_q=size, max_k=places, scale=scale
        )
    attended = cast(Tensor, found)[:, 0]
    return attended.new_empty(attended.shape).index_copy_(0, order, attended).view(query.shape)


def _attend_padded(
    query: Tensor, segments: _Segments, size: int, scale: float, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """Segments padded by the queries behind them, which find their own results elsewhere."""
    order, bounds, keys, values, counts = segments
    heads, most, places, _ = keys.shape
    number = torch.arange(len(order), device=order.device, dtype=torch.int32)
    rows = order[(bounds[:-1, None] + number[:size]).clamp(max=len(order) - 1)]  # (N M, T)
    padded = query.flatten(0, 1).index_select(0, rows.flatten()).view(heads * most, size, -1)
    seen = torch.arange(places, device=order.device) < counts.flatten()[:, None]
    mask = query.new_zeros(()).where(seen, torch.finfo(query.dtype).min)[:, None]  # (N M, 1, K)
    output, sums = _softmax_attention(
        padded, keys.flatten(0, 1), values.flatten(0, 1), mask, scale, with_sums
    )
    segment = torch.searchsorted(bounds[1:], number, right=True)
    place = segment * size + number - bounds[segment]
    place = torch.empty_like(place).index_copy_(0, order, place)  # of queries in their own order
    output = output.flatten(0, 1).index_select(0, place).view(query.shape)
    return output, sums.flatten().index_select(0, place).view(
        query.shape[:2]
    ) if with_sums else sums


def _of_head(ids: Tensor, each: int) -> Tensor:
    """Ids within the N heads of (N, ...) as ids within all, ``each`` a head."""
    first = torch.arange(0, len(ids) * each, each, device=ids.device)
    return ids + first.view(-1, *[1] * (ids.dim() - 1))
