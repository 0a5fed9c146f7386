"""`dgt.accelerate` on the real classes of Hugging Face's transformers: small, random weights, no network."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import dgt
from dgt.acceleration import inspect_model
from dgt.acceleration.intercept import installed_processors

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIZES = {"image_size": 96, "patch_size": 8}  # 144 patches
IMAGES = {"pixel_values": (3, 96, 96)}
CLIPS = {"pixel_values": (4, 3, 96, 96)}  # 288 tubes of two frames


def depth_anything() -> nn.Module:
    backbone = hf.Dinov2Config(**SMALL, **SIZES, out_indices=[1, 2], reshape_hidden_states=False)
    neck = {
        "reassemble_hidden_size": 32,
        "neck_hidden_sizes": [16, 16],
        "reassemble_factors": [2, 1],
    }
    sizes = {"patch_size": 8, "fusion_hidden_size": 16, "head_hidden_size": 8}
    return hf.DepthAnythingForDepthEstimation(
        hf.DepthAnythingConfig(backbone_config=backbone, **neck, **sizes)
    )


def vjepa2() -> nn.Module:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    predictor = {"pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
    return hf.VJEPA2Model(
        hf.VJEPA2Config(crop_size=96, patch_size=8, frames_per_clip=4, **sizes, **predictor)
    )


def build(kind: str, **options) -> nn.Module:
    """A small model, by the common stem of its class and configuration names."""
    stem = kind.removesuffix("Model")
    return getattr(hf, f"{stem}Model")(getattr(hf, f"{stem}Config")(**SMALL, **SIZES, **options))


FAMILIES = {  # constructor, inputs, class and register tokens, layers that can use groups
    "DINOv3ViT": (lambda: build("DINOv3ViT", num_register_tokens=4), IMAGES, 5, 2),
    "Dinov2": (lambda: build("Dinov2"), IMAGES, 1, 2),
    "Dinov2WithRegisters": (
        lambda: build("Dinov2WithRegisters", num_register_tokens=3),
        IMAGES,
        4,
        2,
    ),
    "DepthAnything": (depth_anything, IMAGES, 1, 2),
    "SiglipVision": (lambda: build("SiglipVision"), IMAGES, 0, 2),
    "ViT": (lambda: build("ViT"), IMAGES, 1, 2),
    "DeiT": (lambda: build("DeiT"), IMAGES, 2, 2),
    "CLIPVision": (lambda: build("CLIPVision"), IMAGES, 1, 2),
    "IJepa": (lambda: build("IJepa"), IMAGES, 0, 2),
    "Aimv2Vision": (lambda: build("Aimv2Vision"), IMAGES, 0, 2),
    "Sapiens2": (lambda: build("Sapiens2"), IMAGES, 9, 2),
    "VideoMAE": (lambda: build("VideoMAE", num_frames=4), CLIPS, 0, 2),
    "VJEPA2": (vjepa2, {"pixel_values_videos": CLIPS["pixel_values"]}, 0, 3),
}


def inputs(kind: str, count: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(count, *shape) for name, shape in FAMILIES[kind][1].items()}


def model_of(kind: str) -> nn.Module:
    """A model whose attention is not uniform."""
    torch.manual_seed(0)
    model = FAMILIES[kind][0]().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and any(
            word in name for word in ("q_proj", "k_proj", "query", "key")
        ):
            nn.init.normal_(parameter, 0, 0.4)
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_found_in_every_family(kind) -> None:
    _, _, prefix, layers = FAMILIES[kind]
    rows = inspect_model(model_of(kind), inputs(kind), least_tokens=100)
    grouped = [row for row in rows if not row.reason]
    assert len(grouped) == layers
    assert {row.num_prefix_tokens for row in grouped} == {prefix}
    assert {bool(row.note) for row in grouped} == {prefix == 0}
    assert all(row.tokens % 144 == prefix for row in grouped)
    assert {row.reason for row in rows if row.reason} <= {
        "called with need_weights",
        "few tokens",
    }


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("kind", ["DINOv3ViT", "SiglipVision", "DepthAnything", "VJEPA2"])
def test_accelerated_and_back(kind, tmp_path, monkeypatch) -> None:
    model, images = model_of(kind), inputs(kind, 4)
    positional = next(iter(images.values()))
    with torch.no_grad():
        before = model(positional)[0]
        report = dgt.accelerate(model, positional if kind == "DINOv3ViT" else images, error=0.99)
        after = model(**images)[0]
        with dgt.exact_attention(model):
            assert torch.equal(model(**images)[0], before)
        report.save(tmp_path / "plan")
        other = model_of(kind)
        dgt.apply_plan(other, tmp_path / "plan")
        assert torch.equal(other(positional)[0], after)
    assert (
        1 <= sum(layer.setting.choice == "groups" for layer in report.layers) <= FAMILIES[kind][3]
    )
    assert not torch.equal(after, before)
    assert 0 < report.measured_error < 0.99


@pytest.mark.usefixtures("slow_attention")
def test_the_door_of_transformers() -> None:
    """`attn_implementation="dgt"` is exact until there is a plan, masks included."""
    dgt.register_attention()
    for kind in ("Dinov2", "DepthAnything"):
        model, images = model_of(kind), inputs(kind)
        with torch.no_grad():
            before = model(**images)[0]
            model.set_attn_implementation("dgt")
            assert torch.equal(model(**images)[0], before)
            dgt.accelerate(model, images, 0.9)
            assert len(installed_processors(model)) == 2
            assert not torch.equal(model(**images)[0], before)


def test_groups_by_name_alone() -> None:
    dgt.register_attention("dgt-8-16", num_groups=8, top_k=16, num_prefix_tokens=1)
    dgt.register_attention("dgt-8-all", num_groups=8, top_k=36, num_prefix_tokens=1)
    model, images = model_of("Dinov2"), inputs("Dinov2")
    outputs = {}
    with torch.no_grad():
        for name in ("sdpa", "dgt-8-16", "dgt-8-all"):
            model.set_attn_implementation(name)
            outputs[name] = model(**images)[0]
        error = (outputs["dgt-8-16"] - outputs["sdpa"]).norm() / outputs["sdpa"].norm()
        assert 0 < error < 0.2
        assert (outputs["dgt-8-all"] - outputs["sdpa"]).norm() / outputs["sdpa"].norm() < error
        small = torch.randn(1, 3, 48, 48)  # 36 patches: too few
        model.set_attn_implementation("sdpa")
        expected = model(small)[0]
        model.set_attn_implementation("dgt-8-16")
        assert torch.equal(model(small)[0], expected)
    with pytest.raises(
        ValueError,
        match='model must use its original attention: load it with attn_implementation="sdpa"',
    ):
        dgt.accelerate(model, images)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match='load it with attn_implementation="sdpa"'):
        dgt.accelerate(model, images)


def test_groups_by_name_alone_are_for_as_many_keys_as_queries() -> None:
    dgt.register_attention("dgt-8-8", num_groups=8, top_k=8)
    attend = hf.AttentionInterface()["dgt-8-8"]
    module = nn.Module()
    module.is_causal = False
    query, key, value = torch.randn(1, 2, 100, 8), *torch.randn(2, 1, 2, 80, 8)
    output = attend(module, query, key, value, None)[0].transpose(1, 2)
    assert torch.equal(output, F.scaled_dot_product_attention(query, key, value))


def siglip2(count: int = 2, real: int = 144) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = hf.Siglip2VisionModel(
        hf.Siglip2VisionConfig(**SMALL, patch_size=8, num_patches=144)
    ).eval()
    mask = (torch.arange(144) < real).expand(count, 144).int()
    shapes = torch.tensor([[real // 12, 12]]).expand(count, 2)
    return model, {
        "pixel_values": torch.randn(count, 144, 192),
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
    }


@pytest.mark.parametrize("implementation", ["sdpa", "dgt"])
def test_masks_of_transformers(implementation) -> None:
    """Images without padding need no mask; padded ones come with a key mask, which groups respect."""
    dgt.register_attention()
    for real in (144, 120):
        model, images = siglip2(real=real)
        with torch.no_grad():
            before = model(**images)[0]
            model.set_attn_implementation(implementation)
            assert torch.equal(model(**images)[0], before)
        rows = inspect_model(model, images, least_tokens=100)
        assert [row.reason for row in rows if row.name.startswith("encoder")] == [""] * 2


@pytest.mark.usefixtures("slow_attention")
@torch.no_grad()
def test_padded_images_are_accelerated() -> None:
    """What the model returns at padding counts in the error as all else does."""
    model, images = siglip2(count=4, real=120)
    before = model(**images)[0]
    report = dgt.accelerate(model, images, 0.5, forward=lambda model, item: model(**item)[0])
    assert "groups" in {row.setting.choice for row in report.layers}
    error = (model(**images)[0] - before).norm(dim=(1, 2)) / before.norm(dim=(1, 2))
    assert report.measured_error == pytest.approx(float(error[1]), rel=1e-3)


@pytest.mark.usefixtures("slow_attention")
def test_packed_images_of_a_language_model() -> None:
    """Qwen2-VL's tower attends once per image in a sequence of several."""
    torch.manual_seed(0)
    sizes = {
        "embed_dim": 32,
        "hidden_size": 32,
        "patch_size": 4,
        "depth": 2,
        "num_heads": 2,
        "mlp_ratio": 2,
    }
    model = hf.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel._from_config(
        hf.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(**sizes)
    ).eval()

    def pack(*sides: int) -> dict[str, Tensor]:
        grids = torch.tensor([[1, side, side] for side in sides])
        return {
            "hidden_states": torch.randn(int(grids.prod(1).sum()), 3 * 2 * 16),
            "grid_thw": grids,
        }

    items = [pack(8, 10), pack(12), pack(8, 10, 6), pack(16, 2)]
    report = dgt.accelerate(model, items, 0.3)
    assert [(row.name, row.calls, row.setting.choice) for row in report.layers] == [
        ("blocks.0.attn", 3, "groups"),
        ("blocks.1.attn", 3, "groups"),
    ]
    with torch.no_grad():
        after = model(**items[0])[0]
        with dgt.exact_attention(model):
            before = model(**items[0])[0]
    assert 0 < (after - before).norm() / before.norm() < 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 8}, "num_groups and top_k must be given both or neither, got 8 and None"),
        ({"name": "sdpa"}, "name must not be a built-in name of transformers, got 'sdpa'"),
        ({"num_groups": 0, "top_k": 8}, "num_groups must be at least 1, got 0"),
        ({"num_prefix_tokens": 5}, "num_prefix_tokens must be left out without num_groups, got 5"),
        ({"exact": True, "residual_keys": 2}, "residual_keys must be left out without num_groups"),
    ],
)
def test_bad_registrations(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        dgt.register_attention(**options)
