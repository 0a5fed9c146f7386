"""The backends of the operator: their names, what ``"auto"`` stands for, and the one loaded where it is used."""

import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from dgt.ops.triton.fallback import failures

BACKENDS = ("reference", "eager", "triton")


def resolve_backend(backend: str, tokens: Tensor | None = None) -> str:
    """Return the backend that ``"auto"`` stands for on (B, H, L, D) tokens; a named one is checked and kept.

    Raises:
        ValueError: for an unknown name.
    """
    if backend == "auto":
        if tokens is None or not tokens.is_cuda or tokens.dtype == torch.float64 or tokens.shape[-1] > 128:
            return "eager"
        return "triton" if not failures and _can_run_triton(tokens.device.index) else "eager"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(['auto', *BACKENDS])}, got {backend!r}")
    return backend


def load_triton() -> ModuleType:
    """Return the Triton backend, :mod:`dgt.ops.triton.operators`.

    Raises:
        ValueError: if Triton is not installed.
    """
    try:
        from dgt.ops.triton import operators
    except ImportError as error:
        raise ValueError(
            'backend="triton" needs Triton, which is not installed: pip install triton, or use backend="eager"'
        ) from error
    return operators


@torch.compiler.assume_constant_result
def _can_run_triton(device: int | None) -> bool:
    """Tell whether Triton is installed and this CUDA device new enough for it."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
