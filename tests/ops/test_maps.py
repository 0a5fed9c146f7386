"""Operators on maps in training: what PyTorch's modules compute, with their gradients, at least as exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dgt.ops import maps
from dgt.ops.cpu import library

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)
EPSILON = 1e-5
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def gelu_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return maps.gelu_norm(x, weight, bias, EPSILON)[0]


def gelu_norm_of_pytorch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(F.gelu(x), None, None, weight, bias, True, 0.0, EPSILON)


def draw_gelu_norm(channels: int, dtype: torch.dtype, mean: float = 0.0) -> list[Tensor]:
    x = mean + torch.randn(3, channels, 7, 5).contiguous(memory_format=torch.channels_last)
    return [x.to(dtype), torch.randn(channels), torch.randn(channels)]


def add_depthwise_of_pytorch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    return x + F.conv2d(x, weight, bias, padding=1, groups=len(weight))


def draw_add_depthwise(channels: int, dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(3, channels, 7, 5).contiguous(memory_format=torch.channels_last)
    return [x.to(dtype), torch.randn(channels, 1, 3, 3), torch.randn(channels)]


PAIRS = {
    "gelu_norm": (gelu_norm, gelu_norm_of_pytorch, draw_gelu_norm),
    "add_depthwise": (maps.add_depthwise, add_depthwise_of_pytorch, draw_add_depthwise),
}


def with_gradients(
    function: Callable[..., Tensor], arguments: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    """The output, and the gradient in every argument."""
    leaves = [argument.detach().clone().requires_grad_() for argument in arguments]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("channels", [37, 64])
@pytest.mark.parametrize("spread", [1, 30])
def test_output_and_gradients_are_as_close_to_float64_as_those_of_pytorch(
    spread, channels, dtype, name
) -> None:
    ours, of_pytorch, draw = PAIRS[name]
    arguments = draw(channels, dtype)
    arguments[0] *= spread
    grad = torch.randn_like(arguments[0])
    doubles = [argument.double() for argument in arguments]
    exact = with_gradients(of_pytorch, doubles, grad)
    plain = with_gradients(of_pytorch, arguments, grad)
    found = with_gradients(ours, arguments, grad)
    for one, other, both in zip(found, plain, exact, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert error(one, both) <= 1.5 * error(other, both) + torch.finfo(torch.float32).eps


def test_a_mean_of_many_deviations_costs_no_digits() -> None:
    arguments = draw_gelu_norm(8, torch.float32, mean=2000.0)
    grad = torch.randn_like(arguments[0])
    exact = with_gradients(gelu_norm_of_pytorch, [it.double() for it in arguments], grad)
    for one, both in zip(with_gradients(gelu_norm, arguments, grad), exact, strict=True):
        assert error(one, both) < 2000 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", PAIRS)
def test_results_are_the_same_bits_in_any_layout_and_with_any_number_of_threads(name) -> None:
    ours, _, draw = PAIRS[name]
    x, *parameters = draw(37, torch.float32)
    grad = torch.randn_like(x)
    expected = with_gradients(ours, (x, *parameters), grad)
    assert expected[0].is_contiguous(memory_format=torch.channels_last)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        apart = with_gradients(ours, (x.contiguous(), *parameters), grad.contiguous())
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(apart, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_have_gradients(name) -> None:
    ours, of_pytorch, draw = PAIRS[name]
    arguments = draw(4, torch.float32)
    weights = torch.randn_like(arguments[0])

    def second(function):
        leaves = [argument.clone().requires_grad_() for argument in arguments]
        leaves[1:] = [leaf * leaves[0].mean() for leaf in leaves[1:]]  # which depend on the first
        grads = torch.autograd.grad((function(*leaves) * weights).sum(), leaves, create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        return torch.autograd.grad(total, leaves, materialize_grads=True)

    for one, other in zip(second(ours), second(of_pytorch), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_nan_stays_nan(name) -> None:
    ours, of_pytorch, draw = PAIRS[name]
    arguments = draw(20, torch.float32)
    arguments[0][1, 17, 3, 2] = torch.nan
    grad = torch.randn_like(arguments[0])
    expected = with_gradients(of_pytorch, arguments, grad)
    for one, other in zip(with_gradients(ours, arguments, grad), expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())


def test_passes_the_checks_of_pytorch() -> None:
    x, weight, bias = (it.requires_grad_() for it in draw_gelu_norm(5, torch.float32))
    torch.library.opcheck(torch.ops.dgt.gelu_norm.default, (x, weight, bias, EPSILON))
    x, weight, bias = (it.requires_grad_() for it in draw_add_depthwise(5, torch.float32))
    torch.library.opcheck(torch.ops.dgt.add_depthwise.default, (x, weight, bias))


def test_work_is_counted_as_that_of_the_convolution() -> None:
    counts = []
    for function in (maps.add_depthwise, add_depthwise_of_pytorch):
        arguments = draw_add_depthwise(5, torch.float32)
        with FlopCounterMode(display=False) as counter:
            function(*arguments)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
