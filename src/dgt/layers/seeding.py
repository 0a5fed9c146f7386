"""The first centroids: those that k-means finds among the queries of the first training batch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dgt.ops.grouping import seed_centroids

SEED_TOKENS_PER_GROUP = 32  # size of the sample that is clustered


@torch.library.custom_op("dgt::seed_from_batch", mutates_args=("centroids", "seeded"))
def seed_from_batch(
    centroids: Tensor,
    seeded: Tensor,
    num_updates: Tensor,
    query: Tensor,
    query_mask: Tensor | None,
    group_name: str = "",
) -> None:
    """Cluster evenly spaced tokens of the batch; with a process group, of the batches of all.

    All of them get what one process with the whole batch would get. An operator, as compiled code
    calls it before every forward, without a graph of its own for the first.

    Where a process has no real token, or one that is not finite, the next batch is the first.

    Args:
        centroids: (H, G, D), set in place, unless they have been updated.
        seeded: bool, on the CPU; True where all is done, and nothing is gathered. Becomes True
            where that is so now.
        num_updates: how often the centroids have been updated.
        query: (B, H, L, D).
        query_mask: bool (B, L), True where a token is real, or None.
        group_name: of the process group; "" for none.
    """
    if seeded:
        return
    if num_updates > 0:
        seeded.fill_(True)
        return
    num_groups = centroids.shape[1]
    tokens = query.detach().float().transpose(0, 1).flatten(1, 2)  # (H, B L, D)
    if query_mask is not None:
        tokens = tokens[:, query_mask.flatten()]
    sample = max(1, SEED_TOKENS_PER_GROUP * num_groups // _world_size(group_name))
    if tokens.shape[1]:
        tokens = tokens[:, torch.arange(sample, device=query.device) * tokens.shape[1] // sample]
    else:
        tokens = tokens.new_full((tokens.shape[0], sample, tokens.shape[2]), torch.nan)
    tokens = _gather(tokens, group_name)
    if tokens.isfinite().all():
        centroids.copy_(seed_centroids(tokens, num_groups))
        seeded.fill_(True)


@seed_from_batch.register_fake
def _(
    centroids: Tensor,
    seeded: Tensor,
    num_updates: Tensor,
    query: Tensor,
    query_mask: Tensor | None,
    group_name: str = "",
) -> None:
    return None


def _world_size(group_name: str) -> int:
    """Return the number of processes of a group, by its name; 1 for ""."""
    return dist.get_world_size(_resolve(group_name)) if group_name else 1


def _gather(tokens: Tensor, group_name: str) -> Tensor:
    """Concatenate the (H, N, D) tokens of all processes of a group, by its name, along N."""
    if not group_name:
        return tokens
    shares = [torch.empty_like(tokens) for _ in range(_world_size(group_name))]
    dist.all_gather(shares, tokens.contiguous(), group=_resolve(group_name))
    return torch.cat(shares, dim=1)


def _resolve(group_name: Any) -> Any:
    return dist.distributed_c10d._resolve_process_group(group_name)
