"""The operator with PyTorch's own kernels: any device, no host copies, static shapes.

Nothing waits for the device and every shape follows from (B, H, L, S, D, G, k) alone, so CUDA
graphs capture it and ``torch.compile`` traces it whole. Differentiable in query, key, value and
key_bias. On CPUs it is the path of float64 and of machines without the native kernel; there
:mod:`dgt.ops.operators` wraps it.

Arguments are right already; shapes as in :mod:`dgt.ops.reference`, letters as in :mod:`dgt.ops`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops.checks import check_no_nan, full_precision, wide_type
from dgt.ops.lloyd import cluster_tokens
from dgt.ops.remainder import sum_groups, summarize_unselected
from dgt.ops.residual_keys import summarize_clusters
from dgt.ops.torch_attention import Heads, attend_in_heads

__all__ = [
    "attend",
    "attend_with_logsumexp",
    "cluster_tokens",
    "group_queries",
    "group_statistics",
    "select_keys",
    "summarize_clusters",
    "summarize_unselected",
]

BIAS_CHANNELS = 8  # more channels that carry key_bias; kernels like multiples of eight


def group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Assign (B, H, L, D) queries to the nearest of (H, G, D) centroids.

    Returns (B, H, L) int64, -1 at padding.
    """
    with full_precision(query.device):
        scores = query.detach().float() @ centroids.detach().float().mT  # (B, H, L, G)
    check_no_nan("query", scores)
    group_ids = scores.argmax(-1)  # of equal scores the first
    return group_ids if key_mask is None else group_ids.where(key_mask[:, None], -1)


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Select the best keys for every centroid, ties to the lowest (Eq. 1).

    Returns (B, H, G, min(k, S)) int64, ascending, then -1.
    """
    tokens = key.shape[2]
    count = min(top_k, tokens)
    with full_precision(key.device):
        scores = centroids.detach().float() @ key.detach().float().mT  # (B, H, G, S)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    check_no_nan("key", scores)
    # Descending; which of equal scores are taken is not promised.
    best, key_ids = scores.topk(count)
    level = best[..., -1:]
    # These are right; the places behind them get the first keys whose score is the level.
    above = best != level
    counter = torch.int16 if tokens < 1 << 15 else torch.int32
    number = torch.arange(1, count + 1, device=key.device, dtype=counter) - above.sum(
        -1, True, dtype=counter
    )
    on_level = (scores == level).cumsum(-1, dtype=counter)
    key_ids = torch.where(above, key_ids, torch.searchsorted(on_level, number))
    # Padding goes behind all keys.
    key_ids = key_ids.masked_fill(best.isneginf(), tokens).sort(-1).values
    return key_ids.masked_fill(key_ids == tokens, -1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every query over the keys of its group (Eq. 2).

    Returns (B, H, L, D), zero where a query sees no key.
    """
    return _attend(query, key, value, group_ids, key_ids, scale, key_bias, with_sums=False)[0]


def attend_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and the (B, H, L) log-sum-exp of every query; -inf where it sees no key."""
    return _attend(query, key, value, group_ids, key_ids, scale, key_bias, with_sums=True)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    """Output, and the logarithms of the sums if they are wanted (else an empty tensor)."""
    channels, dtype = query.shape[-1], query.dtype
    # Where half precision is slower, and its gradients would add up in half precision.
    if query.device.type == "cpu":
        query, key, value = (tensor.to(wide_type(dtype)) for tensor in (query, key, value))
    if scale == 0:  # by which no constant can be divided
        query, scale = query * 0.0, 1.0
    with full_precision(query.device):  # the types are the caller's
        if key_bias is not None:
            query, key, value = _append_bias(query, key, value, key_bias, scale)
        heads = Heads(*(tensor.flatten(0, 1) for tensor in (query, key, value, group_ids, key_ids)))
        output, sums = attend_in_heads(heads, scale, with_sums)
    sees = (key_ids >= 0).any(-1).gather(-1, group_ids.clamp(min=0)) & (group_ids >= 0)
    output = output.view(query.shape)[..., :channels].to(dtype).masked_fill(~sees[..., None], 0.0)
    return output, sums.view(sees.shape).masked_fill(~sees, -torch.inf) if with_sums else sums


def _append_bias(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add ``key_bias / scale`` to the scores by extra channels of query and key.

    No kernel needs to know of it.

    In half precision the constant is a sum of three numbers, which are exact together.
    """
    rest = key_bias.to(wide_type(query.dtype)) / scale
    parts = []
    for _ in range(1 if rest.dtype == query.dtype else 3):
        parts.append(rest.to(query.dtype))
        rest = torch.where(parts[-1].isinf(), 0.0, rest - parts[-1])
    spare = BIAS_CHANNELS - len(parts)
    ones = query.new_ones(()).expand(*query.shape[:3], len(parts))
    query = F.pad(torch.cat([query, ones], -1), (0, spare))
    key = F.pad(torch.cat([key, torch.stack(parts, -1)], -1), (0, spare))
    return query, key, F.pad(value, (0, BIAS_CHANNELS))


def group_statistics(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sum the normalized queries of every group over batch and tokens, and count them.

    Returns float32 (H, G, D) and (H, G).
    """
    with full_precision(query.device):
        return sum_groups(F.normalize(query.detach().float(), dim=-1), group_ids, num_groups)
