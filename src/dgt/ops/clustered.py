"""Attention of a pretrained model in groups computed from the image itself, with M residual keys per group.

    query_clusters = cluster_tokens(query, num_groups)            # groups, and their mean queries
    key_clusters   = cluster_tokens(key, residual_keys)
    key_ids        = select_keys(mean queries, key, top_k)        # exact keys (Eq. 1): those that lose most
    residual keys  = what key_ids leaves out of each cluster      # dgt.ops.residual_keys
    output         = attend(query, prefix + selected + residual)  # one softmax (Eq. 2)

No weights, no calibration, no state: any model's softmax attention can be replaced by it.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops import flops, torch_backend
from dgt.ops.attention import attend_with_residual_keys
from dgt.ops.checks import (
    check_count,
    check_mask,
    check_operands,
    check_scale,
    describe,
    full_precision,
    needs_gradients,
    repeat_heads,
)
from dgt.ops.clusters import cluster_keys, find_clusters
from dgt.ops.cpu.interface import new_tokens
from dgt.ops.dispatch import OperatorSteps, Steps, choose_steps
from dgt.ops.first_order import attend_to_first_order
from dgt.ops.lloyd import sum_members
from dgt.ops.prefix import join_prefix, prepend_prefix
from dgt.ops.registry import can_run_triton, load_kernels, operator
from dgt.ops.residual_keys import one_cluster


def clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_groups: int,
    top_k: int,
    residual_keys: int = 1,
    num_prefix_tokens: int = 0,
    scale: float | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    first_order: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Approximate dense softmax attention of a pretrained model in groups, with residual keys.

    Queries after the prefix are clustered (:func:`dgt.cluster_tokens`). Every query attends to all
    prefix tokens, to ``top_k`` exact keys of its group, and to M residual keys, each of which
    represents the other keys of one cluster (``docs/residual_keys.md``). Exact are those keys that a
    residual key would represent worst: with the largest weights for the mean query of the group, times
    their squared distances from the center of their cluster and the distances of their values; without
    residual keys, those with the largest weights. Queries of the prefix attend to all keys. Exact where
    the queries of a group are equal, and with ``top_k >= S - P``. Differentiable in query, key and value
    with groups, clusters and selected keys held fixed; if gradients are needed, the steps are taken one
    by one, which needs more memory and time than the one call without them.

    Args:
        query: (B, H, L, D) float tensor.
        key, value: (B, H, S, D) float tensors of query's type; S may differ from L. With fewer heads, a divisor of H,
            each serves as many heads of the queries in turn.
        num_groups: G, from 1 to the queries after the prefix.
        top_k: K >= 1 exact keys for every group; clamped to the keys after the prefix.
        residual_keys: M, from 0 (none: what is not selected is left out) to the keys after the prefix.
        num_prefix_tokens: P, the first tokens of queries and keys alike (class, registers, text).
        scale: factor on the scores; default 1 / sqrt(D).
        query_mask: optional bool (B, L), True where a query is real; the output of others is zero, and they are of no
            group. In self-attention padding is masked as queries and as keys.
        key_mask: optional bool (B, S), True where a key is real; nothing sees the others.
        first_order: add what residual keys lose to first order in the offset of a query from its group's mean
            (:mod:`dgt.ops.first_order`); pays for long sequences. Nothing without residual keys.
        backend: as in :func:`dgt.dynamic_group_attention`.

    Returns:
        (B, H, L, D) of the query's type.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed; on
            CPUs also for NaN in ``query`` or ``key``.

    Example:
        >>> query, key, value = torch.randn(3, 1, 6, 1370, 64)
        >>> output = clustered_attention(
        ...     query, key, value, num_groups=32, top_k=48, residual_keys=32, num_prefix_tokens=1
        ... )
        >>> output.shape
        torch.Size([1, 6, 1370, 64])
    """
    check_operands(query, key, value)
    check_mask("query_mask", query_mask, "query", query)
    check_mask("key_mask", key_mask, "key", key)
    if not isinstance(first_order, bool):
        raise TypeError(f"first_order must be True or False, got {describe(first_order)}")
    _check_sizes(
        query,
        key,
        num_groups=num_groups,
        top_k=top_k,
        residual_keys=residual_keys,
        num_prefix_tokens=num_prefix_tokens,
    )
    return attend_in_clusters(
        query,
        key,
        value,
        num_groups=num_groups,
        top_k=top_k,
        residual_keys=residual_keys,
        num_prefix_tokens=num_prefix_tokens,
        scale=check_scale(scale, query.shape[-1]),
        query_mask=query_mask,
        key_mask=key_mask,
        first_order=first_order,
        backend=backend,
    )


def attend_in_clusters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_groups: int,
    top_k: int,
    residual_keys: int,
    num_prefix_tokens: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    first_order: bool,
    backend: str = "auto",
) -> Tensor:
    """:func:`clustered_attention` without its checks, for accelerated models, whose tensors and numbers fit."""
    if backend == "auto" and residual_keys and query.is_cuda:
        # Keys are chosen by a channel more than they are attended to.
        backend = "auto" if can_run_triton(F.pad(query[:, :, :1], (0, 1))) else "torch"
    steps = choose_steps(backend, query, key, value)
    take_steps: Callable[..., Tensor] = functools.partial(_take_steps, steps)
    if isinstance(steps, OperatorSteps):
        if steps.backend == "auto":  # in a file, which has no gradients
            take_steps = _clustered_attention
        elif steps.backend == "native" and not (
            torch.is_grad_enabled() and needs_gradients(query, key, value)
        ):
            take_steps = functools.partial(_clustered_attention, backend="native")
    return take_steps(
        query,
        key,
        value,
        num_groups=num_groups,
        top_k=top_k,
        residual_keys=residual_keys,
        num_prefix_tokens=num_prefix_tokens,
        scale=scale,
        query_mask=query_mask,
        key_mask=key_mask,
        first_order=first_order and residual_keys > 0,
    )


def _fake_clustered(call: SimpleNamespace) -> Tensor:
    return new_tokens(call.query)


@operator(name="attend_in_clusters", fake=_fake_clustered, flops=flops.clustered_attention)
def _clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_groups: int,
    top_k: int,
    residual_keys: int,
    num_prefix_tokens: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    first_order: bool,
    backend: str = "auto",
) -> Tensor:
    """The whole without gradients, on the native kernels or, in files that name no backend, as quickly as the machine
    that reads them can.
    """
    kernels = load_kernels(backend, query)
    in_steps = kernels is torch_backend
    whole = functools.partial(_take_steps, kernels) if in_steps else kernels.clustered_attention
    with torch.no_grad():
        output: Tensor = whole(
            query,
            key,
            value,
            num_groups=num_groups,
            top_k=top_k,
            residual_keys=residual_keys,
            num_prefix_tokens=num_prefix_tokens,
            scale=scale,
            query_mask=query_mask,
            key_mask=key_mask,
            first_order=first_order,
        )
    return new_tokens(query).copy_(output) if in_steps else output


def _take_steps(
    steps: Steps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_groups: int,
    top_k: int,
    residual_keys: int,
    num_prefix_tokens: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    first_order: bool,
) -> Tensor:
    """Cluster, select, sum up and attend."""
    prefix = num_prefix_tokens
    mask = None if key_mask is None else key_mask[:, prefix:]
    cluster_ids = None
    losses = None
    if residual_keys:
        cluster_ids = _cluster_keys(steps, key, residual_keys, prefix, key_mask)
        losses = log_losses(key, value, cluster_ids, residual_keys)[:, :, prefix:]
        cluster_ids, losses = repeat_heads(query, cluster_ids, losses)
    key, value = repeat_heads(query, key, value)
    patches = query[:, :, prefix:]
    of_patches = None if query_mask is None else query_mask[:, prefix:]
    means, group_ids = find_clusters(steps, "query", patches, num_groups, of_patches)
    key_ids = _select(steps, means * scale, key[:, :, prefix:], losses, top_k, mask)
    key_ids = prepend_prefix(key_ids, prefix, key_mask)
    if first_order:
        output = attend_to_first_order(
            steps,
            patches,
            key,
            value,
            group_ids,
            key_ids,
            scale=scale,
            cluster_ids=cast(Tensor, cluster_ids),
            count=residual_keys,
        )
    else:
        output = attend_with_residual_keys(
            steps,
            patches,
            key,
            value,
            group_ids,
            key_ids,
            scale=scale,
            key_mask=key_mask,
            residual_keys=residual_keys,
            key_cluster_ids=cluster_ids,
        )
    if prefix:
        output, _ = join_prefix(
            output,
            group_ids,
            query,
            key,
            value,
            scale=scale,
            query_mask=query_mask,
            key_mask=key_mask,
        )
    return output


def _cluster_keys(
    steps: Steps,
    key: Tensor,
    residual_keys: int,
    prefix: int,
    key_mask: Tensor | None,
) -> Tensor:
    """(B, H, S) int64 clusters of the keys of every head; -1 for the prefix and for padding."""
    if residual_keys == 1:
        mask = None if key_mask is None else key_mask[:, prefix:]
        return F.pad(one_cluster(key[:, :, prefix:], mask), (prefix, 0), value=-1)
    return cluster_keys(steps, key, residual_keys, prefix, key_mask)


@torch.no_grad()
def log_losses(key: Tensor, value: Tensor, cluster_ids: Tensor, count: int) -> Tensor:
    """How badly the center of its cluster stands for a key: (B, H, S) log(|k - center|^2 |v - center|), float32.

    Finite also where nothing is lost, so that as many keys are chosen as are asked for.
    """
    with full_precision(key.device):
        of_keys = _square_distances(key, cluster_ids, count)
        squared = of_keys.square() * _square_distances(value, cluster_ids, count)
        least = torch.finfo(torch.float32).tiny
        return 0.5 * squared.nan_to_num(least, least).clamp(min=least).log()


def _square_distances(tokens: Tensor, cluster_ids: Tensor, count: int) -> Tensor:
    """Those of (B, H, S, D) tokens from the centers of their clusters: (B, H, S)."""
    tokens = tokens.float()
    sums, counts = sum_members(tokens, cluster_ids, count)
    centers = sums / counts.clamp(min=1)[..., None]
    own = torch.take_along_dim(centers, cluster_ids.clamp(min=0)[..., None], 2)
    return (tokens - own).square().sum(-1)


@torch.no_grad()
def _select(
    steps: Steps,
    means: Tensor,
    key: Tensor,
    losses: Tensor | None,
    top_k: int,
    mask: Tensor | None,
) -> Tensor:
    """The best of (B, H, S, D) keys for every image's own (B, H, G, D) mean queries: (B, H, G, K) int64.

    (B, H, S) ``losses`` are added to the scores: one channel more.
    """
    if losses is not None:
        means = F.pad(means, (0, 1), value=1.0)
        key = torch.cat([key.float(), losses[..., None]], -1)
    if mask is None:  # heads of one image
        key_ids = steps.select_keys(means.flatten(0, 1), key.flatten(0, 1)[None], top_k, None)
        return cast(Tensor, key_ids).view(*means.shape[:3], -1)
    images = range(len(key))
    return torch.cat(
        [steps.select_keys(means[i], key[i : i + 1], top_k, mask[i : i + 1]) for i in images]
    )


def _check_sizes(
    query: Tensor,
    key: Tensor,
    *,
    num_groups: int,
    top_k: int,
    residual_keys: int,
    num_prefix_tokens: int,
) -> None:
    """Check the numbers of a call against its tokens."""
    check_count("num_prefix_tokens", num_prefix_tokens, least=0)
    queries, keys = query.shape[2] - num_prefix_tokens, key.shape[2] - num_prefix_tokens
    if min(queries, keys) < 1:
        came = f"{num_prefix_tokens} with {query.shape[2]} queries and {key.shape[2]} keys"
        raise ValueError(
            f"num_prefix_tokens must be fewer than the queries and the keys, got {came}"
        )
    check_count("num_groups", num_groups)
    if num_groups > queries:
        raise ValueError(
            f"num_groups must be at most the {queries} queries after the prefix, got {num_groups}"
        )
    check_count("top_k", top_k)
    check_count("residual_keys", residual_keys, least=0)
    if residual_keys > keys:
        raise ValueError(
            f"residual_keys must be at most the {keys} keys after the prefix, got {residual_keys}"
        )
