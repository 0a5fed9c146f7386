"""What is saved between activation and normalization; linear layers on tokens; everything else is unchanged."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dgt.layers import ConvStem, InvertedResidualFFN, batch_norm, convolution, native
from dgt.layers.convolution import PixelConv2d, TokenLinear


def results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradients of input and parameters, and buffers after one training step."""
    module, x = copy.deepcopy(module).train(), x.clone().requires_grad_()
    output = module(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in module.parameters()), *module.buffers()]


def plainly(x, act, norm, then=batch_norm.unchanged, *rest):
    """What :func:`activate_and_norm` computes."""
    return then(norm(act(x)), *rest)


@pytest.mark.parametrize(
    ("build", "shape"),
    [(lambda: ConvStem(3, 6), (2, 3, 9, 12)), (lambda: InvertedResidualFFN(6), (2, 4, 5, 6))],
)
def test_training_is_the_same_bit_for_bit(build, shape, monkeypatch) -> None:
    torch.manual_seed(0)
    module, x = build(), torch.randn(shape)
    monkeypatch.setattr(native, "reason_against_native", lambda: "not wanted")
    economical = results(module, x)
    monkeypatch.setattr(convolution, "activate_and_norm", plainly)
    for same, plain in zip(economical, results(module, x), strict=True):
        assert torch.equal(same, plain)


def test_second_derivatives() -> None:
    module = InvertedResidualFFN(3, 2).double().train()
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))
    assert torch.autograd.gradgradcheck(module, (x,))


def test_transforms_and_files_take_it() -> None:
    module, x = InvertedResidualFFN(3, 2).eval(), torch.randn(1, 2, 3, 3)
    expected = torch.autograd.functional.jacobian(lambda x: module(x).sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda x: module(x).sum())(x), expected)
    torch.testing.assert_close(torch.func.jacfwd(lambda x: module(x).sum())(x), expected)
    torch.jit.save(torch.jit.trace(module, x), io.BytesIO())


class CountingGelu(nn.GELU):
    """GELU that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_activations_are_computed_again_in_the_backward_pass() -> None:
    module = InvertedResidualFFN(6).train()
    module.act = CountingGelu()
    output = module(torch.randn(2, 4, 5, 6))
    assert module.act.calls == 2
    output.sum().backward()
    assert module.act.calls == 4
    with torch.no_grad():
        module(torch.randn(2, 4, 5, 6))
    assert module.act.calls == 6


def test_checkpointing_around_it_gives_the_same() -> None:
    module, x = InvertedResidualFFN(6).train(), torch.randn(2, 4, 5, 6, requires_grad=True)
    (plain,) = torch.autograd.grad(module(x).square().sum(), x)
    again = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    (recomputed,) = torch.autograd.grad(again.square().sum(), x)
    assert torch.equal(plain, recomputed)


def test_no_input_of_the_expanded_width_is_kept(monkeypatch) -> None:
    """PyTorch's convolutions and norms keep no such input; only the activations do."""
    monkeypatch.setattr(native, "reason_against_native", lambda: "not wanted")
    nodes = [InvertedResidualFFN(6).train()(torch.randn(2, 4, 5, 6, requires_grad=True)).grad_fn]
    for node in nodes:  # grows during the loop
        nodes += [following for following, _ in node.next_functions if following is not None]
    inputs = [node._raw_saved_input.data for node in nodes if hasattr(node, "_raw_saved_input")]
    assert sum(x is None for x in inputs) >= 4
    assert {x.numel() for x in inputs if x is not None} == {2 * 4 * 5 * 6}


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 8), (1, 7, 8), (3, 8), (2, 2, 3, 4, 8), (2, 6, 6, 8), (1, 70, 8)]
)
def test_a_linear_of_tokens_gives_what_a_linear_does(shape, threads) -> None:
    torch.manual_seed(0)
    layer, x, plain = TokenLinear(8, 5), torch.randn(shape), nn.Linear(8, 5)
    plain.load_state_dict(layer.state_dict())
    for ours, theirs in zip(results(layer, x), results(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("maps", "size", "few"), [(1, 32, False), (2, 8, False), (16, 8, False), (1, 7, True)]
)
def test_a_convolution_of_many_pixels_is_one_of_onednn_for_any_threads(
    maps, size, few, threads
) -> None:
    torch.manual_seed(0)
    layer, plain = PixelConv2d(32, 16, 1), nn.Conv2d(32, 16, 1)
    x = torch.randn(maps, size, size, 32).permute(0, 3, 1, 2)
    plain.load_state_dict(layer.state_dict())
    with torch.autograd.profiler.profile() as profile:
        found = results(layer, x)
    for ours, theirs in zip(found, results(plain, x), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-4, atol=1e-4
        )  # gradients sum over 1,024 pixels
    ran = {event.name for event in profile.function_events}
    assert ("aten::mkldnn_convolution" in ran) is (torch.backends.mkldnn.is_available() and not few)
    assert ("aten::addmm" in ran) is few or not convolution.ONEDNN_BESIDE_MKL
    assert "aten::slow_conv_dilated2d" not in ran


def test_files_and_other_types_keep_linears() -> None:
    """Where runtimes, autocast, or quantized weights have their own matrix products, no convolution is used."""
    layer, x = TokenLinear(8, 5), torch.randn(2, 3, 4, 8)
    assert layer.as_convolution(x) is convolution.ONEDNN_BESIDE_MKL
    assert not layer.as_convolution(x.double())
    assert not layer.double().as_convolution(x.double())
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert not layer.as_convolution(x)
        assert layer(x).dtype == torch.bfloat16
    traced = torch.jit.trace(layer, x).graph
    assert "aten::linear" in str(traced)
    assert "aten::conv" not in str(traced)
    exported = torch.export.export(layer, (x,)).graph
    assert any(node.target == torch.ops.aten.linear.default for node in exported.nodes)
