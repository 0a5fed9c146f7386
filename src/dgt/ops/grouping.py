"""Query groups and centroids: assignment, statistics, update, seeding (section 3.1, Eqs. 3-4).

Assignment is by the largest dot product with unit-norm centroids, ties (of scores as computed) to
the lowest group; scores and statistics are computed in float32 whatever the input's type. State
goes in and comes out: nothing here changes its arguments.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops.checks import (
    check_count,
    check_device,
    check_ids,
    check_mask,
    check_shape,
    check_share,
    check_tensor,
    check_tokens,
    full_precision,
)
from dgt.ops.dispatch import choose_steps


def group_queries(
    query: Tensor, centroids: Tensor, query_mask: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Assign every query to the group of its nearest centroid.

    ``group_ids[b, h, l] = argmax_g <query[b, h, l], centroids[h, g]>``, ties to the lowest g.

    Args:
        query: (B, H, L, D) float tensor.
        centroids: (H, G, D) float tensor, unit norm.
        query_mask: optional bool (B, L), True where a query is real.
        backend: as in :func:`dgt.dynamic_group_attention`.

    Returns:
        (B, H, L) int64 group ids; -1 at padding.

    Raises:
        TypeError, ValueError: for a wrong type, rank, shape or device; on the CPU also for NaN in
            ``query`` (on an accelerator looking would stall the stream: there NaN passes on, as in
            PyTorch's own attention).

    Example:
        >>> centroids = F.normalize(torch.randn(2, 48, 32), dim=-1)
        >>> group_queries(torch.randn(1, 2, 196, 32), centroids).shape
        torch.Size([1, 2, 196])
    """
    check_tokens("query", query, centroids)
    check_mask("query_mask", query_mask, "query", query)
    steps = choose_steps(backend, query)
    group_ids: Tensor = steps.group_queries(query, centroids, query_mask)
    return group_ids


def group_statistics(
    query: Tensor, group_ids: Tensor, num_groups: int, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Sum the normalized queries of every group over batch and tokens, and count them (Eq. 3).

    Statistics of parts of a batch add up.

    Args:
        query: (B, H, L, D) float tensor.
        group_ids: (B, H, L) int64 from :func:`group_queries`; -1 (padding) is not counted.
        num_groups: G.
        backend: as in :func:`dgt.dynamic_group_attention`.

    Returns:
        ``(sums, counts)``, float32 (H, G, D) and (H, G).

    Raises:
        TypeError, ValueError: for a wrong type, rank, shape or device.
    """
    steps = choose_steps(backend, query)
    sums, counts = steps.group_statistics(query, group_ids, num_groups)
    return sums, counts


def blend_centroids(
    centroids: Tensor, sums: Tensor, counts: Tensor, rate: float | Tensor
) -> Tensor:
    """Move centroids toward the mean normalized query of their group, at unit norm (Eq. 4).

    ``e_j <- Norm((1 - rate) e_j + rate e'_j)`` with ``e'_j = sums_j / counts_j``. Groups that are
    empty, whose statistics are not finite (a diverged step), or whose new centroid would vanish,
    keep theirs.
    """
    mean = sums / counts.clamp(min=1)[..., None]
    moved = (1 - rate) * centroids + rate * mean
    length = moved.norm(dim=-1)
    usable = (counts > 0) & length.isfinite() & (length > 1e-6)
    return torch.where(usable[..., None], F.normalize(moved, dim=-1), centroids)


def update_centroids(centroids: Tensor, query: Tensor, group_ids: Tensor, rate: float) -> Tensor:
    """Return the centroids after one step of Eqs. 3-4; the arguments stay as they are.

    ``e'_j = mean of Norm(query) over group j`` (Eq. 3), ``e_j <- Norm((1 - rate) e_j + rate e'_j)``
    (Eq. 4). ``rate = 1 - tau`` is Eq. 4 as printed; ``rate = tau`` is the reading in which tau is
    the speed of the update.

    Args:
        centroids: (H, G, D) float tensor, unit norm.
        query: (B, H, L, D) float tensor.
        group_ids: (B, H, L) int64 from :func:`group_queries`; -1 is not counted.
        rate: weight of the new mean, in [0, 1].

    Returns:
        (H, G, D) centroids, unit norm, of ``centroids``' type; empty groups keep theirs.

    Raises:
        TypeError, ValueError: for a wrong type, rank, shape, device, or a rate outside [0, 1].

    Example:
        >>> query = torch.randn(4, 2, 196, 32)
        >>> centroids = F.normalize(torch.randn(2, 48, 32), dim=-1)
        >>> group_ids = group_queries(query, centroids)
        >>> update_centroids(centroids, query, group_ids, rate=0.9).shape
        torch.Size([2, 48, 32])
    """
    check_tokens("query", query, centroids)
    check_tensor("group_ids", group_ids, "BHL", floating=False)
    check_shape("group_ids", group_ids, "BHL", tuple(query.shape[:3]), "query")
    check_device("query", query, group_ids=group_ids)
    check_ids("group_ids", group_ids, centroids.shape[1])
    check_share("rate", rate)
    sums, counts = group_statistics(query, group_ids, centroids.shape[1])
    return blend_centroids(centroids.detach().float(), sums, counts, rate).to(centroids.dtype)


def seed_centroids(tokens: Tensor, num_groups: int, steps: int = 10) -> Tensor:
    """Cluster unit-norm tokens into starting centroids by k-means++ and spherical k-means.

    Deterministic: the random choices of k-means++ come from a generator with a fixed seed.

    Args:
        tokens: (H, N, D) float tensor, the sample to cluster; N may be smaller than G (tokens then
            repeat).
        num_groups: G.
        steps: k-means (Lloyd) steps.

    Returns:
        (H, G, D) float32 centroids, unit norm.

    Raises:
        TypeError, ValueError: for a wrong type or rank, an empty sample, ``num_groups`` < 1 or
            ``steps`` < 0.

    Example:
        >>> seed_centroids(torch.randn(2, 1000, 32), num_groups=48).shape
        torch.Size([2, 48, 32])
    """
    check_tensor("tokens", tokens, "HND", floating=True)
    check_count("num_groups", num_groups)
    check_count("steps", steps, least=0)
    if 0 in tokens.shape:
        raise ValueError(f"tokens must not be empty (H, N, D), got shape {tuple(tokens.shape)}")
    with full_precision(tokens.device), torch.no_grad():
        unit = F.normalize(tokens.float(), dim=-1)
        # A token without direction gets one, so that no centroid is zero.
        unit[..., 0] += (unit == 0).all(-1)
        return _cluster(unit[None], _spread_out(unit, num_groups), steps)


def find_centroids(query: Tensor, centroids: Tensor, steps: int = 2) -> Tensor:
    """Refine centroids for each image by a few k-means steps on its queries.

    Args:
        query: (B, H, L, D) float tensor.
        centroids: (H, G, D), or (B, H, G, D) of an earlier layer, frame or step; unit norm.
        steps: k-means (Lloyd) steps; each costs one grouping pass.

    Returns:
        (B, H, G, D) float32 centroids, unit norm, for :func:`dgt.dynamic_group_attention`; no
        gradient.

    Raises:
        TypeError, ValueError: for a wrong type, rank or shape, or ``steps`` < 0.

    Example:
        >>> centroids = F.normalize(torch.randn(2, 48, 32), dim=-1)
        >>> find_centroids(torch.randn(4, 2, 196, 32), centroids).shape
        torch.Size([4, 2, 48, 32])
    """
    check_count("steps", steps, least=0)
    if isinstance(centroids, Tensor) and centroids.dim() == 3:
        check_tokens("query", query, centroids)
        centroids = centroids.expand(len(query), *centroids.shape)
    check_tensor("query", query, "BHLD", floating=True)
    check_tensor("centroids", centroids, "BHGD", floating=True)
    check_shape("centroids", centroids, "BHGD", (*query.shape[:2], *centroids.shape[2:]), "query")
    tokens = query.detach().flatten(0, 1)[None]
    start = centroids.detach().to(torch.float32, copy=True).flatten(0, 1)
    check_tokens("query", tokens, start)
    return _cluster(tokens, start, steps).view(*query.shape[:2], *start.shape[1:])


def _cluster(tokens: Tensor, centroids: Tensor, steps: int) -> Tensor:
    """Lloyd steps on (B, H, L, D) tokens, from (H, G, D) centroids."""
    backend = choose_steps("auto", tokens)
    for _ in range(steps):
        group_ids = backend.group_queries(tokens, centroids, None)
        sums, counts = backend.group_statistics(tokens, group_ids, centroids.shape[1])
        centroids = blend_centroids(centroids, sums, counts, rate=1.0)
    return centroids


def _spread_out(unit: Tensor, num_groups: int) -> Tensor:
    """Choose G of the (H, N, D) unit tokens by k-means++, favoring those far from the chosen."""
    heads, count, channels = unit.shape
    generator = torch.Generator().manual_seed(0)
    shape = (num_groups, heads, 1)
    draws = torch.rand(shape, generator=generator, device="cpu", dtype=unit.dtype).to(unit.device)
    chosen = unit.new_empty(heads, num_groups, channels)
    distance = unit.new_full((heads, count), 2.0)
    for group in range(num_groups):
        mass = distance.cumsum(-1)
        pick = torch.searchsorted(mass, draws[group] * mass[:, -1:]).clamp_(max=count - 1)
        chosen[:, group] = unit.gather(1, pick[..., None].expand(-1, -1, channels))[:, 0]
        closeness = torch.einsum("hnd,hd->hn", unit, chosen[:, group])
        # A floor above zero lets a sample with fewer distinct tokens than groups repeat some of
        # them.
        distance = torch.minimum(distance, 1 - closeness).clamp_(min=1e-6)
    return chosen
