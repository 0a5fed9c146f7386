"""Dynamic Group Attention (section 3.1): group the queries, select keys for every group, attend inside each group.

    groups = group_queries(query, centroids)            # each query -> its nearest centroid
    keys   = select_keys(centroids, key, top_k)         # each centroid -> its k best keys   (Eq. 1)
    output = attend(query, key, value, groups, keys)    # attention inside each group        (Eq. 2)

The first two steps choose indices and carry no gradient; the centroids learn by Eqs. 3-4 (:mod:`dgt.ops.grouping`).
Every public function checks its arguments once; what it calls, which layers call without it, chooses a backend
(:mod:`dgt.ops.dispatch`) and takes its steps.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dgt.ops import operators
from dgt.ops.checks import (
    check_below_infinity,
    check_choice,
    check_count,
    check_device,
    check_fixed_in_exports,
    check_ids,
    check_key_ids,
    check_mask,
    check_operands,
    check_residual_keys,
    check_scale,
    check_shape,
    check_tensor,
    check_tokens,
    describe,
    needs_gradients,
    repeat_heads,
    wide_type,
)
from dgt.ops.clusters import cluster_keys
from dgt.ops.dispatch import OperatorSteps, Steps, choose_steps
from dgt.ops.prefix import join_prefix, prepend_prefix
from dgt.ops.residual_keys import attend_to_residual_keys, one_cluster

LOWEST_BIAS = torch.finfo(torch.float32).min / 4


class DynamicGroupAttentionOutput(NamedTuple):
    """The result of :func:`dynamic_group_attention`."""

    output: Tensor
    """(B, H, L, D), of the query's type; zero at padding."""
    group_ids: Tensor
    """(B, H, L) int64: the group of every query, -1 at padding; empty with ``return_ids=False``."""
    key_ids: Tensor
    """(B, H, G, min(top_k, S)) int64: the keys of every group, ascending; -1 where there are fewer real tokens.

    With a prefix of P tokens (B, H, G, P + min(top_k, L - P)), the prefix first, -1 in the place of one that is masked.
    Empty with ``return_ids=False``.
    """


def dynamic_group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
    *,
    query_mask: Tensor | None = None,
    num_prefix_tokens: int = 0,
    residual_keys: int = 0,
    key_cluster_ids: Tensor | None = None,
    return_ids: bool = True,
) -> DynamicGroupAttentionOutput:
    """Attend from every query to the ``top_k`` keys of its group, anywhere in the image (Eqs. 1-2).

    With ``top_k >= S`` this equals ``F.scaled_dot_product_attention(query, key, value)``.

    Args:
        query: (B, H, L, D) float tensor.
        key, value: (B, H, S, D) float tensors of query's type; S equals L unless queries and keys come from two images.
            With fewer heads, a divisor of H, each serves as many heads of the queries in turn.
        centroids: (H, G, D) float tensor, unit norm; or (B, H, G, D), every image's own (:func:`dgt.find_centroids`).
        top_k: k >= 1 keys for every group; clamped to S.
        scale: factor on the scores; default 1 / sqrt(D).
        key_mask: optional bool (B, S), True where a key is real. The others are never selected, and nothing sees them;
            what they hold must be finite. It hides no query. None with an image's own centroids.
        backend: the implementation of all steps. One that is named is never exchanged for another.

            - ``"auto"``: on CPUs ``"native"`` and on NVIDIA's GPUs ``"triton"``, where they are here and take the
              call; everywhere else ``"torch"``.
            - ``"reference"``: dense, any type, twice differentiable; shares no code with the others.
            - ``"native"``: a C++ kernel for CPUs; up to 256 channels per head, no float64.
            - ``"torch"``: PyTorch's own kernels, any device and type.
            - ``"triton"``: fused kernels for NVIDIA's GPUs of compute capability 8.0 and later. Up to 128 channels
              per head, no float64.
        query_mask: optional bool (B, L), True where a query is real. The others yield zero, are of no group (-1), and
            are part of no mean of queries. In self-attention padding is masked as queries and as keys. None with an
            image's own centroids.
        num_prefix_tokens: the first P tokens (class, registers, text) are of no group: they attend to all tokens, and
            every token attends to them besides the keys of its group. L must be S.
        residual_keys: M, attend also to what the selected keys leave out, summed up in M keys a group
            (:mod:`dgt.ops.residual_keys`): for models that were trained with global attention. With M > 1 there is one
            for each cluster of keys.
        key_cluster_ids: optional (B, H, S) int64, the cluster of every key, 0 to M - 1; a key of cluster -1 is part of
            no residual key. None: with M > 1 :func:`dgt.cluster_tokens` finds them.
        return_ids: False asks for the output alone, which some backends compute faster; the ids are then empty.

    Returns:
        :class:`DynamicGroupAttentionOutput`: ``output``, ``group_ids`` (-1 also for prefix tokens), ``key_ids`` (the
        prefix first).

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed; on
            CPUs also for NaN in ``query`` or ``key`` (looking would stall an accelerator: there NaN
            passes on, as in PyTorch's own attention).

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 196, 32)
        >>> centroids = F.normalize(torch.randn(2, 48, 32), dim=-1)
        >>> dynamic_group_attention(query, key, value, centroids, top_k=98).output.shape
        torch.Size([1, 2, 196, 32])
    """
    check_operands(query, key, value)
    _check_prefix(query, key, num_prefix_tokens)
    _check_residual_keys(residual_keys, key_cluster_ids, query, key, num_prefix_tokens)
    check_mask("query_mask", query_mask, "query", query)
    check_mask("key_mask", key_mask, "key", key)
    if isinstance(centroids, Tensor) and centroids.dim() == 4:
        _check_own_centroids(query, centroids, query_mask, key_mask)
    else:
        check_tokens("query", query, centroids)
    check_count("top_k", top_k)
    return attend_in_groups(
        query,
        key,
        value,
        centroids,
        top_k=top_k,
        scale=check_scale(scale, query.shape[-1]),
        query_mask=query_mask,
        key_mask=key_mask,
        backend=backend,
        num_prefix_tokens=num_prefix_tokens,
        residual_keys=residual_keys,
        key_cluster_ids=key_cluster_ids,
        return_ids=return_ids,
    )


def attend_in_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    *,
    top_k: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    backend: str,
    num_prefix_tokens: int = 0,
    residual_keys: int = 0,
    key_cluster_ids: Tensor | None = None,
    return_ids: bool = True,
) -> DynamicGroupAttentionOutput:
    """:func:`dynamic_group_attention` without its checks of tensors, for layers, whose tensors fit each other."""
    if top_k < 1:
        check_count("top_k", top_k)
    steps = choose_steps(backend, query, key, value)
    if residual_keys > 1 or key_cluster_ids is not None:
        key_cluster_ids = _clusters_of_keys(
            steps,
            query,
            key,
            count=residual_keys,
            given=key_cluster_ids,
            num_prefix_tokens=num_prefix_tokens,
            key_mask=key_mask,
        )
    if key.shape[1] != query.shape[1]:
        key, value = repeat_heads(query, key, value)
    images = None
    if centroids.dim() == 4:  # every image's own: its heads are those of one image
        images = query.shape[:2]
        query, key, value = _as_one_image(query), _as_one_image(key), _as_one_image(value)
        centroids = centroids.flatten(0, 1)
        key_cluster_ids = None if key_cluster_ids is None else _as_one_image(key_cluster_ids)
    in_one = isinstance(steps, OperatorSteps) and steps.has_whole
    if in_one and steps.backend == "native":
        in_one = not (residual_keys and num_prefix_tokens)
    elif in_one:
        in_one = not (residual_keys or num_prefix_tokens) and query.shape == key.shape
    if in_one:
        may_differentiate = torch.is_grad_enabled() and needs_gradients(query, key, value)
        output, _, group_ids, key_ids, _ = operators.attention(
            query,
            key,
            value,
            centroids,
            top_k=top_k,
            scale=scale,
            query_mask=query_mask,
            key_mask=key_mask,
            num_prefix_tokens=num_prefix_tokens,
            residual_keys=residual_keys,
            key_cluster_ids=key_cluster_ids,
            return_ids=return_ids or may_differentiate,
            backend=steps.backend,
        )
    else:
        output, group_ids, key_ids = _take_steps(
            steps,
            query,
            key,
            value,
            centroids,
            top_k=top_k,
            scale=scale,
            query_mask=query_mask,
            key_mask=key_mask,
            num_prefix_tokens=num_prefix_tokens,
            residual_keys=residual_keys,
            key_cluster_ids=key_cluster_ids,
        )
    if images is not None:
        output = _as_images(output, images)
        if return_ids:
            group_ids, key_ids = _as_images(group_ids, images), _as_images(key_ids, images)
    if not return_ids and group_ids.numel():
        group_ids = key_ids = group_ids.new_empty(0)
    return DynamicGroupAttentionOutput(output, group_ids, key_ids)


def _clusters_of_keys(
    steps: Steps,
    query: Tensor,
    key: Tensor,
    *,
    count: int,
    given: Tensor | None,
    num_prefix_tokens: int,
    key_mask: Tensor | None,
) -> Tensor:
    """The clusters of the keys, (B, H, S), for all heads of the queries."""
    if count > 1:
        check_fixed_in_exports("key", key, "several residual keys a group")
    if given is not None:
        return given if key_mask is None else given.masked_fill(~key_mask[:, None], -1)
    clusters = cluster_keys(steps, key, count, num_prefix_tokens, key_mask)
    shared_by = query.shape[1] // key.shape[1]
    return clusters if shared_by == 1 else clusters.repeat_interleave(shared_by, dim=1)


def _as_one_image(tensor: Tensor) -> Tensor:
    """(B, H, ...) heads of images as (1, B H, ...), the heads of one: each with centroids of its own."""
    return tensor.flatten(0, 1)[None]


def _as_images(tensor: Tensor, images: torch.Size) -> Tensor:
    """The same, back as (B, H, ...)."""
    return tensor[0].unflatten(0, images)


def _take_steps(
    steps: Steps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    *,
    top_k: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    num_prefix_tokens: int,
    residual_keys: int,
    key_cluster_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, groups and keys, in three steps."""
    prefix = num_prefix_tokens
    patches = query[:, :, prefix:]
    mask = None if key_mask is None else key_mask[:, prefix:]
    of_patches = None if query_mask is None else query_mask[:, prefix:]
    group_ids = steps.group_queries(patches, centroids, of_patches)
    key_ids = steps.select_keys(centroids, key[:, :, prefix:], top_k, mask)
    key_ids = prepend_prefix(key_ids, prefix, key_mask)
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
        key_cluster_ids=key_cluster_ids,
    )
    if prefix:
        output, group_ids = join_prefix(
            output,
            group_ids,
            query,
            key,
            value,
            scale=scale,
            query_mask=query_mask,
            key_mask=key_mask,
        )
    return output, group_ids, key_ids


def attend_with_residual_keys(
    steps: Steps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    *,
    scale: float,
    key_mask: Tensor | None,
    residual_keys: int,
    key_cluster_ids: Tensor | None,
) -> Tensor:
    """Attend inside groups, to M residual keys as well, of given clusters of keys or, with M = 1, of all keys.

    What a mask hides must be of cluster -1.
    """
    if not residual_keys:
        output: Tensor = steps.attend(query, key, value, group_ids, key_ids, scale)
        return output
    if key_cluster_ids is None and key_mask is not None:
        key_cluster_ids = one_cluster(key, key_mask)
    attend_in: Callable[..., Tensor] = functools.partial(attend_to_residual_keys, steps)
    if isinstance(steps, OperatorSteps):
        in_one = steps.backend in ("native", "auto")
        if steps.backend == "triton":  # which then keeps in float32 what only gradients read
            in_one = needs_gradients(query, key, value)
        if in_one:
            attend_in = steps.attend
    output = attend_in(
        query,
        key,
        value,
        group_ids,
        key_ids,
        scale=scale,
        key_cluster_ids=key_cluster_ids,
        residual_keys=residual_keys,
    )
    return output


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
        key_bias: optional (B, H, S) float tensor, added to the scores of a key: the logarithm of
            the number of keys it represents. Below infinity; a key of -inf is as one that is not
            listed.

    Returns:
        (B, H, L, D) of the query's type; zero at padding, and for a group without keys.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed; on
            the CPU also for ids out of range or doubled (on an accelerator looking would stall the
            stream).

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 196, 32)
        >>> centroids = F.normalize(torch.randn(2, 48, 32), dim=-1)
        >>> group_ids = dgt.group_queries(query, centroids)
        >>> key_ids = dgt.select_keys(centroids, key, top_k=98)
        >>> dgt.attend(query, key, value, group_ids, key_ids).shape
        torch.Size([1, 2, 196, 32])
    """
    scale = _check_attend(query, key, value, group_ids, key_ids, scale=scale, key_bias=key_bias)
    key_ids, key_bias = _without_weightless_keys(key_ids, key_bias)
    steps = choose_steps(backend, query, key, value, key_bias)
    output: Tensor = steps.attend(query, key, value, group_ids, key_ids, scale, key_bias=key_bias)
    return output


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
    """:func:`attend`, and what is needed to merge its result with attention over other keys (:func:`merge_attention`).

    Args:
        query, key, value, group_ids, key_ids, scale, backend, key_bias: as in :func:`attend`.

    Returns:
        ``(output, logsumexp)``: the second (B, H, L), float32 or float64, the logarithm of every query's sum of
        exponentials, -inf if it sees no key. Both are differentiable.

    Raises:
        TypeError, ValueError: as :func:`attend`.

    Example:
        >>> image = attend_with_logsumexp(query, key, value, group_ids, key_ids)
        >>> text = attend_with_logsumexp(query, text_key, text_value, group_ids, text_key_ids)
        >>> output, _ = merge_attention(image, text)
    """
    scale = _check_attend(query, key, value, group_ids, key_ids, scale=scale, key_bias=key_bias)
    key_ids, key_bias = _without_weightless_keys(key_ids, key_bias)
    steps = choose_steps(backend, query, key, value, key_bias)
    output, sums = steps.attend_with_logsumexp(
        query, key, value, group_ids, key_ids, scale, key_bias=key_bias
    )
    return output, sums


def merge_attention(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries over disjoint sets of keys into attention over all of them.

    Args:
        parts: ``(output, logsumexp)`` each, (B, H, L, D) and (B, H, L), as of :func:`attend_with_logsumexp`.

    Returns:
        ``(output, logsumexp)`` of the union; zero and -inf where no part sees a key.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> first = attend_with_logsumexp(query, key, value, group_ids, key_ids)
        >>> second = attend_with_logsumexp(query, key, value, group_ids, other_key_ids)
        >>> output, logsumexp = merge_attention(first, second)
    """
    if not parts:
        raise ValueError("parts must be at least one pair of output and logsumexp, got none")
    for part in parts:
        if not isinstance(part, tuple) or len(part) != 2:
            raise TypeError(f"parts must be pairs of output and logsumexp, got {describe(part)}")
        output, logsumexp = part
        check_tensor("output", output, "BHLD", floating=True)
        check_tensor("logsumexp", logsumexp, "BHL", floating=True)
        check_shape("output", output, "BHLD", tuple(parts[0][0].shape), "the first part")
        check_shape("logsumexp", logsumexp, "BHL", tuple(output.shape[:3]), "output")
    sums = torch.stack([part[1] for part in parts])  # (parts, B, H, L)
    blind = sums.isneginf().all(0)
    weights = sums.masked_fill(blind, 0.0).softmax(0)
    merged = sum(weight[..., None] * part[0] for weight, part in zip(weights, parts, strict=True))
    whole = sums.masked_fill(blind, 0.0).logsumexp(0).masked_fill(blind, -torch.inf)
    return cast(Tensor, merged).to(parts[0][0].dtype), whole


def _without_weightless_keys(
    key_ids: Tensor, key_bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Take keys whose bias is -inf out of the lists: then no backend meets a row of nothing but -inf.

    What people write in its place, the lowest number of a type, is kept above what hides keys in kernels.
    """
    if key_bias is None:
        return key_ids, None
    weightless = key_bias.isneginf()
    listed = weightless[:, :, None].expand(-1, -1, key_ids.shape[2], -1)
    is_out = listed.gather(-1, key_ids.clamp(min=0))
    finite = key_bias.masked_fill(weightless, 0.0).to(wide_type(key_bias.dtype))
    return key_ids.masked_fill(is_out, -1), finite.clamp(min=LOWEST_BIAS)


def _check_own_centroids(
    query: Tensor, centroids: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> None:
    """Check the (B, H, G, D) centroids of every image."""
    for name, mask in (("query_mask", query_mask), ("key_mask", key_mask)):
        if mask is not None:
            raise ValueError(f"{name} must be None where centroids are (B, H, G, D)")
    check_shape("centroids", centroids, "BHGD", (*query.shape[:2], *centroids.shape[2:]), "query")


def _check_prefix(query: Tensor, key: Tensor, num_prefix_tokens: int) -> None:
    """Check the number of prefix tokens."""
    check_count("num_prefix_tokens", num_prefix_tokens, least=0)
    if num_prefix_tokens and (query.shape[2] != key.shape[2] or num_prefix_tokens >= key.shape[2]):
        came = f"{num_prefix_tokens} with {query.shape[2]} queries and {key.shape[2]} keys"
        raise ValueError(
            f"num_prefix_tokens must be 0, or fewer than the tokens if L = S, got {came}"
        )


def _check_residual_keys(
    residual_keys: int,
    key_cluster_ids: Tensor | None,
    query: Tensor,
    key: Tensor,
    num_prefix_tokens: int,
) -> None:
    """Check the number of residual keys per group, and the clusters that they represent."""
    check_residual_keys(residual_keys, key.shape[2] - num_prefix_tokens)
    if key_cluster_ids is None:
        return
    name = "key_cluster_ids"
    if residual_keys == 0:
        raise ValueError(f"{name} must be None without residual_keys")
    check_tensor(name, key_cluster_ids, "BHS", floating=False)
    check_shape(name, key_cluster_ids, "BHS", (*query.shape[:2], key.shape[2]), "query and key")
    check_device("key", key, key_cluster_ids=key_cluster_ids)
    check_ids(name, key_cluster_ids, residual_keys)


def _check_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    *,
    scale: float | None,
    key_bias: Tensor | None,
) -> float:
    """Check the arguments of attention inside groups; returns the scale."""
    check_operands(query, key, value, share_heads=False)
    check_choice(query, key, group_ids, key_ids)
    check_ids("group_ids", group_ids, key_ids.shape[2])
    check_key_ids(key_ids, key.shape[2])
    if key_bias is not None:
        check_tensor("key_bias", key_bias, "BHS", floating=True)
        check_shape("key_bias", key_bias, "BHS", tuple(key.shape[:3]), "key")
        check_device("query", query, key_bias=key_bias)
        check_below_infinity("key_bias", key_bias)
    return check_scale(scale, query.shape[-1])
