"""The whole operator in a few dense lines: the oracle that every other backend is tested against (Eqs. 1-2).

The contract is that of :mod:`dgt.ops.attention`; arguments are checked already. Any dtype, any device, (B, H, L, L) in
memory, attention twice differentiable. Nothing here is shared with another backend. Read it first.
"""

import torch
from torch import Tensor

from dgt.ops.checks import check_no_nan, full_precision


def group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Assign (B, H, L, D) queries to the nearest of (H, G, D) centroids: (B, H, L) int64, -1 at padding."""
    with full_precision(query.device):
        scores = query.detach().float() @ centroids.detach().float().mT  # (B, H, L, G)
    check_no_nan("query", scores)
    group_ids = scores.argmax(-1)  # of equal scores the first
    return group_ids if key_mask is None else group_ids.where(key_mask[:, None], -1)


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Select the best of (B, H, L, D) keys for (H, G, D) centroids: (B, H, G, min(top_k, L)) int64, then -1 (Eq. 1)."""
    tokens = key.shape[2]
    with full_precision(key.device):
        scores = centroids.detach().float() @ key.detach().float().mT  # (B, H, G, L)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    check_no_nan("key", scores)
    ranking = scores.argsort(dim=-1, descending=True, stable=True)  # of equal scores the first
    ranking = ranking.masked_fill(scores.gather(-1, ranking).isneginf(), tokens)  # padding is sent behind all keys
    key_ids = ranking[..., :top_k].sort(-1).values
    return key_ids.masked_fill(key_ids == tokens, -1)


def attend(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float) -> Tensor:
    """Softmax attention of every query over the keys of its group (Eq. 2), as dense attention under a mask.

    Args:
        query, key, value: (B, H, L, D).
        group_ids: (B, H, L) int64, -1 for padding.
        key_ids: (B, H, G, K) int64, -1 for an empty place.
        scale: factor on the scores.

    Returns:
        (B, H, L, D); zero at padding, and where a group has no keys.
    """
    batch, heads, groups, _ = key_ids.shape
    # One column more than there are keys takes the empty places, and is cut off.
    chosen = torch.zeros(batch, heads, groups, key.shape[2] + 1, dtype=torch.bool, device=key.device)
    chosen = chosen.scatter(-1, key_ids.remainder(key.shape[2] + 1), True)[..., :-1]
    real = (group_ids >= 0)[..., None]
    sees = torch.take_along_dim(chosen, group_ids.clamp(min=0)[..., None], dim=2) & real  # (B, H, L, L)
    with full_precision(query.device):  # the types are the caller's
        score = torch.einsum("bhid,bhjd->bhij", query, key) * scale
        weight = score.masked_fill(~sees, -torch.inf).softmax(-1).masked_fill(~sees, 0.0)
        return torch.einsum("bhij,bhjd->bhid", weight, value)
