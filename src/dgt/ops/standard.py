"""The steps in operations that every exporter translates, for ``torch.onnx.export``.

The exporters of PyTorch, timm and Optimum know nothing of this package. What they record is made of
these steps, and becomes one file of standard operators: attention inside groups is attention to all
keys under a mask. The files that ``dgt export`` writes have translations of their own
(:mod:`dgt.inference.onnx_operators`), and are faster where tokens are many.

Contracts are those of :mod:`dgt.ops.torch_backend`, but that keys are in no order.
"""

from typing import NoReturn

import torch
from torch import Tensor

from dgt.ops.checks import wide_type

HIDDEN = -1e30  # finite, so that no row can become NaN
MANY = (
    "dgt has no clusters of tokens, and so neither several residual keys a group nor models after dgt.accelerate, in "
    "standard operators of ONNX: export the model without them, for OpenVINO with its extension "
    "(`dgt export RUN FILE.onnx --openvino-extension`, with `--plan PLAN`), or with torch.export"
)


def group_queries(query: Tensor, centroids: Tensor, query_mask: Tensor | None) -> Tensor:
    """The nearest centroid of every query: (B, H, L) int64, -1 at padding."""
    group_ids = (query.float() @ centroids.float().mT).argmax(-1)
    return group_ids if query_mask is None else group_ids.where(query_mask[:, None], -1)


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """The best keys of every centroid (Eq. 1): (B, H, G, min(k, S)) int64, -1 where there are none."""
    scores = centroids.float() @ key.float().mT
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    best, key_ids = scores.topk(torch.sym_min(top_k, key.shape[2]))
    return key_ids if key_mask is None else key_ids.where(best > -torch.inf, -1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every query over the keys of its group (Eq. 2): (B, H, L, D)."""
    batch, heads, groups, _ = key_ids.shape
    tokens = key.shape[2]
    place = key_ids.where(key_ids >= 0, tokens)  # a last column takes the empty places
    hidden = query.new_full((batch, heads, groups, tokens + 1), HIDDEN)
    rows = hidden.scatter(-1, place, 0.0)[..., :tokens]
    row_of_query = group_ids.clamp(min=0)[..., None].expand(-1, -1, -1, tokens)
    score = query @ key.mT * scale + rows.gather(2, row_of_query)
    if key_bias is not None:
        score = score + key_bias[:, :, None].to(score.dtype)
    lists_a_key = (key_ids >= 0).any(-1).gather(-1, group_ids.clamp(min=0))
    sees = (lists_a_key & (group_ids >= 0))[..., None]
    return (score.softmax(-1) @ value).where(sees, 0.0)


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
    """The residual key of every group: k', v' (B, H, G, 1, D), b (B, H, G, 1), and zeros.

    Where nothing is left, b hides the key: ids in files have no empty places.

    Raises:
        NotImplementedError: for several residual keys a group, which need clusters of keys.
    """
    if residual_keys != 1:
        raise NotImplementedError(MANY)
    query, key, value = (tensor.to(wide_type(query.dtype)) for tensor in (query, key, value))
    groups, tokens = key_ids.shape[2], key.shape[2]
    members = (group_ids[..., None] == torch.arange(groups, device=query.device)).to(query.dtype)
    count = members.sum(2)[..., None].clamp(min=1.0)
    mean = members.mT @ query / count * scale
    hidden = torch.zeros(*key_ids.shape[:3], tokens + 1, dtype=query.dtype, device=query.device)
    hidden = hidden.scatter(-1, key_ids.where(key_ids >= 0, tokens), 1.0)[..., :tokens] > 0
    hidden = hidden | (key_cluster_ids < 0)[:, :, None]
    score = (mean @ key.mT).masked_fill(hidden, HIDDEN)
    weight = score.softmax(-1)
    rest_key = weight @ key
    bias = score.logsumexp(-1) - (mean * rest_key).sum(-1)
    parts = (rest_key, weight @ value, bias)
    rest_key, rest_value, bias = (part.unsqueeze(3) for part in parts)
    return rest_key, rest_value, bias, torch.zeros_like(bias, dtype=torch.bool)


def cluster_tokens(*_: object) -> NoReturn:
    """Refuse clusters of tokens, which only accelerated models and several residual keys need."""
    raise NotImplementedError(MANY)
