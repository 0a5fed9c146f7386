"""The backends of the operator: names, the choice of ``"auto"``, and their modules.

=============  =====================================================================================
``reference``  :mod:`dgt.ops.reference`: dense, any type and device, twice differentiable; the
               oracle of all others
``native``     :mod:`dgt.ops.cpu.operators`: the C++ kernel for CPUs, where it was built
``torch``      :mod:`dgt.ops.torch_ops`: PyTorch's own kernels, any device (on CPUs within
               :mod:`dgt.ops.operators`)
``triton``     :mod:`dgt.ops.triton.backend`: fused kernels for CUDA; experimental, so by name only
=============  =====================================================================================

Each module offers the same functions over arguments that are right already; their contracts are in
:mod:`dgt.ops.torch_ops`:

- ``group_queries(query, centroids, key_mask)``, ``select_keys(centroids, key, top_k, key_mask)``
- ``attend(query, key, value, group_ids, key_ids, scale, key_bias)``, and ``attend_with_logsumexp``
  of the same
- ``summarize_unselected(query, key, value, group_ids, key_ids, scale, key_mask)``
- ``cluster_tokens(tokens, num_clusters, steps, every, mask)``, and ``summarize_clusters`` as ``summarize_unselected``,
  with ``key_cluster_ids, num_clusters`` in place of ``key_mask``
- ``group_statistics(query, group_ids, num_groups)``
- ``attention(query, key, value, centroids, call)``, only where it has the steps in one: what
  :func:`dgt.dynamic_group_attention` returns; or None where such a call takes the three steps
- ``clustered_attention(query, key, value, call)``, only where it has the steps in one, or None as
  above

A ``call`` is one of those of :mod:`dgt.ops.calls`.

A backend that is named is never exchanged for another.
"""

from types import ModuleType

import torch
from torch import Tensor

from dgt.ops import operators, reference, torch_ops
from dgt.ops.checks import has_tangent
from dgt.ops.native_loader import can_run_native, check_native, load_native

BACKENDS = ("reference", "native", "torch", "triton")
# Without gradients of a remainder, of a key_bias and of the logarithms of the sums.
FORWARD_ONLY = ("triton",)


def check_backend(backend: str) -> str:
    """Return the name of a backend, or ``"auto"``, if it is one.

    Raises:
        ValueError: for an unknown name.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(
            f"backend must be one of {', '.join(['auto', *BACKENDS])}, got {backend!r}"
        )
    return backend


def resolve_backend(backend: str, tokens: Tensor | None = None) -> str:
    """Return the backend that ``"auto"`` selects for (B, H, L, D) tokens; check a named one.

    Raises:
        ValueError: for an unknown name, or ``"native"`` where it cannot run.
    """
    backend = check_backend(backend)
    if backend == "native" and tokens is not None and not tokens.is_meta:
        check_native(tokens)
    if backend != "auto":
        return backend
    return "native" if tokens is not None and can_run_native(tokens) else "torch"


def resolve_call(backend: str, forward_only: str | None, *tensors: Tensor | None) -> str:
    """The backend that a call runs on.

    Args:
        backend: as the caller named it.
        forward_only: what the call asks for that some backends have no gradients of; None where it is nothing.
        tensors: all that could ask for gradients, tokens first.
    """
    resolved = resolve_backend(backend, tensors[0])
    if resolved != "reference" and has_tangent(*tensors):
        raise ValueError(
            f'backend must be "reference" for forward-mode differentiation, got "{backend}"'
        )
    needs_gradients = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )
    if forward_only is not None and resolved in FORWARD_ONLY and needs_gradients:
        raise ValueError(
            f'backend must be "torch" or "reference" for gradients of {forward_only}, got "{backend}"'
        )
    return resolved


def load_backend(backend: str, tokens: Tensor) -> ModuleType:
    """Return the module of a backend that :func:`resolve_backend` named, for these tokens.

    Raises:
        ValueError: if it is not installed.
    """
    if backend == "native" and (tokens.is_meta or operators.is_writing_file()):
        return operators  # which count, and which files hold, since they run everywhere
    match backend:
        case "reference":
            return reference
        case "native":
            return load_native()
        case "triton":
            return load_triton()
        case _:
            return operators if tokens.device.type in ("cpu", "meta") else torch_ops


def load_triton() -> ModuleType:
    """Return the Triton backend, :mod:`dgt.ops.triton.backend`.

    Raises:
        ValueError: if Triton is not installed.
    """
    try:
        from dgt.ops.triton import backend
    except ImportError as error:
        raise ValueError(
            'backend="triton" needs Triton, which is not installed: pip install triton, '
            'or use backend="torch"'
        ) from error
    return backend
