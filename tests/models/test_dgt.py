"""The models as timm users see them: sizes, parameters, features, heads, padding, checkpoints."""

from __future__ import annotations

import json

import pytest
import timm
import torch
from timm.models import group_parameters, save_for_hf
from timm.optim import create_optimizer_v2
from torch import nn

import dgt

PARAMETERS = {"dgt_tiny": 24_093_928, "dgt_small": 51_764_712 + 267, "dgt_base": 90_279_656 + 356}
SIZES = [(32, 32), (33, 47), (64, 40), (75, 101), (32, 200)]


def strided(size: tuple[int, int], stride: int) -> tuple[int, int]:
    return -(-size[0] // stride), -(-size[1] // stride)


def attention_layers(model: nn.Module) -> list[dgt.DGAttention]:
    return [module for module in model.modules() if isinstance(module, dgt.DGAttention)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_paper(name) -> None:
    model = timm.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert {layer.centroids.shape[-1] for layer in attention_layers(model)} == {32}


def test_the_models_are_registered() -> None:
    blocks = {
        f"{size}_{block}_block"
        for size in ("dgt_nano", "dgt_tiny")
        for block in ("swin", "cswin", "cmt")
    }
    assert set(timm.list_models("dgt_*")) == {"dgt_nano", *PARAMETERS} | blocks


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("post_norm", [False, True])
def test_any_size_from_32_pixels_on(size, post_norm, small) -> None:
    model = small(post_norm=post_norm)
    images = torch.randn(2, 3, *size)
    assert model(images).shape == (2, 10)
    assert model(images).isfinite().all()
    _, maps = model.forward_intermediates(images)
    assert [tuple(m.shape[2:]) for m in maps] == [
        strided(size, stride) for stride in (4, 8, 16, 32)
    ]


def test_a_stem_of_stride_one_halves_all_strides(small) -> None:
    model = small(stem_stride=1)
    _, maps = model.forward_intermediates(torch.randn(1, 3, 33, 40))
    assert [tuple(m.shape[2:]) for m in maps] == [
        strided((33, 40), stride) for stride in (2, 4, 8, 16)
    ]
    assert [info["reduction"] for info in model.feature_info] == [2, 4, 8, 16]


@pytest.mark.parametrize("size", SIZES[:3])
def test_features_only(size) -> None:
    model = timm.create_model("dgt_nano", features_only=True).eval()
    maps = model(torch.randn(1, 3, *size))
    assert model.feature_info.reduction() == [4, 8, 16, 32]
    assert model.feature_info.channels() == [32, 64, 128, 256]
    shapes = [
        (1, c, *strided(size, s)) for c, s in zip((32, 64, 128, 256), (4, 8, 16, 32), strict=True)
    ]
    assert [tuple(m.shape) for m in maps] == shapes
    some = timm.create_model("dgt_nano", features_only=True, out_indices=(0, 2)).eval()
    assert [m.shape[1] for m in some(torch.randn(1, 3, *size))] == [32, 128]


def test_intermediates_are_what_forward_computes(small) -> None:
    model, images = small(), torch.randn(2, 3, 64, 48)
    last, maps = model.forward_intermediates(images)
    assert torch.equal(last, model.forward_features(images))
    assert torch.equal(maps[-1], last)
    chosen = model.forward_intermediates(
        images, indices=[1, 2], intermediates_only=True, stop_early=True
    )
    assert all(torch.equal(a, b) for a, b in zip(chosen, maps[1:3], strict=True))
    (channels_last,) = model.forward_intermediates(
        images, indices=1, output_fmt="NHWC", intermediates_only=True
    )
    assert torch.equal(channels_last.permute(0, 3, 1, 2), last)
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW' or 'NHWC', got 'NLC'"):
        model.forward_intermediates(images, output_fmt="NLC")


def test_pruning_leaves_the_features(small) -> None:
    model, images = small(), torch.randn(1, 3, 64, 48)
    expected = model.forward_intermediates(images, indices=[1], intermediates_only=True)[0]
    assert model.prune_intermediate_layers([1]) == [1]
    assert torch.equal(model.forward_features(images), expected)
    assert len(model.stages) == 2


def test_classifier_and_pooling_can_be_replaced(small) -> None:
    model, images = small(), torch.randn(2, 3, 64, 48)
    features = model.forward_features(images)
    assert torch.equal(model(images), model.forward_head(features))
    assert torch.equal(
        model.get_classifier()(model.forward_head(features, pre_logits=True)), model(images)
    )
    model.reset_classifier(3)
    assert (model(images).shape, model.num_classes) == ((2, 3), 3)
    model.reset_classifier(0)
    assert model(images).shape == (2, model.head_hidden_size) == (2, 24)
    model.reset_classifier(4, "catavgmax")
    assert model(images).shape == (2, 4)
    model.reset_classifier(0, "")
    assert model(images).shape == (2, 24, 2, 2)
    assert not model.training


def test_options_of_the_constructor(small) -> None:
    assert small(in_chans=1)(torch.randn(1, 1, 40, 32)).shape == (1, 10)
    assert small(num_classes=0)(torch.randn(1, 3, 40, 32)).shape == (1, 24)
    assert small(global_pool="")(torch.randn(1, 3, 40, 64)).shape == (1, 10, 2, 2)
    model = small(drop_path_rate=0.3)
    rates = [
        getattr(block.drop_path1, "drop_prob", 0.0)
        for stage in model.stages
        for block in stage.blocks
    ]
    assert rates == pytest.approx([0.0, 0.06, 0.12, 0.18, 0.24, 0.3])
    assert small(dtype=torch.bfloat16)(torch.randn(1, 3, 32, 32).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("argument", "value", "error", "expected"),
    [
        ("depths", (1, 1), ValueError, r"be equally long, got .*\(1, 1\)"),
        ("depths", 2, TypeError, "be one int per stage, got 2"),
        ("mlp_ratio", 0, ValueError, "be above 0 and finite, got 0"),
        ("mlp_ratio", "4", TypeError, "be a number, got '4'"),
        ("attention", ("group", "local") * 2, ValueError, "be one of group, .* got 'local'"),
    ],
)
def test_bad_settings(argument, value, error, expected, small) -> None:
    with pytest.raises(error, match=rf"\b{argument}\b.* must {expected}"):
        small(**{argument: value})


@pytest.mark.parametrize("size", [(31, 64), (64, 31), (8, 8)])
def test_an_image_under_32_pixels(size, small) -> None:
    for call in (
        small(),
        small().forward_intermediates,
        lambda images: dgt.group_records(small(), images),
    ):
        with pytest.raises(
            ValueError, match=rf"images must be at least 32 x 32 pixels, got {size[0]} x {size[1]}"
        ):
            call(torch.randn(1, 3, *size))


def test_more_residual_keys_than_a_stage_has_tokens(small) -> None:
    """Stages one to three have 128, 32 and 8 tokens of 32 x 64 pixels."""
    model, images = small(residual_keys=8), torch.randn(1, 3, 32, 64)
    assert model(images).isfinite().all()
    dgt.set_attention(model, residual_keys=9)
    for call in (model, model.forward_intermediates):
        with pytest.raises(
            ValueError, match="at most 8, the tokens of stage 3 for images of 32 x 64 pixels, got 9"
        ):
            call(images)


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 1, 64, 64), (1, 64, 64, 3)])
def test_images_of_another_shape(shape, small) -> None:
    with pytest.raises(ValueError, match=r"images must be a \(B, 3, H, W\) tensor, got shape"):
        small()(torch.randn(shape))


@pytest.mark.parametrize("post_norm", [False, True])
def test_parameters_that_must_not_decay(post_norm, small) -> None:
    model = small(post_norm=post_norm)
    names = dict(model.named_parameters())
    listed = model.no_weight_decay()
    assert listed == {name for name in names if ".cpe." in name or "logit_scale" in name}
    assert any("logit_scale" in name for name in listed) == post_norm
    free = [
        g
        for g in create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.1).param_groups
        if g["weight_decay"] == 0.0
    ]
    assert {id(names[name]) for name in listed} <= {
        id(p) for group in free for p in group["params"]
    }


@pytest.mark.parametrize("coarse", [False, True])
def test_parameters_sort_by_depth(coarse, small) -> None:
    model = small()
    depth = group_parameters(model, model.group_matcher(coarse), reverse=True)
    assert depth.keys() == dict(model.named_parameters()).keys()
    blocks = [
        depth[f"stages.{i}.blocks.{j}.norm1.weight"]
        for i, n in enumerate((1, 2, 2, 1))
        for j in range(n)
    ]
    assert depth["stem.convs.0.weight"] < depth["stages.0.merge.conv.weight"]
    assert blocks == sorted(blocks)
    assert len(set(blocks)) == (4 if coarse else 6)
    assert max(blocks) < depth["head.fc.weight"]


@pytest.mark.parametrize(
    ("image_size", "options"),
    [
        ((64, 48), {}),
        ((41, 67), {"post_norm": True}),
        ((64, 48), {"residual_keys": 1}),
        ((41, 67), {"residual_keys": 5}),
    ],
)
def test_a_padded_image_gives_what_it_gives_alone(image_size, options, small) -> None:
    """Feature maps of every stage, and in the first block the very same groups and keys."""
    model = small(**options)
    height, width = image_size
    image = torch.randn(1, 3, height, width)
    batch = 3 * torch.randn(2, 3, 75, 101)
    batch[1, :, :height, :width] = image[0]
    mask = torch.ones(2, 75, 101, dtype=torch.bool)
    mask[1, height:] = mask[1, :, width:] = False

    _, padded = model.forward_intermediates(batch, mask=mask)
    _, alone = model.forward_intermediates(image)
    for ours, theirs in zip(padded, alone, strict=True):
        real = ours[1, :, : theirs.shape[2], : theirs.shape[3]]
        torch.testing.assert_close(
            real, theirs[0], rtol=0, atol=1e-5 * max(1.0, theirs.abs().max().item())
        )
        assert not ours[1, :, theirs.shape[2] :].any()
    within, single = dgt.group_records(model, batch, mask)[0], dgt.group_records(model, image)[0]
    assert (
        within.attention.group_ids[1]
        .view(-1, *within.grid)[:, : single.grid[0], : single.grid[1]]
        .equal(single.attention.group_ids[0].view(-1, *single.grid))
    )
    rows = single.attention.key_ids[0] // single.grid[1]
    columns = single.attention.key_ids[0] % single.grid[1]
    assert torch.equal(within.attention.key_ids[1], rows * within.grid[1] + columns)


def test_a_saved_folder_makes_the_same_model(tmp_path, small) -> None:
    model = timm.create_model("dgt_nano", num_classes=7)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    optimizer.step()
    save_for_hf(
        model.eval(), str(tmp_path), model_config={"num_classes": 7}, safe_serialization=True
    )
    assert (tmp_path / "model.safetensors").is_file()
    assert json.loads((tmp_path / "config.json").read_text())["architecture"] == "dgt_nano"
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(2, 3, 70, 64)
    assert torch.equal(loaded(images), model(images))
    for ours, theirs in zip(attention_layers(loaded), attention_layers(model), strict=True):
        assert torch.equal(ours.centroids, theirs.centroids)
        assert ours.num_updates == 1


def test_a_padded_image_gives_the_logits_it_gives_alone() -> None:
    torch.manual_seed(0)
    model = timm.create_model("dgt_nano", num_classes=5).eval()
    image = torch.randn(1, 3, 64, 64)
    padded = torch.nn.functional.pad(image, (0, 64, 0, 32))
    mask = torch.zeros(1, 96, 128, dtype=torch.bool)
    mask[:, :64, :64] = True
    with torch.no_grad():
        features, real = model.forward_features(padded, mask), model.masks(mask)[-1]
        torch.testing.assert_close(
            model.forward_head(features, mask=real), model(image), rtol=0, atol=2e-5
        )
        model.reset_classifier(5, "max")
        with pytest.raises(ValueError, match="mask needs global_pool 'avg', got 'max'"):
            model.forward_head(features, mask=real)


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (torch.ones(2, 64, 64, dtype=torch.bool), ValueError),
        (torch.ones(1, 32, 64, dtype=torch.bool), ValueError),
        (torch.ones(64, 64, dtype=torch.bool), ValueError),
        (torch.ones(1, 64, 64), TypeError),
    ],
)
def test_a_mask_that_does_not_fit_the_images(mask, error) -> None:
    model = timm.create_model("dgt_nano").eval()
    with pytest.raises(error, match="mask must"):
        model.forward_features(torch.randn(1, 3, 64, 64), mask)
    with pytest.raises(error, match="mask must"):
        dgt.group_records(model, torch.randn(1, 3, 64, 64), mask)


def test_images_of_another_type() -> None:
    images = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    for came, kind in ((images, r"torch\.uint8"), (images.numpy(), "ndarray")):
        with pytest.raises(
            TypeError, match=f"(?s)images must be a floating point tensor, .*{kind}"
        ):
            timm.create_model("dgt_nano")(came)


def test_a_training_forward_on_the_meta_device() -> None:
    model = timm.create_model("dgt_nano", num_classes=4, device="meta").train()
    assert model(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 4)


def test_feed_forward_networks_begin_as_convolutions_of_1x1() -> None:
    """Kaiming's deviation for C' outputs, with the draws that a convolution would take."""
    torch.manual_seed(3)
    model = timm.create_model("dgt_nano", depths=(1, 0, 0, 0), num_classes=2)
    ffn = model.stages[0].blocks[0].ffn
    for linear in (ffn.expand, ffn.project):
        wanted = (2 / linear.out_features) ** 0.5
        assert linear.weight.detach().std() == pytest.approx(wanted, rel=0.05)
        assert not linear.bias.any()
    assert model.head.fc.weight.detach().std() == pytest.approx(0.02, rel=0.05)


@torch.no_grad()
def test_batches_as_other_models_take_them(small) -> None:
    """Of no images; with NaN in one of them; one by one in ``vmap``."""
    model, images = small().eval(), torch.randn(3, 3, 64, 64)
    expected = model(images)
    assert model(images[:0]).shape == (0, 10)
    by_vmap = torch.func.vmap(lambda image: model(image[None])[0])(images)
    torch.testing.assert_close(by_vmap, expected, rtol=1e-4, atol=1e-4)
    images[1, 0, 5, 5] = torch.nan
    found = model(images)
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])
    assert found[1].isnan().all()
