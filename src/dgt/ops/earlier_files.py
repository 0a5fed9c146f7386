"""Operators of ``.pt2`` files that earlier code wrote, so that they load and mean what they meant.

There the mask of keys hid queries, too, where both were equally many.
"""

from types import SimpleNamespace

from torch import Tensor

from dgt.ops import flops
from dgt.ops.checks import wide_type
from dgt.ops.clustered import attend_in_clusters
from dgt.ops.cpu.interface import new_tokens
from dgt.ops.operators import attend
from dgt.ops.registry import operator


def _fake_clustered(call: SimpleNamespace) -> Tensor:
    return new_tokens(call.query)


@operator(fake=_fake_clustered, flops=flops.clustered_attention)
def clustered_attention(
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
    first_order: bool,
    backend: str = "auto",
) -> Tensor:
    """As :func:`dgt.clustered_attention`.

    Raises:
        ValueError: for clusters of keys that all heads share, which there are no more.
    """
    if share_key_clusters:
        raise ValueError(
            "share_key_clusters must be False, got True: this file is of an earlier dgt, whose heads could share "
            "clusters of keys; export the model again"
        )
    output = attend_in_clusters(
        query.detach(),
        key.detach(),
        value.detach(),
        num_groups=num_groups,
        top_k=top_k,
        residual_keys=residual_keys,
        num_prefix_tokens=num_prefix_tokens,
        scale=scale,
        query_mask=key_mask if query.shape[2] == key.shape[2] else None,
        key_mask=key_mask,
        first_order=first_order,
        backend=backend,
    )
    return new_tokens(query).copy_(output)


def _fake_residual(call: SimpleNamespace) -> tuple[Tensor, ...]:
    query = call.query
    logsumexp = query.new_empty(query.shape[:3], dtype=wide_type(query.dtype))
    return new_tokens(query), logsumexp, query.new_empty(0), query.new_empty(0)


@operator(fake=_fake_residual, flops=flops.attend)
def attend_to_residual_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_cluster_ids: Tensor | None,
    residual_keys: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``dgt::attend``; two empty results stand for those that no file read."""
    output, logsumexp, _ = attend(
        query,
        key,
        value,
        group_ids,
        key_ids,
        scale=scale,
        key_cluster_ids=key_cluster_ids,
        residual_keys=residual_keys,
    )
    return output, logsumexp, query.new_empty(0), query.new_empty(0)
