"""Attention inside each group in plain PyTorch, forward and backward, on any device: the path of CPUs (Eq. 2).

Two regimes and one rule, :func:`is_dense_masked`. *Gathered*: queries are sorted by group and cut into tiles
that never straddle two groups; a tile attends to the gathered keys of its group, so time and memory follow L K and
nothing of size L x L exists. *Dense under a mask*, for few tokens, where gathering costs more than it saves: heads
attend densely under a mask whose rows are picked by group. Either way the work is cut into parts that stay in the
caches, each a small dense attention, and the backward pass computes the weights again instead of keeping them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops import flops
from dgt.ops.checks import full_precision
from dgt.ops.grouping import CHUNK_ELEMENTS

HIDDEN = -1e30  # added to the score of a key that a query must not see; finite, so that no row can become NaN


def is_dense_masked(queries: int, groups: int, top_k: int) -> bool:
    """Tell whether dense attention under a mask beats sorting and gathering: L <= 2 (K + G), as measured on CPUs."""
    return queries <= 2 * (top_k + groups)


@torch.library.custom_op("dgt::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every query over the keys of its group (Eq. 2); shapes as in :mod:`dgt.ops.reference`.

    Differentiable once. Repetitions give the same result and gradients, bit for bit.
    """
    return _forward(query, key, value, group_ids, key_ids, scale, key_bias, False)[0]


@torch.library.custom_op("dgt::attend_with_logsumexp", mutates_args=())
def attend_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and the (B, H, L) logarithm of every query's sum of exponentials; -inf where it sees no key."""
    return _forward(query, key, value, group_ids, key_ids, scale, key_bias, True)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    """Output, and the logarithms of the sums if they are wanted."""
    groups, keys = _by_head(group_ids, key_ids)
    dense = is_dense_masked(query.shape[2], *key_ids.shape[2:])
    with full_precision(query.device):
        forward = _attend_dense_masked if dense else _attend_gathered
        return forward(query, key, value, groups, keys, scale, key_bias, with_sums)


def _attend_dense_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    keys: Tensor,
    scale: float,
    key_bias: Tensor | None,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    """Dense under a mask: whole heads, densely under a mask."""
    q, k, v = (tensor.flatten(0, 1) for tensor in (query, key, value))  # (B H, L, D)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.empty(groups.shape if with_sums else 0, dtype=_wide(q), device=q.device)
    for part, bias in _heads(groups, keys, k.shape[1], key_bias, CHUNK_ELEMENTS):
        output[part], found = _small_attention(q[part], k[part], v[part], bias, scale, with_sums)
        if with_sums:
            sums[part] = found
    if groups.amin() < 0:
        output[groups < 0] = 0.0
        sums = sums.masked_fill(groups < 0, -torch.inf) if with_sums else sums
    return output.view(query.shape), sums.view(query.shape[:3] if with_sums else 0)


def _attend_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    keys: Tensor,
    scale: float,
    key_bias: Tensor | None,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    """Gathered: tiles of queries of one group over the gathered keys of that group."""
    rows, key_rows, value_rows = _with_empty_row(query), key.flatten(0, 2), value.flatten(0, 2)
    count = query.shape[:3].numel()
    output = query.new_zeros(count + 1, query.shape[3])  # the last row takes what empty slots yield
    sums = torch.full((count + 1 if with_sums else 1,), -torch.inf, dtype=_wide(query), device=query.device)
    for part in _tiled_parts(groups, keys, key.shape[2], key_bias, CHUNK_ELEMENTS):
        q, k, v = _pick(rows, part.queries), _pick(key_rows, part.keys), _pick(value_rows, part.keys)
        attended, found = _small_attention(q, k, v, part.bias, scale, with_sums)
        output.index_copy_(0, part.queries.flatten(), attended.flatten(0, 1))
        if with_sums:
            sums.index_copy_(0, part.queries.flatten(), found.flatten())
    return output[:-1].view(query.shape), sums[:-1].view(query.shape[:3] if with_sums else 0)


def _small_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """Attention of P times T queries: (P, T, D), and (P, T) logarithms of sums, which PyTorch's keeps to itself."""
    if not with_sums:
        mask = None if bias is None else bias.to(q.dtype)[:, None]
        output = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask, scale=scale)
        return output[:, 0], output
    wide = _wide(q)
    score = torch.bmm(q.to(wide) * scale, k.to(wide).transpose(1, 2))
    score = score if bias is None else score.add_(bias)
    sums = score.logsumexp(-1)
    return torch.bmm(score.sub_(sums[..., None]).exp_(), v.to(wide)).to(q.dtype), sums


register_flop_formula(torch.ops.dgt.attend)(flops.attend)
register_flop_formula(torch.ops.dgt.attend_with_logsumexp)(flops.attend)
attend.register_fake(lambda query, *_: query.new_empty(query.shape))
attend_with_logsumexp.register_fake(
    lambda query, *_: (query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=_wide(query)))
)


@torch.library.custom_op("dgt::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    grad_sums: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    key_bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in query, key, value and key_bias (empty where there is none)."""
    groups, keys = _by_head(group_ids, key_ids)
    dense = is_dense_masked(query.shape[2], *key_ids.shape[2:])
    backward = _backward_dense_masked if dense else _backward_gathered
    with full_precision(query.device):
        *grads, grad_bias = backward(grad, grad_sums, query, key, value, groups, keys, key_bias, scale)
    grad_q, grad_k, grad_v = (g.view(t.shape).to(t.dtype) for g, t in zip(grads, (query, key, value), strict=True))
    return grad_q, grad_k, grad_v, grad_bias if key_bias is None else grad_bias.view_as(key_bias).to(key_bias.dtype)


def _backward_dense_masked(
    grad: Tensor,
    grad_sums: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    keys: Tensor,
    key_bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """Dense under a mask: the gradients of whole heads, (B H, L, D) each and (B H, L)."""
    wide = _wide(query)
    q, k, v, g = (tensor.flatten(0, 1).to(wide) for tensor in (query, key, value, grad))
    s = None if grad_sums is None else grad_sums.flatten(0, 1).to(wide)
    if groups.amin() < 0:
        g = g.masked_fill(groups[..., None] < 0, 0.0)
        s = None if s is None else s.masked_fill(groups < 0, 0.0)
    grads = tuple(torch.empty(t.shape, dtype=wide, device=t.device) for t in (q, k, v))
    grad_bias = q.new_empty(0 if key_bias is None else k.shape[:2])
    # Parts of a quarter: the gradients keep four times the temporaries of the forward.
    for part, bias in _heads(groups, keys, k.shape[1], key_bias, CHUNK_ELEMENTS // 4):
        sums = None if s is None else s[part]
        *pieces, of_keys = _gradients(g[part], sums, q[part], k[part], v[part], bias, scale)
        for whole, piece in zip(grads, pieces, strict=True):
            whole[part] = piece
        if key_bias is not None:
            grad_bias[part] = of_keys
    return (*grads, grad_bias)


def _backward_gathered(
    grad: Tensor,
    grad_sums: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    keys: Tensor,
    key_bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gathered: the gradients of all tiles, added up for the keys that several of them see, (B H L, D) and (B H L)."""
    rows, grad_rows = _with_empty_row(query), _with_empty_row(grad)
    key_rows, value_rows = key.flatten(0, 2), value.flatten(0, 2)
    sum_rows = None if grad_sums is None else F.pad(grad_sums.flatten(), (0, 1))
    wide = _wide(query)
    grad_q, grad_k, grad_v = (torch.zeros_like(r, dtype=wide) for r in (rows, key_rows, value_rows))
    grad_bias = grad_k.new_zeros(0 if key_bias is None else len(grad_k))
    for part in _tiled_parts(groups, keys, key.shape[2], key_bias, CHUNK_ELEMENTS // 4):
        q, g = _pick(rows, part.queries).to(wide), _pick(grad_rows, part.queries).to(wide)
        k, v = _pick(key_rows, part.keys).to(wide), _pick(value_rows, part.keys).to(wide)
        sums = None if sum_rows is None else sum_rows[part.queries].to(wide)
        dq, dk, dv, of_keys = _gradients(g, sums, q, k, v, part.bias, scale)
        grad_q.index_copy_(0, part.queries.flatten(), dq.flatten(0, 1))
        grad_k.index_add_(0, part.keys.flatten(), dk.flatten(0, 1))
        grad_v.index_add_(0, part.keys.flatten(), dv.flatten(0, 1))
        if key_bias is not None:
            grad_bias.index_add_(0, part.keys.flatten(), of_keys.flatten())
    return grad_q[:-1], grad_k, grad_v, grad_bias


@_attend_backward.register_fake
def _(
    grad: Tensor,
    grad_sums: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    key_bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    none = grad.new_empty(0, dtype=_wide(query))
    return tuple(none if t is None else t.new_empty(t.shape) for t in (query, key, value, key_bias))


def _gradients(
    grad: Tensor, grad_sums: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of softmax(scale q k^T + bias) v for a batch of small attentions (the appendix's four products).

    In q, k, v, and in what is added to the scores of a key; ``grad_sums`` is the gradient in the logarithms of the
    sums, whose own gradient in the scores is the softmax.
    """
    score = torch.bmm(q * scale, k.transpose(1, 2))
    weight = (score if bias is None else score.add_(bias)).softmax(-1)
    grad_weight = torch.bmm(grad, v.transpose(1, 2))
    mean = (grad_weight * weight).sum(-1, keepdim=True)
    grad_score = grad_weight.sub_(mean if grad_sums is None else mean - grad_sums[..., None]).mul_(weight)
    grad_bias = mean if bias is None else grad_score.sum(1)
    grad_score = grad_score.mul_(scale)
    grad_v = torch.bmm(weight.transpose(1, 2), grad)
    return torch.bmm(grad_score, k), torch.bmm(grad_score.transpose(1, 2), q), grad_v, grad_bias


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.scale, key_bias = inputs
    ctx.save_for_backward(*tensors, key_bias)


def _backward(ctx, grad, grad_sums=None):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # once: gradient checkpointing unpacks what it recomputed a single time
    *grads, grad_bias = torch.ops.dgt.attend_backward(grad, grad_sums, *saved, ctx.scale)
    return (*grads, None, None, None, None if saved[5] is None else grad_bias)


attend.register_autograd(_backward, setup_context=_save)
attend_with_logsumexp.register_autograd(_backward, setup_context=_save)


def _wide(tokens: Tensor) -> torch.dtype:
    """The type of sums: float32, or float64 where that came."""
    return torch.promote_types(tokens.dtype, torch.float32)


class _Part(NamedTuple):
    """A batch of P tiles of T queries, as rows of the flattened (B H L, D) tensors."""

    queries: Tensor  # (P, T) rows of queries; the number of rows (one past the end) marks an empty slot
    keys: Tensor  # (P, K) rows of keys
    bias: Tensor | None  # (P, 1, K): what is added to the scores; HIDDEN at empty places


def _pick(rows: Tensor, ids: Tensor) -> Tensor:
    """Gather (N, D) rows by (P, T) ids: (P, T, D)."""
    return rows.index_select(0, ids.flatten()).view(*ids.shape, -1)


def _with_empty_row(tokens: Tensor) -> Tensor:
    """Flatten (B, H, L, D) to (B H L + 1, D); the last row, zero, stands for an empty slot."""
    return F.pad(tokens.flatten(0, 2), (0, 0, 0, 1))


def _by_head(group_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten ids to (B H, L) and (B H, G, K); a group without keys loses its queries: they become padding, -1."""
    groups, keys = group_ids.flatten(0, 1), key_ids.flatten(0, 1)
    if keys.amin() < 0:
        no_keys = (keys < 0).all(-1)
        groups = groups.masked_fill(no_keys.gather(1, groups.clamp(min=0)), -1)
    return groups, keys


def _heads(
    groups: Tensor, keys: Tensor, tokens: int, key_bias: Tensor | None, size: int
) -> Iterator[tuple[slice, Tensor]]:
    """Cut heads into parts of about ``size`` scores: heads, and their (heads, L, tokens) mask to add."""
    some_empty = bool(keys.amin() < 0)
    for part in _slices(len(groups), groups.shape[1] * tokens, size):
        # Where places are empty (-1), one column more than there are keys takes them, and is cut off.
        hidden = torch.full((*keys[part].shape[:2], tokens + some_empty), HIDDEN, device=keys.device)
        hidden.scatter_(-1, keys[part].where(keys[part] >= 0, tokens) if some_empty else keys[part], 0.0)
        bias = rows_of_groups(hidden[..., :tokens], groups[part])
        yield part, bias if key_bias is None else bias + key_bias.flatten(0, 1)[part, None]


def rows_of_groups(table: Tensor, groups: Tensor) -> Tensor:
    """Pick for every query its group's row: (N, G, S) and (N, L) give (N, L, S); padding, -1, gets any row."""
    first = torch.arange(len(table), device=table.device)[:, None] * table.shape[1]
    rows = table.flatten(0, 1).index_select(0, (groups.clamp(min=0) + first).flatten())
    return rows.view(*groups.shape, -1)


def _tiled_parts(groups: Tensor, keys: Tensor, tokens: int, key_bias: Tensor | None, size: int) -> Iterator[_Part]:
    """Gathered: tiles of queries of one group, each with the selected keys of that group."""
    heads, num_groups, top_k = keys.shape
    queries, segment = _tiles(groups, num_groups)
    first = torch.arange(heads, device=keys.device)[:, None, None] * tokens
    key_rows = (keys.clamp(min=0) + first).flatten(0, 1)  # (B H G, K)
    empty = (keys < 0).flatten(0, 1)
    bias = None if key_bias is None else key_bias.flatten()[key_rows][:, None]  # (B H G, 1, K)
    if empty.any():
        bias = (torch.zeros(1, device=keys.device) if bias is None else bias).where(~empty[:, None], HIDDEN)
    for part in _slices(len(segment), queries.shape[1] * top_k, size):
        chosen = segment[part]
        yield _Part(queries[part], key_rows[chosen], None if bias is None else bias[chosen])


def _tiles(groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sort queries by (head, group) and cut every such segment into tiles.

    Args:
        groups: (B H, L) group of every query, -1 for padding.
        num_groups: G.

    Returns:
        (tiles, T) rows of the flattened queries, B H L in empty slots; (tiles,) the segment ``head G + group`` of each.
    """
    heads, count = groups.shape
    size = 32 if count < 48 * num_groups else 64  # small groups would leave large tiles half empty
    first = torch.arange(heads, device=groups.device)[:, None] * num_groups
    segments = torch.where(groups < 0, heads * num_groups, groups + first).flatten()
    order = segments.argsort(stable=True)
    lengths = segments.bincount(minlength=heads * num_groups + 1)[:-1]
    ends = lengths.cumsum(0)
    tiles = (lengths + size - 1) // size
    segment = torch.repeat_interleave(torch.arange(len(tiles), device=groups.device), tiles)
    nth = torch.arange(len(segment), device=groups.device) - (tiles.cumsum(0) - tiles)[segment]
    slot = ((ends - lengths)[segment] + nth * size)[:, None] + torch.arange(size, device=groups.device)
    rows = order[slot.clamp(max=len(order) - 1)]
    return torch.where(slot < ends[segment][:, None], rows, heads * count), segment


def _slices(count: int, elements: int, size: int) -> Iterator[slice]:
    """Cut ``count`` items of so many elements each into runs of about ``size`` elements."""
    step = max(1, size // elements)
    return (slice(start, start + step) for start in range(0, count, step))
