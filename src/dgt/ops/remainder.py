"""What the selected keys leave out, as one more key of every group.

Let U be the keys that a group did not select. Softmax attention needs two things of them, for every query q of the
group: the logarithm of their mass, ``Z(q) = log sum_{j in U} exp(s q.k_j)``, and their mean value. Around the group's
mean query m, with ``p = softmax_{j in U}(s m.k_j)``,

    Z(q) = Z(m) + s (q - m).k' + O(|q - m|^2),    k' = sum_j p_j k_j,    v' = sum_j p_j v_j,

for ``s k'`` is the gradient of Z at m. To first order the remainder is therefore *a key like any other*: k', with the
value v' and the constant ``b = Z(m) - s m.k'`` added to its score. Attention over the selected keys and this one is
exact where nothing is left out (k = L), where a group's queries are equal, and where its remaining keys are.
Cost: three products of (G, L, D) a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dgt.ops.torch_ops import summarize_unselected

__all__ = ["WithRemainder", "add_remainder", "summarize_unselected"]


class WithRemainder(NamedTuple):
    """Arguments of :func:`dgt.attend` in which every group has one key more."""

    key: Tensor
    """(B, H, S + G, D): the keys, then k' of every group."""
    value: Tensor
    """(B, H, S + G, D): the values, then v'."""
    key_ids: Tensor
    """(B, H, G, K + 1) int64: last in every list its group's own k', -1 where nothing was left out."""
    key_bias: Tensor
    """(B, H, S + G): what is added to the score of a key, zeros and then b."""


def add_remainder(
    key: Tensor, value: Tensor, key_ids: Tensor, remainder: tuple[Tensor, Tensor, Tensor, Tensor]
) -> WithRemainder:
    """Append the remainder of every group, from :func:`summarize_unselected`, to the keys, as one of its list."""
    rest_key, rest_value, bias, empty = remainder
    tokens = key.shape[2]
    own = torch.arange(tokens, tokens + key_ids.shape[2], device=key.device).where(~empty, -1)
    return WithRemainder(
        torch.cat([key, rest_key.to(key.dtype)], dim=2),
        torch.cat([value, rest_value.to(value.dtype)], dim=2),
        torch.cat([key_ids, own[..., None]], dim=-1),
        torch.cat([bias.new_zeros(key.shape[:3]), bias], dim=-1),
    )
