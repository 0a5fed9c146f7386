"""Operators on maps in training on the native kernels (``kernels/maps.h``): GELU with BatchNorm, and a map
plus its depthwise convolution.

Maps are (B, C, H, W) tensors of float32, bfloat16 or float16; those that do not lie in memory as (B, H, W, C) are
copied, and results lie so. Parameters and their gradients are float32. Results are the same bits with any number of
threads.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from dgt.ops.cpu import library
from dgt.ops.cpu.interface import NO_MEMORY, TYPES
from dgt.ops.cpu.structures import MapProblem


def new_map(like: Tensor) -> Tensor:
    """Return an empty (B, C, H, W) map that lies in memory as (B, H, W, C)."""
    return torch.empty_like(like, memory_format=torch.channels_last)


def as_channels_last(x: Tensor) -> Tensor:
    """The same (B, C, H, W) map, as (B, H, W, C) in memory."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def gelu_norm(input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """BatchNorm of GELU by the statistics of the batch: the output, and mean and variance, (2, C) float64.

    The variance is not corrected: squares are divided by N, not N - 1.
    """
    statistics = input.new_empty((2, input.shape[1]), dtype=torch.float64)
    problem = _describe(input, weight, bias)
    _set_norm(problem, statistics, epsilon)
    return _output(problem, "dgt_gelu_norm", input), statistics


def gelu_norm_again(
    input: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, epsilon: float
) -> Tensor:
    """The output of :func:`gelu_norm`, computed once more from its statistics."""
    problem = _describe(input, weight, bias)
    _set_norm(problem, statistics, epsilon)
    return _output(problem, "dgt_gelu_norm_again", input)


def gelu_norm_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`gelu_norm` in input, weight and bias."""
    problem = _describe(input, weight, bias)
    _set_norm(problem, statistics, epsilon)
    return _gradients(problem, "dgt_gelu_norm_backward", grad, input, weight, bias)


def add_depthwise(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A map plus its 3 x 3 depthwise convolution with (C, 1, 3, 3) weights, zero padding and a bias."""
    return _output(_describe(input, weight, bias), "dgt_add_depthwise", input)


def add_depthwise_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`add_depthwise` in input, weight and bias."""
    problem = _describe(input, weight, bias)
    return _gradients(problem, "dgt_add_depthwise_backward", grad, input, weight, bias)


def _describe(input: Tensor, weight: Tensor, bias: Tensor) -> MapProblem:
    """Describe a map and two parameters, or copies of them, which the description holds."""
    operands = [as_channels_last(input), weight.contiguous(), bias.contiguous()]
    problem = MapProblem()
    problem.operands = operands
    problem.images, problem.channels, problem.height, problem.width = input.shape
    problem.type = TYPES[input.dtype]
    problem.input, problem.weight, problem.bias = (tensor.data_ptr() for tensor in operands)
    return problem


def _set_norm(problem: MapProblem, statistics: Tensor, epsilon: float) -> None:
    """Describe what BatchNorm needs beside a map and parameters."""
    problem.statistics = statistics.data_ptr()
    problem.epsilon = epsilon


def _output(problem: MapProblem, kernel: str, input: Tensor) -> Tensor:
    """Have a kernel write its output, a map like the input."""
    output = new_map(input)
    problem.output = output.data_ptr()
    _run(kernel, problem)
    return output


def _gradients(
    problem: MapProblem, kernel: str, grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Have a kernel write the gradients in input, weight and bias."""
    grad = as_channels_last(grad.to(input.dtype))
    in_input = new_map(input)
    in_weight, in_bias = weight.new_empty(weight.shape), bias.new_empty(bias.shape)
    problem.grad_output = grad.data_ptr()
    problem.grad_input = in_input.data_ptr()
    problem.grad_weight = in_weight.data_ptr()
    problem.grad_bias = in_bias.data_ptr()
    _run(kernel, problem)
    return in_input, in_weight, in_bias


def _run(kernel: str, problem: MapProblem) -> None:
    """Call a kernel on PyTorch's threads.

    Raises:
        MemoryError: where there is no room for what the kernel keeps.
    """
    problem.threads = torch.get_num_threads()
    problem.parallel_for = library.parallel_for()
    loaded: Any = library.load()
    if getattr(loaded, kernel)(ctypes.byref(problem)) == NO_MEMORY:
        raise MemoryError(f"out of memory for the workspace of {kernel}")
