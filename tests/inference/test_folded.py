"""Snapshots without normalizations, in any type: equal to the model, and as frozen as packed ones."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

import dgt
from dgt.inference import optimize_for_inference
from dgt.inference.folded import FoldedConvolution, FoldedFeedForward, FoldedStem

SMALL = {
    "stem_width": 8,
    "dims": (16, 32),
    "num_heads": (1, 2),
    "depths": (1, 1),
    "head_width": 24,
    "num_groups": 4,
    "top_k": 9,
}

CMT = {
    "attention": ("reduced", "reduced"),
    "extents": (2, 1),
    "intervals": (1, 1),
    "global_tokens": (0, 0),
}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def trained(dtype: torch.dtype = torch.float64, name: str = "dgt_nano", **options) -> nn.Module:
    """A small model with weights and statistics of norms as after training."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **SMALL, **options).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0.0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.to(dtype)


def images(*size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("name", "options"),
    [("dgt_nano", {}), ("dgt_nano", {"post_norm": True}), ("dgt_nano_cmt_block", CMT)],
)
def test_outputs_and_maps_of_padded_images_are_equal(name, options) -> None:
    model = trained(name=name, **options)
    fast = optimize_for_inference(model)
    kinds = {type(module) for module in fast.modules()}
    assert {FoldedStem, FoldedFeedForward, FoldedConvolution} <= kinds
    for size in ((32, 48), (47, 33), (32, 48)):
        assert error(fast(images(*size)), model(images(*size))) < 1e-14
    mask = torch.ones(2, 47, 33, dtype=torch.bool)
    mask[1, 40:] = mask[1, :, 20:] = False
    found = fast.forward_features(images(47, 33), mask)
    assert error(found, model.forward_features(images(47, 33), mask)) < 1e-14


def test_attention_that_replaced_another_keeps_its_unit_centroids() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64, num_classes=5)
    dgt.replace_attention(model.double().eval(), num_groups=4, top_k=4)
    model.blocks[0].attn.centroids.mul_(3)
    fast = optimize_for_inference(model)
    attention = fast.blocks[0].attn
    assert attention.unit_centroids().data_ptr() == attention.centroids.data_ptr()
    assert torch.equal(fast(images(64, 64)), model(images(64, 64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_snapshot_in_another_type_errs_as_the_model_in_that_type(dtype, monkeypatch) -> None:
    monkeypatch.setattr("dgt.inference.optimize.layout", lambda: None)
    model = trained()
    x = images(32, 48)
    fast = optimize_for_inference(model, dtype=dtype)
    found = fast(x.to(dtype))
    assert found.dtype == dtype
    plain = copy.deepcopy(model).to(dtype)(x.to(dtype))
    assert error(found, model(x)) < 2 * error(plain, model(x))
    low = torch.bfloat16 if dtype == torch.float32 else dtype
    with torch.autocast("cpu", low):
        assert error(fast(x.float()), model(x)) < 0.05


def test_weights_are_rounded_once_from_float64() -> None:
    """A norm that undoes a large scale of the weights leaves no trace of it."""
    model = trained()
    ffn = model.stages[0].blocks[0].ffn
    expected = optimize_for_inference(model, dtype=torch.bfloat16).stages[0].blocks[0].ffn
    for norm in (ffn.norm1, ffn.norm2, ffn.norm3):
        norm.running_var.mul_(1e10)
        norm.eps *= 1e10
        norm.weight.mul_(1e5)
    found = optimize_for_inference(model, dtype=torch.bfloat16).stages[0].blocks[0].ffn
    assert torch.equal(found.depthwise.weight, expected.depthwise.weight)
    assert torch.equal(found.project.weight, expected.project.weight)


NAMES = (
    "stem",
    "stem.convs.1",
    "stem.norms.0",
    "stages.0.merge.norm",
    "stages.0.blocks.0",
    "stages.0.blocks.0.cpe.conv",
    "stages.0.blocks.0.attn",
    "stages.0.blocks.0.attn.qkv",
    "stages.0.blocks.0.ffn",
    "stages.0.blocks.0.ffn.expand",
    "stages.0.blocks.0.ffn.norm1",
    "stages.0.blocks.0.ffn.depthwise",
    "stages.0.blocks.0.ffn.drop",
    "head.fc",
)


class Summed(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.cumsum(0)


@pytest.mark.parametrize("kind", ["hook", "parametrized", "forward"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_as_built_stays_as_it_is(kind, name) -> None:
    model, x = trained(), images(32, 32)
    before = model(x)
    module = model.get_submodule(name)
    if kind == "hook":
        module.register_forward_hook(lambda _module, _inputs, output: output.relu())
    elif kind == "parametrized":
        if not hasattr(module, "weight"):
            return
        nn.utils.parametrize.register_parametrization(module, "weight", Summed())
    else:
        plain = module.forward
        module.forward = lambda *args: plain(*args).relu()
    expected = model(x)
    assert error(optimize_for_inference(model)(x), expected) < 1e-13
    assert error(expected, before) > 1e-6


def test_every_part_of_it_is_called_as_a_module() -> None:
    x = images(32, 32)
    plain = optimize_for_inference(trained())(x)
    for name, _ in optimize_for_inference(trained()).named_modules():
        fast, calls = optimize_for_inference(trained()), []
        module = fast.get_submodule(name)
        if not isinstance(module, nn.ModuleList):
            module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            assert torch.equal(fast(x), plain)
            assert calls, name


def test_it_is_copied_and_pickled_whole_with_what_it_keeps_of_a_size() -> None:
    fast, x = optimize_for_inference(trained()), images(32, 48)
    expected = fast(x)
    for same in (
        copy.deepcopy(fast),
        pickle.loads(pickle.dumps(fast)),
        optimize_for_inference(fast),
    ):
        assert torch.equal(same(x), expected)


def test_what_it_cannot_do_is_said_in_a_sentence() -> None:
    fast, x = optimize_for_inference(trained()), images(32, 48)
    assert fast.eval() is fast
    assert not any(parameter.requires_grad for parameter in fast.parameters())
    with pytest.raises(RuntimeError, match="only predicts: train the original"):
        fast.train()
    with pytest.raises(RuntimeError, match="has no state dict"):
        fast.state_dict()
    with pytest.raises(RuntimeError, match="takes no state dict"):
        fast.load_state_dict({}, strict=False)
    for bad in (x.float(), x.to("meta")):
        with pytest.raises(TypeError, match=r"in torch.float64 on cpu, got a \(2, .* tensor of"):
            fast(bad)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="gradients of the original"):
        fast(x.requires_grad_())
    with pytest.raises(RuntimeError, match="export or trace the original"):
        torch.export.export(fast, (x.detach(),))
    with pytest.raises(TypeError, match=r"dtype must be one of .*, or None, got torch.int8"):
        optimize_for_inference(trained(), dtype=torch.int8)
    with pytest.raises(ValueError, match="dtype must be None for a snapshot"):
        optimize_for_inference(fast, dtype=torch.float32)


def test_it_compiles() -> None:
    ffn = optimize_for_inference(trained()).stages[0].blocks[0].ffn
    x = torch.randn(1, 5, 6, 16, dtype=torch.float64)
    compiled = torch.compile(ffn, backend="eager", fullgraph=True)
    for _ in range(2):
        assert error(compiled(x), ffn(x)) < 1e-14
