"""The inverted residual feed-forward network on the native kernel, in one pass over the image: for what predicts.

It has no gradients, and takes float32 alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops.cpu.convolution import LIBRARY, batch_norm
from dgt.ops.cpu.convolution_interface import FeedForwardProblem, new_prepared, run
from dgt.ops.cpu.interface import as_mask, pointer


class Weights(NamedTuple):
    """The parameters of the network, of C channels and R C hidden ones.

    Norms are what :func:`dgt.ops.cpu.convolution.statistics` returns, or empty where there is none.
    """

    expand_weight: Tensor  # (R C, C, 1, 1)
    expand_bias: Tensor | None  # (R C,)
    norm1: list[Tensor]  # (R C,)
    depthwise_weight: Tensor  # (R C, 1, 3, 3)
    depthwise_bias: Tensor | None  # (R C,)
    norm2: list[Tensor]  # (R C,)
    project_weight: Tensor  # (C, R C, 1, 1)
    project_bias: Tensor | None  # (C,)
    norm3: list[Tensor]  # (C,)
    epsilons: list[float]  # of the three norms

    def parameters(self) -> list[Tensor]:
        """Return all tensors of them."""
        tensors = [self.expand_weight, self.depthwise_weight, self.project_weight]
        tensors += [
            bias
            for bias in (self.expand_bias, self.depthwise_bias, self.project_bias)
            if bias is not None
        ]
        return tensors + self.norm1 + self.norm2 + self.norm3


def feed_forward(
    x: Tensor, weights: Weights, mask: Tensor | None, prepared: Tensor | None = None
) -> Tensor:
    """Return ``norm3(project(norm2(gelu(y + depthwise(y)))))`` with ``y = norm1(gelu(expand(x)))`` (Eq. 10).

    Args:
        x: (B, H, W, C).
        weights: of the network.
        mask: bool (B, H, W), True where a token is real, or None; elsewhere ``y`` is zero.
        prepared: what :func:`prepare` returned for these weights, or None.

    Returns:
        (B, H, W, C), contiguous.
    """
    output: Tensor = torch.ops.dgt.native_feed_forward(x, *weights, mask, prepared)
    return output


def prepare(weights: Weights) -> Tensor:
    """Return the weights as the kernel reads them, for many calls: bytes."""
    weights = _contiguous(weights)
    problem = _describe(weights)
    prepared = new_prepared("dgt_feed_forward_bytes", problem)
    problem.prepared = prepared.data_ptr()
    run("dgt_prepare_feed_forward", problem)
    return prepared


LIBRARY.define(
    "native_feed_forward(Tensor x, Tensor expand_weight, Tensor? expand_bias, Tensor[] norm1, "
    "Tensor depthwise_weight, Tensor? depthwise_bias, Tensor[] norm2, Tensor project_weight, "
    "Tensor? project_bias, Tensor[] norm3, float[] epsilons, Tensor? mask, Tensor? prepared) -> Tensor"
)


def _feed_forward(x: Tensor, *arguments: Any) -> Tensor:
    """The operator on CPUs; its arguments come in the order of its definition above."""
    *parameters, mask, prepared = arguments
    weights = _contiguous(Weights(*parameters))
    x = x.contiguous()
    mask = as_mask(mask)
    output = torch.empty_like(x)
    problem = _describe(weights)
    problem.images, problem.height, problem.width, _ = x.shape
    problem.input = x.data_ptr()
    problem.mask = pointer(mask)
    problem.prepared = pointer(prepared)
    problem.output = output.data_ptr()
    run("dgt_feed_forward", problem)
    return output


def _contiguous(weights: Weights) -> Weights:
    """The weights, laid out as (outputs, inputs, places)."""
    return weights._replace(
        expand_weight=weights.expand_weight.contiguous(),
        depthwise_weight=weights.depthwise_weight.contiguous(),
        project_weight=weights.project_weight.contiguous(),
    )


def _describe(weights: Weights) -> FeedForwardProblem:
    """Describe contiguous weights."""
    problem = FeedForwardProblem()
    problem.hidden, problem.channels = weights.expand_weight.shape[:2]
    problem.expand_weight = weights.expand_weight.data_ptr()
    problem.expand_bias = pointer(weights.expand_bias)
    problem.norm1 = batch_norm(weights.norm1, weights.epsilons[0])
    problem.depthwise_weight = weights.depthwise_weight.data_ptr()
    problem.depthwise_bias = pointer(weights.depthwise_bias)
    problem.norm2 = batch_norm(weights.norm2, weights.epsilons[1])
    problem.project_weight = weights.project_weight.data_ptr()
    problem.project_bias = pointer(weights.project_bias)
    problem.norm3 = batch_norm(weights.norm3, weights.epsilons[2])
    return problem


def _new_map(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _flops(x: Sequence[int], expand_weight: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products of every token, and nine taps of every hidden channel."""
    images, height, width, channels = x
    return 2 * images * height * width * int(expand_weight[0]) * (2 * channels + 9)


LIBRARY.impl("native_feed_forward", _feed_forward, "CPU")
torch.library.register_fake("dgt::native_feed_forward", _new_map)
register_flop_formula(torch.ops.dgt.native_feed_forward)(_flops)
