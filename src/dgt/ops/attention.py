"""Dynamic Group Attention (section 3.1): group the queries, select keys for every group, attend inside each group.

    groups = group_queries(query, centroids)            # each query -> its nearest centroid
    keys   = select_keys(centroids, key, top_k)         # each centroid -> its k best keys   (Eq. 1)
    output = attend(query, key, value, groups, keys)    # attention inside each group        (Eq. 2)

The first two steps choose indices and carry no gradient; the centroids learn by Eqs. 3-4 (:mod:`dgt.ops.grouping`).
"""

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops import eager, reference
from dgt.ops import remainder as remainders
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
    full_precision,
    has_tangent,
)
from dgt.ops.grouping import group_queries
from dgt.ops.remainder import add_remainder
from dgt.ops.selection import select_keys
from dgt.ops.triton.fallback import falls_back


class DynamicGroupAttentionOutput(NamedTuple):
    """What :func:`dynamic_group_attention` returns."""

    output: Tensor
    """(B, H, L, D), of the query's type; zero at padding."""
    group_ids: Tensor
    """(B, H, L) int64: the group of every query, -1 at padding."""
    key_ids: Tensor
    """(B, H, G, min(top_k, S)) int64: the keys of every group, ascending; -1 where there are fewer real tokens.

    With a prefix of P tokens (B, H, G, P + min(top_k, L - P)), the prefix first, -1 in the place of one that is masked.
    """


@falls_back
def dynamic_group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
    num_prefix_tokens: int = 0,
    remainder: bool = False,
) -> DynamicGroupAttentionOutput:
    """Attend from every query to the ``top_k`` keys of its group, anywhere in the image (Eqs. 1-2).

    With ``top_k >= S`` this equals ``F.scaled_dot_product_attention(query, key, value)``.

    Args:
        query: (B, H, L, D) float tensor.
        key, value: (B, H, S, D) float tensors of query's type; S is L, but where queries and keys are of two images.
            With fewer heads, a divisor of H, each serves as many heads of the queries in turn.
        centroids: (H, G, D) float tensor, unit norm; or (B, H, G, D), every image's own (:func:`dgt.find_centroids`).
        top_k: k >= 1 keys for every group; clamped to S.
        scale: factor on the scores; default 1 / sqrt(D).
        key_mask: optional bool (B, S), True where a token is real. Padding is never selected, never counted, and, where
            L is S, yields zero; what it holds must be finite. None with an image's own centroids.
        backend: ``"reference"`` (dense, any type, twice differentiable, shares no code with the others), ``"eager"``
            (fast, plain PyTorch, any device), ``"triton"`` (fused kernels for CUDA; up to 128 channels per head, no
            float64, no gradients of a remainder), or ``"auto"``: Triton where it can run, eager elsewhere and, with a
            warning, where a kernel fails. It governs all steps; a backend that is named never falls back to another.
        num_prefix_tokens: the first P tokens (class, registers, text) are of no group: they attend to all tokens, and
            every token attends to them besides the keys of its group. L must be S.
        remainder: attend also to what the selected keys leave out, summed up in one key a group
            (:mod:`dgt.ops.remainder`): for models that were trained with global attention.

    Returns:
        :class:`DynamicGroupAttentionOutput`: ``output``, ``group_ids`` (-1 also for prefix tokens), ``key_ids`` (the
        prefix first).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    if isinstance(centroids, Tensor) and centroids.dim() == 4:
        rest = (top_k, scale, key_mask, backend, num_prefix_tokens, remainder)
        return _with_own_centroids(query, key, value, centroids, rest)
    key, value = _all_heads(query, key, value)
    _check_operator(query, key, value, key_mask, num_prefix_tokens)
    scale = check_scale(scale, query.shape[-1])
    backend = _resolve(backend, remainder, "a remainder", query, key, value)
    return _three_steps(query, key, value, centroids, top_k, scale, key_mask, backend, num_prefix_tokens, remainder)


def _three_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float,
    key_mask: Tensor | None,
    backend: str,
    prefix: int,
    remainder: bool,
) -> DynamicGroupAttentionOutput:
    """Group, select, attend: all that is not prefix, which attends to everything."""
    patches, mask = query[:, :, prefix:], None if key_mask is None else key_mask[:, prefix:]
    if backend == "triton" and query.shape == key.shape and not (prefix and key_mask is not None):  # in one operator
        check_tokens("query", query, centroids)
        check_count("top_k", top_k)
        check_no_nan("query", query)
        rest = (centroids.detach(), top_k, float(scale), key_mask, remainder)
        output, _, group_ids, key_ids, *_ = load_triton().attention(patches, key, value, *rest)
        key_ids = _with_prefix(key_ids, prefix, None) if prefix else key_ids
    else:
        group_ids = group_queries(patches, centroids, mask if query.shape[2] == key.shape[2] else None, backend)
        key_ids = select_keys(centroids, key[:, :, prefix:], top_k, mask, backend)
        key_ids = _with_prefix(key_ids, prefix, key_mask) if prefix else key_ids
        seen: tuple[Any, ...] = (key, value, key_ids, None)
        if remainder:
            step = reference if backend == "reference" else remainders
            found = step.summarize_unselected(patches, key, value, group_ids, key_ids, scale, key_mask)
            seen = add_remainder(key, value, key_ids, found)
        output = _attend(backend, False, patches, *seen[:2], group_ids, seen[2], scale, seen[3])[0]
    if prefix:
        everything = None if key_mask is None else key_mask[:, None, None]
        with full_precision(query.device):
            whole = F.scaled_dot_product_attention(query[:, :, :prefix], key, value, everything, scale=scale)
        if key_mask is not None:
            whole = whole.masked_fill(~key_mask[:, None, :prefix, None], 0.0)
        output = torch.cat([whole, output], dim=2)
        group_ids = F.pad(group_ids, (prefix, 0), value=-1)
    return DynamicGroupAttentionOutput(output, group_ids, key_ids)


@falls_back
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float | None = None,
    backend: str = "auto",
    key_bias: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every query over the selected keys of its group (Eq. 2).

    ``output[b, h, l] = softmax(scale query[b, h, l] key[b, h, ids]^T + key_bias[b, h, ids]) value[b, h, ids]`` with
    ``ids = key_ids[b, h, group_ids[b, h, l]]``. Differentiable in query, key, value and key_bias.

    Args:
        query: (B, H, L, D) float tensor.
        key, value: (B, H, S, D) float tensors of query's type.
        group_ids: (B, H, L) int64; -1 marks padding.
        key_ids: (B, H, G, K) int64, no key twice in one list; -1 marks an empty place.
        scale: factor on the scores; default 1 / sqrt(D).
        backend: as in :func:`dynamic_group_attention`.
        key_bias: optional (B, H, S) float tensor, added to the scores of a key: the logarithm of how many keys it
            stands for. In Triton without gradients.

    Returns:
        (B, H, L, D) of the query's type; zero at padding, and for a group without keys.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; on the CPU also for ids out of
            range or doubled (on an accelerator looking would stall the stream).
    """
    scale = _check_attend(query, key, value, group_ids, key_ids, scale=scale, key_bias=key_bias)
    backend = _resolve(backend, key_bias is not None, "attention with key_bias", query, key, value, key_bias)
    return _attend(backend, False, query, key, value, group_ids, key_ids, scale, key_bias)[0]


def attend_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float | None = None,
    backend: str = "auto",
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attend`, and what it takes to join its result with attention over other keys (:func:`merge_attention`).

    Arguments and errors are those of :func:`attend`; in Triton without gradients.

    Returns:
        ``(output, logsumexp)``: the second (B, H, L), float32 or float64, the logarithm of every query's sum of
        exponentials, -inf where it sees no key. Both are differentiable.
    """
    scale = _check_attend(query, key, value, group_ids, key_ids, scale=scale, key_bias=key_bias)
    backend = _resolve(backend, True, "the logarithms of the sums", query, key, value, key_bias)
    output, sums = _attend(backend, True, query, key, value, group_ids, key_ids, scale, key_bias)
    return output, sums


def merge_attention(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join attentions of the same queries over disjoint sets of keys into that over all of them.

    Args:
        parts: ``(output, logsumexp)`` each, (B, H, L, D) and (B, H, L), as of :func:`attend_with_logsumexp`.

    Returns:
        ``(output, logsumexp)`` of the union; zero and -inf where no part sees a key.
    """
    sums = torch.stack([part[1] for part in parts])  # (parts, B, H, L)
    blind = sums.isneginf().all(0)
    weights = sums.masked_fill(blind, 0.0).softmax(0)
    output = sum(weight[..., None] * part[0] for weight, part in zip(weights, parts, strict=True))
    whole = sums.masked_fill(blind, 0.0).logsumexp(0).masked_fill(blind, -torch.inf)
    return cast(Tensor, output).to(parts[0][0].dtype), whole


def _attend(backend: str, with_sums: bool, *arguments: Any) -> tuple[Tensor, ...]:
    """Attend inside groups on a backend; the arguments, those of :func:`attend` but for its backend, are right."""
    if backend == "triton":
        output, sums, *_ = load_triton().attend(*arguments[:5], float(arguments[5]), arguments[6])
        return (output, sums * math.log(2)) if with_sums else (output,)
    if backend == "reference":
        return reference.attend_with_logsumexp(*arguments)
    return eager.attend_with_logsumexp(*arguments) if with_sums else (eager.attend(*arguments),)


def _resolve(backend: str, forward_only: bool, what: str, *tensors: Tensor | None) -> str:
    """The backend that a call runs on; for some Triton has no gradients of these tensors, the first of them tokens."""
    resolved = resolve_backend(backend, tensors[0])
    if resolved != "reference" and has_tangent(*tensors):
        raise ValueError(f'backend must be "reference" for forward-mode differentiation, got "{backend}"')
    wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if resolved == "triton" and forward_only and wanted:
        if backend == "triton":
            raise ValueError(f'backend must be "eager" or "reference" for gradients of {what}, got "triton"')
        return "eager"
    return resolved


def _with_own_centroids(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, rest: tuple[Any, ...]
) -> DynamicGroupAttentionOutput:
    """Every image has its own centroids: images become heads of one."""
    key, value = _all_heads(query, key, value)
    _check_inputs(query, key, value)
    if rest[2] is not None:
        raise ValueError("key_mask must be None where centroids are (B, H, G, D)")
    check_shape("centroids", centroids, "BHGD", (*query.shape[:2], *centroids.shape[2:]), "query")
    q, k, v = (tensor.flatten(0, 1)[None] for tensor in (query, key, value))
    found = dynamic_group_attention(q, k, v, centroids.flatten(0, 1), *rest)
    return DynamicGroupAttentionOutput(*(tensor[0].unflatten(0, query.shape[:2]) for tensor in found))


def _all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key heads that serve several heads of queries."""
    if not all(isinstance(t, Tensor) and t.dim() == 4 for t in (query, key, value)) or key.shape[1] == query.shape[1]:
        return key, value  # wrong ones are told by the checks that follow
    if 0 in key.shape[:2] or query.shape[1] % key.shape[1]:
        raise ValueError(f"key must have heads that divide query's {query.shape[1]}, got {key.shape[1]}")
    each = query.shape[1] // key.shape[1]
    return key.repeat_interleave(each, dim=1), value.repeat_interleave(each, dim=1)


def _with_prefix(key_ids: Tensor, prefix: int, key_mask: Tensor | None) -> Tensor:
    """Lists of patches as lists of tokens, the prefix before them."""
    always = torch.arange(prefix, device=key_ids.device)
    if key_mask is not None:
        always = always.where(key_mask[:, :prefix], -1)[:, None, None]
    return torch.cat([always.expand(*key_ids.shape[:3], prefix), (key_ids + prefix).where(key_ids >= 0, -1)], dim=-1)


def _check_operator(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, prefix: int) -> None:
    """Check what the three steps do not check themselves."""
    _check_inputs(query, key, value)
    check_key_mask(key_mask, key.shape[0], key.shape[2], key)
    check_count("num_prefix_tokens", prefix, least=0)
    if prefix and (query.shape[2] != key.shape[2] or prefix >= key.shape[2]):
        came = f"{prefix} with {query.shape[2]} queries and {key.shape[2]} keys"
        raise ValueError(f"num_prefix_tokens must be 0 or fewer than the tokens, as many queries as keys, got {came}")


def _check_attend(*arguments: Tensor, scale: float | None, key_bias: Tensor | None) -> float:
    """Check what attention inside groups takes; returns the scale."""
    query, key, value, group_ids, key_ids = arguments
    _check_inputs(query, key, value)
    check_choice(query, key, group_ids, key_ids)
    check_ids("group_ids", group_ids, key_ids.shape[2])
    check_key_ids(key_ids, key.shape[2])
    if key_bias is not None:
        check_tensor("key_bias", key_bias, "BHS", floating=True)
        check_shape("key_bias", key_bias, "BHS", tuple(key.shape[:3]), "key")
        check_device("query", query, key_bias=key_bias)
    return check_scale(scale, query.shape[-1])


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
