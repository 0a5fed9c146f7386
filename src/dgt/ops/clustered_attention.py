"""Attention of a pretrained model in groups computed from the image itself, with M residual keys per group.

    query_clusters = cluster_tokens(query, num_groups)            # groups, and their mean queries
    key_ids        = select_keys(mean queries, key, top_k)        # exact keys (Eq. 1)
    key_clusters   = cluster_tokens(key, residual_keys)
    residual keys  = what key_ids leaves out of each cluster      # dgt.ops.residual_keys
    output         = attend(query, prefix + selected + residual)  # one softmax (Eq. 2)

No weights, no calibration, no state: any model's softmax attention can be replaced by it.
"""

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops import flops, operators
from dgt.ops.backends import load_backend, resolve_call
from dgt.ops.calls import ClusteredCall
from dgt.ops.checks import (
    check_count,
    check_key_mask,
    check_operands,
    check_scale,
    describe,
    repeat_heads,
)
from dgt.ops.clusters import cluster_keys, find_clusters
from dgt.ops.native_loader import can_run_native
from dgt.ops.prefix import join_prefix, prepend_prefix
from dgt.ops.remainder import add_remainder


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
    key_mask: Tensor | None = None,
    share_key_clusters: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Approximate dense softmax attention of a pretrained model in groups, with residual keys.

    Queries after the prefix are clustered (:func:`dgt.cluster_tokens`). Every query attends to all
    prefix tokens, to the ``top_k`` keys that score highest with the mean query of its group, and to
    M residual keys, each of which represents the unselected keys of one cluster
    (``docs/residual_keys.md``). Queries of the prefix attend to all keys. Exact where the queries of a
    group are equal, and with ``top_k >= S - P``. Differentiable in query, key and value with groups,
    clusters and selected keys held fixed; if gradients are needed, the steps are taken one by
    one, which needs more memory and time than the one call without them.

    Args:
        query: (B, H, L, D) float tensor.
        key, value: (B, H, S, D) float tensors of query's type; S may differ from L. With fewer heads, a divisor of H,
            each serves as many heads of the queries in turn.
        num_groups: G, from 1 to the queries after the prefix.
        top_k: K >= 1 exact keys for every group; clamped to the keys after the prefix.
        residual_keys: M, from 0 (none: what is not selected is left out) to the keys after the prefix.
        num_prefix_tokens: P, the first tokens of queries and keys alike (class, registers, text).
        scale: factor on the scores; default 1 / sqrt(D).
        key_mask: optional bool (B, S), True where a key is real; where L is S also of the queries, and the output of
            others is zero.
        share_key_clusters: cluster the keys of all heads together, on their concatenated channels: the price of one
            clustering, for which M may be larger.
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
    repeated_key, repeated_value = repeat_heads(query, key, value)
    check_operands(query, repeated_key, repeated_value)
    _check_sizes(query, key, num_groups, top_k, residual_keys, num_prefix_tokens)
    check_key_mask(key_mask, key.shape[0], key.shape[2], key)
    if not isinstance(share_key_clusters, bool):
        raise TypeError(
            f"share_key_clusters must be True or False, got {describe(share_key_clusters)}"
        )
    call = ClusteredCall(
        num_groups=num_groups,
        top_k=top_k,
        residual_keys=residual_keys,
        num_prefix_tokens=num_prefix_tokens,
        scale=check_scale(scale, query.shape[-1]),
        key_mask=key_mask,
        share_key_clusters=share_key_clusters,
    )
    backend = resolve_call(backend, "residual keys" if residual_keys else None, query, key, value)
    if operators.is_writing_file():
        output: Tensor = torch.ops.dgt.clustered_attention(query, key, value, *call)
        return output
    return _attend(load_backend(backend, query), query, key, value, call)


def _attend(
    steps: ModuleType, query: Tensor, key: Tensor, value: Tensor, call: ClusteredCall
) -> Tensor:
    """In one step where the backend has it for such a call, else in several."""
    in_one_step = getattr(steps, "clustered_attention", None)
    if in_one_step is not None:
        output = in_one_step(query, key, value, call)
        if output is not None:
            return cast(Tensor, output)
    repeated_key, repeated_value = repeat_heads(query, key, value)
    return _attend_in_steps(steps, query, repeated_key, repeated_value, key, call)


@torch.library.custom_op("dgt::clustered_attention", mutates_args=())
def _clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_groups: int,
    top_k: int,
    residual_keys: int,
    num_prefix_tokens: int,
    scale: float,
    key_mask: Tensor | None,
    share_key_clusters: bool,
) -> Tensor:
    """What files hold, without gradients: as quick as the machine that reads one can be."""
    call = ClusteredCall(
        num_groups=num_groups,
        top_k=top_k,
        residual_keys=residual_keys,
        num_prefix_tokens=num_prefix_tokens,
        scale=scale,
        key_mask=key_mask,
        share_key_clusters=share_key_clusters,
    )
    backend = "native" if can_run_native(query) else "torch"
    with torch.no_grad():
        return _attend(load_backend(backend, query), query, key, value, call).contiguous()


@_clustered_attention.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


register_flop_formula(torch.ops.dgt.clustered_attention)(flops.clustered_attention)


def _attend_in_steps(
    steps: ModuleType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_key: Tensor,
    call: ClusteredCall,
) -> Tensor:
    """Cluster, select, sum up and attend by the steps of a backend; ``own_key`` has the heads that the caller gave."""
    prefix, scale, key_mask = call.num_prefix_tokens, call.scale, call.key_mask
    mask = None if key_mask is None else key_mask[:, prefix:]
    patches = query[:, :, prefix:]
    query_mask = mask if query.shape[2] == key.shape[2] else None
    means, group_ids = find_clusters(steps, "query", patches, call.num_groups, query_mask)
    key_ids = _select(steps, -means if scale < 0 else means, key[:, :, prefix:], call.top_k, mask)
    key_ids = prepend_prefix(key_ids, prefix, key_mask)
    arguments = (patches, key, value, group_ids, key_ids, scale)
    if call.residual_keys == 0:
        output = steps.attend(*arguments)
    else:
        if call.residual_keys == 1:
            rest = steps.summarize_unselected(*arguments, key_mask)
        else:
            own_key = (
                own_key.transpose(1, 2).flatten(2)[:, None] if call.share_key_clusters else own_key
            )
            cluster_ids = cluster_keys(steps, own_key, call.residual_keys, prefix, key_mask)
            cluster_ids = cluster_ids.repeat_interleave(
                query.shape[1] // cluster_ids.shape[1], dim=1
            )
            rest = steps.summarize_clusters(*arguments, cluster_ids, call.residual_keys)
        more = add_remainder(key, value, key_ids, rest)
        output = steps.attend(
            patches, more.key, more.value, group_ids, more.key_ids, scale, more.key_bias
        )
    if prefix:
        output, _ = join_prefix(output, group_ids, query, key, value, scale, key_mask)
    return cast(Tensor, output)


@torch.no_grad()
def _select(
    steps: ModuleType, means: Tensor, key: Tensor, top_k: int, mask: Tensor | None
) -> Tensor:
    """The best of (B, H, S, D) keys for every image's own (B, H, G, D) mean queries: (B, H, G, K) int64."""
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
