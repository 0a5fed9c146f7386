"""Prefix tokens (class, registers, text): in no group; they see all tokens and all see them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops.checks import full_precision
from dgt.ops.dense import dense_attention


def prepend_prefix(key_ids: Tensor, num_prefix_tokens: int, key_mask: Tensor | None) -> Tensor:
    """Make lists of the keys after the prefix lists of all keys, the prefix first.

    Args:
        key_ids: (B, H, G, K) int64, counted from the first token after the prefix; -1 for an empty
            place.
        num_prefix_tokens: P.
        key_mask: optional bool (B, L), True where a token is real.

    Returns:
        (B, H, G, P + K) int64, counted from the first token; -1 also in the place of a prefix token
        that is not real.
    """
    if not num_prefix_tokens:
        return key_ids
    prefix = torch.arange(num_prefix_tokens, device=key_ids.device)
    if key_mask is not None:
        prefix = prefix.where(key_mask[:, :num_prefix_tokens], -1)[:, None, None]
    prefix = prefix.expand(*key_ids.shape[:3], num_prefix_tokens)
    return torch.cat([prefix, (key_ids + num_prefix_tokens).where(key_ids >= 0, -1)], dim=-1)


def join_prefix(
    output: Tensor,
    group_ids: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Let the prefix attend to all tokens, and put it before the results of the others.

    Args:
        output: (B, H, L - P, D) of the tokens after the prefix.
        group_ids: (B, H, L - P) int64, theirs.
        query, key, value: (B, H, L, D), or keys and values of S other tokens.
        scale: factor on the scores.
        query_mask: optional bool (B, L), True where a query is real; others yield zero.
        key_mask: optional bool (B, S), True where a key is real.

    Returns:
        (B, H, L, D) output and (B, H, L) groups, -1 for the prefix.
    """
    prefix = query.shape[2] - output.shape[2]
    sees = None if key_mask is None else key_mask[:, None, None]
    with full_precision(query.device):
        whole = dense_attention(query[:, :, :prefix], key, value, sees, scale=scale)
    if query_mask is not None:
        whole = whole.masked_fill(~query_mask[:, None, :prefix, None], 0.0)
    return torch.cat([whole, output], dim=2), F.pad(group_ids, (prefix, 0), value=-1)
