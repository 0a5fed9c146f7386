"""Attention inside each group in plain PyTorch, forward and backward, on any device: the path of CPUs (Eq. 2).

Two regimes and one rule, :func:`is_dense_masked`. *Gathered*: queries are sorted by group and cut into tiles
that never straddle two groups; a tile attends to the gathered keys of its group, so time and memory follow L K and
nothing of size L x L exists. *Dense under a mask*, for few tokens, where gathering costs more than it saves: heads
attend densely under a mask whose rows are picked by group. Either way the work is cut into parts that stay in the
caches, each a small dense attention, which threads share (:mod:`dgt.ops.parts`), and the backward pass computes the
weights again instead of keeping them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops import flops
from dgt.ops.checks import full_precision
from dgt.ops.parts import MOST_SCORES, SHARED, cut, part_size, run_parts

HIDDEN = -1e30  # added to the score of a key that a query must not see; finite, so that no row can become NaN


class _Heads(NamedTuple):
    """What is attended to and how, with images and heads flattened to N heads."""

    query: Tensor  # (N, L, D)
    key: Tensor  # (N, S, D)
    value: Tensor  # (N, S, D)
    groups: Tensor  # (N, L), -1 for padding
    keys: Tensor  # (N, G, K), -1 for an empty place
    scale: float
    bias: Tensor | None  # (N, S)
    dense: bool  # the regime

    def some(self, heads: slice) -> "_Heads":
        return _Heads(*cast(Any, (x[heads] if isinstance(x, Tensor) else x for x in self)))


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
    return _forward(query, _by_head(query, key, value, group_ids, key_ids, scale, key_bias), False)[0]


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
    return _forward(query, _by_head(query, key, value, group_ids, key_ids, scale, key_bias), True)


def _forward(query: Tensor, x: _Heads, with_sums: bool) -> tuple[Tensor, Tensor]:
    """Output, and the logarithms of the sums if they are wanted."""
    with full_precision(query.device):
        output, sums = (_attend_dense_masked if x.dense else _attend_gathered)(x, with_sums)
    return output.view(query.shape), sums.view(query.shape[:3] if with_sums else 0)


def _attend_dense_masked(x: _Heads, with_sums: bool) -> tuple[Tensor, Tensor]:
    """Dense under a mask: whole heads, densely under a mask."""
    output = torch.empty(x.query.shape, dtype=x.query.dtype, device=x.query.device)
    sums = torch.empty(x.groups.shape if with_sums else 0, dtype=_wide(output), device=output.device)

    def work(heads: slice) -> None:
        part = x.some(heads)
        output[heads], found = _small_attention(*part[:3], _mask(part), x.scale, with_sums)
        if with_sums:
            sums[heads] = found

    run_parts(work, _runs_of_heads(x), output.device, x.groups.numel())
    if _some_negative(x.groups):
        output[x.groups < 0] = 0.0
        sums = sums.masked_fill(x.groups < 0, -torch.inf) if with_sums else sums
    return output, sums


def _attend_gathered(x: _Heads, with_sums: bool) -> tuple[Tensor, Tensor]:
    """Gathered: tiles of queries of one group over the gathered keys of that group."""
    rows, key_rows, value_rows = (tensor.flatten(0, 1) for tensor in x[:3])
    tiles = _cut_into_tiles(x)
    output = (rows.new_zeros if tiles.padding else rows.new_empty)((len(rows) + 1, rows.shape[1]))  # one for no query
    sums = torch.full((len(output) if with_sums else 1,), -torch.inf, dtype=_wide(rows), device=rows.device)

    def work(some: slice) -> None:
        queries, keys, bias = tiles.part(some)
        q = _pick(rows, queries.clamp(max=len(rows) - 1))
        attended, found = _small_attention(q, _pick(key_rows, keys), _pick(value_rows, keys), bias, x.scale, with_sums)
        output.index_copy_(0, queries.flatten(), attended.flatten(0, 1))
        if with_sums:
            sums.index_copy_(0, queries.flatten(), found.flatten())

    run_parts(work, tiles.parts, rows.device, len(rows))
    return output[:-1], sums[:-1]


def _small_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """Attention of P times T queries: (P, T, D), and (P, T) logarithms of sums, which PyTorch's keeps to itself."""
    if not with_sums:
        # CPUs add float32 to scores of half precision; a remainder's constant in bfloat16 would be a hundredth off.
        mask = None if bias is None else bias.to(_wide(q) if q.device.type == "cpu" else q.dtype)[:, None]
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
    x = _by_head(query, key, value, group_ids, key_ids, scale, key_bias)
    g, s = grad.flatten(0, 1), None if grad_sums is None else grad_sums.flatten(0, 1)
    grad_q, grad_k, grad_v, grad_bias = _empty_gradients(query, key, value, key_bias)

    def work(heads: slice) -> None:
        backward = _backward_dense_masked if x.dense else _backward_gathered
        pieces = backward(g[heads], None if s is None else s[heads], x.some(heads))
        for whole, piece in zip((grad_q, grad_k, grad_v, grad_bias), pieces, strict=True):
            if whole.numel():
                whole.flatten(0, 1)[heads] = piece

    with full_precision(query.device):
        run_parts(work, _runs_of_heads(x), query.device, x.groups.numel())
    return grad_q, grad_k, grad_v, grad_bias


def _empty_gradients(*inputs: Tensor | None) -> Iterator[Tensor]:
    return (torch.empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs)


def _backward_dense_masked(grad: Tensor, grad_sums: Tensor | None, x: _Heads) -> tuple[Tensor, ...]:
    """Dense under a mask: the gradients in query, key, value and bias of N heads."""
    g, q, k, v = (tensor.to(_wide(grad)) for tensor in (grad, *x[:3]))
    if _some_negative(x.groups):
        g = g.masked_fill(x.groups[..., None] < 0, 0.0)
        grad_sums = None if grad_sums is None else grad_sums.masked_fill(x.groups < 0, 0.0)
    return _gradients(g, None if grad_sums is None else grad_sums.to(g), q, k, v, _mask(x), x.scale)


def _backward_gathered(grad: Tensor, grad_sums: Tensor | None, x: _Heads) -> tuple[Tensor, ...]:
    """Gathered: the same gradients; those of keys add up over all tiles."""
    rows, grad_rows = _with_empty_row(x.query), _with_empty_row(grad)
    key_rows, value_rows = x.key.flatten(0, 1), x.value.flatten(0, 1)
    sum_rows = None if grad_sums is None else F.pad(grad_sums.flatten(), (0, 1))
    wide = _wide(grad)
    grad_q, grad_k, grad_v = (torch.zeros_like(r, dtype=wide) for r in (rows, key_rows, value_rows))
    grad_bias = grad_k.new_zeros(len(grad_k))
    tiles = _cut_into_tiles(x)
    for queries, keys, bias in map(tiles.part, tiles.parts):
        q, g = _pick(rows, queries).to(wide), _pick(grad_rows, queries).to(wide)
        k, v = _pick(key_rows, keys).to(wide), _pick(value_rows, keys).to(wide)
        sums = None if sum_rows is None else sum_rows[queries].to(wide)
        dq, dk, dv, of_keys = _gradients(g, sums, q, k, v, bias, x.scale)
        grad_q.index_copy_(0, queries.flatten(), dq.flatten(0, 1))
        grad_k.index_add_(0, keys.flatten(), dk.flatten(0, 1))
        grad_v.index_add_(0, keys.flatten(), dv.flatten(0, 1))
        if x.bias is not None:
            grad_bias.index_add_(0, keys.flatten(), of_keys.flatten())
    found = (grad_q[:-1], x.query), (grad_k, x.key), (grad_v, x.value), (grad_bias, x.key[..., 0])
    return tuple(gradient.view(like.shape) for gradient, like in found)


_attend_backward.register_fake(lambda grad, sums, q, k, v, ids, keys, bias, _: tuple(_empty_gradients(q, k, v, bias)))


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
    *tensors, key_ids, ctx.scale, key_bias = inputs
    small = torch.int16 if tensors[1].shape[2] <= 1 << 15 else torch.int32  # many groups have as many ids as features
    ctx.save_for_backward(*tensors, key_ids.to(small), key_bias)


def _backward(ctx, grad, grad_sums=None):  # type: ignore[no-untyped-def]
    *tensors, key_ids, key_bias = ctx.saved_tensors  # once: checkpointing unpacks what it recomputed a single time
    *grads, grad_bias = torch.ops.dgt.attend_backward(grad, grad_sums, *tensors, key_ids.long(), key_bias, ctx.scale)
    return (*grads, None, None, None, None if key_bias is None else grad_bias)


attend.register_autograd(_backward, setup_context=_save)
attend_with_logsumexp.register_autograd(_backward, setup_context=_save)


def _wide(tokens: Tensor) -> torch.dtype:
    """The type of sums: float32, or float64 where that came."""
    return torch.promote_types(tokens.dtype, torch.float32)


def _pick(rows: Tensor, ids: Tensor) -> Tensor:
    """Gather (N, D) rows by (P, T) ids: (P, T, D)."""
    return rows.index_select(0, ids.flatten()).view(*ids.shape, -1)


def _with_empty_row(tokens: Tensor) -> Tensor:
    """Flatten (N, L, D) to (N L + 1, D); the last row, zero, stands for an empty slot."""
    return F.pad(tokens.flatten(0, 1), (0, 0, 0, 1))


def _by_head(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float, key_bias: Tensor | None
) -> _Heads:
    """Flatten images and heads; a group without keys loses its queries: they become padding, -1."""
    q, k, v, groups, keys = (tensor.flatten(0, 1) for tensor in (query, key, value, group_ids, key_ids))
    no_keys = keys[..., 0] < 0  # it takes an empty first place to have none
    if no_keys.any():
        no_keys = (keys < 0).all(-1)
        groups = groups.masked_fill(no_keys.gather(1, groups.clamp(min=0)), -1)
    dense = is_dense_masked(q.shape[1], *keys.shape[1:])
    return _Heads(q, k, v, groups, keys, scale, None if key_bias is None else key_bias.flatten(0, 1), dense)


def _runs_of_heads(x: _Heads) -> list[slice]:
    """Cut heads into runs that threads share, by the size of their masks."""
    if x.dense:
        scores = x.groups.shape[1] * x.key.shape[1]
        return cut(len(x.groups), part_size(len(x.groups) * scores, x.groups.numel(), MOST_SCORES) // scores)
    # Tiles that add up gradients of one key are of one head. Too few heads stay together, and threads share operators.
    each = len(x.groups) // torch.get_num_threads() if x.groups.numel() >= SHARED else 0
    return cut(len(x.groups), max(1, each // 4) if each else len(x.groups))


def _mask(x: _Heads) -> Tensor:
    """What to add to the scores of N heads, (N, L, S)."""
    tokens, empty = x.key.shape[1], _some_negative(x.keys)
    # Where places are empty (-1), one column more than there are keys takes them, and is cut off.
    hidden = torch.full((*x.keys.shape[:2], tokens + empty), HIDDEN, device=x.keys.device)
    first = torch.arange(0, hidden.numel(), hidden.shape[2], device=hidden.device).view(*hidden.shape[:2], 1)
    places = first + (x.keys.where(x.keys >= 0, tokens) if empty else x.keys)
    hidden.view(-1).index_fill_(0, places.flatten(), 0.0)  # half the time of scatter_
    mask = rows_of_groups(hidden[..., :tokens], x.groups)
    return mask if x.bias is None else mask + x.bias[:, None]


def rows_of_groups(table: Tensor, groups: Tensor) -> Tensor:
    """Pick for every query its group's row: (N, G, S) and (N, L) give (N, L, S); padding, -1, gets any row."""
    first = torch.arange(len(table), device=table.device)[:, None] * table.shape[1]
    return _pick(table.flatten(0, 1), groups.clamp(min=0) + first)


class _Tiles(NamedTuple):
    """Queries of a group as a tile, or as several if they are many; of one size, a third of the slots stayed empty."""

    order: Tensor  # (N L,) rows of queries, sorted by head and group
    first: Tensor  # (tiles,) place in that order at which a tile begins, the longest first
    length: Tensor  # (tiles,)
    segment: Tensor  # (tiles,) `head G + group`
    keys: Tensor  # (N G, K) rows of keys
    bias: Tensor | None  # (N G, 1, K): what is added to the scores; HIDDEN at empty places
    padding: int  # queries of no tile
    parts: list[slice]

    def part(self, run: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of P tiles of up to T queries (P, T), N L in empty slots, rows of their keys (P, K), bias (P, 1, K)."""
        first, length, segment = self.first[run, None], self.length[run, None], self.segment[run]
        slot = torch.arange(int(length[0, 0]), device=first.device)
        rows = self.order[(first + slot).clamp(max=len(self.order) - 1)].where(slot < length, len(self.order))
        return rows, self.keys[segment], None if self.bias is None else self.bias[segment]


def _cut_into_tiles(x: _Heads) -> _Tiles:
    """Sort the queries of N heads by group, and cut them; by numpy, which opens no parallel regions."""
    (heads, groups, top_k), tokens, device = x.keys.shape, x.groups.shape[1], x.keys.device
    head = np.arange(heads)[:, None]
    slots = np.where((ids := x.groups.cpu().numpy()) < 0, groups, ids)  # padding comes last in its head
    order = np.argsort(slots.astype(np.uint16 if groups < 1 << 16 else np.int64), axis=-1, kind="stable")  # radix sort
    numbers = np.bincount((slots + head * (groups + 1)).ravel(), minlength=heads * (groups + 1)).reshape(heads, -1)
    count, start = (t[:, :-1].ravel() for t in (numbers, numbers.cumsum(1) - numbers + head * tokens))
    size = part_size(tokens * heads * top_k, tokens * heads)
    pieces = -(-count // max(64, size // top_k))
    longest = -(-count // np.maximum(pieces, 1))
    segment = np.repeat(np.arange(len(count)), pieces)
    before = (np.arange(len(segment)) - (pieces.cumsum() - pieces)[segment]) * longest[segment]
    length = np.minimum(longest[segment], count[segment] - before)
    by_length = np.argsort(-length, kind="stable")
    keys = x.keys.cpu().numpy()
    rows = (np.maximum(keys, 0) + head[..., None] * x.key.shape[1]).reshape(-1, top_k)
    arrays = (order + head * tokens).ravel(), *(t[by_length] for t in (start[segment] + before, length, segment)), rows
    in_order, first, lengths, segments, key_rows = (torch.from_numpy(t).to(device) for t in arrays)
    bias = None if x.bias is None else x.bias.flatten()[key_rows][:, None]
    if keys.min() < 0:
        bias = (x.query.new_zeros(1) if bias is None else bias).where(x.keys.flatten(0, 1)[:, None] >= 0, HIDDEN)
    parts = _runs_of_tiles(length[by_length], top_k, size)
    return _Tiles(in_order, first, lengths, segments, key_rows, bias, int(numbers[:, -1].sum()), parts)


def _runs_of_tiles(length: Any, top_k: int, size: int) -> list[slice]:
    """Cut tiles, the longest first, into parts of about ``size`` scores: none is much shorter than a part's first."""
    parts, begin = [], 0
    while begin < len(length):
        most = int(length[begin])
        alike = int(np.searchsorted(-length, 8 - int(0.8 * most), side="right"))  # a few slots or a fifth shorter
        parts.append(slice(begin, min(alike, begin + max(1, size // (most * top_k)))))
        begin = parts[-1].stop
    return parts


def _some_negative(ids: Tensor) -> bool:
    """Whether there is padding or an empty place, -1; numpy finds out in a tenth of the time of PyTorch."""
    return bool((ids.numpy() if ids.device.type == "cpu" else ids).min() < 0)
