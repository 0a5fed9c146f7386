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
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dgt.ops import flops, torch_backend
from dgt.ops.checks import wide_type
from dgt.ops.cpu import backend as native
from dgt.ops.cpu.interface import new_tokens
from dgt.ops.prefix import join_prefix
from dgt.ops.registry import KERNELS, LIBRARY, load_kernels, load_triton, operator
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
    query: Tensor, centroids: Tensor, key_mask: Tensor | None, backend: str = "auto"
) -> Tensor:
    """As :func:`dgt.group_queries`; the mask is of queries, but files know it by this name."""
    kernels = load_kernels(backend, query)
    group_ids: Tensor = kernels.group_queries(query, centroids, key_mask)
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


def _fake_attend(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    query = call.query
    logsumexp = query.new_empty(query.shape[:3], dtype=wide_type(query.dtype))
    return new_tokens(query), logsumexp


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Output, and the (B, H, L) log-sum-exp of every query, which may be zeros unless it is asked for."""
    kernels = load_kernels(backend, query)
    arguments = (query, key, value, group_ids, key_ids, scale, key_bias)
    if kernels is torch_backend and not with_logsumexp:
        output = kernels.attend(*arguments)
        logsumexp = query.new_zeros(query.shape[:3], dtype=wide_type(query.dtype))
    else:
        output, logsumexp = kernels.attend_with_logsumexp(*arguments)
    return _as_new_tokens(output), logsumexp


def _fake_attention(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, prefix = call.query, call.num_prefix_tokens
    batch, heads, queries, _ = query.shape
    length = prefix + torch.sym_min(call.top_k, call.key.shape[2] - prefix)
    of_queries = (batch, heads, queries) if call.return_ids else (0,)
    of_keys = (batch, heads, call.centroids.shape[1], length) if call.return_ids else (0,)
    return (
        new_tokens(query),
        query.new_empty(of_queries, dtype=torch.float32),
        query.new_empty(of_queries, dtype=torch.int64),
        query.new_empty(of_keys, dtype=torch.int64),
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
    return_ids: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three steps in one, on ``"native"`` and ``"triton"``: output, log-sum-exp, groups and keys.

    All but the first are empty without ``return_ids``; gradients need them.
    """
    kernels = KERNELS.get(backend) or load_kernels(backend, query)
    output, logsumexp, group_ids, key_ids = kernels.attention(
        query,
        key,
        value,
        centroids,
        top_k=top_k,
        scale=scale,
        query_mask=query_mask,
        key_mask=key_mask,
        num_prefix_tokens=num_prefix_tokens,
        return_ids=return_ids,
    )
    return output, logsumexp, group_ids, key_ids


def _float32_like(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients as kernels return them; empty for None."""
    like = cast(Tensor, tensors[0])
    shapes = ((0,) if tensor is None else tensor.shape for tensor in tensors)
    return tuple(like.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _fake_attend_backward(call: SimpleNamespace) -> tuple[Tensor, ...]:
    if call.backend == "triton":  # whose kernels add up in float32 and round once
        of_tokens = (new_tokens(tensor) for tensor in (call.query, call.key, call.value))
        return *of_tokens, call.query.new_empty(0, dtype=torch.float32)
    return _float32_like(call.query, call.key, call.value, call.key_bias)


@operator(fake=_fake_attend_backward, flops=flops.attend_backward)
def attend_backward(
    grad: Tensor,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    key_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    num_prefix_tokens: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in query, key, value and key_bias (empty where there is none) of either operator above.

    They are float32, but of the tokens' type from Triton.
    """
    kernels = load_kernels(backend, query)
    in_query, in_key, in_value, in_bias = kernels.attend_backward(
        grad,
        grad_logsumexp,
        query,
        key,
        value,
        output,
        logsumexp,
        group_ids,
        key_ids,
        key_bias,
        query_mask,
        key_mask,
        scale,
        num_prefix_tokens,
    )
    return in_query, in_key, in_value, in_bias


def _fake_residual_keys(query: Tensor, lists: torch.Size, count: int) -> tuple[Tensor, Tensor]:
    """Residual keys with their values, and biases, for (B, H, G, K) lists."""
    shape = (*lists[:3], count)
    pairs = query.new_empty((*shape, 2, query.shape[3]), dtype=torch.float32)
    return pairs, query.new_empty(shape, dtype=torch.float32)


def _fake_attend_to_residual_keys(call: SimpleNamespace) -> tuple[Tensor, ...]:
    residual = _fake_residual_keys(call.query, call.key_ids.shape, call.residual_keys)
    return *_fake_attend(call), *residual


@operator(fake=_fake_attend_to_residual_keys, flops=flops.attend_to_residual_keys)
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
    """As :func:`dgt.ops.residual_keys.attend_to_residual_keys`: output, log-sum-exp, residual keys and biases.

    On the native kernels where they take the tokens; else, in files, in PyTorch, and all but the output is zeros.
    """
    tokens = (query, key, value, group_ids, key_ids, scale, key_cluster_ids, residual_keys)
    if load_kernels("auto", query) is native:
        return native.attend_to_residual_keys(*tokens)
    output = _as_new_tokens(attend_in_steps(torch_backend, *tokens))
    logsumexp = query.new_zeros(query.shape[:3], dtype=wide_type(query.dtype))
    pairs, biases = _fake_residual_keys(query, key_ids.shape, residual_keys)
    return output, logsumexp, pairs.zero_(), biases.zero_()


def _fake_attention_to_residual_keys(call: SimpleNamespace) -> tuple[Tensor, ...]:
    key_ids = _fake_key_ids(call)
    residual = _fake_residual_keys(call.query, key_ids.shape, call.residual_keys)
    return *_fake_attend(call), _fake_group_ids(call), key_ids, *residual


def _fake_attend_to_residual_keys_backward(call: SimpleNamespace) -> tuple[Tensor, ...]:
    return _float32_like(call.query, call.key, call.value)


def _fake_attention_backward(call: SimpleNamespace) -> Tensor:
    batch, heads, count, channels = call.query.shape
    shape = (batch, count, 3, heads, channels)
    return cast(Tensor, call.query.new_empty(shape, dtype=torch.float32))


attention_to_residual_keys = operator(
    fake=_fake_attention_to_residual_keys, flops=flops.attention_to_residual_keys
)(native.attention_to_residual_keys)
attend_to_residual_keys_backward = operator(
    fake=_fake_attend_to_residual_keys_backward, flops=flops.attend_to_residual_keys_backward
)(native.attend_to_residual_keys_backward)
attention_backward = operator(fake=_fake_attention_backward, flops=flops.attend_backward)(
    native.attention_backward
)


# ---- their gradients ----


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, group_ids, key_ids, ctx.scale, key_bias, _, ctx.backend = inputs
    ctx.num_prefix_tokens = 0
    _save(ctx, (query, key, value, *output, group_ids, key_ids, key_bias, None, None))


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, _, _, ctx.scale, query_mask, key_mask, *rest = inputs
    ctx.num_prefix_tokens, _, ctx.backend = rest
    ctx.mark_non_differentiable(*output[2:])
    _save(ctx, (query, key, value, *output, None, query_mask, key_mask))


def _save_attend_to_residual_keys(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    query, key, value, group_ids, key_ids, ctx.scale, clusters, ctx.residual_keys = inputs
    ctx.mark_non_differentiable(*output[1:])
    _save_residual(ctx, (query, key, value, *output, group_ids, key_ids, clusters))


def _save_attention_to_residual_keys(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    query, key, value, _, _, ctx.scale, _, key_mask, clusters, ctx.residual_keys = inputs
    ctx.mark_non_differentiable(*output[1:])
    attended, logsumexp, group_ids, key_ids, *residual = output
    if clusters is None and key_mask is not None:
        clusters = one_cluster(key, key_mask)
    _save_residual(
        ctx, (query, key, value, attended, logsumexp, *residual, group_ids, key_ids, clusters)
    )


def _save_residual(ctx: Any, saved: tuple[Any, ...]) -> None:
    *rest, key_ids, clusters = saved
    ctx.set_materialize_grads(False)
    if clusters is not None:
        clusters = _as_small(clusters, ctx.residual_keys)
    ctx.save_for_backward(*rest, _as_small(key_ids, saved[1].shape[2]), clusters)


def _save(ctx: Any, saved: tuple[Any, ...]) -> None:
    query, key, value, output, logsumexp, group_ids, key_ids, *rest = saved
    ctx.set_materialize_grads(False)
    if load_kernels(ctx.backend, query) is torch_backend:  # which attends again
        output = logsumexp = None
    small = _as_small(key_ids, key.shape[2])
    ctx.save_for_backward(query, key, value, output, logsumexp, group_ids, small, *rest)


def _as_small(ids: Tensor, count: int) -> Tensor:
    """Ids below a count in few bytes: many groups have as many ids as there are features."""
    return ids.to(torch.int16 if count <= 1 << 15 else torch.int32)


def _attend_gradients(
    ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None
) -> tuple[Tensor | None, ...]:
    # Once: checkpointing unpacks what it recomputed a single time.
    in_query, in_key, in_value, in_bias = _gradients(ctx, ctx.saved_tensors, grad, grad_logsumexp)
    return in_query, in_key, in_value, None, None, None, in_bias, None, None


def _attention_gradients(
    ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    query, key, value, output, logsumexp, group_ids, key_ids, _, *masks = saved
    rest = (None,) * 8
    joined = ctx.backend == "native" and query.shape == key.shape and grad_logsumexp is None
    if grad is None or not joined or torch.is_grad_enabled():
        return *_gradients(ctx, saved, grad, grad_logsumexp)[:3], *rest
    ids = (group_ids, key_ids.long())
    settings = (*masks, ctx.scale, ctx.num_prefix_tokens)
    grads = attention_backward(grad, query, key, value, output, logsumexp, *ids, *settings)
    return *grads.to(query.dtype).permute(2, 0, 3, 1, 4).unbind(0), *rest


def _attend_to_residual_keys_gradients(
    ctx: Any, grad: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    return *_residual_gradients(ctx, grad), *(None,) * 5


def _attention_to_residual_keys_gradients(
    ctx: Any, grad: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    return *_residual_gradients(ctx, grad), *(None,) * 7


def _residual_gradients(ctx: Any, grad: Tensor | None) -> list[Tensor | None]:
    """Gradients in query, key and value."""
    query, key, value, *computed, group_ids, key_ids, clusters = ctx.saved_tensors
    if grad is None:
        return [None, None, None]
    key_ids = key_ids.long()
    clusters = None if clusters is None else clusters.long()
    of = (query, key, value)
    rest = (group_ids, key_ids, ctx.scale, clusters, ctx.residual_keys)
    twice = torch.is_grad_enabled()
    if not twice and load_kernels("auto", query) is native:
        grads = attend_to_residual_keys_backward(
            grad, *of, *computed, group_ids, key_ids, clusters, ctx.scale
        )
        return [part.to(query.dtype) for part in grads]
    # Again in PyTorch's operations, also for gradients of gradients.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH) if twice else nullcontext():
        query, key, value = leaves = [_leaf(tensor, twice) for tensor in of]
        output = attend_in_steps(torch_backend, query, key, value, *rest)
        asked = [tensor for tensor in leaves if tensor.requires_grad]
        parts = iter(torch.autograd.grad(output, asked, grad, create_graph=twice))
    return [next(parts) if tensor.requires_grad else None for tensor in leaves]


def _gradients(
    ctx: Any, saved: tuple[Any, ...], grad: Tensor | None, grad_logsumexp: Tensor | None
) -> list[Tensor | None]:
    """Gradients in query, key, value and key_bias; None where there is no bias."""
    query, key, value, output, logsumexp, group_ids, key_ids, key_bias, *masks = saved
    key_ids = key_ids.long()
    if grad is None:
        grad = torch.zeros_like(query)
    has_kernel = ctx.backend != "triton" or (grad_logsumexp is None and key_bias is None)
    if output is None or not has_kernel or torch.is_grad_enabled():
        inputs = (query, key, value, group_ids, key_ids, key_bias, *masks)
        return _gradients_by_autograd(ctx, inputs, grad, grad_logsumexp)
    grads = attend_backward(
        grad,
        grad_logsumexp,
        query,
        key,
        value,
        output,
        logsumexp,
        group_ids,
        key_ids,
        key_bias,
        *masks,
        ctx.scale,
        ctx.num_prefix_tokens,
        ctx.backend,
    )
    of = (query, key, value, key_bias)
    pairs = zip(grads, of, strict=True)
    return [None if tensor is None else part.to(tensor.dtype) for part, tensor in pairs]


def _gradients_by_autograd(
    ctx: Any, inputs: tuple[Any, ...], grad: Tensor, grad_logsumexp: Tensor | None
) -> list[Tensor | None]:
    """Attend again in PyTorch's operations, and ask autograd for the gradients, also for gradients of gradients."""
    twice = torch.is_grad_enabled()
    query, key, value, group_ids, key_ids, key_bias, query_mask, key_mask = inputs
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH) if twice else nullcontext():
        query, key, value = (_leaf(tensor, twice) for tensor in (query, key, value))
        key_bias = None if key_bias is None else _leaf(key_bias, twice)
        of = (query, key, value, key_bias)
        prefix = ctx.num_prefix_tokens
        ids = (group_ids[:, :, prefix:], key_ids)
        arguments = (query[:, :, prefix:], key, value, *ids, ctx.scale, key_bias)
        results: tuple[Tensor, ...]
        if grad_logsumexp is not None:
            results = torch_backend.attend_with_logsumexp(*arguments)
        else:
            results = (torch_backend.attend(*arguments),)
        if prefix:
            results = join_prefix(
                results[0],
                ids[0],
                query,
                key,
                value,
                scale=ctx.scale,
                query_mask=query_mask,
                key_mask=key_mask,
            )[:1]
        leaves = [tensor for tensor in of if tensor is not None and tensor.requires_grad]
        of_results = (grad, grad_logsumexp)[: len(results)]
        grads = iter(torch.autograd.grad(results, leaves, of_results, create_graph=twice))
    return [None if tensor is None or not tensor.requires_grad else next(grads) for tensor in of]


def _leaf(tensor: Tensor, twice: bool) -> Tensor:
    """What gradients are asked for: of the graph's tensor itself only where they have gradients, too."""
    return tensor.view_as(tensor) if twice else tensor.detach().requires_grad_()


torch.library.register_autograd(attend, _attend_gradients, setup_context=_save_attend, lib=LIBRARY)
torch.library.register_autograd(
    attention, _attention_gradients, setup_context=_save_attention, lib=LIBRARY
)
torch.library.register_autograd(
    attend_to_residual_keys,
    _attend_to_residual_keys_gradients,
    setup_context=_save_attend_to_residual_keys,
    lib=LIBRARY,
)
torch.library.register_autograd(
    attention_to_residual_keys,
    _attention_to_residual_keys_gradients,
    setup_context=_save_attention_to_residual_keys,
    lib=LIBRARY,
)
