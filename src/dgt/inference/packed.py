"""Layers that only predict: their weights are packed for the native CPU kernels.

Each stands for a layer of a model that it was made of. It has neither parameters nor buffers, works
in float32 on a CPU, and has no gradients. Maps are (B, H, W, C) as in :mod:`dgt.layers`.

Kernels are called in operators of PyTorch (:mod:`dgt.ops.registry`), whose dispatcher stands between
them and tensors that hold no data of their own: those of fake, functional and batched tensors, of
subclasses, and views that are negated when they are read.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dgt.inference.cpu.interface import (
    ConvolutionProblem,
    DepthwiseProblem,
    FeedForwardProblem,
    LinearProblem,
    describe_norm,
    layout,
    prepare,
    run,
)
from dgt.inference.frozen import ORIGINAL, Frozen
from dgt.layers import ConvStem, InvertedResidualFFN
from dgt.layers.convolution import channels_first, channels_last
from dgt.ops.checks import describe
from dgt.ops.cpu.interface import as_mask, pointer
from dgt.ops.registry import operator


def _fake_linear(call: SimpleNamespace) -> Tensor:
    output: Tensor = call.x.new_empty((*call.x.shape[:-1], call.outputs))
    return output


def _flops_of_linear(call: SimpleNamespace) -> int:
    return 2 * math.prod(call.x) * int(call.outputs)


@operator(fake=_fake_linear, flops=_flops_of_linear)
def packed_linear(x: Tensor, weights: Tensor, outputs: int) -> Tensor:
    """Map (..., C) to (..., C')."""
    x = x.contiguous()
    output = x.new_empty((*x.shape[:-1], outputs))
    problem = LinearProblem()
    problem.inputs = x.shape[-1]
    problem.tokens = x.numel() // problem.inputs
    problem.outputs = outputs
    problem.input = x.data_ptr()
    problem.output = output.data_ptr()
    if output.numel():
        run("dgt_linear", problem, weights)
    return output


def _convolved(shape: tuple[int, ...], stride: int) -> tuple[int, ...]:
    """(B, H', W') of a 3x3 convolution of a (B, H, W, C) map with zeros around it."""
    images, height, width, _ = shape
    return images, (height - 1) // stride + 1, (width - 1) // stride + 1


def _fake_convolution(call: SimpleNamespace) -> Tensor:
    output: Tensor = call.x.new_empty((*_convolved(call.x.shape, call.stride), call.outputs))
    return output


def _flops_of_convolution(call: SimpleNamespace) -> int:
    return 18 * math.prod(_convolved(call.x, call.stride)) * int(call.x[3]) * int(call.outputs)


@operator(fake=_fake_convolution, flops=_flops_of_convolution)
def packed_convolution(
    x: Tensor, mask: Tensor | None, weights: Tensor, outputs: int, stride: int, with_gelu: bool
) -> Tensor:
    """Map (B, H, W, C) to (B, H', W', C'), with GELU and BatchNorm behind a 3x3 convolution, or without."""
    x, mask = x.contiguous(), as_mask(mask)
    output = x.new_empty((*_convolved(x.shape, stride), outputs))
    problem = ConvolutionProblem()
    problem.images, problem.height, problem.width, problem.channels = x.shape
    problem.outputs = outputs
    problem.stride = stride
    problem.with_gelu = with_gelu
    problem.input = x.data_ptr()
    problem.mask = pointer(mask)
    problem.output = output.data_ptr()
    if output.numel():
        run("dgt_convolution", problem, weights)
    return output


def _fake_same(call: SimpleNamespace) -> Tensor:
    output: Tensor = call.x.new_empty(call.x.shape)
    return output


def _flops_of_feed_forward(call: SimpleNamespace) -> int:
    return 2 * math.prod(call.x[:3]) * int(call.hidden) * (2 * int(call.x[3]) + 9)


@operator(fake=_fake_same, flops=_flops_of_feed_forward)
def packed_feed_forward(x: Tensor, mask: Tensor | None, weights: Tensor, hidden: int) -> Tensor:
    """Map (B, H, W, C) to (B, H, W, C): an inverted residual feed-forward network."""
    x, mask = x.contiguous(), as_mask(mask)
    output = torch.empty_like(x)
    problem = FeedForwardProblem()
    problem.images, problem.height, problem.width, problem.channels = x.shape
    problem.hidden = hidden
    problem.input = x.data_ptr()
    problem.mask = pointer(mask)
    problem.output = output.data_ptr()
    if output.numel():
        run("dgt_feed_forward", problem, weights)
    return output


def _flops_of_depthwise(call: SimpleNamespace) -> int:
    return 18 * math.prod(call.x)


@operator(fake=_fake_same, flops=_flops_of_depthwise)
def packed_depthwise(x: Tensor, weights: Tensor) -> Tensor:
    """Map (B, H, W, C) to (B, H, W, C): a depthwise 3x3 convolution and its input, added."""
    x = x.contiguous()
    output = torch.empty_like(x)
    problem = DepthwiseProblem()
    problem.images, problem.height, problem.width, problem.channels = x.shape
    problem.input = x.data_ptr()
    problem.output = output.data_ptr()
    if output.numel():
        run("dgt_depthwise", problem, weights)
    return output


class Packed(Frozen):
    """A layer whose weights are packed in the layout of this processor's kernels.

    Args:
        problem: names the weights, which are copied.
    """

    def __init__(self, problem: Any) -> None:
        super().__init__()
        self.weights = prepare(problem)
        self.layout = layout()
        self.training = False

    def checked(self, x: Tensor, channels: int) -> Tensor:
        """Return an input (..., channels) that kernels take.

        Raises:
            RuntimeError: gradients are asked for, or the calls are recorded for another process.
            TypeError, ValueError: for another type or shape.
        """
        self.check_prediction(x)
        if torch.is_autocast_enabled("cpu"):
            x = x.float()
        if x.dtype != torch.float32 or not x.is_cpu:
            raise TypeError(f"{ORIGINAL}, in float32 on a CPU, got {describe(x)} on {x.device}")
        if x.shape[-1] != channels or 0 in x.shape[1:]:
            raise ValueError(f"x must have {channels} channels and not be empty, got {describe(x)}")
        return x

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.layout != layout():
            raise RuntimeError(
                f"{ORIGINAL}, with the native kernels that it was made for "
                f"(interface and vector width {self.layout}, here {layout()}): optimize it here"
            )


class PackedLinear(Packed):
    """A linear layer.

    Args:
        weight: (C', C), or (C', C, 1, 1).
        bias: (C',) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.contiguous()
        problem = LinearProblem()
        problem.outputs, problem.inputs = weight.shape[:2]
        problem.weight = weight.data_ptr()
        problem.bias = pointer(bias)
        super().__init__(problem)
        self.in_features = problem.inputs
        self.out_features = problem.outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C) to (..., C')."""
        output: Tensor = packed_linear(
            self.checked(x, self.in_features), self.weights, self.out_features
        )
        return output


class PackedConvolution(Packed):
    """A 3x3 convolution with zeros around the map, and what follows it.

    Args:
        conv: the convolution, of stride 1 or 2.
        norm: BatchNorm of GELU of it; None for neither.
    """

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None = None) -> None:
        weight = conv.weight.contiguous()
        problem = ConvolutionProblem()
        problem.outputs, problem.channels = weight.shape[:2]
        problem.weight = weight.data_ptr()
        problem.bias = pointer(conv.bias)
        problem.norm = describe_norm(norm)
        super().__init__(problem)
        self.in_channels = conv.in_channels
        self.out_channels = conv.out_channels
        self.stride = conv.stride[0]
        self.with_gelu = norm is not None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H', W', C'); zero where ``mask`` (B, H', W') is False."""
        x = self.checked(x, self.in_channels)
        mask = _checked_mask(mask, _convolved(x.shape, self.stride))
        output: Tensor = packed_convolution(
            x, mask, self.weights, self.out_channels, self.stride, self.with_gelu
        )
        return output


class PackedFeedForward(Packed):
    """An :class:`dgt.layers.InvertedResidualFFN` in one pass over the image."""

    def __init__(self, ffn: InvertedResidualFFN) -> None:
        convs = (ffn.expand, ffn.depthwise, ffn.project)
        expand, depthwise, project = (conv.weight.contiguous() for conv in convs)
        problem = FeedForwardProblem()
        problem.hidden, problem.channels = expand.shape[:2]
        problem.expand_weight = expand.data_ptr()
        problem.expand_bias = pointer(ffn.expand.bias)
        problem.norm1 = describe_norm(ffn.norm1)
        problem.depthwise_weight = depthwise.data_ptr()
        problem.depthwise_bias = pointer(ffn.depthwise.bias)
        problem.norm2 = describe_norm(ffn.norm2)
        problem.project_weight = project.data_ptr()
        problem.project_bias = pointer(ffn.project.bias)
        problem.norm3 = describe_norm(ffn.norm3)
        super().__init__(problem)
        self.channels = problem.channels
        self.hidden = problem.hidden

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        x = self.checked(x, self.channels)
        mask = _checked_mask(mask, x.shape[:-1])
        output: Tensor = packed_feed_forward(x, mask, self.weights, self.hidden)
        return output


class PackedPosition(Packed):
    """A position encoding with its residual: ``x + cpe(x)`` (Eq. 8).

    Args:
        conv: the depthwise convolution of :class:`dgt.layers.ConditionalPositionEncoding`.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        weight = conv.weight.contiguous()
        problem = DepthwiseProblem()
        problem.channels = conv.in_channels
        problem.weight = weight.data_ptr()
        problem.bias = pointer(conv.bias)
        super().__init__(problem)
        self.channels = conv.in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        output: Tensor = packed_depthwise(self.checked(x, self.channels), self.weights)
        return output


class PackedConv2d(nn.Module):
    """An ``nn.Conv2d`` of 1x1, or of 3x3 with a padding of 1: (B, C, H, W) to (B, C', H', W')."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        if conv.kernel_size == (1, 1):
            self.packed: Packed = PackedLinear(conv.weight, conv.bias)
        else:
            self.packed = PackedConvolution(conv)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H', W')."""
        return channels_first(self.packed(channels_last(x)))


class PackedStem(nn.Module):
    """A :class:`dgt.layers.ConvStem`: (B, in_chans, H, W) images to (B, H', W', width)."""

    def __init__(self, stem: ConvStem) -> None:
        super().__init__()
        pairs: Any = zip(stem.convs, stem.norms, strict=True)
        self.convs = nn.ModuleList(PackedConvolution(conv, norm) for conv, norm in pairs)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """As :meth:`dgt.layers.ConvStem.forward`."""
        x = channels_last(image)
        for conv in self.convs:
            x = conv(x, mask)
        return x


def _checked_mask(mask: Tensor | None, size: tuple[int, ...]) -> Tensor | None:
    """Return a bool mask of this size; TypeError or ValueError for another."""
    if mask is None:
        return None
    expected = f"mask must be a bool tensor of shape {tuple(size)}"
    if mask.dtype != torch.bool:
        raise TypeError(f"{expected}, got {describe(mask)}")
    if mask.shape != size:
        raise ValueError(f"{expected}, got {describe(mask)}")
    return mask
