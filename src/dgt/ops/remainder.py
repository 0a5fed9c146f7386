"""The unselected keys, summarized as one more key per group.

Let U be the keys that a group did not select. Softmax attention needs two things of them, for every query q of the
group: the logarithm of their mass, ``Z(q) = log sum_{j in U} exp(s q.k_j)``, and their mean value. Around the group's
mean query m, with ``p = softmax_{j in U}(s m.k_j)``,

    Z(q) = Z(m) + s (q - m).k' + O(|q - m|^2),    k' = sum_j p_j k_j,    v' = sum_j p_j v_j,

for ``s k'`` is the gradient of Z at m. To first order the remainder is therefore *a key like any other*: k', with the
value v' and the constant ``b = Z(m) - s m.k'`` added to its score. Attention over the selected keys and this one is
exact where nothing is left out (k = L), where a group's queries are equal, and where its remaining keys are.
Cost: three products of (G, L, D) a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dgt.ops.checks import full_precision, wide_type

SCORE_ELEMENTS = {"cpu": 1 << 24}  # scores of groups with keys that are held at once
SCORE_ELEMENTS_ELSEWHERE = 1 << 25  # which keep an accelerator busy
HIDDEN = (
    -1e30
)  # the score of a key that is no part of a remainder; finite, so that no row can become NaN


class WithRemainder(NamedTuple):
    """Arguments of :func:`dgt.attend` in which every group has M keys more; M is 1 but with clusters of keys."""

    key: Tensor
    """(B, H, S + G M, D): the keys, then k' of every group."""
    value: Tensor
    """(B, H, S + G M, D): the values, then v'."""
    key_ids: Tensor
    """(B, H, G, K + M) int64: last in every list its group's own k', -1 where nothing was left out."""
    key_bias: Tensor
    """(B, H, S + G M): what is added to the score of a key, zeros and then b."""


def add_remainder(
    key: Tensor, value: Tensor, key_ids: Tensor, remainder: tuple[Tensor, Tensor, Tensor, Tensor]
) -> WithRemainder:
    """Append what is left out of every group to the keys, as the last of its list.

    Args:
        key, value: (B, H, S, D).
        key_ids: (B, H, G, K) int64.
        remainder: from :func:`summarize_unselected`, or, with M keys a group, from
            :func:`dgt.ops.residual_keys.summarize_clusters`.
    """
    rest_key, rest_value, bias, empty = remainder
    if bias.dim() == 3:
        rest_key, rest_value, bias, empty = (tensor.unsqueeze(3) for tensor in remainder)
    groups, each = bias.shape[2:]
    tokens = key.shape[2]
    own = (
        torch.arange(tokens, tokens + groups * each, device=key.device)
        .view(groups, each)
        .where(~empty, -1)
    )
    return WithRemainder(
        torch.cat([key, rest_key.to(key.dtype).flatten(2, 3)], dim=2),
        torch.cat([value, rest_value.to(value.dtype).flatten(2, 3)], dim=2),
        torch.cat([key_ids, own], dim=-1),
        torch.cat([bias.new_zeros(key.shape[:3]), bias.flatten(2)], dim=-1),
    )


def summarize_unselected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summarize, for every group, the keys that are not in its list; differentiable. The arguments are right.

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
    tokens = key.shape[2]
    real = key.new_ones((batch, tokens), dtype=torch.bool) if key_mask is None else key_mask
    with full_precision(query.device):
        q, k, v = (
            tensor.flatten(0, 1).to(wide_type(query.dtype)) for tensor in (query, key, value)
        )
        sums, counts = sum_groups(q[None], group_ids.flatten(0, 1)[None], groups)
        mean = sums / counts.clamp(min=1)[..., None] * scale  # s m, (B H, G, D)
        whole = (mean, k, v, key_ids.flatten(0, 1), real.repeat_interleave(heads, dim=0))
        at_once = max(1, scores_at_once(query.device) // (groups * tokens))
        runs = list(zip(*(tensor.split(at_once) for tensor in whole), strict=True))
        parts = [run_part(_summarize, *run, alone=len(runs) == 1) for run in runs]
    rest_key, rest_value, bias, empty = (torch.cat(part) for part in zip(*parts, strict=True))
    shape = (batch, heads, groups)
    return (
        rest_key.view(*shape, -1),
        rest_value.view(*shape, -1),
        bias.view(shape),
        empty.view(shape),
    )


def _summarize(
    mean: Tensor, key: Tensor, value: Tensor, lists: Tensor, real: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k' and v' (N, G, D), b and whether nothing was left out (N, G), of N heads with their s m."""
    tokens = key.shape[1]
    hidden = mean.new_zeros(*mean.shape[:2], tokens + 1)  # one column more for empty places
    hidden = hidden.scatter(-1, lists.remainder(tokens + 1), HIDDEN)[..., :-1]
    hidden = hidden.masked_fill(~real[:, None], HIDDEN)
    score = torch.baddbmm(hidden, mean, key.mT)
    share = score.softmax(-1)
    rest_key = torch.bmm(share, key)
    bias = score.logsumexp(-1) - (mean * rest_key).sum(-1)
    return rest_key, torch.bmm(share, value), bias, (lists >= 0).sum(-1) >= real.sum(-1)[:, None]


def scores_at_once(device: torch.device) -> int:
    """Return how many scores of groups with keys are held at once on a device."""
    return SCORE_ELEMENTS.get(device.type, SCORE_ELEMENTS_ELSEWHERE)


def run_part(
    step: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], *arguments: Any, alone: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run a step on one part of the heads or groups, so that the scores of no two parts are held at once.

    Gradients would keep those of all parts: they compute them again, unless the part is the whole.
    """
    if alone or not torch.is_grad_enabled():
        return step(*arguments)
    return checkpoint(step, *arguments, use_reentrant=False, preserve_rng_state=False)


def sum_groups(tokens: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sum the (B, H, L, D) tokens of every group over batch and tokens, (H, G, D), and count them, (H, G)."""
    heads, channels = tokens.shape[1], tokens.shape[3]
    # Padding is sent to one extra group, which is cut off again: no data-dependent shape.
    slots = num_groups + 1
    first = torch.arange(heads, device=tokens.device)[None, :, None] * slots
    slot = (torch.where(group_ids < 0, num_groups, group_ids) + first).flatten()
    sums = tokens.new_zeros(heads * slots, channels).index_add(0, slot, tokens.flatten(0, 2))
    counts = tokens.new_zeros(heads * slots).index_add(0, slot, tokens.new_ones(()).expand_as(slot))
    return sums.view(heads, slots, channels)[:, :num_groups], counts.view(heads, slots)[
        :, :num_groups
    ]
