"""The top-k keys of every group (Eq. 1).

Scores are computed in float32 whatever the input's type. Ties go to the lowest key index, so the selection is one
well-defined set; it is returned in ascending order of index, which is also the order in which memory likes to be read.
"""

import numpy as np
import torch
from torch import Tensor

from dgt.ops.checks import check_count, check_key_mask, check_tokens


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None = None) -> Tensor:
    """Select the ``top_k`` keys with the largest dot product with every group's centroid (Eq. 1).

    Args:
        centroids: (H, G, D) float tensor, unit norm.
        key: (B, H, L, D) float tensor.
        top_k: k >= 1, clamped to L.
        key_mask: optional bool (B, L), True where a token is real; padding is never selected.

    Returns:
        (B, H, G, min(top_k, L)) int64 key ids in ascending order; where an image has fewer real tokens than that,
        the places left over at the end hold -1.

    Raises:
        TypeError, ValueError: for a wrong type, rank, shape or device, or ``top_k`` < 1.
    """
    check_tokens("key", key, centroids)
    check_count("top_k", top_k)
    check_key_mask(key_mask, key.shape[0], key.shape[2], key)
    ids: Tensor = torch.ops.dgt.select_keys(centroids.detach(), key.detach(), top_k, key_mask)
    return ids


@torch.library.custom_op("dgt::select_keys", mutates_args=())
def _select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    batch, heads, tokens, _ = key.shape
    count = min(top_k, tokens)
    ids = key.new_empty((batch, heads, centroids.shape[1], count), dtype=torch.int64)
    with torch.autocast(key.device.type, enabled=False):
        for image in range(batch):  # an image at a time: its scores stay in cache
            scores = torch.matmul(centroids.float(), key[image].float().transpose(-1, -2))
            if key_mask is not None:
                scores = scores.masked_fill(~key_mask[image], -torch.inf)
            ids[image] = _places(_largest(scores, count), count)
    return ids


@_select_keys.register_fake
def _(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    batch, heads, tokens, _ = key.shape
    return key.new_empty((batch, heads, centroids.shape[1], torch.sym_min(top_k, tokens)), dtype=torch.int64)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Mark the ``count`` largest scores of every row, ties to the lowest index; scores of -inf are never marked."""
    threshold = _kth_largest(scores, count)
    chosen = (scores >= threshold) & (scores > -torch.inf)
    crowded = chosen.sum(-1) > count  # rows in which a tie crosses the threshold
    if crowded.any():
        above, level = scores[crowded] > threshold[crowded], scores[crowded] == threshold[crowded]
        room = count - above.sum(-1, keepdim=True)
        chosen[crowded] = above | (level & (level.cumsum(-1) <= room))
    return chosen


def _kth_largest(scores: Tensor, count: int) -> Tensor:
    """Return the ``count``-th largest score of every row, kept as a last dimension of one."""
    if scores.device.type != "cpu":
        return scores.topk(count).values[..., -1:]
    place = scores.shape[-1] - count  # numpy's vectorised quickselect takes a tenth of the time of torch.topk
    return torch.from_numpy(np.partition(scores.numpy(), place, axis=-1)[..., place : place + 1])


def _places(chosen: Tensor, count: int) -> Tensor:
    """Turn (..., L) marks, at most ``count`` a row, into (..., count) ascending indices, -1 where a row has fewer."""
    shape = torch.Size((*chosen.shape[:-1], count))
    flat = chosen.flatten().nonzero()[:, 0]
    columns = flat % chosen.shape[-1]
    if len(columns) == shape.numel():
        return columns.view(shape)
    rows = flat // chosen.shape[-1]
    order = chosen.flatten(0, -2).cumsum(-1)[rows, columns] - 1
    places = columns.new_full(shape, -1)
    places.view(-1, count)[rows, order] = columns
    return places
