"""A snapshot of a model: the same outputs on every path, frozen, the model itself untouched."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import timm
import torch
from torch import nn

import dgt
from dgt.inference import optimize_for_inference
from dgt.inference.packed import Packed, PackedFeedForward, PackedLinear
from dgt.layers import Block, ConvStem, InvertedResidualFFN
from dgt.ops.cpu import library

with_kernels = pytest.mark.skipif(library.load() is None, reason="the kernels are not built here")


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A small model whose normalization layers have seen data."""
    torch.manual_seed(0)
    model = timm.create_model("dgt_nano", num_classes=7, depths=(1, 1, 2, 1)).train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 64, 64))
    return model.eval()


@pytest.mark.parametrize("size", [(64, 64), (33, 47), (32, 160), (96, 128)])
def test_outputs_are_equal(trained, size) -> None:
    images = torch.randn(2, 3, *size)
    fast = optimize_for_inference(trained)
    torch.testing.assert_close(fast(images), trained(images), rtol=0, atol=1e-4)


def test_feature_maps_and_masks_are_equal(trained) -> None:
    fast = optimize_for_inference(trained)
    images, mask = torch.randn(2, 3, 64, 96), torch.zeros(2, 64, 96, dtype=torch.bool)
    mask[0], mask[1, :40, :70] = True, True
    plain_maps = trained.forward_intermediates(images, intermediates_only=True, mask=mask)
    fast_maps = fast.forward_intermediates(images, intermediates_only=True, mask=mask)
    for plain, same in zip(plain_maps, fast_maps, strict=True):
        torch.testing.assert_close(same, plain, rtol=0, atol=1e-4)


SHALLOW = {"depths": (1, 1, 1, 1)}
MODELS = {
    "features": ("dgt_nano", {"features_only": True, **SHALLOW}),
    "post-norm": ("dgt_nano", {"post_norm": True, **SHALLOW}),
    "without pooling": ("dgt_nano", {"global_pool": "", **SHALLOW}),
    "Swin's blocks": ("dgt_nano_swin_block", SHALLOW),
    "CSWin's blocks": ("dgt_nano_cswin_block", SHALLOW),
    "CMT's blocks": ("dgt_nano_cmt_block", SHALLOW),
    "residual keys": ("dgt_nano", {"residual_keys": 4, "top_k": 8, **SHALLOW}),
    "Swin": ("swin_nano", SHALLOW),
    "ViL": ("vil_small", {}),
    "CrossFormer": ("crossformer_small", SHALLOW),
}


@pytest.mark.parametrize("kind", MODELS)
def test_other_models_are_equal(kind) -> None:
    torch.manual_seed(0)
    name, options = MODELS[kind]
    model = timm.create_model(name, **options)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.2)
    images = torch.randn(1, 3, 64, 64)
    fast = optimize_for_inference(model.eval())
    again = optimize_for_inference(fast)
    for plain, same, third in zip(model(images), fast(images), again(images), strict=True):
        torch.testing.assert_close(same, plain, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(third, same)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"depth": 2, "img_size": 64, "qk_norm": True}),
        (
            "swin_tiny_patch4_window7_224",
            {"depths": (1, 1, 1, 1), "img_size": 64, "window_size": 4},
        ),
    ],
)
def test_attention_that_replaced_another_is_packed(name, options) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **options).eval()
    dgt.replace_attention(model, num_groups=4, top_k=4, residual_keys=1)
    fast, images = optimize_for_inference(model), torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(fast(images), model(images), rtol=1e-4, atol=1e-4)
    layers = [part for part in fast.modules() if isinstance(part, dgt.DGAttention)]
    assert layers
    if library.load() is not None:
        assert not any(isinstance(part.qkv, nn.Linear) for part in layers)


def test_the_model_itself_stays_as_it_is(trained) -> None:
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    state = torch.random.get_rng_state()
    trained.train()
    fast = optimize_for_inference(trained)
    assert trained.training
    assert not fast.training
    assert torch.equal(torch.random.get_rng_state(), state)
    after = trained.eval().state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.requires_grad for parameter in trained.parameters())
    assert not any(parameter.requires_grad for parameter in fast.parameters())


def test_later_changes_of_the_model_do_not_reach_it(trained) -> None:
    model, images = copy.deepcopy(trained), torch.randn(1, 3, 64, 64)
    fast = optimize_for_inference(model)
    before = fast(images)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.zero_()
    assert torch.equal(fast(images), before)


@with_kernels
def test_every_layer_is_packed(trained) -> None:
    fast = optimize_for_inference(trained)
    kinds = (nn.Linear, nn.Conv2d, dgt.layers.InvertedResidualFFN)
    assert not [name for name, module in fast.named_modules() if isinstance(module, kinds)]


def test_it_is_copied_and_pickled_whole(trained) -> None:
    fast, images = optimize_for_inference(trained), torch.randn(1, 3, 64, 64)
    expected = fast(images)
    assert torch.equal(copy.deepcopy(fast)(images), expected)
    assert torch.equal(pickle.loads(pickle.dumps(fast))(images), expected)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(images), expected)


@with_kernels
def test_what_it_cannot_do_is_said_in_a_sentence(trained, monkeypatch) -> None:
    fast, images = optimize_for_inference(trained), torch.randn(1, 3, 64, 64)
    assert fast.eval() is fast
    with pytest.raises(RuntimeError, match="only predicts: train the original"):
        fast.train()
    with pytest.raises(RuntimeError, match="has no state dict"):
        fast.state_dict()
    with pytest.raises(RuntimeError, match="takes no state dict"):
        fast.load_state_dict(trained.state_dict(), strict=False)
    with torch.enable_grad():
        assert not fast(images).requires_grad
        with pytest.raises(RuntimeError, match="take gradients of the original"):
            fast(images.requires_grad_())
    with pytest.raises(RuntimeError, match="export or trace the original"):
        torch.jit.trace(fast, images)
    stored = pickle.dumps(fast)
    monkeypatch.setattr("dgt.inference.packed.layout", lambda: (0, 4))
    with pytest.raises(RuntimeError, match="optimize it here"):
        pickle.loads(stored)


def test_settings_and_records_of_the_attention_work_on_it(trained) -> None:
    fast = optimize_for_inference(trained)
    images = torch.randn(1, 3, 64, 64)
    for plain, same in zip(
        dgt.group_records(trained, images), dgt.group_records(fast, images), strict=True
    ):
        assert plain.name == same.name
        assert (plain.attention.group_ids == same.attention.group_ids).float().mean() > 0.999
    outputs = {}
    for backend in ("auto", "reference"):
        dgt.set_attention(fast, top_k=9, backend=backend)
        outputs[backend] = fast(images)
    torch.testing.assert_close(outputs["auto"], outputs["reference"], rtol=0, atol=1e-4)
    assert not torch.allclose(outputs["auto"], trained(images), atol=1e-3)


def test_it_takes_bfloat16_and_compilers(trained) -> None:
    fast, images = optimize_for_inference(trained), torch.randn(2, 3, 64, 64)
    expected = fast(images)
    with torch.autocast("cpu", torch.bfloat16):
        found = fast(images)
    assert (found.float() - expected).norm() < 0.05 * expected.norm()
    torch.compiler.reset()
    compiled = torch.compile(fast, backend="eager")
    torch.testing.assert_close(compiled(images), expected, rtol=0, atol=1e-4)


class Rectified(nn.Module):
    """What an adapter is to its layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x).relu()


class Summed(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.cumsum(0)


def rectify(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output.relu()


NAMES = (
    "stem",
    "stem.convs.1",
    "stem.norms.2",
    "stem.act",
    "stages.1.merge.conv",
    "stages.1.merge.norm",
    "stages.2.blocks.0.cpe",
    "stages.2.blocks.0.cpe.conv",
    "stages.2.blocks.0.attn.qkv",
    "stages.2.blocks.0.attn.proj",
    "stages.2.blocks.0.ffn",
    "stages.2.blocks.0.ffn.expand",
    "stages.2.blocks.0.ffn.act",
    "stages.2.blocks.0.ffn.norm2",
    "stages.2.blocks.0.ffn.depthwise",
    "stages.2.blocks.0.ffn.drop",
    "stages.2.blocks.0",
    "head.conv",
    "head.fc",
)


@pytest.mark.parametrize("kind", ["hook", "wrapped", "parametrized", "forward", "padding"])
def test_what_is_not_as_built_stays_as_it_is(kind, trained) -> None:
    images = torch.randn(1, 3, 64, 64)
    for name in NAMES:
        model = copy.deepcopy(trained)
        module = model.get_submodule(name)
        if kind == "hook":
            module.register_forward_hook(rectify)
        elif kind == "wrapped":
            if name in ("stem", "stages.2.blocks.0", "stages.2.blocks.0.ffn"):
                continue  # called with a mask
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Rectified(module))
        elif kind == "parametrized":
            if not hasattr(module, "weight"):
                continue
            nn.utils.parametrize.register_parametrization(module, "weight", Summed())
        elif kind == "forward":
            plain = module.forward
            module.forward = lambda *args, plain=plain: plain(*args).relu()
        elif isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            module.padding_mode = "circular"
            module._reversed_padding_repeated_twice = [1, 1, 1, 1]
        else:
            continue
        expected = model(images)
        found = optimize_for_inference(model)(images)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4, msg=name)
        assert not torch.allclose(expected, trained(images), rtol=0, atol=1e-4), name


@pytest.mark.parametrize("cls", [nn.GELU, nn.Linear, ConvStem, InvertedResidualFFN, Block])
def test_another_forward_of_a_class_stays(cls, trained, monkeypatch) -> None:
    images = torch.randn(1, 3, 64, 64)
    plain = cls.forward
    monkeypatch.setattr(cls, "forward", lambda *args: plain(*args).relu())
    expected = trained(images)
    found = optimize_for_inference(trained)(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    monkeypatch.undo()
    assert not torch.allclose(expected, trained(images), rtol=0, atol=1e-4)


@with_kernels
def test_the_rest_of_it_is_still_packed(trained) -> None:
    model = copy.deepcopy(trained)
    model.stages[0].blocks[0].attn.qkv.register_forward_hook(rectify)
    fast = optimize_for_inference(model)
    block = fast.stages[0].blocks[0]
    assert type(block.attn.qkv) is nn.Linear
    assert type(block.attn.proj) is PackedLinear
    assert type(block.ffn) is PackedFeedForward


def test_hooks_and_adapters_that_come_later_act(trained) -> None:
    images = torch.randn(1, 3, 64, 64)
    plain = optimize_for_inference(trained)(images)
    for name, _ in optimize_for_inference(trained).named_modules():
        fast = optimize_for_inference(trained)
        module = fast.get_submodule(name)
        if isinstance(module, nn.ModuleList):
            continue
        calls = []
        module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert torch.equal(fast(images), plain)
        assert calls, name
        if isinstance(module, Packed) and "stem" not in name and "ffn" not in name:
            parent, _, child = name.rpartition(".")
            setattr(fast.get_submodule(parent), child, Rectified(module))
            assert not torch.allclose(fast(images), plain, rtol=0, atol=1e-5), name


def test_without_kernels_nothing_is_packed(trained, monkeypatch) -> None:
    monkeypatch.setattr("dgt.inference.optimize.layout", lambda: None)
    fast = optimize_for_inference(trained)
    assert not any(isinstance(module, Packed) for module in fast.modules())
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(fast(images), trained(images), rtol=0, atol=1e-4)
    assert not any(parameter.requires_grad for parameter in fast.parameters())


def test_what_cannot_be_optimized() -> None:
    with pytest.raises(TypeError, match="model must be a module, got str"):
        optimize_for_inference("dgt_tiny")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="model must contain modules that a snapshot makes faster, got a Linear"
    ):
        optimize_for_inference(nn.Linear(3, 3))


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_no_images_are_as_many_outputs(trained, dtype) -> None:
    images = torch.randn(0, 3, 64, 64, dtype=dtype)
    assert optimize_for_inference(trained, dtype)(images).shape == trained(images.float()).shape


def test_the_default_device_is_of_no_account(trained) -> None:
    images = torch.randn(1, 3, 64, 64)
    with torch.device("meta"):
        fast = optimize_for_inference(trained)
    torch.testing.assert_close(fast(images), trained(images), rtol=0, atol=1e-4)
