"""The feed-forward network and depthwise convolutions in training: gradients compared with PyTorch's."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dgt.ops.cpu import library
from dgt.ops.cpu.convolution import depthwise_convolution
from dgt.ops.cpu.feed_forward_training import Parameters, feed_forward_in_training

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)

EPSILONS = [1e-5, 1e-4, 1e-3]
# Odd sizes; one image, line, or column; channels below, at, and beyond whole vectors; and more
# tokens than fit in one panel of the kernel.
SHAPES = [(2, 7, 5, 8), (1, 1, 9, 3), (3, 6, 1, 16), (1, 5, 4, 17), (2, 15, 14, 12)]


class Call(NamedTuple):
    """The network's arguments, and the gradient of its output."""

    x: Tensor
    parameters: Parameters
    mask: Tensor | None
    grad: Tensor


def new_call(shape: tuple[int, ...], is_masked: bool = False, with_biases: bool = True) -> Call:
    torch.manual_seed(0)
    channels, hidden = shape[-1], 4 * shape[-1]
    bias = torch.randn(hidden) if with_biases else None
    parameters = Parameters(
        expand_weight=torch.randn(hidden, channels, 1, 1) * channels**-0.5,
        expand_bias=bias,
        norm1_weight=torch.randn(hidden),
        norm1_bias=torch.randn(hidden),
        depthwise_weight=torch.randn(hidden, 1, 3, 3) / 3,
        depthwise_bias=None if bias is None else bias.flip(0).clone(),
        norm2_weight=torch.randn(hidden),
        norm2_bias=torch.randn(hidden),
        project_weight=torch.randn(channels, hidden, 1, 1) * hidden**-0.5,
        project_bias=torch.randn(channels) if with_biases else None,
        norm3_weight=torch.randn(channels),
        norm3_bias=torch.randn(channels),
    )
    mask = torch.rand(shape[:3]) > 0.25 if is_masked else None
    return Call(torch.randn(shape), parameters, mask, torch.randn(shape))


def plainly(x: Tensor, p: Parameters, mask: Tensor | None) -> Tensor:
    """The network in PyTorch's functions (Eq. 10)."""

    def norm(y: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        return F.batch_norm(y, None, None, weight, bias, True, 0.0, epsilon)

    y = F.gelu(F.conv2d(x.permute(0, 3, 1, 2), p.expand_weight, p.expand_bias))
    y = norm(y, p.norm1_weight, p.norm1_bias, EPSILONS[0])
    y = y if mask is None else y * mask.unsqueeze(1)
    mixed = F.conv2d(y, p.depthwise_weight, p.depthwise_bias, padding=1, groups=y.shape[1])
    y = norm(F.gelu(y + mixed), p.norm2_weight, p.norm2_bias, EPSILONS[1])
    y = F.conv2d(y, p.project_weight, p.project_bias)
    return norm(y, p.norm3_weight, p.norm3_bias, EPSILONS[2]).permute(0, 2, 3, 1)


def natively(x: Tensor, p: Parameters, mask: Tensor | None) -> Tensor:
    return feed_forward_in_training(x, p, EPSILONS, mask)[0]


def results(function, call: Call, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Output and all gradients by name."""
    x = call.x.to(dtype).detach().requires_grad_()
    parameters = Parameters(
        *(None if p is None else p.to(dtype).detach().requires_grad_() for p in call.parameters)
    )
    output = function(x, parameters, call.mask)
    output.backward(call.grad.to(dtype))
    found = {"output": output.detach(), "x": x.grad}
    for name, parameter in parameters._asdict().items():
        if parameter is not None:
            found[name] = parameter.grad
    return found


def assert_as_exact_as_pytorch(found, plain, exact) -> None:
    """Assert that our float32 is as close to float64 as PyTorch's float32, up to a factor.

    For both, rounding errors grow where variances happen to be small; individual numbers are closer
    or farther by chance, which the factor and 1e-5 of the largest number allow for.
    """
    for name, expected in exact.items():
        allowed = 4 * (plain[name] - expected).abs().max() + 1e-5 * (1 + expected.abs().max())
        error = (found[name] - expected).abs().max()
        assert error <= allowed, f"{name}: {error} beside {allowed}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_masked", [False, True])
def test_gradients_are_those_of_pytorch(shape, is_masked) -> None:
    call = new_call(shape, is_masked)
    found = results(natively, call)
    plain = results(plainly, call)
    assert_as_exact_as_pytorch(found, plain, results(plainly, call, torch.float64))


def test_biases_may_be_missing() -> None:
    call = new_call((2, 5, 6, 9), with_biases=False)
    found = results(natively, call)
    plain = results(plainly, call)
    assert_as_exact_as_pytorch(found, plain, results(plainly, call, torch.float64))


def test_a_large_mean_costs_no_digits_of_the_variance() -> None:
    call = new_call((2, 6, 6, 8))
    biased = call.parameters._replace(expand_bias=torch.full((32,), 300.0))
    call = call._replace(parameters=biased)
    found = natively(call.x, call.parameters, None)
    exact = plainly(call.x.double(), Parameters(*(p.double() for p in call.parameters)), None)
    plain = plainly(call.x, call.parameters, None)
    assert (found - exact).abs().max() <= 4 * (plain - exact).abs().max() + 1e-6


def test_statistics_are_those_of_the_batch() -> None:
    call = new_call((2, 7, 5, 8))
    _, statistics = feed_forward_in_training(call.x, call.parameters, EPSILONS, None)
    p = call.parameters
    activated = F.gelu(F.conv2d(call.x.permute(0, 3, 1, 2), p.expand_weight, p.expand_bias))
    mean, variance = statistics.mean[:32], statistics.variance[:32]
    torch.testing.assert_close(mean, activated.mean((0, 2, 3)), atol=1e-6, rtol=1e-6)
    expected = activated.var((0, 2, 3), correction=0)
    torch.testing.assert_close(variance, expected, atol=1e-6, rtol=1e-5)


def test_repeats_and_threads_change_no_bit() -> None:
    call = new_call((3, 14, 13, 24), is_masked=True)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            found.append(results(natively, call))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in found[0].items())


@pytest.mark.parametrize("wanted", ["x", "expand_weight", "project_bias", "norm2_weight"])
def test_gradients_of_one_alone_are_the_same(wanted) -> None:
    call = new_call((2, 6, 5, 12))
    expected = results(natively, call)[wanted]
    arguments = {"x": call.x, **call.parameters._asdict()}
    leaf = arguments[wanted].detach().requires_grad_()
    arguments[wanted] = leaf
    x = arguments.pop("x")
    natively(x, Parameters(**arguments), None).backward(call.grad)
    assert torch.equal(leaf.grad, expected)


def test_inputs_of_other_strides_are_read_right() -> None:
    call = new_call((2, 6, 5, 12))
    expected = results(natively, call)
    turned = call.x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    grad = call.grad.transpose(1, 2).contiguous().transpose(1, 2)
    weight = call.parameters.expand_weight.transpose(0, 1).contiguous().transpose(0, 1)
    parameters = call.parameters._replace(expand_weight=weight)
    found = results(natively, call._replace(x=turned, grad=grad, parameters=parameters))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_operators_pass_pytorchs_checks() -> None:
    call = new_call((2, 4, 3, 5))
    parameters = [p.detach().requires_grad_() for p in call.parameters]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    x = call.x.detach().requires_grad_()
    arguments = (x, *parameters, EPSILONS, None)
    operator = torch.ops.dgt.native_feed_forward_training.default
    torch.library.opcheck(operator, arguments, test_utils=tests)
    weight = torch.randn(5, 1, 3, 3, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    operator = torch.ops.dgt.native_depthwise_convolution.default
    torch.library.opcheck(operator, (x, weight, bias, True), test_utils=tests)


def test_flops_are_counted() -> None:
    call = new_call((2, 4, 4, 8))
    with FlopCounterMode(display=False) as counter:
        results(natively, call)
    forward = 2 * 32 * 32 * (2 * 8 + 9)
    assert counter.get_total_flops() == 3 * forward


def test_gradients_of_gradients_are_refused() -> None:
    call = new_call((2, 4, 4, 8))
    x = call.x.requires_grad_()
    (grad,) = torch.autograd.grad(
        natively(x, call.parameters, None), x, call.grad, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        grad.sum().backward()
    weight = torch.randn(8, 1, 3, 3)
    output = depthwise_convolution(x, weight, None, False)
    (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        grad.sum().backward()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("residual", [True, False])
def test_gradients_of_depthwise_convolutions(shape, residual) -> None:
    torch.manual_seed(1)
    channels = shape[-1]
    tensors = (
        torch.randn(shape),
        torch.randn(channels, 1, 3, 3),
        torch.randn(channels),
        torch.randn(shape),
    )

    def run(function, dtype: torch.dtype) -> dict[str, Tensor]:
        x, weight, bias = (tensor.to(dtype).detach().requires_grad_() for tensor in tensors[:3])
        output = function(x, weight, bias)
        output.backward(tensors[3].to(dtype))
        return {"output": output.detach(), "x": x.grad, "weight": weight.grad, "bias": bias.grad}

    def by_pytorch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        maps = x.permute(0, 3, 1, 2)
        convolved = F.conv2d(maps, weight, bias, padding=1, groups=channels)
        return (maps + convolved if residual else convolved).permute(0, 2, 3, 1)

    def by_kernel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return depthwise_convolution(x, weight, bias, residual)

    exact = run(by_pytorch, torch.float64)
    found = run(by_kernel, torch.float32)
    plain = run(by_pytorch, torch.float32)
    assert_as_exact_as_pytorch(found, plain, exact)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = run(by_kernel, torch.float32)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())


def test_frozen_weights_of_depthwise_convolutions_have_no_gradients() -> None:
    x = torch.randn(1, 4, 4, 8, requires_grad=True)
    weight, bias = torch.randn(8, 1, 3, 3), torch.randn(8)
    depthwise_convolution(x, weight, bias, True).sum().backward()
    expected = x.grad
    x.grad = None
    weight.requires_grad_()
    depthwise_convolution(x.detach(), weight, bias, True).sum().backward()
    assert x.grad is None
    depthwise_convolution(x, weight.detach(), bias.requires_grad_(), True).sum().backward()
    assert torch.equal(x.grad, expected)
    torch.testing.assert_close(bias.grad, torch.full((8,), 16.0), atol=0, rtol=0)
    assert weight.grad is not None
