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
from dgt.ops.triton.operators import group_queries, group_statistics, select_keys

__all__ = ["attend", "attention", "group_queries", "group_statistics", "select_keys"]


def attend(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float) -> Tensor:
    """Attend inside each group; arguments, here and below, as in :mod:`dgt`, already checked. Differentiable once."""
    output: Tensor = operators.attend(query, key, value, group_ids, key_ids, float(scale))[0]
    return output


def attention(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the whole operator; ``(output, group_ids, key_ids)`` as in :func:`dgt.dynamic_group_attention`."""
    made = operators.attention(query, key, value, centroids.detach(), top_k, float(scale), key_mask)
    return made[0], made[2], made[3]
