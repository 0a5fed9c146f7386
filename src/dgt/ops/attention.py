"""Dynamic Group Attention (section 3.1): group the queries, select keys for every group, attend inside each group.

    groups = group_queries(query, centroids)            # each query -> its nearest centroid
    keys   = select_keys(centroids, key, top_k)         # each centroid -> its k best keys   (Eq. 1)
    output = attend(query, key, value, groups, keys)    # attention inside each group        (Eq. 2)

The first two steps choose indices and carry no gradient; the centroids learn by Eqs. 3-4 (:mod:`dgt.ops.grouping`).
"""

from typing import NamedTuple

from torch import Tensor

from dgt.ops import eager, reference
from dgt.ops.backends import load_triton, resolve_backend
from dgt.ops.checks import (
    check_choice,
    check_count,
    check_device,
    check_ids,
    check_key_ids,
    check_key_mask,
    check_no_nan,
    check_scale,
    check_shape,
    check_tensor,
    check_tokens,
)
from dgt.ops.grouping import group_queries
from dgt.ops.selection import select_keys


class DynamicGroupAttentionOutput(NamedTuple):
    """What :func:`dynamic_group_attention` returns."""

    output: Tensor
    """(B, H, L, D), of the query's type; zero at padding."""
    group_ids: Tensor
    """(B, H, L) int64: the group of every query, -1 at padding."""
    key_ids: Tensor
    """(B, H, G, min(top_k, L)) int64: the keys of every group, ascending; -1 where there are fewer real tokens."""


def dynamic_group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> DynamicGroupAttentionOutput:
    """Attend from every query to the ``top_k`` keys of its group, anywhere in the image (Eqs. 1-2).

    With ``top_k >= L`` this equals ``F.scaled_dot_product_attention(query, key, value)``.

    Args:
        query, key, value: (B, H, L, D) float tensors of one type.
        centroids: (H, G, D) float tensor, unit norm.
        top_k: k >= 1 keys for every group; clamped to L.
        scale: factor on the scores; default 1 / sqrt(D).
        key_mask: optional bool (B, L), True where a token is real. Padding is never selected, never counted, and
            yields zero; what it holds must be finite.
        backend: ``"reference"`` (dense, any type, twice differentiable, shares no code with the others), ``"eager"``
            (fast, plain PyTorch, any device), ``"triton"`` (fused kernels for CUDA; up to 128 channels per head, no
            float64), or ``"auto"``: Triton where it can run, eager elsewhere. It governs all three steps, and a choice
            never falls back to another.

    Returns:
        :class:`DynamicGroupAttentionOutput`: ``output``, ``group_ids``, ``key_ids``.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _check_inputs(query, key, value)
    check_shape("key", key, "BHLD", tuple(query.shape), "query")
    check_scale(scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if resolve_backend(backend, query) == "triton":  # may do all three steps in one kernel
        check_tokens("query", query, centroids)
        check_count("top_k", top_k)
        check_key_mask(key_mask, query.shape[0], query.shape[2], query)
        check_no_nan("query", query)
        fused = load_triton().attention(query, key, value, centroids, top_k, scale, key_mask)
        return DynamicGroupAttentionOutput(*fused)
    group_ids = group_queries(query, centroids, key_mask, backend)
    key_ids = select_keys(centroids, key, top_k, key_mask, backend)
    output = _attend(query, key, value, group_ids, key_ids, scale, backend)
    return DynamicGroupAttentionOutput(output, group_ids, key_ids)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention of every query over the selected keys of its group (Eq. 2).

    ``output[b, h, l] = softmax(scale query[b, h, l] key[b, h, ids]^T) value[b, h, ids]`` with
    ``ids = key_ids[b, h, group_ids[b, h, l]]``. Differentiable in query, key and value.

    Args:
        query, key, value: (B, H, L, D) float tensors of one type.
        group_ids: (B, H, L) int64; -1 marks padding.
        key_ids: (B, H, G, K) int64, no key twice in one list; -1 marks an empty place.
        scale: factor on the scores; default 1 / sqrt(D).
        backend: as in :func:`dynamic_group_attention`.

    Returns:
        (B, H, L, D) of the query's type; zero at padding, and for a group without keys.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; on the CPU also for ids out of
            range or doubled (on an accelerator looking would stall the stream).
    """
    _check_inputs(query, key, value)
    check_choice(query, key, group_ids, key_ids)
    check_ids("group_ids", group_ids, key_ids.shape[2])
    check_key_ids(key_ids, key.shape[2])
    check_scale(scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attend(query, key, value, group_ids, key_ids, scale, backend)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float, backend: str
) -> Tensor:
    """Attend inside groups on the backend asked for; the arguments are right."""
    backend = resolve_backend(backend, query)
    step = load_triton() if backend == "triton" else reference if backend == "reference" else eager
    output: Tensor = step.attend(query, key, value, group_ids, key_ids, scale)
    return output


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check query, key and value against each other."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor, "BHLD", floating=True)
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have query's type {query.dtype}, got {tensor.dtype}")
    check_shape("key", key, "BHLD", (*query.shape[:2], key.shape[2], query.shape[3]), "query")
    check_shape("value", value, "BHLD", tuple(key.shape), "key")
    check_device("query", query, key=key, value=value)
    if query.numel() == 0 or key.numel() == 0:
        raise ValueError(f"query and key must not be empty, got {tuple(query.shape)} and {tuple(key.shape)}")
