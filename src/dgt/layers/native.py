"""Conditions under which a layer uses the native CPU kernels, which are for inference and have no gradients."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dgt.ops.checks import has_tangent
from dgt.ops.native import convolution, feed_forward
from dgt.ops.native_loader import reason_against_native

__all__ = ["Prepared", "convolution", "convolves_natively", "feed_forward", "predicts_natively"]

PLAIN = (Tensor, nn.Parameter)  # neither quantized, nor distributed, nor followed by torch.fx


def predicts_natively(x: Tensor, *parameters: Tensor | None) -> bool:
    """Tell whether the native kernels take this input of a layer with these parameters.

    They do in float32 on a CPU if no gradients are needed. Files that other processes run,
    exported or traced, keep PyTorch's operators.
    """
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    tensors = [tensor for tensor in (x, *parameters) if tensor is not None]
    if not all(map(_is_plain, tensors)):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return x.numel() > 0 and not has_tangent(x) and reason_against_native() is None


@torch.jit.ignore
def convolves_natively(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """:func:`predicts_natively`, in the branch of a layer that TorchScript reads over."""
    return predicts_natively(x, weight, bias)


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is an ordinary one of float32 on a CPU."""
    return type(tensor) in PLAIN and tensor.dtype == torch.float32 and tensor.is_cpu


class Prepared:
    """Weights in a native kernel's layout, cached until they change."""

    def __init__(self) -> None:
        self._key: tuple[tuple[int, int], ...] = ()
        self._memory: Tensor | None = None

    def __reduce__(self) -> Any:
        # Copies and files leave it out: another processor may read weights otherwise.
        return Prepared, ()

    def of(
        self, parameters: Iterable[Tensor | None], prepare: Callable[[], Tensor]
    ) -> Tensor | None:
        """Return what ``prepare()`` returned when these parameters were last seen to change.

        None while a compiler follows, or where changes cannot be seen.
        """
        tensors = [parameter for parameter in parameters if parameter is not None]
        if torch.compiler.is_compiling() or any(tensor.is_inference() for tensor in tensors):
            return None
        key = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)
        if key != self._key:
            self._memory = prepare()
            self._key = key
        return self._memory
