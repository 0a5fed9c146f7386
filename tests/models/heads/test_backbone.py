"""Backbones of segmentation and detection: four maps at any size, masks where supported, initial weights."""

from __future__ import annotations

import pytest
import torch

from dgt.models.heads.backbone import build_backbone

SMALL_SWIN = {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dgt_nano", {}),
        ("resnet10t", {}),
        ("pvt_v2_b0", {}),
        ("swin_tiny_patch4_window7_224", SMALL_SWIN),
    ],
)
@pytest.mark.parametrize("size", [(97, 161), (33, 40)])
def test_maps_of_any_model_have_the_sizes_that_the_strides_say(
    name: str, arguments: dict[str, object], size: tuple[int, int]
) -> None:
    backbone = build_backbone(name, **arguments).eval()
    with torch.no_grad():
        maps = backbone(torch.randn(2, 3, *size))
    expected = [
        (2, c, -(-size[0] // s), -(-size[1] // s))
        for c, s in zip(backbone.channels, (4, 8, 16, 32), strict=True)
    ]
    assert [tuple(x.shape) for x in maps] == expected
    assert backbone.strides == [4, 8, 16, 32]


def test_a_padded_image_gives_the_maps_it_gives_alone() -> None:
    backbone = build_backbone("dgt_nano").eval()
    image = torch.randn(1, 3, 64, 96)
    padded = torch.nn.functional.pad(image, (0, 32, 0, 64))
    mask = torch.zeros(1, 128, 128, dtype=torch.bool)
    mask[:, :64, :96] = True
    with torch.no_grad():
        alone, together = backbone(image), backbone(padded, mask)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(
            other[..., : one.shape[-2], : one.shape[-1]], one, atol=1e-4, rtol=1e-4
        )


def test_a_mask_of_another_meaning_is_left_out() -> None:
    """That of Hiera is of a masked autoencoder."""
    backbone = build_backbone("hiera_tiny_224", 224, embed_dim=24, stages=(1, 1, 1, 1)).eval()
    images, mask = torch.randn(1, 3, 224, 224), torch.zeros(1, 224, 224, dtype=torch.bool)
    with torch.no_grad():
        for one, other in zip(backbone(images), backbone(images, mask), strict=True):
            assert torch.equal(one, other)


def test_what_is_no_pyramid_is_refused_by_name() -> None:
    ready = build_backbone("dgt_nano")
    for backbone, options, error, message in (
        ("vit_tiny_patch16_224", {}, ValueError, r"strides .*, got \(16, 16, 16, 16\) from Vision"),
        ("resnet5O", {}, ValueError, "backbone must be a registered timm model, got 'resnet5O'"),
        ("resnet10t", {"top_k": 3}, ValueError, r"'resnet10t' cannot be built with \{'top_k': 3\}"),
        (
            "test_convnext",
            {"depths": [1]},
            ValueError,
            r"built with \{'depths': \[1\]\}: list index",
        ),
        (3, {}, TypeError, "FeatureBackbone, got int"),
        (ready, {"top_k": 3}, TypeError, "arguments must be empty unless backbone is a model name"),
    ):
        with pytest.raises(error, match=message):
            build_backbone(backbone, **options)
