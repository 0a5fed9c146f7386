"""The ablation's blocks and the appendix's hybrids: sizes, parameters, timm's Swin, features, padding, training."""

from __future__ import annotations

import re

import pytest
import timm
import torch
from timm.layers import LayerNorm
from timm.models.swin_transformer import SwinTransformer
from torch import nn

import dgt
from dgt.layers.baselines.cswin import StripeAttention
from dgt.layers.baselines.swin import WindowAttention

PARAMETERS = {
    "dgt_tiny_swin_block": 23_736_682,
    "dgt_tiny_cswin_block": 23_763_560,
    "dgt_tiny_cmt_block": 24_133_544 + 576_240,  # plus the position tables
    "swin_tiny": 28_288_354,
    "swin_tiny_dga": 28_309_192,
    "cswin_tiny": 22_320_552,
    "cswin_tiny_dga": 22_320_552,
    "vil_small": 24_635_080,  # printed in their own papers: 24.6, 39.7 and 55.7 M
    "vil_medium": 39_720_520,
    "vil_base": 55_695_688,
    "crossformer_small": 30_657_394,  # 30.7, 52.0 and 92.0 M
    "crossformer_base": 51_971_554,
    "crossformer_large": 91_971_184,
}
BLOCKS = ("dgt_nano_swin_block", "dgt_nano_cswin_block", "dgt_nano_cmt_block")
WHOLE = ("cmt_small", "vil_small", "crossformer_small")
HYBRIDS = ("swin_nano", "swin_nano_dga", "cswin_nano", "cswin_nano_dga")
SMALL = {
    "dims": (16, 16, 32, 32),
    "num_heads": (2, 2, 2, 2),
    "depths": (1, 2, 1, 1),
    "stem_width": 8,
}


def make(name: str, **options) -> dgt.DynamicGroupTransformer:
    """A small model with ten classes and norms, biases, and tables as after training, in evaluation mode."""
    torch.manual_seed(3)
    model = timm.create_model(
        name, **{"num_classes": 10, "num_groups": 5, "head_width": 24, **SMALL, **options}
    )
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean, 0.0, 0.2)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
        for parameter in part.parameters(recurse=False):
            if parameter.dim() == 1:
                nn.init.normal_(parameter, 0.5, 0.2)
    return model.eval()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name) -> None:
    model = timm.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["swin", "cswin"])
def test_a_hybrid_differs_from_its_original_in_attention_and_position_alone(name) -> None:
    one, other = (
        set(dict(timm.create_model(f"{name}_nano{dga}").named_parameters())) for dga in ("", "_dga")
    )
    here = r"stages\.\d\.blocks\.\d\.attn\."
    lost = here + (
        "relative_position_bias_table" if name == "swin" else r"lepe\.[01]\.(weight|bias)"
    )
    assert all(re.fullmatch(lost, parameter) for parameter in one - other)
    assert all(
        re.fullmatch(r"stages\.\d\.blocks\.\d\.cpe\.conv\.(weight|bias)", parameter)
        for parameter in other - one
    )


def test_what_the_paper_s_hybrids_attend_to() -> None:
    layers = {
        name: [
            m
            for m in timm.create_model(name, device="meta").modules()
            if isinstance(m, dgt.DGAttention)
        ]
        for name in ("swin_tiny_dga", "cswin_tiny_dga")
    }
    assert [len(found) for found in layers.values()] == [12, 25]
    assert {layer.top_k for layer in layers["swin_tiny_dga"]} == {49}
    stripes = [
        m.width
        for m in timm.create_model("cswin_tiny", device="meta").modules()
        if isinstance(m, StripeAttention)
    ]
    assert stripes == [1, 2, 2, *[7] * 21, 0]
    windows = [
        m.shift
        for m in timm.create_model("swin_tiny", device="meta").modules()
        if isinstance(m, WindowAttention)
    ]
    assert windows == [0, 3] * 6


@pytest.mark.parametrize("size", [(32, 32), (33, 75)])
@pytest.mark.parametrize("name", [*BLOCKS, *HYBRIDS, *WHOLE])
def test_any_size_from_32_pixels_on(name, size) -> None:
    model, images = make(name), torch.randn(2, 3, *size)
    last, maps = model.forward_intermediates(images)
    assert [tuple(m.shape[2:]) for m in maps] == [
        (-(-size[0] // s), -(-size[1] // s)) for s in (4, 8, 16, 32)
    ]
    assert torch.equal(last, model.forward_features(images))
    assert model(images).shape == (2, 10)
    assert model(images).isfinite().all()
    with pytest.raises(ValueError, match="images must be at least 32 x 32 pixels, got 31 x 64"):
        model(torch.randn(1, 3, 31, 64))


@pytest.mark.parametrize("name", ["swin_nano", "dgt_nano_cmt_block", "vil_small"])
def test_a_stem_of_stride_one_halves_all_strides(name) -> None:
    model = make(name, stem_stride=1)
    _, maps = model.forward_intermediates(torch.randn(1, 3, 33, 32))
    assert [tuple(m.shape[2:]) for m in maps] == [(17, 16), (9, 8), (5, 4), (3, 2)]
    assert [info["reduction"] for info in model.feature_info] == [2, 4, 8, 16]


def from_timm(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of timm's Swin under our names."""
    renamed = {
        r"^patch_embed\.proj": "stem.conv",
        r"^patch_embed\.norm": "stem.norm",
        r"^layers\.(\d)\.downsample": r"stages.\1.merge",
        r"^layers": "stages",
        r"mlp\.": "ffn.",
        r"^norm": "head.norm",
    }
    for pattern, name in renamed.items():
        weights = {re.sub(pattern, name, key): tensor for key, tensor in weights.items()}
    return weights


@pytest.mark.parametrize("size", [64, 112])
def test_our_swin_is_that_of_timm(size) -> None:
    """With timm's weights, the outputs of all stages; maps are larger than a window, at 64 px finally smaller."""
    row = {"depths": (2, 2, 2, 1), "num_heads": (1, 2, 4, 8), "num_classes": 7}
    theirs = SwinTransformer(
        size,
        embed_dim=16,
        window_size=(7, 7, 7, 2) if size == 112 else 2,
        norm_layer=LayerNorm,
        **row,
    )
    windows = (7, 7, 7, 2) if size == 112 else (2,) * 4
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, 0.0, 0.1)
    ours = timm.create_model("swin_tiny", dims=(16, 32, 64, 128), extents=windows, **row)
    assert not ours.load_state_dict(from_timm(theirs.state_dict()), strict=True).missing_keys
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=0, atol=1e-5)
        maps = theirs.forward_intermediates(images, intermediates_only=True)
        for one, other in zip(
            ours.forward_intermediates(images, intermediates_only=True), maps, strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "dgt_nano_swin_block",
        "dgt_nano_cswin_block",
        "swin_nano",
        "swin_nano_dga",
        "cswin_nano",
        "crossformer_small",
    ],
)
def test_a_padded_image_gives_what_it_gives_alone(name) -> None:
    """If the image is larger than a shifted window; see the attention's module."""
    model, (height, width) = make(name, depths=(2, 1, 1, 1)), (45, 50)
    image = torch.randn(1, 3, height, width)
    batch = 3 * torch.randn(2, 3, 64, 70)
    batch[1, :, :height, :width] = image[0]
    mask = torch.ones(2, 64, 70, dtype=torch.bool)
    mask[1, height:] = mask[1, :, width:] = False
    with torch.no_grad():
        _, padded = model.forward_intermediates(batch, mask=mask)
        _, alone = model.forward_intermediates(image)
    for ours, theirs in zip(padded, alone, strict=True):
        real = ours[1, :, : theirs.shape[2], : theirs.shape[3]]
        torch.testing.assert_close(
            real, theirs[0], rtol=0, atol=3e-5 * max(1.0, theirs.abs().max().item())
        )


@pytest.mark.parametrize("name", ["dgt_nano_cmt_block", "vil_small"])
def test_a_mask_keeps_padding_out_where_positions_follow_the_whole_map(name) -> None:
    model = make(name)
    images, mask = torch.randn(1, 3, 64, 64), torch.ones(1, 64, 64, dtype=torch.bool)
    mask[:, 40:] = False
    other = images.masked_fill(~mask[:, None], 9.0)
    assert torch.equal(model.forward_features(images, mask), model.forward_features(other, mask))
    assert not torch.equal(model.forward_features(images), model.forward_features(images, mask))


@pytest.mark.parametrize("name", [*BLOCKS, *HYBRIDS, *WHOLE])
def test_training_reaches_every_parameter_also_under_checkpointing(name) -> None:
    gradients = []
    images = torch.randn(4, 3, 40, 64)
    for checkpointing in (False, True):
        model = make(name).train()
        model.set_grad_checkpointing(checkpointing)
        model(images).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients[0])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_groups_of_a_hybrid_can_be_looked_at() -> None:
    records = dgt.group_records(make("cswin_nano_dga"), torch.randn(1, 3, 64, 48))
    assert [record.grid for record in records] == [(16, 12), (8, 6), (8, 6), (4, 3), (2, 2)]


def test_position_tables_do_not_decay() -> None:
    for name, ending in (
        ("dgt_nano_cmt_block", "position_table"),
        ("swin_nano", "relative_position_bias_table"),
        ("vil_small", "row_position"),
        ("vil_small", "global_tokens"),
    ):
        model = make(name)
        assert sum(parameter.endswith(ending) for parameter in model.no_weight_decay()) in (4, 5)


def test_windows_cost_what_they_attend_to() -> None:
    """2 N L C for windows of N tokens, plus linear layers and norms."""
    one, other = (dgt.cost("swin_nano", size) for size in ((64, 64), (128, 64)))
    by_stage = [(a.flops, b.flops) for a, b in zip(one.stages[1:3], other.stages[1:3], strict=True)]
    # Linear in the tokens, which global attention is not.
    assert all(b == 2 * a for a, b in by_stage)
    tokens, dim, keys = 256, 32, 16
    linears, norms = tokens * dim * dim * 12, 2 * tokens * dim
    assert one.stages[1].flops == 2 * (linears + norms + 2 * keys * tokens * dim)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skeleton": "pvt"}, "skeleton must be one of dgt, swin, .*, got 'pvt'"),
        ({"attention": ("long-short",) * 4, "intervals": (8, 4)}, "intervals must have one number"),
        (
            {"attention": ("sliding window",) * 4, "global_tokens": ()},
            "global_tokens must have one",
        ),
        (
            {"extents": (7, 7)},
            "dims, depths, num_heads, attention and extents must be equally long",
        ),
        ({"attention": ("window",) * 4}, "window must be at least 1, got 0"),
        ({"attention": ("stripe",) * 4, "extents": (1,) * 4}, "num_heads must be even"),
        ({"ffn": "glu"}, "ffn must be 'irffn' or 'mlp', got 'glu'"),
        ({"stem_stride": 4}, "stem_stride must be 1 or 2, got 4"),
    ],
)
def test_bad_settings(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        timm.create_model("dgt_nano", **options)
