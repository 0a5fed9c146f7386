"""The backends of attention: their names, the choice of ``"auto"``, and the steps of each.

=============  =====================================================================================
``reference``  :mod:`dgt.ops.reference`: dense, any type and device, twice differentiable; the
               oracle of all others
``native``     :mod:`dgt.ops.cpu.backend`: the C++ kernels for CPUs, where they were built
``torch``      :mod:`dgt.ops.torch_backend`: PyTorch's own kernels, any device
``triton``     :mod:`dgt.ops.triton.backend`: fused kernels for NVIDIA's GPUs
=============  =====================================================================================

The public functions check their arguments and choose the steps of one backend; what lies below them takes arguments
as they are. A backend that is named is never exchanged for another.
"""

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from dgt.ops import lloyd, operators, reference, standard, torch_backend
from dgt.ops import residual_keys as residual
from dgt.ops.checks import (
    has_tangent,
    is_exporting,
    is_plain,
    is_transformed,
    is_vectorized,
    needs_gradients,
)
from dgt.ops.native_loader import can_run_native, check_native
from dgt.ops.registry import can_run_triton, load_triton

BACKENDS = ("reference", "native", "torch", "triton")


class OperatorSteps:
    """The steps as operators that a backend computes; their contracts are in :mod:`dgt.ops.torch_backend`."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.has_whole = backend in ("native", "triton")
        self._named = {} if backend == "auto" else {"backend": backend}  # files name none

    def group_queries(self, *arguments: Any) -> Tensor:
        return cast(Tensor, operators.group_queries(*arguments, **self._named))

    def select_keys(self, *arguments: Any) -> Tensor:
        return cast(Tensor, operators.select_keys(*arguments, **self._named))

    def attend(self, *arguments: Any, **named: Any) -> Tensor:
        return cast(Tensor, operators.attend(*arguments, **named, **self._named)[0])

    def attend_with_logsumexp(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        output, logsumexp, _ = operators.attend(
            *arguments, **named, with_logsumexp=True, **self._named
        )
        return output, logsumexp

    def group_statistics(
        self, query: Tensor, group_ids: Tensor, num_groups: int
    ) -> tuple[Tensor, Tensor]:
        if not self.has_whole:
            return torch_backend.group_statistics(query, group_ids, num_groups)
        sums, counts = operators.group_statistics(
            query.detach(), group_ids, num_groups, self.backend
        )
        return sums, counts

    def cluster_tokens(
        self, tokens: Tensor, num_clusters: int, steps: int, every: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.backend in ("native", "auto"):
            centroids, ids = operators.cluster_tokens(
                tokens.detach(), num_clusters, steps, every, mask
            )
            return centroids, ids
        if self.backend == "triton":
            add_up = load_triton().sum_members
            return lloyd.cluster_tokens_by(add_up, tokens, num_clusters, steps, every, mask)
        return lloyd.cluster_tokens(tokens, num_clusters, steps, every, mask)

    def summarize_clusters(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group_ids: Tensor,
        key_ids: Tensor,
        *,
        scale: float,
        key_cluster_ids: Tensor,
        residual_keys: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens = (query, key, value, group_ids, key_ids)
        settings: dict[str, Any] = {
            "scale": scale,
            "key_cluster_ids": key_cluster_ids,
            "residual_keys": residual_keys,
        }
        # Without data the operator counts: the sums in PyTorch are over blocks with room to spare.
        has_operator = self.backend == "triton" or query.is_meta
        if not has_operator or needs_gradients(query, key, value):
            return residual.summarize_clusters(*tokens, **settings)
        keys, values, bias = operators.summarize_clusters(*tokens, **settings)
        empty = bias.isneginf()
        return keys, values, bias.masked_fill(empty, 0.0), empty


Steps = ModuleType | OperatorSteps
_AS_OPERATORS = {name: OperatorSteps(name) for name in ("auto", "native", "torch", "triton")}


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


def resolve_backend(backend: str, tokens: Tensor) -> str:
    """Return the backend that ``"auto"`` selects for (B, H, L, D) tokens; check a named one.

    Raises:
        TypeError, ValueError: for an unknown name, or one that cannot run here, or not on such tokens.
    """
    if backend == "auto":
        if is_transformed():
            return "reference" if is_vectorized() else "torch"
        if can_run_native(tokens):
            return "native"
        return "triton" if can_run_triton(tokens) and not is_writing_file() else "torch"
    check_backend(backend)
    if backend in ("native", "triton") and is_transformed():
        raise ValueError(
            f'backend must be "auto", "torch" or "reference" inside of torch.func, got "{backend}"'
        )
    if backend == "native" and not tokens.is_meta:
        check_native(tokens)
    if backend == "triton":
        load_triton()
    return backend


def choose_steps(backend: str, tokens: Tensor, *others: Tensor | None) -> Steps:
    """Return the steps of the backend that a call runs on.

    Args:
        backend: as the caller named it.
        tokens: (B, H, L, D).
        others: all else that could ask for gradients.

    Raises:
        TypeError, ValueError: as :func:`resolve_backend`, or for derivatives that the backend does not have.
    """
    if backend == "auto" and is_plain() and can_run_native(tokens):
        return _AS_OPERATORS["native"]
    resolved = resolve_backend(backend, tokens)
    if resolved == "reference":
        return reference
    if has_tangent(tokens, *others):
        raise ValueError(
            f'backend must be "reference" for forward-mode differentiation, got "{backend}"'
        )
    return load_steps(resolved, tokens)


def load_steps(backend: str, tokens: Tensor) -> Steps:
    """Return the steps of a backend that :func:`resolve_backend` named, for these tokens."""
    if backend == "reference":
        return reference
    if backend == "triton":
        return _AS_OPERATORS[backend]
    if _is_writing_onnx():
        return standard
    if is_writing_file():
        return _AS_OPERATORS["auto"]
    if tokens.is_meta:
        return _AS_OPERATORS["torch"]
    if backend == "torch" and (tokens.device.type != "cpu" or is_transformed()):
        return torch_backend
    return _AS_OPERATORS[backend]


def is_writing_file() -> bool:
    """Tell whether ``torch.export`` or ``torch.jit`` records a graph for other processes."""
    return is_exporting() or torch.jit.is_tracing()


@torch.compiler.assume_constant_result
def _is_writing_onnx() -> bool:
    """Tell whether ``torch.onnx.export`` records a graph, also where the compiler traces this function."""
    return bool(torch.onnx.is_in_onnx_export())
