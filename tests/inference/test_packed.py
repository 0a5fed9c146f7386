"""Layers with packed weights against PyTorch's in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from dgt.inference.cpu import interface
from dgt.inference.packed import (
    PackedConvolution,
    PackedFeedForward,
    PackedLinear,
    PackedPosition,
)
from dgt.layers.convolution import InvertedResidualFFN
from dgt.ops.cpu import library

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)

TOLERANCE = 1e-5  # of float32, relative to 1 + |x|


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    return float(((found - expected).abs() / (1 + expected.abs())).max())


def evaluated(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """Non-trivial statistics."""
    size = len(norm.weight)
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
    layer = PackedLinear(weight, bias)
    found = layer(x)
    assert error(found, expected) < TOLERANCE
    assert torch.equal(layer(x.flip(0)), found.flip(0))  # each token for itself


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 5, 8), (1, 30, 17)])
@pytest.mark.parametrize(("channels", "outputs"), [(1, 5), (3, 32), (20, 70)])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_with_gelu_norm_and_mask(size, channels, outputs, stride) -> None:
    x, conv = random(*size, channels), nn.Conv2d(channels, outputs, 3, stride, 1)
    conv.weight.copy_(random(outputs, channels, 3, 3) / (9 * channels) ** 0.5)
    conv.bias.copy_(random(outputs))
    norm = evaluated(nn.BatchNorm2d(outputs))
    convolved = copy.deepcopy(conv).double()(x.double().permute(0, 3, 1, 2))
    assert error(PackedConvolution(conv)(x), convolved.permute(0, 2, 3, 1)) < TOLERANCE
    mask = random(len(x), *convolved.shape[2:]) > 0
    normed = copy.deepcopy(norm).double()(F.gelu(convolved)) * mask[:, None]
    found = PackedConvolution(conv, norm)(x, mask)
    assert error(found, normed.permute(0, 2, 3, 1)) < TOLERANCE
    in_channels_last = conv.to(memory_format=torch.channels_last)
    assert torch.equal(PackedConvolution(in_channels_last, norm)(x, mask), found)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 3, 17), (1, 14, 9, 64), (3, 1, 6, 40)])
def test_a_position_encoding(shape) -> None:
    x, conv = random(*shape), nn.Conv2d(shape[-1], shape[-1], 3, padding=1, groups=shape[-1])
    encoded = copy.deepcopy(conv).double()(x.double().permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    assert error(PackedPosition(conv)(x), encoded + x) < TOLERANCE


# One image in one band, an image in several bands, and several images in a band.
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 7, 5), (1, 90, 40), (9, 13, 11)])
@pytest.mark.parametrize("is_masked", [True, False])
def test_a_feed_forward_network(size, is_masked) -> None:
    x, made = random(*size, 12), network(12, 200)
    mask = random(*size) > -1 if is_masked else None
    expected = copy.deepcopy(made).double()(x.double(), mask)
    assert error(PackedFeedForward(made)(x, mask), expected) < TOLERANCE


def test_the_same_bits_for_any_number_of_threads_and_images(threads) -> None:
    x, made = random(4, 28, 28, 32), PackedFeedForward(network(32, 128))
    conv = PackedConvolution(nn.Conv2d(32, 70, 3, 2, 1))
    linear = PackedLinear(random(70, 32), None)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(torch.cat([result.flatten() for result in (made(x), conv(x), linear(x))]))
    assert torch.equal(made(x[2:3]), made(x)[2:3])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_nan_and_infinities_pass_on() -> None:
    made = PackedFeedForward(network(8, 32))
    for value in (float("nan"), float("inf")):
        x = random(1, 6, 6, 8)
        x[0, 2, 3, 1] = value
        seen = made(x).isfinite().all(-1)
        assert not seen[0, 1:4, 2:5].any()  # the position and its neighbors
        assert seen.sum() == 36 - 9


def test_what_they_do_not_take_is_said() -> None:
    layer, x = PackedLinear(random(5, 8), None), random(2, 4, 4, 8)
    for bad in (x.double(), x.to("meta")):
        with pytest.raises(TypeError, match="in float32 on a CPU"):
            layer(bad)
    assert layer(x[:0]).shape == (0, 4, 4, 5)
    for bad in (x[..., :7], x[:, :0]):
        with pytest.raises(ValueError, match="8 channels and not be empty"):
            layer(bad)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x.bfloat16()), layer(x.bfloat16().float()))
    network_of_8 = PackedFeedForward(network(8, 16))
    with pytest.raises(ValueError, match=r"mask must be a bool tensor of shape \(2, 4, 4\)"):
        network_of_8(x, torch.ones(2, 4, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        network_of_8(x, torch.ones(2, 4, 4))
    with torch.enable_grad(), pytest.raises(RuntimeError, match="take gradients of the original"):
        layer(x.requires_grad_())
    with pytest.raises(RuntimeError, match="take gradients of the original"):
        torch.func.jvp(layer, (random(2, 8),), (random(2, 8),))
    for export in (torch.jit.trace, lambda module, x: torch.export.export(module, (x,))):
        with pytest.raises(RuntimeError, match="export or trace the original"):
            export(layer, random(2, 8))


class Wrapper(Tensor):
    """A tensor that holds another, as those of parallel and quantized weights do, and no data of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor):
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride()
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


@pytest.mark.filterwarnings("ignore:.*performance drop")  # one image after the other
@pytest.mark.parametrize(
    "make",
    [
        lambda: PackedLinear(random(5, 8), random(5)),
        lambda: PackedConvolution(nn.Conv2d(8, 5, 3, 2, 1)),
        lambda: PackedFeedForward(network(8, 16)),
        lambda: PackedPosition(nn.Conv2d(8, 8, 3, padding=1, groups=8)),
    ],
    ids=["linear", "convolution", "feed forward", "position"],
)
def test_tensors_that_hold_no_data_of_their_own(make) -> None:
    layer, x = make(), random(2, 6, 7, 8)
    expected = layer(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for given in (mode.from_tensor(x), x):
            found = layer(given)
            assert isinstance(found, FakeTensor)
            assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert torch.equal(layer(torch._neg_view(-x)), expected)
    assert torch.equal(torch.func.functionalize(layer)(x), expected)
    assert torch.equal(torch.func.vmap(layer)(torch.stack([-x, x]))[1], expected)
    assert torch.equal(make_fx(layer)(torch.zeros_like(x))(x), expected)
    assert torch.equal(layer(Wrapper(x)).inner, expected)


def test_a_library_with_structures_of_another_size_is_refused(monkeypatch):
    class Longer(interface.DepthwiseProblem):
        _fields_ = interface.numbers("more")

    monkeypatch.setattr(interface, "PROBLEMS", (interface.LinearProblem, Longer))
    with pytest.raises(RuntimeError, match=r"of depthwise of \d+ bytes, expected \d+\); reinstall"):
        PackedLinear(random(4, 4), None)
