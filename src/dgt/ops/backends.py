"""The backends of the operator: their names, what ``"auto"`` stands for, and the one loaded where it is used."""

import functools
import importlib.util
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

BACKENDS = ("reference", "eager", "triton")
P = ParamSpec("P")
R = TypeVar("R")
_broken: list[Exception] = []  # why ``"auto"`` takes kernels no more


class KernelError(RuntimeError):
    """A Triton kernel does not compile or cannot be launched."""


def falls_back(step: Callable[P, R]) -> Callable[P, R]:
    """Let ``backend="auto"`` be eager from the first kernel on that fails, with one warning; a named one raises."""

    @functools.wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return step(*args, **kwargs)
        except KernelError as error:
            if _broken:
                raise
            _broken.append(error)
            warnings.warn(f'{error}; backend="auto" is "eager" from here on', RuntimeWarning, stacklevel=2)
        return step(*args, **kwargs)

    return run


def resolve_backend(backend: str, tokens: Tensor | None = None) -> str:
    """Return the backend that ``"auto"`` stands for on (B, H, L, D) tokens; a named one is checked and kept.

    Raises:
        ValueError: for an unknown name.
    """
    if backend == "auto":
        return "triton" if tokens is not None and not _broken and _suits_triton(tokens) else "eager"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(['auto', *BACKENDS])}, got {backend!r}")
    return backend


def load_triton() -> ModuleType:
    """Return the Triton backend, :mod:`dgt.ops.triton`.

    Raises:
        ValueError: if Triton is not installed.
    """
    try:
        from dgt.ops import triton
    except ImportError as error:
        raise ValueError(
            'backend="triton" needs Triton, which is not installed: pip install triton, or use backend="eager"'
        ) from error
    return triton


def _suits_triton(tokens: Tensor) -> bool:
    """Tell whether the kernels can run on these tokens: device, type and channels."""
    suits = tokens.is_cuda and tokens.dtype != torch.float64 and tokens.shape[-1] <= 128
    return suits and _can_run_triton(tokens.device.index)


@torch.compiler.assume_constant_result
def _can_run_triton(device: int | None) -> bool:
    """Tell whether Triton is installed and this CUDA device new enough for it."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
