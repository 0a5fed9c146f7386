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
    is_watched = torch.compiler.is_compiling()
    is_here = (reason_against_native() if is_watched else _reason()) is None
    return is_here and _objection(tokens) is None


def check_native(tokens: Tensor) -> None:
    """Check that the native kernel takes these (B, H, L, D) tokens.

    Raises:
        TypeError: for float64.
        ValueError: where it is not here, or for too many channels or another device.
    """
    way = 'use backend="torch"'
    if (reason := reason_against_native()) is not None:
        raise ValueError(f'backend="native" cannot run here: {reason}; {way}')
    if (objection := _objection(tokens)) is not None:
        wanted, got = objection
        error = TypeError if tokens.dtype not in TYPES else ValueError
        raise error(f'query must {wanted} for backend="native", got {got}; {way}')


def _objection(tokens: Tensor) -> tuple[str, object] | None:
    """What the native kernel wants of (B, H, L, D) tokens, and what came; None where it takes them."""
    if tokens.dtype not in TYPES:
        return "be float32, float16 or bfloat16", tokens.dtype
    if tokens.device.type != "cpu":
        return "be on a CPU", tokens.device
    if tokens.shape[-1] > MAX_CHANNELS:
        return f"have at most {MAX_CHANNELS} channels per head", tokens.shape[-1]
    return None


@torch.compiler.assume_constant_result
def reason_against_native() -> str | None:
    """Why the native kernel cannot run in this process; None where it can."""
    return _reason()


@functools.cache
def _reason() -> str | None:
    return None if library.load() is not None else str(library.why_not())
