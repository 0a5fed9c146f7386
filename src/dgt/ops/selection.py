"""The top-k keys of every group (Eq. 1).

Scores are computed in float32 whatever the input's type. Ties go to the lowest key index, so the selection is one
well-defined set; it is returned in ascending order of index, which is also the order in which memory likes to be read.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops import flops, reference
from dgt.ops.backends import load_triton, resolve_backend
from dgt.ops.checks import check_count, check_key_mask, check_tokens, full_precision, nan_in
from dgt.ops.parts import head_parts, run_parts
from dgt.ops.triton.fallback import falls_back

SORTED = 512  # keys up to which a whole vectorised sort is quicker than looking for one place of it


@falls_back
def select_keys(
    centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Select the ``top_k`` keys with the largest dot product with every group's centroid (Eq. 1).

    Args:
        centroids: (H, G, D) float tensor, unit norm.
        key: (B, H, L, D) float tensor.
        top_k: k >= 1, clamped to L.
        key_mask: optional bool (B, L), True where a token is real; padding is never selected.
        backend: as in :func:`dgt.dynamic_group_attention`.

    Returns:
        (B, H, G, min(top_k, L)) int64 key ids in ascending order; where an image has fewer real tokens than that,
        the places left over at the end hold -1.

    Raises:
        TypeError, ValueError: for a wrong type, rank, shape or device, ``top_k`` < 1, or on the CPU NaN in ``key``.
    """
    check_tokens("key", key, centroids)
    check_count("top_k", top_k)
    check_key_mask(key_mask, key.shape[0], key.shape[2], key)
    backend = resolve_backend(backend, key)
    if backend == "reference":
        return reference.select_keys(centroids, key, top_k, key_mask)
    steps = load_triton() if backend == "triton" else torch.ops.dgt
    key_ids: Tensor = steps.select_keys(centroids.detach(), key.detach(), top_k, key_mask)
    return key_ids


@torch.library.custom_op("dgt::select_keys", mutates_args=())
def _select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    batch, heads, tokens, _ = key.shape
    groups, count = centroids.shape[1], min(top_k, tokens)
    ids = key.new_empty((batch, heads, groups, count), dtype=torch.int64)

    def work(part: tuple[slice, slice, slice]) -> None:
        scores = torch.matmul(centroids[part[1:]].float(), key[part[:2]].float().transpose(-1, -2))
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[part[0], None, None], -torch.inf)
        ids[part] = _largest(scores, count)

    with full_precision(key.device):
        run_parts(work, head_parts(batch, heads, groups, tokens), key.device, batch * heads * tokens)
    return ids


register_flop_formula(torch.ops.dgt.select_keys)(flops.select_keys)


@_select_keys.register_fake
def _(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    batch, heads, tokens, _ = key.shape
    return key.new_empty((batch, heads, centroids.shape[1], torch.sym_min(top_k, tokens)), dtype=torch.int64)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest scores of every row, ascending, ties to the lowest; -1 in place of -inf."""
    threshold, flat = _reach_kth_largest(scores, count)
    shape = torch.Size((*scores.shape[:-1], count))
    # Every row has at least `count` marks: if no row has more, and no mark is padding, that is all.
    if len(flat) == shape.numel() and not threshold.isneginf().any():
        first = torch.arange(0, scores.numel(), scores.shape[-1], device=flat.device)
        return flat.view(-1, count).sub_(first[:, None]).view(shape)
    above, level = scores > threshold, scores == threshold
    room = count - above.sum(-1, keepdim=True)
    chosen = above | (level & (level.cumsum(-1) <= room) & (scores > -torch.inf))
    rows, columns = chosen.flatten(0, -2).nonzero(as_tuple=True)
    places = columns.new_full(shape, -1)
    places.view(-1, count)[rows, chosen.flatten(0, -2).cumsum(-1)[rows, columns] - 1] = columns
    return places


def _reach_kth_largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count``-th largest score of every row, and the places in all rows, ascending, that hold it or more."""
    width = scores.shape[-1]
    if scores.device.type != "cpu" or width <= SORTED or width < 8 * count:  # else too many would reach the bound
        threshold = _kth_largest(scores, count)
        return threshold, _reaching(scores, threshold)
    # Of the maxima of runs (each of every so-manieth score) the `count`-th largest is a lower bound, which few scores
    # reach: only they are sorted. (Numpy partitions long rows by instructions that Zen 4 is slow at.)
    runs = max(SORTED // 2, 2 * count)
    maxima = scores[..., : width // runs * runs].unflatten(-1, (-1, runs)).amax(-2)
    if rest := width % runs:
        maxima[..., :rest] = torch.maximum(maxima[..., :rest], scores[..., -rest:])
    places = _reaching(scores, _kth_largest(maxima, count)).numpy()
    numbers = np.diff(np.searchsorted(places, np.arange(0, scores.numel() + 1, width)))
    candidates = np.full((len(numbers), numbers.max()), -np.inf, np.float32)
    reached = scores.view(-1).numpy()[places]
    candidates[np.arange(numbers.max()) < numbers[:, None]] = reached
    threshold = _kth_largest(torch.from_numpy(candidates), count)
    places = places[reached >= np.repeat(threshold.numpy()[:, 0], numbers)]
    return threshold.view(*scores.shape[:-1], 1), torch.from_numpy(places)


def _reaching(scores: Tensor, threshold: Tensor) -> Tensor:
    """The places in all rows, ascending, whose score is the row's threshold or more."""
    if scores.device.type != "cpu":
        return (scores >= threshold).flatten().nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(scores.numpy() >= threshold.numpy()))  # half the time


def mark_unselected(scores: Tensor, count: int) -> Tensor:
    """Return float32 marks of the scores' shape: 0 at the ``count`` largest of every row, 1 elsewhere.

    Ties go to the lowest index, and a score of -inf is never among the largest, as in :func:`select_keys`.
    """
    threshold = _kth_largest(scores, count)
    marks = torch.lt(scores, threshold, out=torch.empty_like(scores))
    # No row has more marks than it should; ties leave it fewer. (In float64 if float32 could not count them.)
    wide = torch.float32 if scores.numel() < 1 << 24 else torch.float64
    total = threshold.numel() * (scores.shape[-1] - count)
    if marks.sum(dtype=wide) == total and threshold.amin() > -torch.inf:
        return marks
    ids = _largest(scores, count)
    marks = scores.new_ones(*scores.shape[:-1], scores.shape[-1] + 1)
    return marks.scatter_(-1, ids.where(ids >= 0, scores.shape[-1]), 0.0)[..., :-1].contiguous()


def _kth_largest(scores: Tensor, count: int) -> Tensor:
    """Return the ``count``-th largest score of every row, kept as a last dimension of one."""
    if scores.device.type != "cpu":
        return scores.topk(count).values[..., -1:]
    place = scores.shape[-1] - count  # numpy's vectorised sorts take a tenth of the time of torch.topk
    if scores.shape[-1] <= SORTED:
        largest = np.sort(scores.numpy(), axis=-1)[..., place:]
        last = largest[..., -1]
    else:
        last = largest = np.partition(scores.numpy(), place, axis=-1)[..., place:]
    if np.isnan(last.max()):  # NaN sorts last, so it is among these if it is anywhere
        raise nan_in("key")
    return torch.from_numpy(largest[..., :1])
