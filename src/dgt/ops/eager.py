"""Attention inside each group in plain PyTorch, forward and backward, on any device: the path of CPUs (Eq. 2).

Two regimes and one rule, :func:`is_dense_masked`. *Gathered*: queries are sorted by group and cut into tiles
that never straddle two groups; a tile attends to the gathered keys of its group, so time and memory follow L K and
nothing of size L x L exists. *Dense under a mask*, for few
tokens, where gathering costs more than it saves: heads attend densely under a
mask whose rows are picked by group. Either way the work is cut into parts that stay in the caches, each a small dense
attention, and the backward pass computes the weights again instead of keeping them.
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


def attend(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float) -> Tensor:
    """Softmax attention of every query over the keys of its group (Eq. 2); shapes as in :mod:`dgt.ops.reference`.

    Differentiable once. Repetitions give the same result and gradients, bit for bit.
    """
    output: Tensor = torch.ops.dgt.attend(query, key, value, group_ids, key_ids, scale)
    return output


@torch.library.custom_op("dgt::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float) -> Tensor:
    groups, keys = _by_head(group_ids, key_ids)
    with full_precision(query.device):
        if is_dense_masked(query.shape[2], *key_ids.shape[2:]):
            return _attend_dense_masked(query, key, value, groups, keys, scale)
        return _attend_gathered(query, key, value, groups, keys, scale)


def _attend_dense_masked(
    query: Tensor, key: Tensor, value: Tensor, groups: Tensor, keys: Tensor, scale: float
) -> Tensor:
    """Dense under a mask: whole heads, densely under a mask."""
    q, k, v = (tensor.flatten(0, 1)[:, None] for tensor in (query, key, value))  # (B H, 1, L, D)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for part, bias in _heads(groups, keys, k.shape[2], CHUNK_ELEMENTS):
        mask = bias.to(q.dtype)[:, None]
        output[part] = F.scaled_dot_product_attention(q[part], k[part], v[part], attn_mask=mask, scale=scale)
    if groups.amin() < 0:
        output[:, 0][groups < 0] = 0.0
    return output.view(query.shape)


def _attend_gathered(query: Tensor, key: Tensor, value: Tensor, groups: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Gathered: tiles of queries of one group over the gathered keys of that group."""
    rows = _Rows(query, key, value)
    output = query.new_zeros(query.shape[:3].numel() + 1, query.shape[3])  # the last row takes what empty slots yield
    for part in _tiled_parts(groups, keys, key.shape[2], CHUNK_ELEMENTS):
        q, k, v = rows.gather(part)
        bias = None if part.bias is None else part.bias.to(q.dtype)[:, None]
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=bias, scale=scale)
        output.index_copy_(0, part.queries.flatten(), attended.flatten(0, 2))
    return output[:-1].view(query.shape)


register_flop_formula(torch.ops.dgt.attend)(flops.attend)


_attend.register_fake(lambda query, *_: query.new_empty(query.shape))


@torch.library.custom_op("dgt::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups, keys = _by_head(group_ids, key_ids)
    dense = is_dense_masked(query.shape[2], *key_ids.shape[2:])
    with full_precision(query.device):
        grads = (_backward_dense_masked if dense else _backward_gathered)(grad, query, key, value, groups, keys, scale)
    grad_q, grad_k, grad_v = (g.view(t.shape).to(t.dtype) for g, t in zip(grads, (query, key, value), strict=True))
    return grad_q, grad_k, grad_v


def _backward_dense_masked(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, groups: Tensor, keys: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Dense under a mask: the gradients of whole heads, (B H, L, D) each."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v, g = (tensor.flatten(0, 1).to(wide) for tensor in (query, key, value, grad))
    if groups.amin() < 0:
        g = g.masked_fill(groups[..., None] < 0, 0.0)
    grads = tuple(torch.empty(t.shape, dtype=wide, device=t.device) for t in (q, k, v))
    # Parts of a quarter: the gradients keep four times the temporaries of the forward.
    for part, bias in _heads(groups, keys, k.shape[1], CHUNK_ELEMENTS // 4):
        for whole, piece in zip(grads, _gradients(g[part], q[part], k[part], v[part], bias, scale), strict=True):
            whole[part] = piece
    return grads


def _backward_gathered(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, groups: Tensor, keys: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Gathered: the gradients of all tiles, added up for the keys that several of them see, (B H L, D) each."""
    rows, grad_rows = _Rows(query, key, value), _with_empty_row(grad)
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_q, grad_k, grad_v = (torch.zeros_like(r, dtype=wide) for r in (grad_rows, rows.key, rows.value))
    for part in _tiled_parts(groups, keys, key.shape[2], CHUNK_ELEMENTS // 4):
        q, k, v = (t.to(wide) for t in rows.gather(part))
        g = grad_rows.index_select(0, part.queries.flatten()).view(q.shape).to(wide)
        dq, dk, dv = _gradients(g, q, k, v, part.bias, scale)
        grad_q.index_copy_(0, part.queries.flatten(), dq.flatten(0, 1))
        grad_k.index_add_(0, part.keys.flatten(), dk.flatten(0, 1))
        grad_v.index_add_(0, part.keys.flatten(), dv.flatten(0, 1))
    return grad_q[:-1], grad_k, grad_v


_attend_backward.register_fake(lambda _, *qkv: tuple(t.new_empty(t.shape) for t in qkv[:3]))


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of softmax(scale q k^T + bias) v for a batch of small attentions (the appendix's four products)."""
    score = torch.bmm(q * scale, k.transpose(1, 2))
    weight = (score if bias is None else score.add_(bias)).softmax(-1)
    grad_weight = torch.bmm(grad, v.transpose(1, 2))
    mean = (grad_weight * weight).sum(-1, keepdim=True)
    grad_score = grad_weight.sub_(mean).mul_(weight).mul_(scale)
    grad_v = torch.bmm(weight.transpose(1, 2), grad)
    return torch.bmm(grad_score, k), torch.bmm(grad_score.transpose(1, 2), q), grad_v


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    grads = torch.ops.dgt.attend_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*grads, None, None, None)


_attend.register_autograd(_backward, setup_context=_save)


class _Part(NamedTuple):
    """A batch of P tiles of T queries, as rows of the flattened (B H L, D) tensors."""

    queries: Tensor  # (P, T) rows of queries; the number of rows (one past the end) marks an empty slot
    keys: Tensor  # (P, K) rows of keys
    bias: Tensor | None  # (P, 1, K) float32: HIDDEN at empty places


class _Rows:
    """The operator's tensors with batch, heads and tokens flattened, so that any mix of rows is one gather."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.query, self.key, self.value = _with_empty_row(query), key.flatten(0, 2), value.flatten(0, 2)

    def gather(self, part: _Part) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = part.queries.flatten(), part.keys.flatten()
        return (
            self.query.index_select(0, queries).view(*part.queries.shape, -1),
            self.key.index_select(0, keys).view(*part.keys.shape, -1),
            self.value.index_select(0, keys).view(*part.keys.shape, -1),
        )


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


def _heads(groups: Tensor, keys: Tensor, tokens: int, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Cut heads into parts of about ``size`` scores: heads, and their (heads, L, tokens) mask to add."""
    some_empty = bool(keys.amin() < 0)
    for part in _slices(len(groups), groups.shape[1] * tokens, size):
        # Where places are empty (-1), one column more than there are keys takes them, and is cut off.
        hidden = torch.full((*keys[part].shape[:2], tokens + some_empty), HIDDEN, device=keys.device)
        hidden.scatter_(-1, keys[part].where(keys[part] >= 0, tokens) if some_empty else keys[part], 0.0)
        yield part, rows_of_groups(hidden[..., :tokens], groups[part])


def rows_of_groups(table: Tensor, groups: Tensor) -> Tensor:
    """Pick for every query its group's row: (N, G, S) and (N, L) give (N, L, S); padding, -1, gets any row."""
    first = torch.arange(len(table), device=table.device)[:, None] * table.shape[1]
    rows = table.flatten(0, 1).index_select(0, (groups.clamp(min=0) + first).flatten())
    return rows.view(*groups.shape, -1)


def _tiled_parts(groups: Tensor, keys: Tensor, tokens: int, size: int) -> Iterator[_Part]:
    """Gathered: tiles of queries of one group, each with the selected keys of that group."""
    heads, num_groups, top_k = keys.shape
    queries, segment = _tiles(groups, num_groups)
    first = torch.arange(heads, device=keys.device)[:, None, None] * tokens
    key_rows = (keys.clamp(min=0) + first).flatten(0, 1)  # (B H G, K)
    empty = (keys < 0).flatten(0, 1)
    bias = torch.zeros(1, device=keys.device).where(~empty, HIDDEN)[:, None] if empty.any() else None
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
