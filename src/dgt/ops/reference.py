"""The whole operator in a few dense lines: the oracle that every other backend is tested against (Eqs. 1-2).

The contract is that of :mod:`dgt.ops.attention`; arguments are checked already. Any dtype, any device, (B, H, L, L) in
memory, attention twice differentiable. Nothing here is shared with another backend. Read it first.
"""

import torch
from torch import Tensor

from dgt.ops.checks import check_no_nan, full_precision, wide_type


def group_queries(query: Tensor, centroids: Tensor, query_mask: Tensor | None) -> Tensor:
    """Assign (B, H, L, D) queries to the nearest of (H, G, D) centroids: (B, H, L) int64, -1 at padding."""
    with full_precision(query.device):
        scores = query.detach().float() @ centroids.detach().float().mT  # (B, H, L, G)
    check_no_nan("query", scores)
    group_ids = scores.argmax(-1)  # of equal scores the first
    return group_ids if query_mask is None else group_ids.where(query_mask[:, None], -1)


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Select the best of (B, H, L, D) keys for (H, G, D) centroids: (B, H, G, min(top_k, L)) int64, then -1 (Eq. 1)."""
    tokens = key.shape[2]
    with full_precision(key.device):
        scores = centroids.detach().float() @ key.detach().float().mT  # (B, H, G, L)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    check_no_nan("key", scores)
    ranking = scores.argsort(dim=-1, descending=True, stable=True)  # of equal scores the first
    # Padding is sent behind all keys.
    ranking = ranking.masked_fill(scores.gather(-1, ranking).isneginf(), tokens)
    key_ids = ranking[..., :top_k].sort(-1).values
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
    """Softmax attention of every query over the keys of its group (Eq. 2), as dense attention under a mask."""
    return attend_with_logsumexp(query, key, value, group_ids, key_ids, scale, key_bias=key_bias)[0]


def attend_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with a constant for every key's scores, and the logarithms of the softmax's sums.

    Args:
        query: (B, H, L, D).
        key, value: (B, H, S, D).
        group_ids: (B, H, L) int64, -1 for padding.
        key_ids: (B, H, G, K) int64, -1 for an empty place.
        scale: factor on the scores.
        key_bias: optional (B, H, S), added to the scores.

    Returns:
        (B, H, L, D), zero at padding, and where a group has no keys; (B, H, L), float32 at least, -inf there.
    """
    real = (group_ids >= 0)[..., None]
    chosen = _chosen(key_ids, key.shape[2])
    # Of shape (B, H, L, S).
    sees = torch.take_along_dim(chosen, group_ids.clamp(min=0)[..., None], dim=2) & real
    blind = ~sees.any(-1, keepdim=True)
    dtype, wide = query.dtype, wide_type(query.dtype)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    with full_precision(query.device):
        score = torch.einsum("bhid,bhjd->bhij", query, key) * scale
        score = score if key_bias is None else score + key_bias[:, :, None].to(wide)
        score = score.masked_fill(~sees & ~blind, -torch.inf)
        weight = score.softmax(-1).masked_fill(~sees, 0.0)
        output = torch.einsum("bhij,bhjd->bhid", weight, value).to(dtype)
        return output, score.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)


def group_statistics(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sum the normalized (B, H, L, D) queries of every group, and count them: (H, G, D) and (H, G), float32 (Eq. 3)."""
    member = (
        group_ids[..., None] == torch.arange(num_groups, device=query.device)
    ).float()  # (B, H, L, G)
    with full_precision(query.device):
        unit = query.detach().float()
        unit = unit / unit.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        return torch.einsum("bhlg,bhld->hgd", member, unit), member.sum((0, 2))


def cluster_tokens(
    tokens: Tensor, num_clusters: int, steps: int, every: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Lloyd's k-means of (B, H, N, D) tokens (:func:`dgt.cluster_tokens`), image by image and head by head."""
    batch, heads, count, channels = tokens.shape
    centroids = tokens.new_zeros(batch, heads, num_clusters, channels, dtype=torch.float32)
    ids = torch.full((batch, heads, count), -1, device=tokens.device)
    for b in range(batch):
        real = torch.arange(count) if mask is None else mask[b].cpu().nonzero()[:, 0]
        # Spread evenly by the golden ratio.
        order = sorted(range(len(real)), key=lambda j: j * 2654435769 % 2**32)
        for h in range(heads if len(real) else 0):
            x = tokens[b, h, real].detach().float()
            own = x[[order[m % len(real)] for m in range(num_clusters)]]
            for part in [x[order[: -(-len(real) // every)]]] * steps + [x]:
                near = torch.cdist(part, own, compute_mode="donot_use_mm_for_euclid_dist").argmin(
                    -1
                )
                for m in near.unique().tolist():
                    own[m] = part[near == m].mean(0)
            centroids[b, h] = own
            ids[b, h, real] = near
    return centroids, ids


def summarize_clusters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    *,
    scale: float,
    key_cluster_ids: Tensor,
    residual_keys: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Residual keys (:mod:`dgt.ops.residual_keys`), one a cluster: k', v', b, and whether nothing is left of it."""
    dtype, wide = query.dtype, wide_type(query.dtype)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    parts = []
    for m in range(residual_keys):
        mine = key_cluster_ids == m
        others = ~mine[:, :, None]
        parts.append(_summarize(query, key, value, group_ids, key_ids, scale, others=others))
    rest_key, rest_value, bias, empty = (torch.stack(part, 3) for part in zip(*parts, strict=True))
    return rest_key.to(dtype), rest_value.to(dtype), bias, empty


def _summarize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    others: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One of them, of all keys but the ``others``, (B, H, 1, S)."""
    member = (group_ids[..., None] == torch.arange(key_ids.shape[2], device=query.device)).to(
        query.dtype
    )
    hidden = _chosen(key_ids, key.shape[2]) | others
    empty = hidden.all(-1, keepdim=True)
    with full_precision(query.device):
        mean = torch.einsum("bhlg,bhld->bhgd", member, query) / member.sum(2)[..., None].clamp(
            min=1
        )
        score = (mean @ key.mT * scale).masked_fill(hidden & ~empty, -torch.inf)
        share = score.softmax(-1)
        rest_key = share @ key
        bias = score.logsumexp(-1) - scale * (mean * rest_key).sum(-1)
        return rest_key, share @ value, bias, empty[..., 0]


def _chosen(key_ids: Tensor, tokens: int) -> Tensor:
    """(B, H, G, S) marks of the keys in (B, H, G, K) lists."""
    marks = torch.zeros(*key_ids.shape[:3], tokens + 1, dtype=torch.bool, device=key_ids.device)
    # The last column takes the empty places.
    return marks.scatter(-1, key_ids.remainder(tokens + 1), True)[..., :-1]
