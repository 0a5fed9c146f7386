"""Attention with a decomposed bias: SAM's encoders and ViTDet, without a bias of all pairs."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import vision_transformer_sam
from torch import Tensor, nn
from transformers import (
    SamHQVisionConfig,
    SamHQVisionModel,
    SamVisionConfig,
    SamVisionModel,
    VitDetConfig,
    VitDetModel,
)

import dgt
from dgt.acceleration import decomposed_bias, exact

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "image_size": 128}
SAM = {**SIZES, "global_attn_indexes": [1], "window_size": 3, "output_channels": 16, "mlp_dim": 64}


def make_timm(**options: Any) -> nn.Module:
    return timm.create_model(
        "samvit_base_patch16",
        img_size=128,
        embed_dim=32,
        depth=2,
        num_heads=4,
        window_size=3,
        global_attn_indexes=(1,),
        num_classes=0,
        **options,
    )


def make_vitdet() -> nn.Module:
    options = {"window_block_indices": [0], "window_size": 3, "pretrain_image_size": 128}
    return VitDetModel(VitDetConfig(**SIZES, **options, use_relative_position_embeddings=True))


def make_meta() -> nn.Module:
    encoders = pytest.importorskip("segment_anything.modeling.image_encoder")
    return encoders.ImageEncoderViT(
        img_size=128,
        embed_dim=32,
        depth=2,
        num_heads=4,
        out_chans=16,
        use_rel_pos=True,
        window_size=3,
        global_attn_indexes=(1,),
    )


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "timm": make_timm,
    "transformers": lambda: SamVisionModel(SamVisionConfig(**SAM)),
    "transformers, HQ": lambda: SamHQVisionModel(SamHQVisionConfig(**SAM)),
    "ViTDet": make_vitdet,
    "Meta": make_meta,
}


@pytest.fixture(autouse=True)
def always_faster(monkeypatch) -> None:
    """What is faster is timed elsewhere; these sizes are small."""
    monkeypatch.setattr(decomposed_bias, "is_faster", lambda *_: True)
    monkeypatch.setattr(exact, "ratio_of_times", lambda _: 1.0)


def draw(model: nn.Module) -> nn.Module:
    """A model with random weights, relative positions among them."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def output_of(model: nn.Module, images: Tensor) -> Tensor:
    output = model(images)
    return output if isinstance(output, Tensor) else output[0]


def images_of(count: int = 2, height: int = 128, width: int = 128) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, 3, height, width)


@pytest.fixture
def masks(monkeypatch) -> list[torch.Size]:
    """The masks of all pairs that are given to PyTorch's attention."""
    seen: list[torch.Size] = []
    original = F.scaled_dot_product_attention

    def attend(*args: Any, **options: Any) -> Tensor:
        mask = args[3] if len(args) > 3 else options.get("attn_mask")
        if mask is not None:
            seen.append(mask.shape)
        return original(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return seen


@pytest.mark.parametrize("name", MAKERS)
@torch.no_grad()
def test_it_is_the_same_without_a_bias_of_all_pairs(name, masks):
    model = draw(MAKERS[name]())
    images = images_of()
    before = output_of(model, images)
    report = dgt.accelerate(model, error=0)
    assert [layer.setting.choice for layer in report.layers] == ["exact", "exact"]
    assert "note" not in str(report)
    masks.clear()
    after = output_of(model, images)
    assert not masks
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output_of(same, images), after)
    assert not masks
    with dgt.exact_attention(model):
        assert torch.equal(output_of(model, images), before)


@torch.no_grad()
def test_other_sizes_types_and_threads():
    model = draw(make_timm())
    accelerated = copy.deepcopy(model)
    dgt.accelerate(accelerated, error=0)
    for images in (images_of(1, 64, 64), images_of(3, 96, 160)):
        expected = output_of(model, images)
        torch.testing.assert_close(output_of(accelerated, images), expected, rtol=1e-5, atol=1e-5)
    images = images_of(1)
    expected = output_of(model, images)
    found: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            found.append(output_of(accelerated, images))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for output in found:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for dtype, near in ((torch.float16, 0.01), (torch.bfloat16, 0.08)):
        output = output_of(accelerated.to(dtype), images.to(dtype)).float()
        assert (output - expected).norm() < near * expected.norm()


def test_gradients_and_dropout_are_the_models_own(masks):
    model = draw(make_timm())
    images = images_of()
    expected = output_of(model, images)
    dgt.accelerate(model, error=0)
    masks.clear()
    output = output_of(model, images)
    assert len(masks) == 2
    assert torch.equal(output, expected)
    output.sum().backward()
    assert model.blocks[1].attn.rel_pos_h.grad.abs().max() > 0
    model.train()
    for block in model.blocks:
        block.attn.attn_drop.p = 0.5
    masks.clear()
    with torch.no_grad():
        model(images)
    assert len(masks) == 2


@torch.no_grad()
def test_graphs_hold_the_models_own_attention():
    model = draw(make_timm())
    images = images_of()
    expected = output_of(model, images)
    dgt.accelerate(model, error=0)
    exported = torch.export.export(model, (images,)).module()
    traced = torch.jit.trace(model, images)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for graph in (exported, traced, compiled):
        torch.testing.assert_close(output_of(graph, images), expected, rtol=1e-5, atol=1e-5)
    operators = {str(node.target) for node in exported.graph.nodes}
    assert not any(name.startswith("dgt.") for name in operators)


@torch.no_grad()
def test_hooks_and_adapters_act_as_before():
    model = draw(make_timm())
    dgt.accelerate(model, error=0)
    images = images_of()
    before = output_of(model, images)
    seen: list[str] = []
    for name in ("qkv", "proj"):
        layer = model.blocks[1].attn.get_submodule(name)
        layer.register_forward_hook(lambda *_, name=name: seen.append(name))
    model.blocks[1].attn.register_forward_hook(lambda *_: seen.append("attn"))
    assert torch.equal(output_of(model, images), before)
    assert seen == ["qkv", "proj", "attn"]
    model.blocks[1].attn.proj = nn.Sequential(model.blocks[1].attn.proj, nn.Tanh())
    assert not torch.equal(output_of(model, images), before)


class OtherAttention(vision_transformer_sam.Attention):
    """Looks alike, and is not: its bias is twice as large."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        tokens = self.qkv(x.flatten(1, 2)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = tokens.permute(2, 0, 3, 1, 4).flatten(1, 2).unbind(0)
        size = (height, width)
        bias = vision_transformer_sam.get_decomposed_rel_pos_bias(
            2 * query, self.rel_pos_h, self.rel_pos_w, size, size
        )
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2)
        return self.proj(x).unflatten(1, size)


@torch.no_grad()
def test_what_only_looks_alike_is_left_alone_and_said(monkeypatch):
    images = images_of()
    for is_known in (False, True):
        model = draw(make_timm())
        for block in model.blocks:
            block.attn.__class__ = OtherAttention
        if is_known:
            path = f"{OtherAttention.__module__}.{OtherAttention.__qualname__}"
            monkeypatch.setitem(decomposed_bias.FORMS, path, decomposed_bias.TIMM)
        before = output_of(model, images)
        words = "another version" if is_known else "not known"
        assert f"OtherAttention is {words}" in str(dgt.accelerate(model, error=0)).replace(
            "of ", ""
        )
        assert torch.equal(output_of(model, images), before)


def test_a_model_of_nothing_but_look_alikes_is_refused_with_the_reason():
    model = draw(make_meta())
    for block in model.blocks:
        block.attn.__class__ = type("Attention", (type(block.attn),), {})
    with pytest.raises(ValueError, match="its class Attention is not known"):
        dgt.accelerate(model, error=0)


@torch.no_grad()
def test_plans_and_checks_of_them(tmp_path):
    model = draw(make_meta())
    dgt.accelerate(model, error=0).save(tmp_path / "plan.json")
    again = draw(make_meta())
    dgt.apply_plan(again, tmp_path / "plan.json")
    images = images_of()
    assert torch.equal(output_of(again, images), output_of(model, images))
    report = dgt.check_plan(again, images)
    assert report.measured_error < 1e-5
    assert all(layer.dense_ms > 0 for layer in report.layers)
    dgt.accelerate(again, error=0)  # replaces what there was
    assert torch.equal(output_of(again, images), output_of(model, images))


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(SamVisionModel, SamVisionConfig), (SamHQVisionModel, SamHQVisionConfig)],
)
@torch.no_grad()
def test_names_of_transformers(model_class, config, tmp_path, masks):
    original = draw(model_class(config(**SAM)))
    original.save_pretrained(tmp_path)
    images = images_of()
    expected = original(images)[0]
    dgt.register_attention(exact=True)
    dgt.register_attention()
    for name, count in (("dgt-exact", 0), ("dgt", 2)):
        model = model_class.from_pretrained(tmp_path, attn_implementation=name).eval()
        masks.clear()
        torch.testing.assert_close(model(images)[0], expected, rtol=1e-5, atol=1e-5)
        assert len(masks) == count
