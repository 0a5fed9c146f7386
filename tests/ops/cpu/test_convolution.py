"""Linear layers, convolutions and the feed-forward network on the native kernels, against PyTorch in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dgt.layers.convolution import InvertedResidualFFN
from dgt.ops.cpu import convolution, feed_forward, library

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)

TOLERANCE = 1e-5  # of float32, relative to 1 + |x|


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    return float(((found.detach() - expected).abs() / (1 + expected.abs())).max())


def evaluated(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """Non-trivial statistics."""
    size = len(norm.weight)
    with torch.no_grad():
        norm.weight.copy_(random(size))
        norm.bias.copy_(random(size, 1)[:, 0])
        norm.running_mean.copy_(random(1, size)[0])
        norm.running_var.copy_(random(size).abs() + 0.5)
    return norm.eval()


def network(channels: int, hidden: int) -> InvertedResidualFFN:
    torch.manual_seed(channels)
    made = InvertedResidualFFN(channels, hidden / channels).eval()
    for norm in (made.norm1, made.norm2, made.norm3):
        evaluated(norm)
    return made


@pytest.fixture
def threads():
    """Set PyTorch's number of threads, and restore it afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7, 64), (2, 14, 14, 96), (5, 300)])
@pytest.mark.parametrize("outputs", [1, 33, 128])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_layer(shape, outputs, has_bias) -> None:
    x, weight = random(*shape), random(outputs, shape[-1]) / shape[-1] ** 0.5
    bias = random(outputs) if has_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = convolution.linear(x, weight, bias)
    assert error(found, expected) < TOLERANCE
    prepared = convolution.prepare_linear(weight, bias)
    assert torch.equal(convolution.linear(x, weight, bias, prepared), found)
    assert torch.equal(
        convolution.linear(x.flip(0), weight, bias), found.flip(0)
    )  # each token for itself


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 5, 8), (1, 30, 17)])
@pytest.mark.parametrize(("channels", "outputs"), [(1, 5), (3, 32), (20, 70)])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_with_gelu_norm_and_mask(size, channels, outputs, stride) -> None:
    x, weight = random(*size, channels), random(outputs, channels, 3, 3) / (9 * channels) ** 0.5
    bias, norm = random(outputs), evaluated(nn.BatchNorm2d(outputs))
    convolved = F.conv2d(x.double().permute(0, 3, 1, 2), weight.double(), bias.double(), stride, 1)
    assert (
        error(convolution.convolution(x, weight, bias, stride), convolved.permute(0, 2, 3, 1))
        < TOLERANCE
    )
    mask = random(len(x), *convolved.shape[2:]) > 0
    normed = copy.deepcopy(norm).double()(F.gelu(convolved)) * mask[:, None]
    found = convolution.convolution(x, weight, bias, stride, True, norm, mask)
    assert error(found, normed.permute(0, 2, 3, 1)) < TOLERANCE
    channels_last = weight.contiguous(memory_format=torch.channels_last)
    assert torch.equal(
        convolution.convolution(x, channels_last, bias, stride, True, norm, mask), found
    )


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 3, 17), (1, 14, 9, 64), (3, 1, 6, 40)])
@pytest.mark.parametrize("residual", [True, False])
def test_a_depthwise_convolution(shape, residual) -> None:
    channels = shape[-1]
    x, weight, bias = random(*shape), random(channels, 1, 3, 3), random(channels)
    convolved = F.conv2d(
        x.double().permute(0, 3, 1, 2), weight.double(), bias.double(), padding=1, groups=channels
    )
    expected = convolved.permute(0, 2, 3, 1) + (x if residual else 0.0)
    assert error(convolution.depthwise_convolution(x, weight, bias, residual), expected) < TOLERANCE


# One image in one band, an image in several bands, and several images in a band.
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 7, 5), (1, 90, 40), (9, 13, 11)])
@pytest.mark.parametrize("is_masked", [True, False])
def test_a_feed_forward_network(size, is_masked) -> None:
    x, made = random(*size, 12), network(12, 200)
    mask = random(*size) > -1 if is_masked else None
    with torch.no_grad():
        expected = copy.deepcopy(made).double()(x.double(), mask)
        found = feed_forward.feed_forward(x, made.weights(), mask)
        prepared = feed_forward.prepare(made.weights())
        again = feed_forward.feed_forward(x, made.weights(), mask, prepared)
        assert made.runs_natively(x)
        assert torch.equal(made(x, mask), found)
    assert error(found, expected) < TOLERANCE
    assert torch.equal(again, found)


def test_the_same_bits_for_any_number_of_threads_and_images(threads) -> None:
    x, made = random(4, 28, 28, 32), network(32, 128)
    weight = random(70, 32, 3, 3)
    found = []
    with torch.no_grad():
        for count in (1, 2, 3):
            threads(count)
            results = [made(x), convolution.convolution(x, weight, None, 2)]
            results += [convolution.linear(x, weight[:, :, 0, 0], None)]
            found.append(torch.cat([result.flatten() for result in results]))
        assert torch.equal(made(x[2:3]), made(x)[2:3])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_nan_and_infinities_pass_on() -> None:
    made = network(8, 32)
    for value in (float("nan"), float("inf")):
        x = random(1, 6, 6, 8)
        x[0, 2, 3, 1] = value
        with torch.no_grad():
            seen = made(x).isfinite().all(-1)
        assert not seen[0, 1:4, 2:5].any()  # the position and its neighbors
        assert seen.sum() == 36 - 9


def test_operators_are_registered_as_pytorch_wants_them() -> None:
    x = random(1, 5, 4, 8)
    made = network(8, 24).requires_grad_(False)
    calls = {
        "native_linear": (x, random(7, 8), random(7), None),
        "native_convolution": (x, random(7, 8, 3, 3), None, 2, True, [], 0.0, None),
        "native_depthwise_convolution": (x, random(8, 1, 3, 3), None, True),
        "native_feed_forward": (x, *made.weights(), None, None),
    }
    for name, arguments in calls.items():
        operator = getattr(torch.ops.dgt, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_flops_are_those_of_pytorchs_layers() -> None:
    x, made = random(2, 6, 6, 8), network(8, 24)
    with FlopCounterMode(display=False) as native, torch.no_grad():
        made(x)
    with FlopCounterMode(display=False) as plain:
        made(x.requires_grad_())
    assert native.get_total_flops() == plain.get_total_flops() > 0
