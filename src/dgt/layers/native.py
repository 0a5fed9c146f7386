"""Conditions under which a layer uses the native CPU kernels, in inference and in training."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dgt.ops.checks import has_tangent
from dgt.ops.cpu import convolution, feed_forward, feed_forward_training
from dgt.ops.native_loader import reason_against_native

__all__ = [
    "Prepared",
    "are_ordinary",
    "convolution",
    "convolves_natively",
    "feed_forward",
    "feed_forward_training",
    "predicts_natively",
    "runs_natively",
]

PLAIN = (Tensor, nn.Parameter)  # neither quantized, nor distributed, nor followed by torch.fx


def predicts_natively(x: Tensor, *parameters: Tensor | None) -> bool:
    """Tell whether native kernels without gradients take this input with these parameters.

    They do where :func:`runs_natively` returns True and no gradients are needed.
    """
    if not runs_natively(x, *parameters):  # first: what stands for x in a trace has no such fields
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(tensor.requires_grad for tensor in (x, *parameters) if tensor is not None)


def runs_natively(x: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether the native kernels take this input of a layer with these parameters.

    They do in float32 on a CPU, in forward and backward passes that PyTorch itself runs. Files that
    other processes run, exported or traced, keep PyTorch's operators.
    """
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    tensors = [tensor for tensor in (x, *parameters) if tensor is not None]
    if not all(map(_is_plain, tensors)) or _is_transformed():
        return False
    return x.numel() > 0 and not has_tangent(x) and reason_against_native() is None


@torch.jit.ignore
def convolves_natively(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """:func:`predicts_natively`, in the branch of a layer that TorchScript reads over."""
    return predicts_natively(x, weight, bias)


def are_ordinary(*modules: nn.Module) -> bool:
    """Tell whether modules do nothing but their class's own work: no hook waits for their calls."""
    return not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in modules
    )


def _is_transformed() -> bool:
    """Tell whether torch.func follows the computation: it has no rule for our operators."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active()


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
