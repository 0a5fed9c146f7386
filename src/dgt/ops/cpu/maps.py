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
from dgt.ops.cpu.structures import AddDepthwiseProblem, GeluNormProblem


def new_map(like: Tensor) -> Tensor:
    """Return an empty (B, C, H, W) map that lies in memory as (B, H, W, C)."""
    batch, channels, height, width = like.shape
    return like.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2)


def as_channels_last(x: Tensor) -> Tensor:
    """The same (B, C, H, W) map, as (B, H, W, C) in memory."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def gelu_norm(input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """BatchNorm of GELU by the statistics of the batch: the output, and mean and variance, (2, C) float64.

    The variance is not corrected: squares are divided by N, not N - 1.
    """
    statistics = input.new_empty((2, input.shape[1]), dtype=torch.float64)
    output = new_map(input)
    problem = _describe_norm(input, weight, bias, statistics, epsilon)
    problem.output = output.data_ptr()
    _run("dgt_gelu_norm", problem)
    return output, statistics


def gelu_norm_again(
    input: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, epsilon: float
) -> Tensor:
    """The output of :func:`gelu_norm`, computed once more from its statistics."""
    output = new_map(input)
    problem = _describe_norm(input, weight, bias, statistics, epsilon)
    problem.output = output.data_ptr()
    _run("dgt_gelu_norm_again", problem)
    return output


def gelu_norm_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`gelu_norm` in input, weight and bias."""
    grad = as_channels_last(grad.to(input.dtype))
    in_input = new_map(input)
    in_weight, in_bias = weight.new_empty(weight.shape), bias.new_empty(bias.shape)
    problem = _describe_norm(input, weight, bias, statistics, epsilon)
    problem.grad_output = grad.data_ptr()
    problem.grad_input = in_input.data_ptr()
    problem.grad_weight = in_weight.data_ptr()
    problem.grad_bias = in_bias.data_ptr()
    _run("dgt_gelu_norm_backward", problem)
    return in_input, in_weight, in_bias


def add_depthwise(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A map plus its 3 x 3 depthwise convolution with (C, 1, 3, 3) weights, zero padding and a bias."""
    output = new_map(input)
    problem = _describe_convolution(input, weight, bias)
    problem.output = output.data_ptr()
    _run("dgt_add_depthwise", problem)
    return output


def add_depthwise_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`add_depthwise` in input, weight and bias."""
    grad = as_channels_last(grad.to(input.dtype))
    in_input = new_map(input)
    in_weight, in_bias = weight.new_empty(weight.shape), bias.new_empty(bias.shape)
    problem = _describe_convolution(input, weight, bias)
    problem.grad_output = grad.data_ptr()
    problem.grad_input = in_input.data_ptr()
    problem.grad_weight = in_weight.data_ptr()
    problem.grad_bias = in_bias.data_ptr()
    _run("dgt_add_depthwise_backward", problem)
    return in_input, in_weight, in_bias


def _describe_norm(
    input: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, epsilon: float
) -> GeluNormProblem:
    """Describe a call; the rest is to be set."""
    problem = GeluNormProblem()
    problem.channels = input.shape[1]
    problem.positions = input.numel() // input.shape[1]
    problem.epsilon = epsilon
    problem.statistics = statistics.data_ptr()
    _set_operands(problem, input, weight, bias)
    return problem


def _describe_convolution(input: Tensor, weight: Tensor, bias: Tensor) -> AddDepthwiseProblem:
    """Describe a call; the rest is to be set."""
    problem = AddDepthwiseProblem()
    problem.images, problem.channels, problem.height, problem.width = input.shape
    _set_operands(problem, input, weight, bias)
    return problem


def _set_operands(problem: Any, input: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Describe a map and two parameters, or copies of them, which the description holds."""
    operands = [as_channels_last(input), weight.contiguous(), bias.contiguous()]
    problem.operands = operands
    problem.type = TYPES[input.dtype]
    problem.input, problem.weight, problem.bias = (tensor.data_ptr() for tensor in operands)


def _run(name: str, problem: Any) -> None:
    """Call a kernel on PyTorch's threads.

    Raises:
        MemoryError: where there is no room for what the kernel keeps.
    """
    problem.threads = torch.get_num_threads()
    problem.parallel_for = library.parallel_for()
    loaded: Any = library.load()
    if getattr(loaded, name)(ctypes.byref(problem)) == NO_MEMORY:
        raise MemoryError(f"out of memory for the workspace of {name}")
