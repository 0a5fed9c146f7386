"""The operators of attention that PyTorch sees, each registered once, whatever computes it.

The FLOP counter has formulas for them (:mod:`dgt.ops.flops`), ``torch.compile`` takes each as one node, ``.pt2`` files
hold them, and ONNX is translated from them (:mod:`dgt.inference.onnx_operators`). What computes one is its last
argument, ``backend``:

- ``"native"``: :mod:`dgt.ops.cpu.backend`, the C++ kernels.
- ``"torch"``: :mod:`dgt.ops.torch_backend`. On accelerators and under transforms of ``torch.func`` it is called without
  an operator, so that autograd and compilers look into it.
- ``"triton"``: :mod:`dgt.ops.triton.backend`.
- ``"auto"``, the default, which files leave out: the native kernels where they are there and take the call, else
  ``"torch"``. So a file written on one machine is as quick as another machine can be.

A step that the native kernels alone have as an operator is the kernel's own function, registered.

Outputs lie in memory as (B, L, H, D), which the next projection reads as it is.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dgt.ops import flops, torch_backend
from dgt.ops.checks import wide_type
from dgt.ops.cpu.interface import new_residual, new_tokens
from dgt.ops.gradients import new_gradients, split_gradients
from dgt.ops.prefix import join_prefix
from dgt.ops.registry import KERNELS, differentiate, load_kernels, load_triton, operator
from dgt.ops.residual_keys import attend_to_residual_keys as attend_in_steps
from dgt.ops.residual_keys import one_cluster


def _as_new_tokens(output: Tensor) -> Tensor:
    """The same (B, H, L, D) tensor, as (B, L, H, D) in memory."""
    return output.transpose(1, 2).contiguous().transpose(1, 2)


# ---- groups, keys, statistics and clusters: without gradients ----


def _fake_group_ids(call: SimpleNamespace) -> Tensor:
    return cast(Tensor, call.query.new_empty(call.query.shape[:3], dtype=torch.int64))


@operator(fake=_fake_group_ids, flops=flops.group_queries)
def group_queries(
    query: Tensor, centroids: Tensor, query_mask: Tensor | None, backend: str = "auto"
) -> Tensor:
    """As :func:`dgt.group_queries`."""
    kernels = load_kernels(backend, query)
    group_ids: Tensor = kernels.group_queries(query, centroids, query_mask)
    return group_ids


def _fake_key_ids(call: SimpleNamespace) -> Tensor:
    batch, heads, count, _channels = call.key.shape
    shape = (batch, heads, call.centroids.shape[1], torch.sym_min(call.top_k, count))
    return cast(Tensor, call.key.new_empty(shape, dtype=torch.int64))


@operator(fake=_fake_key_ids, flops=flops.select_keys)
def select_keys(
    centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None, backend: str = "auto"
) -> Tensor:
    """As :func:`dgt.select_keys`."""
    kernels = load_kernels(backend, key)
    key_ids: Tensor = kernels.select_keys(centroids, key, top_k, key_mask)
    return key_ids


def _fake_statistics(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    query, groups = call.query, call.num_groups
    sums = query.new_empty((query.shape[1], groups, query.shape[3]), dtype=torch.float32)
    return sums, query.new_empty((query.shape[1], groups), dtype=torch.float32)


@operator(fake=_fake_statistics, flops=flops.group_statistics)
def group_statistics(
    query: Tensor, group_ids: Tensor, num_groups: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Sum the normalized queries of every group, (H, G, D), and count them, (H, G) (Eq. 3)."""
    kernels = load_kernels(backend, query)
    sums, counts = kernels.group_statistics(query, group_ids, num_groups)
    return sums, counts


def _fake_clusters(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    tokens = call.tokens
    batch, heads, count, channels = tokens.shape
    centroids = tokens.new_empty((batch, heads, call.num_clusters, channels), dtype=torch.float32)
    return centroids, tokens.new_empty((batch, heads, count), dtype=torch.int64)


@operator(fake=_fake_clusters, flops=flops.cluster_tokens)
def cluster_tokens(
    tokens: Tensor, num_clusters: int, steps: int, every: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As :func:`dgt.ops.lloyd.cluster_tokens`: on the native kernels where they take the tokens, else in PyTorch."""
    kernels = load_kernels("auto", tokens)
    centroids, ids = kernels.cluster_tokens(tokens, num_clusters, steps, every, mask)
    return centroids, ids


def _fake_sums(call: SimpleNamespace) -> Tensor:
    tokens = call.tokens
    shape = (*tokens.shape[:2], call.num_groups, tokens.shape[3] + 1)
    return cast(Tensor, tokens.new_empty(shape, dtype=torch.float32))


@operator(fake=_fake_sums, flops=flops.sum_groups)
def sum_groups(tokens: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    """Sum the tokens of every group of every head, and count them last: float32 (B, H, G, D + 1).

    On Triton alone; elsewhere it is no operator.
    """
    sums: Tensor = load_triton().sum_groups(tokens, group_ids, num_groups)
    return sums


def _fake_summaries(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    key = call.key
    shape = (*call.key_ids.shape[:3], call.residual_keys)
    keys, values = (key.new_empty((*shape, key.shape[3])) for _ in range(2))
    return keys, values, key.new_empty(shape, dtype=torch.float32)


@operator(fake=_fake_summaries, flops=flops.summarize_clusters)
def summarize_clusters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_cluster_ids: Tensor,
    residual_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Residual keys, their values and biases, -inf where a cluster has no members left.

    On Triton, and where FLOPs are counted without data; elsewhere it is no operator.
    """
    arguments = (query, key, value, group_ids, key_ids, scale, key_cluster_ids, residual_keys)
    keys, values, bias = load_triton().sum_up_clusters(*arguments)
    return keys, values, bias


# ---- attention inside groups (Eq. 2) ----


def _fake_attend(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    query = call.query
    return (
        new_tokens(query),
        query.new_empty(query.shape[:3], dtype=wide_type(query.dtype)),
        new_residual(query, call.key_ids.shape[2], call.residual_keys),
    )


@operator(fake=_fake_attend, flops=flops.attend)
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
    with_logsumexp: bool = False,
    residual_keys: int = 0,
    key_cluster_ids: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend inside groups, to M residual keys as well (:mod:`dgt.ops.residual_keys`), of one cluster without ids.

    Returns the output, the (B, H, L) log-sum-exp of every query, which may be zeros unless it is asked for, and what
    the gradients need of residual keys, with which there is no ``key_bias``.
    """
    kernels = load_kernels(backend, query)
    if kernels is not torch_backend:
        output, logsumexp, residual = kernels.attend(
            query,
            key,
            value,
            group_ids,
            key_ids,
            scale=scale,
            key_bias=key_bias,
            residual_keys=residual_keys,
            key_cluster_ids=key_cluster_ids,
        )
        return output, logsumexp, residual
    logsumexp = query.new_zeros(query.shape[:3], dtype=wide_type(query.dtype))
    if residual_keys:
        output = attend_in_steps(
            kernels,
            query,
            key,
            value,
            group_ids,
            key_ids,
            scale=scale,
            key_cluster_ids=key_cluster_ids,
            residual_keys=residual_keys,
        )
    elif with_logsumexp:
        output, logsumexp = kernels.attend_with_logsumexp(
            query, key, value, group_ids, key_ids, scale, key_bias=key_bias
        )
    else:
        output = kernels.attend(query, key, value, group_ids, key_ids, scale, key_bias=key_bias)
    residual = new_residual(query, key_ids.shape[2], residual_keys).zero_()
    return _as_new_tokens(output), logsumexp, residual


def _fake_attention(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, prefix = call.query, call.num_prefix_tokens
    batch, heads, queries, _ = query.shape
    groups = call.centroids.shape[1]
    length = prefix + torch.sym_min(call.top_k, call.key.shape[2] - prefix)
    of_queries = (batch, heads, queries) if call.return_ids else (0,)
    of_keys = (batch, heads, groups, length) if call.return_ids else (0,)
    return (
        new_tokens(query),
        query.new_empty(of_queries, dtype=torch.float32),
        query.new_empty(of_queries, dtype=torch.int64),
        query.new_empty(of_keys, dtype=torch.int64),
        new_residual(query, groups, call.residual_keys if call.return_ids else 0),
    )


@operator(fake=_fake_attention, flops=flops.attention)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    scale: float,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    num_prefix_tokens: int,
    residual_keys: int,
    key_cluster_ids: Tensor | None,
    return_ids: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The three steps in one, on ``"native"`` and ``"triton"``: output, log-sum-exp, groups, keys and residual keys.

    All but the first are empty without ``return_ids``; gradients need them. Triton takes no residual keys and no
    prefix, the native kernels one of the two. What masks hide must be of cluster -1.
    """
    kernels = KERNELS.get(backend) or load_kernels(backend, query)
    output, logsumexp, group_ids, key_ids, residual = kernels.attention(
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
        return_ids=return_ids,
    )
    return output, logsumexp, group_ids, key_ids, residual


# ---- their gradients ----


def _fake_attend_backward(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    of_bias = (0,) if call.key_bias is None else call.key_bias.shape
    grad_bias = call.query.new_empty(of_bias, dtype=torch.float32)
    return new_gradients(call.query, call.key), grad_bias


@operator(fake=_fake_attend_backward, flops=flops.attend_backward)
def attend_backward(
    grad: Tensor,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    residual: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    key_bias: Tensor | None,
    key_cluster_ids: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    num_prefix_tokens: int,
    residual_keys: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of either operator above: in query, key and value, of their type and together
    (:mod:`dgt.ops.gradients`), and in key_bias, float32, empty where there is none.
    """
    kernels = load_kernels(backend, query)
    grads, grad_bias = kernels.attend_backward(
        grad,
        query,
        key,
        value,
        output,
        logsumexp,
        grad_logsumexp=grad_logsumexp,
        residual=residual,
        group_ids=group_ids,
        key_ids=key_ids,
        key_bias=key_bias,
        key_cluster_ids=key_cluster_ids,
        query_mask=query_mask,
        key_mask=key_mask,
        scale=scale,
        num_prefix_tokens=num_prefix_tokens,
        residual_keys=residual_keys,
    )
    return grads, grad_bias


def _save_attend(ctx: Any, call: SimpleNamespace, results: tuple[Tensor, Tensor, Tensor]) -> None:
    output, logsumexp, residual = results
    ctx.num_prefix_tokens = 0
    ctx.mark_non_differentiable(*((logsumexp, residual) if call.residual_keys else (residual,)))
    _save(
        ctx,
        call,
        Saved(
            query=call.query,
            key=call.key,
            value=call.value,
            output=output,
            logsumexp=logsumexp,
            residual=residual,
            group_ids=call.group_ids,
            key_ids=call.key_ids,
            key_bias=call.key_bias,
            key_cluster_ids=call.key_cluster_ids,
            query_mask=None,
            key_mask=None,
        ),
    )


def _save_attention(ctx: Any, call: SimpleNamespace, results: tuple[Tensor, ...]) -> None:
    output, logsumexp, group_ids, key_ids, residual = results
    ctx.num_prefix_tokens = call.num_prefix_tokens
    ctx.mark_non_differentiable(*results[2:])
    clusters, masks = call.key_cluster_ids, (call.query_mask, call.key_mask)
    if call.residual_keys:  # clusters tell what is hidden
        if clusters is None and call.key_mask is not None:
            clusters = one_cluster(call.key, call.key_mask)
        masks = (None, None)
    _save(
        ctx,
        call,
        Saved(
            query=call.query,
            key=call.key,
            value=call.value,
            output=output,
            logsumexp=logsumexp,
            residual=residual,
            group_ids=group_ids,
            key_ids=key_ids,
            key_bias=None,
            key_cluster_ids=clusters,
            query_mask=masks[0],
            key_mask=masks[1],
        ),
    )


class Saved(NamedTuple):
    """What the gradients read: arguments and results of either operator."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None  # None, as the next two, where attention is computed again
    logsumexp: Tensor | None
    residual: Tensor | None
    group_ids: Tensor
    key_ids: Tensor
    key_bias: Tensor | None
    key_cluster_ids: Tensor | None
    query_mask: Tensor | None
    key_mask: Tensor | None


def _save(ctx: Any, call: SimpleNamespace, saved: Saved) -> None:
    ctx.scale = call.scale
    ctx.residual_keys = call.residual_keys
    ctx.backend = call.backend
    ctx.set_materialize_grads(False)
    if load_kernels(ctx.backend, saved.query) is torch_backend:  # which attends again
        saved = saved._replace(output=None, logsumexp=None, residual=None)
    clusters = saved.key_cluster_ids
    if clusters is not None:
        clusters = _as_small(clusters, ctx.residual_keys)
    key_ids = _as_small(saved.key_ids, saved.key.shape[2])
    ctx.save_for_backward(*saved._replace(key_ids=key_ids, key_cluster_ids=clusters))


def _as_small(ids: Tensor, count: int) -> Tensor:
    """Ids below a count in few bytes: many groups have as many ids as there are features."""
    return ids.to(torch.int16 if count <= 1 << 15 else torch.int32)


def _gradients(
    ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None, *_: Any
) -> dict[str, Tensor | None]:
    """Gradients in query, key, value and key_bias of either operator."""
    # Once: checkpointing unpacks what it recomputed a single time.
    saved = Saved(*ctx.saved_tensors)
    if grad is None and grad_logsumexp is None:
        return {}
    query, key, key_bias, clusters = saved.query, saved.key, saved.key_bias, saved.key_cluster_ids
    saved = saved._replace(
        key_ids=saved.key_ids.long(),
        key_cluster_ids=None if clusters is None else clusters.long(),
    )
    grad = torch.zeros_like(query) if grad is None else grad
    if saved.output is None or torch.is_grad_enabled():
        return _gradients_by_autograd(ctx, saved, grad, grad_logsumexp)
    joined, in_bias = attend_backward(
        grad,
        grad_logsumexp,
        **saved._asdict(),
        scale=ctx.scale,
        num_prefix_tokens=ctx.num_prefix_tokens,
        residual_keys=ctx.residual_keys,
        backend=ctx.backend,
    )
    in_query, in_key, in_value = split_gradients(joined, query.shape, key.shape)
    found: dict[str, Tensor | None] = {"query": in_query, "key": in_key, "value": in_value}
    return found if key_bias is None else {**found, "key_bias": in_bias.to(key_bias.dtype)}


def _gradients_by_autograd(
    ctx: Any, saved: Saved, grad: Tensor, grad_logsumexp: Tensor | None
) -> dict[str, Tensor | None]:
    """Attend again in PyTorch's operations, and ask autograd for the gradients, also for gradients of gradients."""
    twice = torch.is_grad_enabled()
    prefix = ctx.num_prefix_tokens
    key_ids = saved.key_ids
    group_ids = saved.group_ids[:, :, prefix:]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH) if twice else nullcontext():
        names = ("query", "key", "value", "key_bias")
        given = {name: getattr(saved, name) for name in names}
        of = {name: _leaf(it, twice) for name, it in given.items() if it is not None}
        query, key, value = of["query"], of["key"], of["value"]
        key_bias = of.get("key_bias")
        patches = query[:, :, prefix:]
        results: tuple[Tensor, ...]
        if ctx.residual_keys:
            output = attend_in_steps(
                torch_backend,
                patches,
                key,
                value,
                group_ids,
                key_ids,
                scale=ctx.scale,
                key_cluster_ids=saved.key_cluster_ids,
                residual_keys=ctx.residual_keys,
            )
            results = (output,)
        elif grad_logsumexp is not None:
            results = torch_backend.attend_with_logsumexp(
                patches, key, value, group_ids, key_ids, ctx.scale, key_bias=key_bias
            )
        else:
            output = torch_backend.attend(
                patches, key, value, group_ids, key_ids, ctx.scale, key_bias=key_bias
            )
            results = (output,)
        if prefix:
            results = join_prefix(
                results[0],
                group_ids,
                query,
                key,
                value,
                scale=ctx.scale,
                query_mask=saved.query_mask,
                key_mask=saved.key_mask,
            )[:1]
        asked = {name: leaf for name, leaf in of.items() if leaf.requires_grad}
        of_results = (grad, grad_logsumexp)[: len(results)]
        leaves = list(asked.values())
        grads = torch.autograd.grad(results, leaves, of_results, create_graph=twice)
    return dict(zip(asked, grads, strict=True))


def _leaf(tensor: Tensor, twice: bool) -> Tensor:
    """What gradients are asked for: of the graph's tensor itself only where they have gradients, too."""
    return tensor.view_as(tensor) if twice else tensor.detach().requires_grad_()


differentiate(attend, _gradients, _save_attend)
differentiate(attention, _gradients, _save_attention)
