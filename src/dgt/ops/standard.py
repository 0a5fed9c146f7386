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

HIDDEN = -1e30  # finite, so that no row can become NaN


def group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """The nearest centroid of every query: (B, H, L) int64, -1 at padding."""
    group_ids = (query.float() @ centroids.float().mT).argmax(-1)
    return group_ids if key_mask is None else group_ids.where(key_mask[:, None], -1)


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
        score = score + key_bias[:, :, None]
    lists_a_key = (key_ids >= 0).any(-1).gather(-1, group_ids.clamp(min=0))
    sees = (lists_a_key & (group_ids >= 0))[..., None]
    return (score.softmax(-1) @ value).where(sees, 0.0)


def summarize_clusters(*_: object) -> NoReturn:
    """Refuse residual keys."""
    raise NotImplementedError(
        "dgt has no residual keys, and so no model after dgt.accelerate, in standard operators of ONNX: "
        "export the model without them, for OpenVINO with its extension "
        "(`dgt export RUN FILE.onnx --plan PLAN --openvino-extension`), or with torch.export"
    )


def cluster_tokens(*_: object) -> NoReturn:
    """Refuse clusters of tokens, which only accelerated models and residual keys need."""
    summarize_clusters()
