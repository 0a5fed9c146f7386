"""The whole attention as one operator for CPUs, without ids and gradients: what a model that predicts works with.

Groups and keys are those of :func:`dgt.group_queries` and :func:`dgt.select_keys`, ties included, but with few tokens
the comparison that finds a group's keys is the mask of its queries. With many tokens the three steps run in turn.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops import flops
from dgt.ops.checks import full_precision
from dgt.ops.eager import HIDDEN, is_dense_masked, rows_of_groups
from dgt.ops.grouping import nearest_group
from dgt.ops.selection import mark_unselected

CHUNK_ELEMENTS = 1 << 22  # of the masks of a part; they are read once, so larger parts than for gathered tiles pay

# Not torch.library.custom_op: without gradients the bare registration does, at a tenth of the cost of a call.
torch.library.define(
    "dgt::attention", "(Tensor qkv, Tensor centroids, SymInt top_k, float scale, Tensor? key_mask) -> Tensor"
)


@torch.library.register_fake("dgt::attention")
def _(qkv: Tensor, centroids: Tensor, top_k: int, scale: float, key_mask: Tensor | None) -> Tensor:
    _, batch, heads, tokens, channels = qkv.shape
    return qkv.new_empty(batch, tokens, heads * channels)


@register_flop_formula(torch.ops.dgt.attention)
def _(qkv: Any, centroids: Any, top_k: int, *_: Any, **__: Any) -> int:
    return flops.attention(qkv[1:], qkv[1:], qkv[1:], centroids, top_k)


@torch.library.impl("dgt::attention", "CPU")
def _attention(qkv: Tensor, centroids: Tensor, top_k: int, scale: float, key_mask: Tensor | None) -> Tensor:
    """Attend from every query to the keys of its group (Eqs. 1-2), without gradients, contiguous operands.

    Maps (3, B, H, L, D) to (B, L, H D); ``centroids`` (H, G, D) have unit norm; ``key_mask`` (B, L) is True
    where a token is real, the rest becomes zero. ValueError for NaN in query or key where k < L.
    """
    _, batch, heads, tokens, channels = qkv.shape
    groups, count = centroids.shape[1], min(top_k, tokens)
    step = max(1, CHUNK_ELEMENTS // (heads * tokens * max(tokens, groups)))
    output = qkv.new_empty(batch, tokens, heads, channels)
    with full_precision(qkv.device):
        if not is_dense_masked(tokens, groups, count):
            query, key, value = qkv.unbind(0)
            ids = torch.ops.dgt.group_queries(query, centroids, key_mask)
            keys = torch.ops.dgt.select_keys(centroids, key, top_k, key_mask)
            attended: Tensor = torch.ops.dgt.attend(query, key, value, ids, keys, scale)
            return attended.transpose(1, 2).flatten(2)
        for start in range(0, batch, step):
            part = slice(start, start + step)
            mask = None if key_mask is None else key_mask[part]
            output[part] = _attend_dense_masked(qkv[:, part], centroids, count, scale, mask).transpose(1, 2)
    return output.flatten(2)


def _attend_dense_masked(qkv: Tensor, centroids: Tensor, count: int, scale: float, mask: Tensor | None) -> Tensor:
    """Few tokens: attention over all keys of a head, under the mask of each query's group."""
    query, key, value = qkv.unbind(0)
    if mask is None and count == key.shape[2]:  # every group has every key
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    scores = torch.matmul(centroids.float(), qkv[:2].float().transpose(-1, -2))
    of_queries, of_keys = scores.unbind(0)  # (B, H, G, L)
    if mask is not None:
        of_keys.masked_fill_(~mask[:, None, None], -torch.inf)
    groups = nearest_group(of_queries)
    hidden = mark_unselected(of_keys, count).mul_(HIDDEN).to(query.dtype)
    bias = rows_of_groups(hidden.flatten(0, 1), groups.flatten(0, 1)).view(*groups.shape, -1)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    return attended if mask is None else attended.masked_fill(~mask[:, None, :, None], 0.0)


attention = torch.ops.dgt.attention.default
