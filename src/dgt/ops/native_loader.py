"""Whether the native CPU kernel (:mod:`dgt.ops.cpu.backend`) is here and takes a call; it is loaded on first use.

The kernel is :mod:`dgt.ops.cpu`: ``library.load()`` returns None where it was not built or
cannot be loaded, and ``library.why_not()`` says why.
"""

import functools

import torch
from torch import Tensor

from dgt.ops.cpu import library

TYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_CHANNELS = 256


def can_run_native(tokens: Tensor) -> bool:
    """Tell whether the native kernel is here and takes these (B, H, L, D) tokens."""
    fits = (
        tokens.device.type == "cpu" and tokens.dtype in TYPES and tokens.shape[-1] <= MAX_CHANNELS
    )
    is_watched = torch.compiler.is_compiling()
    return fits and (reason_against_native() if is_watched else _reason()) is None


def check_native(tokens: Tensor) -> None:
    """Check that the native kernel takes these (B, H, L, D) tokens.

    Raises:
        TypeError: for float64.
        ValueError: where it is not here, or for too many channels or another device.
    """
    way = 'use backend="torch"'
    if (reason := reason_against_native()) is not None:
        raise ValueError(f'backend="native" cannot run here: {reason}; {way}')
    if tokens.dtype not in TYPES:
        raise TypeError(
            'query must be float32, float16 or bfloat16 for backend="native", '
            f"got {tokens.dtype}; {way}"
        )
    if tokens.device.type != "cpu":
        raise ValueError(f'query must be on a CPU for backend="native", got {tokens.device}; {way}')
    if tokens.shape[-1] > MAX_CHANNELS:
        most = f'{MAX_CHANNELS} channels per head for backend="native"'
        raise ValueError(f"query must have at most {most}, got {tokens.shape[-1]}; {way}")


@torch.compiler.assume_constant_result
def reason_against_native() -> str | None:
    """Why the native kernel cannot run in this process; None where it can."""
    return _reason()


@functools.cache
def _reason() -> str | None:
    return None if library.load() is not None else str(library.why_not())
