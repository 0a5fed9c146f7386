"""Operators on maps for a training step on a CPU: GELU with BatchNorm, and a map plus its depthwise convolution.

PyTorch runs these as several functions of each number, at a third of the memory's bandwidth; the native kernels read a
map once, or as often as the statistics of the batch need. Layers take them where :func:`can_run_on_map` says so, and
PyTorch's modules elsewhere.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops import flops
from dgt.ops.checks import is_plain, needs_gradients
from dgt.ops.cpu import maps as native
from dgt.ops.cpu.maps import new_map
from dgt.ops.native_loader import TYPES, reason_against_native
from dgt.ops.registry import differentiate, gradients_by_autograd, operator


def can_run_on_map(x: Tensor, *parameters: Tensor | None) -> bool:
    """Tell whether the operators below take a (B, C, H, W) map and parameters, and gradients are asked for.

    Everything but autograd is PyTorch's: compilers, traces, transforms, tensors of subclasses; parameters of other
    types than float32, too.
    """
    if not is_plain() or type(x) is not Tensor or not needs_gradients(x):
        return False
    if x.device.type != "cpu" or x.dtype not in TYPES or x.dim() != 4 or x.numel() == 0:
        return False
    return all(_is_plain_parameter(it) for it in parameters) and reason_against_native() is None


def _is_plain_parameter(tensor: Tensor | None) -> bool:
    """Tell whether a parameter is float32, on a CPU, and of no class of its own."""
    if tensor is None or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


# ---- GELU and BatchNorm ----


def _fake_gelu_norm(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    statistics = call.input.new_empty((2, call.input.shape[1]), dtype=torch.float64)
    return new_map(call.input), statistics


def _fake_gradients(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """Of input, weight and bias."""
    weight, bias = call.weight, call.bias
    return new_map(call.input), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


gelu_norm = operator(fake=_fake_gelu_norm, flops=flops.single_numbers)(native.gelu_norm)
gelu_norm_again = operator(fake=lambda call: new_map(call.input), flops=flops.single_numbers)(
    native.gelu_norm_again
)
gelu_norm_backward = operator(fake=_fake_gradients, flops=flops.single_numbers)(
    native.gelu_norm_backward
)


def _save_gelu_norm(ctx: Any, call: SimpleNamespace, results: tuple[Tensor, Tensor]) -> None:
    _, statistics = results
    ctx.epsilon = call.epsilon
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(call.input, call.weight, call.bias, statistics)


def _gelu_norm_gradients(ctx: Any, grad: Tensor, _: Any) -> dict[str, Tensor | None]:
    input, weight, bias, statistics = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of gradients
        input, weight, bias = (tensor.view_as(tensor) for tensor in (input, weight, bias))
        again = F.batch_norm(
            F.gelu(input), None, None, weight, bias, training=True, eps=ctx.epsilon
        )
        return gradients_by_autograd(again, {"input": input, "weight": weight, "bias": bias}, grad)
    found = gelu_norm_backward(
        grad, input, weight=weight, bias=bias, statistics=statistics, epsilon=ctx.epsilon
    )
    return dict(zip(("input", "weight", "bias"), found, strict=True))


differentiate(gelu_norm, _gelu_norm_gradients, _save_gelu_norm)


# ---- a map plus its depthwise convolution ----


add_depthwise = operator(fake=lambda call: new_map(call.input), flops=flops.depthwise)(
    native.add_depthwise
)
add_depthwise_backward = operator(fake=_fake_gradients, flops=flops.depthwise_backward)(
    native.add_depthwise_backward
)


def _save_add_depthwise(ctx: Any, call: SimpleNamespace, _: Tensor) -> None:
    ctx.save_for_backward(call.input, call.weight, call.bias)


def _add_depthwise_gradients(ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
    input, weight, bias = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of gradients
        input, weight, bias = (tensor.view_as(tensor) for tensor in (input, weight, bias))
        again = input + F.conv2d(input, weight, bias, padding=1, groups=weight.shape[0])
        return gradients_by_autograd(again, {"input": input, "weight": weight, "bias": bias}, grad)
    found = add_depthwise_backward(grad, input, weight, bias)
    return dict(zip(("input", "weight", "bias"), found, strict=True))


differentiate(add_depthwise, _add_depthwise_gradients, _save_add_depthwise)
