"""The inverted residual feed-forward network in training on the native kernels, with its gradients (Eq. 10).

BatchNorm takes the statistics of the batch. For the backward pass three maps are kept: before each GELU, and before
the last BatchNorm; everything else is computed again. Hidden maps are (slices, tokens, lanes): slices of as many
channels as the library's vectors have lanes. Results are the same bits in every run and with any number of threads.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops.cpu import library
from dgt.ops.cpu.convolution import LIBRARY, refuse_second_gradients
from dgt.ops.cpu.convolution_interface import TrainingNorm, TrainingProblem, run
from dgt.ops.cpu.interface import as_mask, pointer


class Parameters(NamedTuple):
    """The parameters of the network, of C channels and R C hidden ones."""

    expand_weight: Tensor  # (R C, C, 1, 1)
    expand_bias: Tensor | None  # (R C,)
    norm1_weight: Tensor  # (R C,)
    norm1_bias: Tensor  # (R C,)
    depthwise_weight: Tensor  # (R C, 1, 3, 3)
    depthwise_bias: Tensor | None  # (R C,)
    norm2_weight: Tensor  # (R C,)
    norm2_bias: Tensor  # (R C,)
    project_weight: Tensor  # (C, R C, 1, 1)
    project_bias: Tensor | None  # (C,)
    norm3_weight: Tensor  # (C,)
    norm3_bias: Tensor  # (C,)


class BatchStatistics(NamedTuple):
    """Means and biased variances of the inputs of the three norms, one after the other: (2 R C + C,)."""

    mean: Tensor
    variance: Tensor


def feed_forward_in_training(
    x: Tensor, parameters: Parameters, epsilons: list[float], mask: Tensor | None
) -> tuple[Tensor, BatchStatistics]:
    """Return ``norm3(project(norm2(gelu(y + depthwise(y)))))`` with ``y = norm1(gelu(expand(x)))`` (Eq. 10).

    Args:
        x: (B, H, W, C).
        parameters: of the network.
        epsilons: of the three norms.
        mask: bool (B, H, W), True where a token is real, or None; elsewhere ``y`` is zero.

    Returns:
        (B, H, W, C), contiguous, and the statistics of the batch.
    """
    output, _, _, _, statistics = torch.ops.dgt.native_feed_forward_training(
        x, *parameters, epsilons, mask
    )
    mean, variance, _ = statistics.unbind(0)
    return output, BatchStatistics(mean, variance)


PARAMETERS = (
    "Tensor expand_weight, Tensor? expand_bias, Tensor norm1_weight, Tensor norm1_bias, "
    "Tensor depthwise_weight, Tensor? depthwise_bias, Tensor norm2_weight, Tensor norm2_bias, "
    "Tensor project_weight, Tensor? project_bias, Tensor norm3_weight, Tensor norm3_bias"
)
LIBRARY.define(
    f"native_feed_forward_training(Tensor x, {PARAMETERS}, float[] epsilons, Tensor? mask) "
    "-> (Tensor output, Tensor expanded, Tensor convolved, Tensor projected, Tensor statistics)"
)
LIBRARY.define(
    f"native_feed_forward_backward(Tensor grad, Tensor x, {PARAMETERS}, Tensor? mask, "
    "Tensor expanded, Tensor convolved, Tensor projected, Tensor statistics, "
    "bool wants_input, bool wants_expand_weight) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *weights, epsilons, mask = arguments
    parameters = _contiguous(Parameters(*weights))
    x = x.contiguous()
    mask = as_mask(mask)
    output, expanded, convolved, projected, statistics = _new_results(x, *parameters)
    problem = _describe(x, parameters, mask, statistics, epsilons)
    problem.expanded = expanded.data_ptr()
    problem.convolved = convolved.data_ptr()
    problem.projected = projected.data_ptr()
    problem.output = output.data_ptr()
    run("dgt_feed_forward_training", problem)
    return output, expanded, convolved, projected, statistics


def _new_results(x: Tensor, expand_weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    images, height, width, channels = x.shape
    hidden = expand_weight.shape[0]
    lanes = library.status().lanes or 1
    in_slices = ((hidden + lanes - 1) // lanes, images * height * width, lanes)
    return (
        x.new_empty(x.shape),
        x.new_empty(in_slices),
        x.new_empty(in_slices),
        x.new_empty(x.shape),
        x.new_empty((3, 2 * hidden + channels)),
    )


def _backward(grad: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    weights = arguments[: len(Parameters._fields)]
    mask, expanded, convolved, projected, statistics, wants_input, wants_expand_weight = arguments[
        len(Parameters._fields) :
    ]
    parameters = _contiguous(Parameters(*weights))
    x = x.contiguous()
    grad = grad.contiguous()
    mask = as_mask(mask)
    grads = _new_gradients(grad, x, *parameters)
    grad_x, *of_parameters = grads
    in_parameters = Parameters(*of_parameters)
    problem = _describe(x, parameters, mask, statistics, [0.0] * 3)
    problem.expanded = expanded.data_ptr()
    problem.convolved = convolved.data_ptr()
    problem.projected = projected.data_ptr()
    problem.grad_output = grad.data_ptr()
    problem.grad_input = grad_x.data_ptr() if wants_input else None
    problem.grad_expand_weight = (
        in_parameters.expand_weight.data_ptr() if wants_expand_weight else None
    )
    problem.grad_expand_bias = pointer(in_parameters.expand_bias)
    problem.grad_depthwise_weight = in_parameters.depthwise_weight.data_ptr()
    problem.grad_depthwise_bias = pointer(in_parameters.depthwise_bias)
    problem.grad_project_weight = in_parameters.project_weight.data_ptr()
    problem.grad_project_bias = pointer(in_parameters.project_bias)
    for norm, weight, bias in (
        (problem.norm1, in_parameters.norm1_weight, in_parameters.norm1_bias),
        (problem.norm2, in_parameters.norm2_weight, in_parameters.norm2_bias),
        (problem.norm3, in_parameters.norm3_weight, in_parameters.norm3_bias),
    ):
        norm.grad_weight = weight.data_ptr()
        norm.grad_bias = bias.data_ptr()
    run("dgt_feed_forward_backward", problem)
    return grads


def _new_gradients(grad: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Memory for the gradients of the input and of all parameters; also of a bias that is missing."""
    parameters = Parameters(*arguments[: len(Parameters._fields)])
    channels = parameters.project_weight.shape[0]
    hidden = parameters.expand_weight.shape[0]
    missing = {"expand_bias": hidden, "depthwise_bias": hidden, "project_bias": channels}
    grads = [x.new_empty(x.shape)]
    for name, parameter in parameters._asdict().items():
        shape = (missing[name],) if parameter is None else parameter.shape
        grads.append(x.new_empty(shape))
    return tuple(grads)


def _contiguous(parameters: Parameters) -> Parameters:
    """The parameters, with weights laid out as (outputs, inputs, places)."""
    contiguous: dict[str, Any] = {
        name: None if tensor is None else tensor.contiguous()
        for name, tensor in parameters._asdict().items()
    }
    return Parameters(**contiguous)


def _describe(
    x: Tensor,
    parameters: Parameters,
    mask: Tensor | None,
    statistics: Tensor,
    epsilons: list[float],
) -> TrainingProblem:
    problem = TrainingProblem()
    problem.images, problem.height, problem.width, problem.channels = x.shape
    problem.hidden = parameters.expand_weight.shape[0]
    problem.input = x.data_ptr()
    problem.mask = pointer(mask)
    problem.expand_weight = parameters.expand_weight.data_ptr()
    problem.expand_bias = pointer(parameters.expand_bias)
    problem.depthwise_weight = parameters.depthwise_weight.data_ptr()
    problem.depthwise_bias = pointer(parameters.depthwise_bias)
    problem.project_weight = parameters.project_weight.data_ptr()
    problem.project_bias = pointer(parameters.project_bias)
    hidden, channels = problem.hidden, problem.channels
    of_norms = statistics.split([hidden, hidden, channels], dim=1)
    problem.norm1 = _norm(parameters.norm1_weight, parameters.norm1_bias, of_norms[0], epsilons[0])
    problem.norm2 = _norm(parameters.norm2_weight, parameters.norm2_bias, of_norms[1], epsilons[1])
    problem.norm3 = _norm(parameters.norm3_weight, parameters.norm3_bias, of_norms[2], epsilons[2])
    return problem


def _norm(weight: Tensor, bias: Tensor, statistics: Tensor, epsilon: float) -> TrainingNorm:
    """Describe a norm, whose statistics are views of three rows: mean, variance, 1 / deviation."""
    mean, variance, scale = statistics.unbind(0)
    norm = TrainingNorm()
    norm.weight = weight.data_ptr()
    norm.bias = bias.data_ptr()
    norm.epsilon = epsilon
    norm.mean = mean.data_ptr()
    norm.variance = variance.data_ptr()
    norm.scale = scale.data_ptr()
    return norm


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *parameters, _, mask = inputs
    _, expanded, convolved, projected, statistics = output
    ctx.set_materialize_grads(False)  # zeros as large as the hidden maps
    ctx.mark_non_differentiable(expanded, convolved, projected, statistics)
    ctx.save_for_backward(x, *parameters, mask, expanded, convolved, projected, statistics)


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    wants_input, wants_expand_weight = ctx.needs_input_grad[:2]
    grads = torch.ops.dgt.native_feed_forward_backward(
        grad, *ctx.saved_tensors, wants_input, wants_expand_weight
    )
    wanted = [
        found if is_wanted else None
        for found, is_wanted in zip(grads, ctx.needs_input_grad, strict=False)
    ]
    return (*wanted, None, None)


LIBRARY.impl("native_feed_forward_training", _forward, "CPU")
LIBRARY.impl("native_feed_forward_backward", _backward, "CPU")
torch.library.register_fake("dgt::native_feed_forward_training", _new_results)
torch.library.register_fake("dgt::native_feed_forward_backward", _new_gradients)
torch.library.register_autograd(
    "dgt::native_feed_forward_training", _gradients, setup_context=_save
)
torch.library.register_autograd("dgt::native_feed_forward_backward", refuse_second_gradients)


def _flops(x: Any, expand_weight: Any, *_: Any, **__: Any) -> int:
    """Two products of every token, and nine taps of every hidden channel."""
    images, height, width, channels = x
    return 2 * int(images * height * width) * int(expand_weight[0]) * (2 * int(channels) + 9)


def _backward_flops(grad: Any, x: Any, expand_weight: Any, *_: Any, **__: Any) -> int:
    return 2 * _flops(x, expand_weight)


register_flop_formula(torch.ops.dgt.native_feed_forward_training)(_flops)
register_flop_formula(torch.ops.dgt.native_feed_forward_backward)(_backward_flops)
