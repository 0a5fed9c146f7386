"""Which layer calls use the native kernels, and that nothing else changes."""

import copy

import pytest
import torch
from torch import nn

from dgt.inference import optimize_for_inference
from dgt.inference.form import PreparedLinear
from dgt.layers import native
from dgt.layers.convolution import ConvStem, InvertedResidualFFN, PatchMerging, TokenLinear
from dgt.layers.native import Prepared, predicts_natively
from dgt.models import DynamicGroupTransformer
from dgt.ops.cpu import library

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)


def small_model() -> DynamicGroupTransformer:
    torch.manual_seed(0)
    sizes = {"dims": (16, 32), "depths": (1, 2), "num_heads": (1, 2), "num_groups": 4, "top_k": 20}
    return DynamicGroupTransformer(num_classes=5, stem_width=8, head_width=24, **sizes).eval()


@pytest.fixture
def without_native(monkeypatch):
    """A wrapper that runs a function without native layers."""

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(native, "reason_against_native", lambda: "not wanted")
            return function(*arguments)

    return run


def test_only_predictions_in_float32_on_cpus_are_taken() -> None:
    x, layer = torch.randn(2, 4, 4, 8), nn.Linear(8, 8)
    weights = (layer.weight, layer.bias)
    assert not predicts_natively(x, *weights)  # gradients are needed
    with torch.no_grad():
        assert predicts_natively(x, *weights)
        assert predicts_natively(x, layer.weight, None)
        assert not predicts_natively(x.double(), *weights)
        assert not predicts_natively(x, layer.weight, layer.bias.half())
        assert not predicts_natively(x.to("meta"), *weights)
        assert not predicts_natively(x[:0], *weights)
        with torch.autocast("cpu", torch.bfloat16):
            assert not predicts_natively(x, *weights)
    layer.requires_grad_(False)
    assert predicts_natively(x, *weights)
    assert not predicts_natively(x.requires_grad_(), *weights)


def test_tangents_and_files_keep_pytorchs_operators() -> None:
    layer = TokenLinear(8, 8).requires_grad_(False)
    x = torch.randn(2, 4, 8)
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.ones_like(x) @ layer.weight.T)
    for part in (ConvStem(3, 8).eval(), InvertedResidualFFN(8).eval(), layer):
        part.requires_grad_(False)
        sample = (
            torch.randn(1, 3, 16, 16) if isinstance(part, ConvStem) else torch.randn(1, 4, 4, 8)
        )
        exported = torch.export.export(part, (sample,))
        targets = [str(node.target) for node in exported.graph.nodes]
        assert not any("native" in target for target in targets)
        torch.testing.assert_close(exported.module()(sample), part(sample), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [(32, 32), (70, 41)])
@pytest.mark.parametrize("is_masked", [True, False])
def test_a_model_predicts_the_same(size, is_masked, without_native) -> None:
    model = small_model()
    form = optimize_for_inference(model)
    images = torch.randn(2, 3, *size)
    mask = None
    if is_masked:
        mask = torch.ones(2, *size, dtype=torch.bool)
        mask[1, size[0] // 2 :] = False
    with torch.inference_mode():
        expected = without_native(model.forward_features, images, mask)
        for found in (model, form, copy.deepcopy(form)):
            torch.testing.assert_close(
                found.forward_features(images, mask), expected, atol=2e-5, rtol=2e-5
            )


def test_layers_without_native_gradients_train_as_before(without_native) -> None:
    parts = (ConvStem(3, 8), PatchMerging(8, 12), TokenLinear(8, 8))
    for part in parts:
        x = torch.randn(2, 3, 8, 8) if isinstance(part, ConvStem) else torch.randn(2, 6, 6, 8)
        expected = without_native(copy.deepcopy(part), x)
        assert torch.equal(part(x), expected)


def test_dropout_and_statistics_of_a_batch_are_pytorchs() -> None:
    x = torch.randn(2, 4, 4, 8)
    ffn = InvertedResidualFFN(8, drop=0.5).eval().requires_grad_(False)
    assert ffn.runs_natively(x)
    ffn.drop.train()
    assert not ffn.runs_natively(x)
    ffn = InvertedResidualFFN(8).eval().requires_grad_(False)
    ffn.norm2.train()
    assert not ffn.runs_natively(x)
    ffn = InvertedResidualFFN(8).eval().requires_grad_(False)
    ffn.norm3 = nn.BatchNorm2d(8, track_running_stats=False).eval()
    assert not ffn.runs_natively(x)


def test_prepared_weights_follow_what_is_loaded() -> None:
    torch.manual_seed(1)
    layer = PreparedLinear(TokenLinear(8, 8))
    x = torch.randn(3, 5, 8)
    with torch.inference_mode():
        first = layer(x)
        with torch.inference_mode(False), torch.no_grad():
            layer.linear.weight.mul_(2.0)
            layer.linear.bias.mul_(2.0)
        torch.testing.assert_close(layer(x), 2 * first)
        twin = copy.deepcopy(layer)
        assert torch.equal(twin(x), layer(x))


def test_weights_are_prepared_once() -> None:
    calls = []

    def prepare() -> torch.Tensor:
        calls.append(1)
        return torch.zeros(1)

    prepared, weight = Prepared(), torch.randn(3)
    for _ in range(3):
        assert prepared.of((weight, None), prepare) is not None
    assert len(calls) == 1
    weight.add_(1.0)
    prepared.of((weight, None), prepare)
    assert len(calls) == 2
    with torch.inference_mode():
        assert prepared.of((torch.randn(3),), prepare) is None  # its changes cannot be detected


def test_compiled_models_predict_the_same() -> None:
    model = small_model()
    form = optimize_for_inference(model)
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        expected = model(images)
        for found in (model, form):
            compiled = torch.compile(found, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(images), expected, atol=2e-5, rtol=2e-5)


def test_the_form_of_a_block_leaves_its_input_as_it_is() -> None:
    model = small_model()
    block = optimize_for_inference(model).stages[1].blocks[0]
    assert block.joins_in_place
    assert not model.stages[1].blocks[0].joins_in_place
    x = torch.randn(2, 6, 6, 32)
    before = x.clone()
    with torch.inference_mode():
        found = block(x)
        torch.testing.assert_close(found, model.stages[1].blocks[0](x), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)
    weights = block.ffn.project.weight.requires_grad_()
    block(x).sum().backward()  # with gradients, nothing is overwritten
    assert weights.grad is not None


def test_hooks_are_called_and_replaced_parts_heeded_in_prediction() -> None:
    """The kernels only read weights: if a part is replaced or has hooks, PyTorch's path is used."""
    x = torch.randn(2, 4, 4, 8)
    image = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        for name in ("expand", "norm1", "depthwise", "norm3", "act"):
            network = InvertedResidualFFN(8).eval()
            assert network.runs_natively(x)
            calls = []
            getattr(network, name).register_forward_hook(lambda *_, calls=calls: calls.append(1))
            network(x)
            assert calls, name
        network = InvertedResidualFFN(8).eval()
        plain = network(x)
        network.act = nn.ReLU()
        assert not torch.allclose(network(x), plain)
        stem = ConvStem(3, 8).eval()
        plain = stem(image)
        stem.act = nn.ReLU()
        assert not torch.allclose(stem(image), plain)
