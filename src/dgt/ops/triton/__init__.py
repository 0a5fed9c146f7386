"""The GPU path: the operator as Triton kernels, forward and backward (section 3.1 and the appendix).

Import it only where it is used: it needs Triton. One file per concern:

- ``operators``: what PyTorch sees. Everything below is reached through it.
- ``grouping``, ``selection``: query groups, and the top-k keys of every group.
- ``sorting``: queries in the order of their groups, tiles of them, and the statistics of Eq. 3.
- ``gathered``, ``inverse``: attention over keys gathered by index, many tokens; sums over the groups that chose a key.
- ``dense``: attention under a mask, few tokens.
- ``products``: the four forms of the appendix, for comparison.
- ``common``, ``launch``: what kernels share, and how they are run.

``docs/kernels.md`` tells the reasons.
"""

from torch import Tensor

from dgt.ops.triton import operators


def group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Assign every query to a group; arguments as in :func:`dgt.group_queries`, already checked."""
    ids: Tensor = operators.group_queries(query.detach(), centroids.detach(), key_mask)
    return ids


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Select the keys of every group; arguments as in :func:`dgt.select_keys`, already checked."""
    ids: Tensor = operators.select_keys(centroids.detach(), key.detach(), top_k, key_mask)
    return ids


def attend(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float) -> Tensor:
    """Attend inside each group; arguments as in :func:`dgt.attend`, already checked. Differentiable once."""
    output: Tensor = operators.attend(query, key, value, group_ids, key_ids, float(scale))[0]
    return output


def attention(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the whole operator; ``(output, group_ids, key_ids)`` as in :func:`dgt.dynamic_group_attention`."""
    output, _, group_ids, key_ids, *_ = operators.attention(
        query, key, value, centroids.detach(), top_k, float(scale), key_mask
    )
    return output, group_ids, key_ids


def group_statistics(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sum the unit queries of every group, and count them (Eq. 3), in a fixed order: ``(sums, counts)``.

    Arguments and result as in :func:`dgt.ops.grouping.group_statistics`, already checked.
    """
    sums, counts = operators.group_statistics(query.detach(), group_ids, num_groups)
    return sums, counts
