"""What the selected keys leave out, as one more key of every group.

Let U be the keys that a group did not select. Softmax attention needs two things of them, for every query q of the
group: the logarithm of their mass, ``Z(q) = log sum_{j in U} exp(s q.k_j)``, and their mean value. Around the group's
mean query m, with ``p = softmax_{j in U}(s m.k_j)``,

    Z(q) = Z(m) + s (q - m).k' + O(|q - m|^2),    k' = sum_j p_j k_j,    v' = sum_j p_j v_j,

for ``s k'`` is the gradient of Z at m. To first order the remainder is therefore *a key like any other*: k', with the
value v' and the constant ``b = Z(m) - s m.k'`` added to its score. Attention over the selected keys and this one is
exact where nothing is left out (k = L), where a group's queries are equal, and where its remaining keys are.
Cost: three products of (G, L, D) a head, and no memory of more than a chunk of (G, L) without gradients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dgt.ops.checks import full_precision
from dgt.ops.eager import HIDDEN
from dgt.ops.grouping import sum_groups
from dgt.ops.parts import cut, part_size, run_parts


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


def summarize_unselected(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum up, for every group, the keys that its list does not name; differentiable. The arguments are right.

    Args:
        query: (B, H, L, D).
        key, value: (B, H, S, D).
        group_ids: (B, H, L) int64, -1 for queries of no group.
        key_ids: (B, H, G, K) int64, -1 for an empty place.
        scale: factor on the scores.
        key_mask: optional bool (B, S), True where a key is real; no other is ever part of a remainder.

    Returns:
        (B, H, G, D) k' and v', (B, H, G) b, in float32 (of float64 in float64), and bool (B, H, G), True where nothing
        was left out; the others are finite there, and of no meaning.
    """
    batch, heads, groups, _ = key_ids.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v, groups_of, lists = (t.flatten(0, 1) for t in (query, key, value, group_ids, key_ids))
    padding = None if key_mask is None else ~key_mask.repeat_interleave(heads, dim=0)[:, None]
    with full_precision(query.device):
        sums, counts = sum_groups(q.to(wide)[None], groups_of[None], groups)
        mean = sums / counts.clamp(min=1)[..., None] * scale  # s m, (B H, G, D)
        found: dict[int, tuple[Tensor, ...]] = {}

        def work(part: slice) -> None:
            hidden = None if padding is None else padding[part]
            found[part.start] = _summarize(mean[part], k[part].to(wide), v[part].to(wide), lists[part], hidden)

        alone = torch.compiler.is_compiling() or any(tensor.requires_grad for tensor in (mean, k, v))
        tokens, scores = 0 if alone else k.shape[:2].numel(), groups * k.shape[1]
        parts = cut(len(k), part_size(len(k) * scores, tokens) // scores)
        run_parts(work, parts, query.device, tokens)
    pieces = (found[part.start] for part in parts)
    rest_key, rest_value, bias, empty = (
        torch.cat(whole).unflatten(0, (batch, heads)) for whole in zip(*pieces, strict=True)
    )
    return rest_key, rest_value, bias, empty


def _summarize(
    mean: Tensor, key: Tensor, value: Tensor, key_ids: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k' and v' (N, G, D), b and whether nothing was left out (N, G), of N heads with their s m."""
    tokens, listed = key.shape[1], key_ids >= 0
    hidden = mean.new_zeros(*mean.shape[:2], tokens + 1)  # one more for empty places
    hidden = hidden.scatter_(-1, key_ids.where(listed, tokens), HIDDEN)[..., :-1]
    hidden = hidden if padding is None else hidden.masked_fill(padding, HIDDEN)
    score = torch.baddbmm(hidden, mean, key.mT)
    share = score.softmax(-1)
    # Where scores tie, the gradients of both maxima, which spare the exponentials once more, would not cancel.
    mass = score.logsumexp(-1) if score.requires_grad else score.amax(-1) - share.amax(-1).log()
    rest_key = torch.bmm(share, key)
    real = tokens if padding is None else (~padding).sum(-1)
    return rest_key, torch.bmm(share, value), mass - (mean * rest_key).sum(-1), listed.sum(-1) >= real
