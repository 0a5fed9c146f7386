"""Mask R-CNN over any backbone: the paper's numbers, padding that changes nothing, torchvision's interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.tv_tensors import BoundingBoxes

from dgt.layers import DGAttention
from dgt.models import group_records
from dgt.models.heads.backbone import build_backbone
from dgt.models.heads.mask_rcnn import PaddedMaskRCNN, build_mask_rcnn, mask_rcnn_cost
from dgt.models.padding import real_pixels
from dgt_command.info import model_rows

SMALL: dict[str, Any] = {"fpn_channels": 16, "box_channels": 16, "mask_channels": [16]}
SMALL["anchor_sizes"] = (8, 16, 24, 32, 48)


def small_detector(backbone: str = "dgt_nano", **options: Any) -> PaddedMaskRCNN:
    """A detector with three classes for images of about 64 pixels."""
    torch.manual_seed(3)
    return build_mask_rcnn(backbone, 4, image_size=64, **{**SMALL, **options})


def target(
    *boxes: tuple[int, int, int, int], size: tuple[int, int] = (64, 96)
) -> dict[str, Tensor]:
    """Boxes filled by their masks, all in class 1."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
        mask[y0:y1, x0:x1] = 1
    places = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {"boxes": places, "labels": torch.ones(len(boxes), dtype=torch.int64), "masks": masks}


# Parameters in millions and GFLOPs at 800 x 1280, as printed in the paper. ResNet-50 shows that we
# count the heads as the paper does; it does not say why its numbers for DGT are 1.9 to 3.1 % below
# ours.
@pytest.mark.parametrize(
    ("name", "params", "flops", "surplus"),
    [
        ("resnet50", 44, 260, 0.002),
        ("dgt_tiny", 42, 272, 0.032),
        ("dgt_small", 70, 386, 0.026),
        ("dgt_base", 108, 540, 0.02),
    ],
)
def test_parameters_and_flops_beside_the_papers(
    name: str, params: float, flops: float, surplus: float
) -> None:
    counted = mask_rcnn_cost(name)
    assert counted.params / 1e6 == pytest.approx(params, abs=0.5)
    assert counted.flops / 1e9 == pytest.approx(flops, rel=surplus)


def test_info_shows_them() -> None:
    row = model_rows("dgt_tiny", task="detect")[0]
    assert (row["paper_params"], row["paper_flops"], row["image_size"]) == (
        42_000_000,
        272_000_000_000,
        [800, 1280],
    )
    assert [stage["name"] for stage in row["stages"]] == [
        "backbone",
        "pyramid",
        "rpn_head",
        "box_head",
        "mask_head",
    ]
    assert sum(stage["flops"] for stage in row["stages"]) == pytest.approx(row["flops"], rel=1e-3)


def test_k_is_the_papers_for_a_dgt_by_name_and_the_callers_otherwise() -> None:
    def chosen(model: PaddedMaskRCNN) -> set[int]:
        return {module.top_k for module in model.modules() if isinstance(module, DGAttention)}

    assert chosen(small_detector()) == {500}
    assert chosen(small_detector(top_k=20)) == {20}
    backbone = build_backbone("dgt_nano", top_k=33)
    assert chosen(build_mask_rcnn(backbone, 4, **SMALL)) == {33}


def test_an_image_in_a_padded_batch_gives_what_it_gives_alone() -> None:
    model = small_detector(top_k=24).eval()
    images = [torch.rand(3, 64, 96), torch.rand(3, 75, 64), torch.rand(3, 64, 106)]
    network = model.backbone.model

    def look(batch: list[Tensor]) -> tuple[list[Tensor], Any, list[tuple[int, int]]]:
        padded, _ = model.transform(batch)
        mask = real_pixels(padded.image_sizes, padded.tensors.shape[-2:])
        return (
            model.backbone(padded.tensors, mask),
            group_records(network, padded.tensors, mask)[0],
            padded.image_sizes,
        )

    with torch.no_grad():
        together, record, sizes = look(images)
        for place, image in enumerate(images):
            alone, alone_record, _ = look([image])
            for stride, one, many in zip(model.backbone.strides, alone, together, strict=True):
                height, width = (-(-side // stride) for side in sizes[place])
                torch.testing.assert_close(
                    many[place, :, :height, :width],
                    one[0, :, :height, :width],
                    atol=1e-4,
                    rtol=1e-4,
                )
            ids, alone_ids = record.attention.key_ids[place], alone_record.attention.key_ids[0]
            assert torch.equal(
                positions(ids, record.grid[1]), positions(alone_ids, alone_record.grid[1])
            )


def positions(key_ids: Tensor, columns: int) -> Tensor:
    """Rows and columns of tokens, which do not depend on the width of the padded grid."""
    return torch.stack([key_ids // columns, key_ids % columns])


@pytest.mark.parametrize("backbone", ["dgt_nano", "resnet10t", "swin_tiny_patch4_window7_224"])
def test_one_step_reaches_every_weight(backbone: str) -> None:
    shrunk = (
        {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}
        if "swin" in backbone
        else {}
    )
    model = small_detector(backbone, **shrunk).train()
    images = [torch.rand(3, 64, 96), torch.rand(3, 80, 64)]
    losses = model(images, [target((8, 8, 40, 40), (50, 20, 80, 60)), target(size=(80, 64))])
    assert set(losses) == {
        "loss_classifier",
        "loss_box_reg",
        "loss_mask",
        "loss_objectness",
        "loss_rpn_box_reg",
    }
    total = torch.stack(list(losses.values())).sum()
    assert torch.isfinite(total)
    total.backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert without == []


def test_a_batch_without_objects_trains_too() -> None:
    model = small_detector().train()
    losses = model([torch.rand(3, 64, 96)] * 2, [target(), target()])
    torch.stack(list(losses.values())).sum().backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_detections_come_at_the_images_own_size() -> None:
    model = small_detector(options={"box_score_thresh": 0.0, "box_detections_per_img": 5}).eval()
    with torch.no_grad():
        found = model([torch.rand(3, 45, 90), torch.rand(3, 160, 128)])
    for detections, (height, width) in zip(found, [(45, 90), (160, 128)], strict=True):
        assert detections["masks"].shape[1:] == (1, height, width)
        assert (
            len(detections["boxes"]) == len(detections["scores"]) == len(detections["masks"]) <= 5
        )
        assert (detections["boxes"] <= torch.tensor([width, height, width, height])).all()


def test_thin_images_are_looked_at_as_long_as_a_pixel_is_left() -> None:
    model = small_detector().eval()
    with torch.no_grad():
        assert model([torch.rand(3, 10, 1000)])[0]["masks"].shape[2:] == (10, 1000)
        with pytest.raises(
            ValueError, match=r"resized to 107, got 3 x 1500 \(height x width\) in images\[1\]"
        ):
            model([torch.rand(3, 40, 40), torch.rand(3, 3, 1500)])


@pytest.mark.parametrize("training", [False, True])
def test_autocast_does_not_round_places(training: bool) -> None:
    detector = small_detector(options={"min_size": 320, "max_size": 400}).train(training)
    anchors: list[Tensor] = []
    boxes: list[Tensor] = []
    detector.rpn.anchor_generator.register_forward_hook(lambda *call: anchors.append(call[2][0]))
    pool = detector.roi_heads.box_roi_pool
    pool.register_forward_pre_hook(lambda _, inputs: boxes.append(inputs[1][0]))
    images, targets = [torch.rand(3, 320, 400)], [target((301, 33, 383, 99), size=(320, 400))]
    found = detector(images, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = detector(images, targets)
    assert torch.equal(*anchors)
    assert boxes[1].dtype == torch.float32
    if training:  # the object itself is among the regions
        assert (boxes[1] == targets[0]["boxes"]).all(dim=1).any()
        assert all(loss.isfinite() for loss in found.values())
    else:
        assert found[0]["boxes"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_detector_of_half_precision_has_places_of_full(dtype: torch.dtype) -> None:
    detector = small_detector().to(dtype)
    images = [torch.rand(3, 64, 96, dtype=dtype), torch.rand(3, 64, 64, dtype=dtype)]
    losses = detector.train()(images, [target((8, 8, 40, 40)), target(size=(64, 64))])
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in detector.parameters())
    for found in detector.eval()(images):
        assert found["boxes"].dtype == torch.float32
        assert len(found["boxes"])


def test_training_wants_targets_with_boxes_that_have_area() -> None:
    model = small_detector().train()
    with pytest.raises(ValueError, match="targets must be given in training"):
        model([torch.rand(3, 64, 64)])
    flat = target((8, 8, 20, 20), (30, 8, 30, 20))
    with pytest.raises(
        ValueError,
        match=r"must have positive width and height, got \[30\.0, 8\.0, 30\.0, 20\.0\] in targets\[1\]",
    ):
        model([torch.rand(3, 64, 96)] * 2, [target((8, 8, 20, 20)), flat])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"labels": torch.tensor([0])}, r"labels must be at least 1, .* got 0 in targets\[1\]"),
        (
            {"boxes": torch.tensor([[8.0, 8.0, torch.inf, 20.0]])},
            r"boxes must have positive width and height, got \[8\.0, 8\.0, inf, 20\.0\] in targets\[1\]",
        ),
        (
            {"boxes": torch.tensor([[100.0, 8.0, 120.0, 20.0]])},
            r"boxes must be in their image of 64 x 96 pixels, got \[100\.0, .* in targets\[1\]",
        ),
        (
            {"labels": torch.tensor([1, 2])},
            r"labels must be \(N,\) = \(1,\), one a box, got \(2,\) in targets\[1\]",
        ),
        (
            {"labels": torch.tensor([4])},
            r"labels must be below the number of classes, 4, got 4 in targets\[1\]",
        ),
        (
            {"masks": torch.full((1, 64, 96), 255, dtype=torch.uint8)},
            r"masks must be 1 where .* got 255 in targets\[1\]",
        ),
        (
            {
                "boxes": BoundingBoxes(
                    [[8.0, 8.0, 12.0, 12.0]],
                    format="XYWH",
                    canvas_size=(64, 96),
                )
            },
            r"boxes must be \(N, 4\), x0 y0 x1 y1, got XYWH in targets\[1\]",
        ),
        (
            {"boxes": torch.zeros(0)},
            r"boxes must be \(N, 4\), x0 y0 x1 y1, got \(0,\) in targets\[1\]",
        ),
        ({"labels": torch.tensor([-1])}, r"labels must be at least 1, .* got -1 in targets\[1\]"),
        (
            {"masks": torch.ones(1, 96, 64, dtype=torch.uint8)},
            r"masks must be \(N, H, W\) = \(1, 64, 96\), got \(1, 96, 64\) in targets\[1\]",
        ),
    ],
)
def test_targets_that_would_train_something_else(wrong: dict[str, Tensor], message: str) -> None:
    model, right = small_detector().train(), target((8, 8, 20, 20))
    with pytest.raises(ValueError, match=message):
        model([torch.rand(3, 64, 96)] * 2, [right, {**right, **wrong}])
    with pytest.raises(ValueError, match="targets must be one an image, 2, got 1"):
        model([torch.rand(3, 64, 96)] * 2, [right])
    with pytest.raises(ValueError, match="images must be at least one in training, got none"):
        model([], [])
    assert model.eval()([]) == []


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("num_classes", 1, "be at least 2, including background, got 1"),
        ("image_size", 16, "be at least 32, got 16"),
        ("box_channels", "x", "be an integer of at least 1, got 'x'"),
        ("mask_channels", "wide", "be integers of at least 1, got 'wide'"),
        ("anchor_sizes", (8, 16), "be 5 numbers of at least 1, got"),
        ("options", {"box_treshold": 1}, "be keyword arguments of .* MaskRCNN, got box_treshold"),
    ],
)
def test_bad_settings_are_named(argument: str, value: Any, expected: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{argument} must {expected}"):
        build_mask_rcnn(**{"backbone": "dgt_nano", "num_classes": 4, argument: value})
