"""The three steps as registered operators: what PyTorch sees of DG-Attention on CPUs and in files.

``dgt::group_queries``, ``dgt::select_keys``, ``dgt::attend`` and ``dgt::attend_with_logsumexp`` are
what the FLOP counter has formulas for (:mod:`dgt.ops.flops`), what a ``.pt2`` file holds, what ONNX
is translated from (:mod:`dgt.inference.onnx_operators`), and what TorchScript calls.
``torch.compile`` takes each as one node.

What computes them is their last argument, ``implementation``:

- ``"torch"``: :mod:`dgt.ops.torch_ops`. On CPUs and the meta device the backend ``"torch"`` is this
  module. (On accelerators it is :mod:`dgt.ops.torch_ops` itself, which autograd and compilers look
  into.)
- ``"auto"``, the default, which files and TorchScript do not name: the native kernel where it is
  there and takes the call, else ``"torch"``. So a file written on one machine is as quick as
  another machine can be.

The backend ``"native"`` does not come through here, but where a file is written:
:mod:`dgt.ops.cpu.operators` has operators of its own. Gradients are computed from the inputs
again: nothing but these is kept for them.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops import flops, torch_ops
from dgt.ops.checks import wide_type
from dgt.ops.lloyd import cluster_tokens
from dgt.ops.native_loader import can_run_native, load_native
from dgt.ops.remainder import summarize_unselected
from dgt.ops.residual_keys import summarize_clusters
from dgt.ops.torch_ops import group_statistics

__all__ = [
    "attend",
    "attend_with_logsumexp",
    "cluster_tokens",
    "group_queries",
    "group_statistics",
    "select_keys",
    "summarize_clusters",
    "summarize_unselected",
]


def group_queries(query: Tensor, centroids: Tensor, key_mask: Tensor | None) -> Tensor:
    """As :func:`dgt.ops.torch_ops.group_queries`."""
    group_ids: Tensor = torch.ops.dgt.group_queries(
        query.detach(), centroids.detach(), key_mask, _named()
    )
    return group_ids


def select_keys(centroids: Tensor, key: Tensor, top_k: int, key_mask: Tensor | None) -> Tensor:
    """As :func:`dgt.ops.torch_ops.select_keys`."""
    key_ids: Tensor = torch.ops.dgt.select_keys(
        centroids.detach(), key.detach(), top_k, key_mask, _named()
    )
    return key_ids


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> Tensor:
    """As :func:`dgt.ops.torch_ops.attend`."""
    output: Tensor = torch.ops.dgt.attend(
        query, key, value, group_ids, key_ids, scale, key_bias, _named()
    )
    return output


def attend_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`dgt.ops.torch_ops.attend_with_logsumexp`."""
    arguments = (query, key, value, group_ids, key_ids, scale, key_bias, _named())
    output, sums = torch.ops.dgt.attend_with_logsumexp(*arguments)
    return output, sums


def is_writing_file() -> bool:
    """Tell whether ``torch.export`` or ``torch.jit`` records a graph for other processes."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def _named() -> str:
    """The implementation to name in a call: none in a file."""
    return "auto" if is_writing_file() else "torch"


def _steps(implementation: str, tokens: Tensor) -> ModuleType:
    """The module that computes what an operator was called for."""
    if implementation == "auto" and can_run_native(tokens):
        return load_native()
    return torch_ops


@torch.library.custom_op("dgt::group_queries", mutates_args=())
def _group_queries(
    query: Tensor, centroids: Tensor, key_mask: Tensor | None, implementation: str = "auto"
) -> Tensor:
    group_ids: Tensor = _steps(implementation, query).group_queries(query, centroids, key_mask)
    return group_ids


@_group_queries.register_fake
def _(
    query: Tensor, centroids: Tensor, key_mask: Tensor | None, implementation: str = "auto"
) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.int64)


@torch.library.custom_op("dgt::select_keys", mutates_args=())
def _select_keys(
    centroids: Tensor,
    key: Tensor,
    top_k: int,
    key_mask: Tensor | None,
    implementation: str = "auto",
) -> Tensor:
    key_ids: Tensor = _steps(implementation, key).select_keys(centroids, key, top_k, key_mask)
    return key_ids


@_select_keys.register_fake
def _(
    centroids: Tensor,
    key: Tensor,
    top_k: int,
    key_mask: Tensor | None,
    implementation: str = "auto",
) -> Tensor:
    batch, heads, tokens, _ = key.shape
    return key.new_empty(
        (batch, heads, centroids.shape[1], torch.sym_min(top_k, tokens)), dtype=torch.int64
    )


@torch.library.custom_op("dgt::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    steps = _steps(implementation, query)
    output: Tensor = steps.attend(query, key, value, group_ids, key_ids, scale, key_bias)
    # The native kernel lays it out for the next projection; a graph is told one layout.
    return output.contiguous()


@_attend.register_fake
def _(query: Tensor, *_: Any, **__: Any) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("dgt::attend_with_logsumexp", mutates_args=())
def _attend_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    steps = _steps(implementation, query)
    output, sums = steps.attend_with_logsumexp(
        query, key, value, group_ids, key_ids, scale, key_bias
    )
    return output.contiguous(), sums


@_attend_with_logsumexp.register_fake
def _(query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(
        query.shape[:3], dtype=wide_type(query.dtype)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, value, group_ids, key_ids, ctx.scale, key_bias, ctx.implementation = inputs
    # Many groups have as many ids as features.
    small = torch.int16 if key.shape[2] <= 1 << 15 else torch.int32
    ctx.save_for_backward(query, key, value, key_bias, group_ids, key_ids.to(small))


def _backward(ctx: Any, grad: Tensor, grad_sums: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Attend again, now seen by autograd, and ask it for the gradients."""
    # Once: checkpointing unpacks what it recomputed a single time.
    *inputs, group_ids, key_ids = ctx.saved_tensors
    leaves = [tensor.detach().requires_grad_() for tensor in inputs if tensor is not None]
    query, key, value = leaves[:3]
    key_bias = leaves[3] if len(leaves) == 4 else None
    arguments = (query, key, value, group_ids, key_ids.long(), ctx.scale, key_bias)
    steps = _steps(ctx.implementation, query)
    with torch.enable_grad():
        if grad_sums is None:
            grads = torch.autograd.grad(steps.attend(*arguments), leaves, grad)
        else:
            grads = torch.autograd.grad(
                steps.attend_with_logsumexp(*arguments), leaves, (grad, grad_sums)
            )
    grad_bias = grads[3] if len(grads) == 4 else None
    return (*grads[:3], None, None, None, grad_bias, None)


_attend.register_autograd(_backward, setup_context=_save)
_attend_with_logsumexp.register_autograd(_backward, setup_context=_save)

register_flop_formula(torch.ops.dgt.group_queries)(flops.group_queries)
register_flop_formula(torch.ops.dgt.select_keys)(flops.select_keys)
register_flop_formula(torch.ops.dgt.attend)(flops.attend)
register_flop_formula(torch.ops.dgt.attend_with_logsumexp)(flops.attend)
