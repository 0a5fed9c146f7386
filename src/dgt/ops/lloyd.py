"""Lloyd's k-means in PyTorch operations: :func:`dgt.cluster_tokens` on any device, with data-independent shapes."""

from collections.abc import Callable

import torch
from torch import Tensor

from dgt.ops.checks import full_precision
from dgt.ops.residual_keys import sum_groups

SCORE_ELEMENTS = 1 << 24  # of tokens with centroids, held at once
STEPS = 5  # Lloyd steps on a sample of the tokens
EVERY = 8  # the sample is one of this many tokens, or more
LEAST_OF_CLUSTER = 4  # tokens of the sample
GOLDEN = 2654435769  # 2^32 over the golden ratio


# (B, H, N, D) tokens, (B, H, N) ids and M: the sums of the members, (B, H, M, D), and how many, (B, H, M)
SumMembers = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def sum_members(x: Tensor, ids: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Sum and count the (B, H, N, D) tokens of every cluster, ids -1 left out: (B, H, M, D) and (B, H, M)."""
    sums, counts = sum_groups(x.flatten(0, 1)[None], ids.flatten(0, 1)[None], num_clusters)
    return sums.unflatten(0, x.shape[:2]), counts.unflatten(0, x.shape[:2])


def cluster_tokens(
    tokens: Tensor, num_clusters: int, steps: int, every: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cluster (B, H, N, D) tokens; arguments as in :func:`dgt.cluster_tokens`, already checked.

    Returns:
        (B, H, M, D) float32 centroids and (B, H, N) int64 ids.
    """
    return cluster_tokens_by(sum_members, tokens, num_clusters, steps, every, mask)


def cluster_tokens_by(
    add_up: SumMembers,
    tokens: Tensor,
    num_clusters: int,
    steps: int,
    every: int,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As :func:`cluster_tokens`, with a function that sums and counts the members of clusters."""
    with full_precision(tokens.device):
        x = tokens.detach().float()
        sample, hidden, first = _choose_sample(x, num_clusters, every, mask)
        centroids = torch.take_along_dim(x, first, 2)
        for _ in range(steps):
            ids = _assign(sample, centroids, hidden)
            centroids = _move(centroids, *add_up(sample, ids, num_clusters))
        ids = _assign(x, centroids, None if mask is None else ~mask)
        return _move(centroids, *add_up(x, ids, num_clusters)), ids


def spread_out(
    count: int, mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """An order of tokens in which every prefix is evenly spread over them, for any image width.

    Real token number j stands where ``j * GOLDEN`` modulo 2^32 puts it: those of any interval of such multiples of the
    golden ratio are apart by a few Fibonacci numbers, which share no period with rows of an image.

    Args:
        count: N.
        mask: optional bool (B, N), True where a token is real.
        device: of the result.

    Returns:
        (B or 1, N) int64 token numbers, those that are not real last; (B, 1) how many are, None where all are.
    """
    if mask is None:
        place = torch.arange(count, device=device) * GOLDEN % (1 << 32)
        return place.argsort()[None], None
    place = (mask.cumsum(-1) - 1) * GOLDEN % (1 << 32)
    return place.masked_fill(~mask, 1 << 32).argsort(dim=-1, stable=True), mask.sum(
        -1, keepdim=True
    )


def _choose_sample(
    x: Tensor, num_clusters: int, every: int, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """One of ``every`` tokens (B, H, n, D), which of them are not real (B, n), and tokens that start the clusters."""
    order, real = spread_out(x.shape[2], mask, x.device)
    size = (x.shape[2] + every - 1) // every
    sample = torch.take_along_dim(x, order[:, None, :size, None], 2)
    if real is None:
        return sample, None, order[:, None, :num_clusters, None]
    hidden = torch.arange(size, device=x.device) * every >= real
    first = torch.arange(num_clusters, device=x.device) % real.clamp(min=1)
    return sample, hidden, order.gather(-1, first)[:, None, :, None]


def sample_distance(tokens: int, num_clusters: int, every: int) -> int:
    """Return of how many tokens one is in the sample: ``every``, or fewer where clusters would get too few."""
    return max(1, min(every, tokens // (LEAST_OF_CLUSTER * num_clusters)))


def _assign(x: Tensor, centroids: Tensor, hidden: Tensor | None) -> Tensor:
    """The nearest of (B, H, M, D) centroids, the first of equal ones: (B, H, n) int64, -1 for masked tokens."""
    batch, heads = x.shape[:2]
    bias = centroids.square().sum(-1)[:, :, None] * -0.5
    at_once = max(1, SCORE_ELEMENTS // (batch * heads * centroids.shape[2]))
    ids = torch.cat([(part @ centroids.mT + bias).argmax(-1) for part in x.split(at_once, 2)], 2)
    return ids if hidden is None else ids.masked_fill(hidden[:, None], -1)


def _move(centroids: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
    """The means of the members of every cluster; an empty one keeps its centroid."""
    means = sums / counts.clamp(min=1)[..., None]
    return torch.where((counts > 0)[..., None], means, centroids)
