"""The top-k keys of every group (Eq. 1).

Scores are computed in float32 whatever the input's type. Ties go to the lowest key index, so the
selection is one well-defined set; it is returned in ascending order of index, which is also the
order in which memory likes to be read.
"""

from torch import Tensor

from dgt.ops.checks import check_count, check_mask, check_tokens
from dgt.ops.dispatch import choose_steps


def select_keys(
    centroids: Tensor,
    key: Tensor,
    top_k: int,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Select the ``top_k`` keys with the largest dot product with every group's centroid (Eq. 1).

    Args:
        centroids: (H, G, D) float tensor, unit norm.
        key: (B, H, L, D) float tensor.
        top_k: k >= 1, clamped to L.
        key_mask: optional bool (B, L), True where a token is real; padding is never selected.
        backend: as in :func:`dgt.dynamic_group_attention`.

    Returns:
        (B, H, G, min(top_k, L)) int64 key ids in ascending order; where an image has fewer real
        tokens than that, the places left over at the end hold -1.

    Raises:
        TypeError, ValueError: for a wrong type, rank, shape or device, ``top_k`` < 1, or on the CPU
            NaN in ``key``.

    Example:
        >>> centroids = F.normalize(torch.randn(2, 48, 32), dim=-1)
        >>> select_keys(centroids, torch.randn(1, 2, 196, 32), top_k=98).shape
        torch.Size([1, 2, 48, 98])
    """
    check_tokens("key", key, centroids)
    check_count("top_k", top_k)
    check_mask("key_mask", key_mask, "key", key)
    steps = choose_steps(backend, key)
    key_ids: Tensor = steps.select_keys(centroids, key, top_k, key_mask)
    return key_ids
