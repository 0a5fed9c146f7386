"""The built-in scenes: pure functions of their arguments, with answers that agree with each other."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgt.data.classification import ClassificationData
from dgt.data.detection import DetectionData
from dgt.data.scenes import DISTANCE, KINDS, RADIUS, Scenes, draw_scene
from dgt.data.segmentation import SegmentationData
from dgt.utils.errors import UserError


def same(first, second):
    return all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(first, second, strict=True)
    )


def parts(scene):
    return [scene.image, scene.label, scene.label_map, scene.boxes, scene.masks, scene.categories]


@given(
    index=st.integers(0, 10**6),
    size=st.integers(32, 97),
    split=st.sampled_from(["train", "val", "test"]),
)
@settings(max_examples=60, deadline=None)
def test_answers_agree_with_each_other(index, size, split):
    scene = draw_scene(index, split, size)
    count = len(scene.categories)
    assert scene.image.shape == (3, size, size)
    assert scene.image.dtype == torch.uint8
    assert scene.masks.shape == (count, size, size)
    assert scene.boxes.shape == (count, 4)
    assert scene.boxes.dtype == torch.float32
    assert scene.masks.flatten(1).any(dim=1).all()
    assert scene.masks.sum(dim=0).max() == 1
    painted = (scene.masks * (scene.categories + 1)[:, None, None]).sum(dim=0)
    assert torch.equal(painted, scene.label_map)
    for mask, box in zip(scene.masks, scene.boxes, strict=True):
        rows, columns = torch.nonzero(mask, as_tuple=True)
        assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


@pytest.mark.parametrize("size", [32, 64])
def test_label_is_the_kind_that_covers_most(size):
    for index in range(150):
        scene = draw_scene(index, "val", size)
        areas = scene.masks.flatten(1).sum(dim=1)
        largest = int(areas.argmax())
        assert scene.categories[largest] == scene.label
        others = torch.cat([areas[:largest], areas[largest + 1 :]])
        assert areas[largest] > 1.5 * others.max()


def test_every_kind_occurs_and_about_equally_often():
    counts = np.bincount(
        [draw_scene(index, image_size=32).label for index in range(800)], minlength=len(KINDS)
    )
    assert counts.min() > 60
    assert counts.max() < 140


def test_shapes_have_equal_area():
    axis = np.linspace(-2, 2, 501, dtype=np.float32)
    for kind, radius in RADIUS.items():
        inside = DISTANCE[kind](axis[None, :] / radius, axis[:, None] / radius) < 0
        assert inside.sum() * (axis[1] - axis[0]) ** 2 == pytest.approx(np.pi, rel=0.02), kind


def test_some_objects_hide_others():
    drawn = [draw_scene(index, image_size=96) for index in range(60)]
    boxes_meet = 0
    for scene in drawn:
        low = torch.maximum(scene.boxes[:, None, :2], scene.boxes[None, :, :2])
        high = torch.minimum(scene.boxes[:, None, 2:], scene.boxes[None, :, 2:])
        boxes_meet += int(((high > low).all(dim=-1).sum() - len(scene.boxes)).item() > 0)
    assert boxes_meet > 20


def test_same_arguments_same_scene_and_others_another():
    first = parts(draw_scene(7, "train", 48))
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    assert same(first, parts(draw_scene(7, "train", 48)))
    others = [
        draw_scene(8, "train", 48),
        draw_scene(7, "val", 48),
    ]
    assert not any(torch.equal(first[0], other.image) for other in others)


def test_another_size_is_the_same_image(monkeypatch):
    monkeypatch.setattr("dgt.data.scenes.NOISE", 0.0)
    small, large = (draw_scene(5, image_size=size) for size in (96, 192))
    assert small.label == large.label
    assert torch.equal(small.categories, large.categories)
    halved = torch.nn.functional.avg_pool2d(large.image.float(), 2)
    assert (halved - small.image.float()).abs().mean() < 3


def test_data_set_has_its_length_and_draws_by_index():
    scenes = Scenes("val", 5, 32)
    assert len(scenes) == 5
    assert scenes.class_names == KINDS
    assert same(parts(scenes[3]), parts(draw_scene(3, "val", 32)))
    with pytest.raises(IndexError):
        scenes[5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "split must be one of train, val, test, got 'dev'"),
        ({"image_size": 31}, "image_size must be at least 32, got 31"),
        ({"index": -1}, "index"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_scene(**{"index": 0, **arguments})


def test_an_empty_set_is_refused():
    with pytest.raises(ValueError, match="length"):
        Scenes("train", 0)


@pytest.mark.parametrize(
    ("data", "option", "value"),
    [
        (ClassificationData, "label_column", "label"),
        (ClassificationData, "val_class_map", "map.txt"),
        (ClassificationData, "train_split", "train"),
        (SegmentationData, "classes", ["disc"]),
        (SegmentationData, "zero_is_ignored", False),
        (DetectionData, "difficult", "keep"),
        (DetectionData, "box_format", "xyxy"),
        (DetectionData, "val_images", "val"),
    ],
)
def test_what_says_how_files_are_read_is_refused(data: Any, option: str, value: Any) -> None:
    with pytest.raises(
        UserError, match=f"data.{option} must be left out for data.dataset 'scenes'"
    ):
        data(dataset="scenes", **{option: value})
