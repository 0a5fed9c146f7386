"""Linear layers and convolutions on the native kernels, for what predicts.

Depthwise convolutions have gradients, the others have none. Maps are (B, H, W, C), float32.
:func:`dgt.layers.native.predicts_natively` and ``runs_natively`` tell where they can be used.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from dgt.ops.cpu.convolution_interface import (
    BatchNorm,
    ConvolutionProblem,
    DepthwiseProblem,
    LinearProblem,
    new_prepared,
    run,
)
from dgt.ops.cpu.interface import as_mask, pointer

# Without the wrapper of `torch.library.custom_op`, which takes as long as a small layer.
LIBRARY = torch.library.Library("dgt", "FRAGMENT")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, prepared: Tensor | None = None
) -> Tensor:
    """Return ``F.linear(x, weight, bias)``.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs).
        bias: (outputs,) or None.
        prepared: what :func:`prepare_linear` returned for these weights, or None.

    Returns:
        (..., outputs), contiguous.
    """
    output: Tensor = torch.ops.dgt.native_linear(x, weight, bias, prepared)
    return output


def prepare_linear(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the weights of a linear layer as the kernel reads them, for many calls: bytes."""
    problem = _describe_linear(weight, bias)
    prepared = new_prepared("dgt_linear_bytes", problem)
    problem.prepared = prepared.data_ptr()
    run("dgt_prepare_linear", problem)
    return prepared


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    with_gelu: bool = False,
    norm: nn.Module | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return ``norm(gelu(convolution of x))``: 3x3, with zeros around the map.

    Args:
        x: (B, H, W, C).
        weight: (C', C, 3, 3).
        bias: (C',) or None.
        stride: 1 or 2.
        with_gelu: whether GELU follows.
        norm: BatchNorm in evaluation that follows, or None.
        mask: bool (B, H', W'), True where a token is real, or None; elsewhere the result is zero.

    Returns:
        (B, H', W', C'), contiguous.
    """
    normed: Any = norm
    found = [] if norm is None else statistics(norm)
    epsilon = 0.0 if norm is None else float(normed.eps)
    output: Tensor = torch.ops.dgt.native_convolution(
        x, weight, bias, stride, with_gelu, found, epsilon, mask
    )
    return output


def depthwise_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool) -> Tensor:
    """Convolve every channel with its own 3x3 kernel, with zeros around the map; with gradients.

    Args:
        x: (B, H, W, C).
        weight: (C, 1, 3, 3).
        bias: (C,) or None.
        residual: add the input.

    Returns:
        (B, H, W, C), contiguous.
    """
    output: Tensor = torch.ops.dgt.native_depthwise_convolution(x, weight, bias, residual)
    return output


LIBRARY.define("native_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? prepared) -> Tensor")
LIBRARY.define(
    "native_convolution(Tensor x, Tensor weight, Tensor? bias, SymInt stride, bool with_gelu, Tensor[] norm, "
    "float epsilon, Tensor? mask) -> Tensor"
)
LIBRARY.define(
    "native_depthwise_convolution(Tensor x, Tensor weight, Tensor? bias, bool residual) -> Tensor"
)
LIBRARY.define(
    "native_depthwise_backward(Tensor grad, Tensor x, Tensor weight, bool residual, bool wants_input, "
    "bool wants_weight) -> (Tensor, Tensor, Tensor)"
)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, prepared: Tensor | None) -> Tensor:
    x = x.contiguous()
    weight = weight.contiguous()
    output = _new_linear(x, weight)
    problem = _describe_linear(weight, bias)
    problem.tokens = x.numel() // weight.shape[1]
    problem.input = x.data_ptr()
    problem.prepared = pointer(prepared)
    problem.output = output.data_ptr()
    run("dgt_linear", problem)
    return output


def _describe_linear(weight: Tensor, bias: Tensor | None) -> LinearProblem:
    problem = LinearProblem()
    problem.outputs, problem.inputs = weight.shape
    problem.weight = weight.data_ptr()
    problem.bias = pointer(bias)
    return problem


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    with_gelu: bool,
    norm: Sequence[Tensor],
    epsilon: float,
    mask: Tensor | None,
) -> Tensor:
    x = x.contiguous()
    channels_last = (
        weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    )
    if not channels_last:
        weight = weight.contiguous()
    mask = as_mask(mask)
    output = _new_convolved(x, weight, bias, stride)
    problem = ConvolutionProblem()
    problem.images, problem.height, problem.width, problem.channels = x.shape
    problem.outputs = output.shape[3]
    problem.stride = stride
    problem.with_gelu = with_gelu
    problem.input = x.data_ptr()
    problem.mask = pointer(mask)
    problem.weight = weight.data_ptr()
    problem.taps_last = not channels_last
    problem.bias = pointer(bias)
    problem.norm = batch_norm(norm, epsilon)
    problem.output = output.data_ptr()
    run("dgt_convolution", problem)
    return output


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool) -> Tensor:
    x = x.contiguous()
    weight = weight.contiguous()
    output = torch.empty_like(x)
    problem = _describe_depthwise(x, weight, residual)
    problem.bias = pointer(bias)
    problem.output = output.data_ptr()
    run("dgt_depthwise_convolution", problem)
    return output


def _depthwise_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    residual: bool,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias; undefined where not wanted."""
    x = x.contiguous()
    weight = weight.contiguous()
    grad = grad.contiguous()
    grads = _new_depthwise_gradients(grad, x, weight)
    in_x, in_weight, in_bias = grads
    problem = _describe_depthwise(x, weight, residual)
    problem.grad_output = grad.data_ptr()
    problem.grad_input = in_x.data_ptr() if wants_input else None
    problem.grad_weight = in_weight.data_ptr() if wants_weight else None
    problem.grad_bias = in_bias.data_ptr()
    run("dgt_depthwise_backward", problem)
    return grads


def _describe_depthwise(x: Tensor, weight: Tensor, residual: bool) -> DepthwiseProblem:
    problem = DepthwiseProblem()
    problem.images, problem.height, problem.width, problem.channels = x.shape
    problem.with_input = residual
    problem.input = x.data_ptr()
    problem.weight = weight.data_ptr()
    return problem


def _save_depthwise(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.residual = inputs
    ctx.save_for_backward(x, weight)


def _depthwise_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
    in_x, in_weight, in_bias = torch.ops.dgt.native_depthwise_backward(
        grad, x, weight, ctx.residual, wants_x, wants_weight or wants_bias
    )
    return (
        in_x if wants_x else None,
        in_weight if wants_weight else None,
        in_bias if wants_bias else None,
        None,
    )


def batch_norm(norm: Sequence[Tensor], epsilon: float) -> BatchNorm:
    """Describe what :func:`statistics` returned; nothing, where that is empty."""
    if not norm:
        return BatchNorm()
    return BatchNorm(*map(pointer, norm), epsilon)


def statistics(norm: nn.Module) -> list[Tensor]:
    """Return what BatchNorm in evaluation consists of: weight, bias, mean and variance, each (C,)."""
    normed: Any = norm
    return [normed.weight, normed.bias, normed.running_mean, normed.running_var]


def _new_linear(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _new_convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, *rest: Any
) -> Tensor:
    images, height, width, _ = x.shape
    return x.new_empty(
        (images, (height - 1) // stride + 1, (width - 1) // stride + 1, weight.shape[0])
    )


def _new_map(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def refuse_second_gradients(ctx: Any, *_: Any) -> None:
    """Stand for the gradients of an operator that computes gradients.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "the native layers have no gradients of gradients; set DGT_NATIVE_ISA=none to train with PyTorch's operators"
    )


def _new_depthwise_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(weight.shape), x.new_empty(x.shape[-1:])


LIBRARY.impl("native_linear", _linear, "CPU")
LIBRARY.impl("native_convolution", _convolution, "CPU")
LIBRARY.impl("native_depthwise_convolution", _depthwise, "CPU")
LIBRARY.impl("native_depthwise_backward", _depthwise_backward, "CPU")
torch.library.register_fake("dgt::native_depthwise_backward", _new_depthwise_gradients)
torch.library.register_autograd(
    "dgt::native_depthwise_convolution", _depthwise_gradients, setup_context=_save_depthwise
)
torch.library.register_autograd("dgt::native_depthwise_backward", refuse_second_gradients)
torch.library.register_fake("dgt::native_linear", _new_linear)
torch.library.register_fake("dgt::native_convolution", _new_convolved)
torch.library.register_fake("dgt::native_depthwise_convolution", _new_map)


def _linear_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * _tokens(x) * int(weight[0]) * int(weight[1])


def _convolution_flops(x: Any, weight: Any, bias: Any, stride: int, *_: Any, **__: Any) -> int:
    places = int(x[0]) * ((int(x[1]) - 1) // stride + 1) * ((int(x[2]) - 1) // stride + 1)
    return 2 * 9 * places * int(weight[0]) * int(weight[1])


def _depthwise_flops(x: Any, *_: Any, **__: Any) -> int:
    return 2 * 9 * _tokens(x) * int(x[-1])


def _depthwise_backward_flops(grad: Any, *_: Any, **__: Any) -> int:
    return 2 * _depthwise_flops(grad)


def _tokens(shape: Any) -> int:
    count = 1
    for size in shape[:-1]:
        count *= int(size)
    return count


register_flop_formula(torch.ops.dgt.native_linear)(_linear_flops)
register_flop_formula(torch.ops.dgt.native_convolution)(_convolution_flops)
register_flop_formula(torch.ops.dgt.native_depthwise_convolution)(_depthwise_flops)
register_flop_formula(torch.ops.dgt.native_depthwise_backward)(_depthwise_backward_flops)
