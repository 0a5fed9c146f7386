"""The GPU path: the operator as Triton kernels, forward and backward (section 3.1 and the appendix).

Import it only where it is used: it needs Triton. One file per concern:

- ``operators``: what PyTorch sees. Everything below is reached through it.
- ``grouping``: query groups, queries in their order, tiles of them, and the statistics of Eq. 3.
- ``selection``: the top-k keys of every group. ``passes``: the launches that do both.
- ``gathered``, ``inverse``: attention over keys gathered by index, many tokens; sums over the groups that chose a key.
- ``dense``: attention under a mask, few tokens.
- ``products``: the four forms of the appendix, for comparison.
- ``common``, ``launch``: what kernels share, and how they are run.

``docs/kernels.md`` tells the reasons.
"""

from torch import Tensor

from dgt.ops.triton import operators


def group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Assign every query to a group; arguments, here and below, as in the functions of :mod:`dgt`, already checked."""
    ids: Tensor = operators.group_queries(query.detach(), centroids.detach(), key_mask)
    return ids


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """Select the keys of every group."""
    ids: Tensor = operators.select_keys(centroids.detach(), key.detach(), top_k, key_mask)
    return ids


def attend(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float) -> Tensor:
    """Attend inside each group. Differentiable once."""
    output: Tensor = operators.attend(query, key, value, group_ids, key_ids, float(scale))[0]
    return output


def attention(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the whole operator; ``(output, group_ids, key_ids)`` as in :func:`dgt.dynamic_group_attention`."""
    made = operators.attention(query, key, value, centroids.detach(), top_k, float(scale), key_mask)
    return made[0], made[2], made[3]


def group_statistics(query: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sum the unit queries of every group, and count them (Eq. 3), in a fixed order: ``(sums, counts)``."""
    sums, counts = operators.group_statistics(query.detach(), group_ids, num_groups)
    return sums, counts
