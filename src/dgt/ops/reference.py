"""The whole operator in a few dense lines: the oracle that every other backend is tested against (Eqs. 1-2).

Any dtype, any device, twice differentiable, (B, H, L, L) in memory. Read it first.
"""

import torch
from torch import Tensor

from dgt.ops.precision import full_precision


def attend(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float) -> Tensor:
    """Softmax attention of every query over the keys of its group (Eq. 2), as dense attention under a mask.

    Args:
        query: (B, H, L, D).
        key, value: (B, H, L, D).
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
