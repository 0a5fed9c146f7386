"""Hugging Face data sets for segmentation and detection: the same reports as from folders."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import ExifTags, Image

from dgt.data.coco import CocoImages
from dgt.data.detection import DetectionData
from dgt.data.hub_objects import HubObjects
from dgt.data.image_io import BrokenImage, WrongLabels
from dgt.data.label_maps import HubLabelMaps
from dgt.data.segmentation import SegmentationData

CLASSES = ["wall", "floor", "lamp"]


@pytest.fixture(autouse=True)
def quiet_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not use the user's cache or the network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def stored(pixels: Any, kind: str = "PNG", orientation: int = 1) -> dict[str, Any]:
    """An image as a data set stores it."""
    stream, exif = io.BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(np.asarray(pixels, np.uint8)).save(stream, kind, exif=exif)
    return {"bytes": stream.getvalue(), "path": None}


BROKEN = {"bytes": b"no image", "path": None}
PHOTOGRAPH = np.full((40, 60, 3), 90)


def save_label_maps(root: Path, images: list[Any], maps: list[Any], **names: str) -> Path:
    features = datasets.Features(
        {names.get("image", "image"): datasets.Image(), names.get("mask", "mask"): datasets.Image()}
    )
    columns = dict(zip(features, (images, maps), strict=True))
    table = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": table, "validation": table}).save_to_disk(root)
    return root


def open_maps(root: Path, **options: Any) -> SegmentationData:
    given = {
        "classes": CLASSES,
        "zero_is_ignored": False,
        "num_workers": 0,
        "batch_size": 2,
        **options,
    }
    data = SegmentationData(str(root), image_size=32, **given)
    data.setup()
    return data


class TestLabelMaps:
    def test_a_broken_image_a_wrong_label_and_a_turned_image_are_reported(
        self, tmp_path: Path
    ) -> None:
        labels = np.ones((40, 60))
        maps = [labels, labels, 7 * labels, labels.T]
        turned = stored(PHOTOGRAPH, "JPEG", orientation=6)
        root = save_label_maps(
            tmp_path, [stored(PHOTOGRAPH), BROKEN, stored(PHOTOGRAPH), turned], [*map(stored, maps)]
        )
        reader = HubLabelMaps(root, "train", CLASSES, zero_is_ignored=False)
        image, found = reader[0]
        assert (image.size, set(found.ravel())) == ((60, 40), {1})
        assert isinstance(reader[1], BrokenImage)
        assert "[train:1].image" in reader[1].path
        assert isinstance(reader[2], WrongLabels)
        assert "label 7 is not one of the 3 classes" in reader[2].reason
        image, found = reader[3]
        assert (image.size, found.shape) == ((40, 60), (60, 40))

    def test_batches_are_those_of_segmentation(self, tmp_path: Path) -> None:
        root = save_label_maps(tmp_path, [stored(PHOTOGRAPH)] * 2, [stored(np.ones((40, 60)))] * 2)
        data = open_maps(root)
        images, targets = next(iter(data.train_dataloader()))
        assert images.shape == (2, 3, 32, 32)
        assert set(targets.labels.unique().tolist()) <= {1, 255}

    def test_what_nothing_says_is_asked_for(self, tmp_path: Path) -> None:
        pictures = [stored(PHOTOGRAPH)]
        root = save_label_maps(tmp_path / "a", pictures, pictures, mask="pixels")
        for options, told in (
            ({"zero_is_ignored": None}, "data.zero_is_ignored must be true or false"),
            ({}, "has no label map column: name one of image, pixels as data.label_column"),
            ({"label_column": "image"}, "'image' holds the images already"),
            ({"classes": None}, "the classes of .* are not known"),
        ):
            with pytest.raises((ValueError, FileNotFoundError), match=told):
                open_maps(root, **options)
        data = open_maps(root, label_column="pixels")
        assert isinstance(data.datasets["train"].reader[0], WrongLabels)

    def test_a_label_map_of_another_size_is_refused_before_anything_runs(
        self, tmp_path: Path
    ) -> None:
        root = save_label_maps(tmp_path, [stored(PHOTOGRAPH)], [stored(np.ones((40, 50)))])
        with pytest.raises(ValueError, match=r"has 50 x 40 pixels, but its image .* has 60 x 40"):
            open_maps(root)


def save_objects(
    root: Path, feature: Any, rows: list[Any], image: Any = None, **more: list[Any]
) -> Path:
    kinds = {name: datasets.Value("int32") for name in more}
    features = datasets.Features({"image": datasets.Image(), "objects": feature, **kinds})
    images = [image or stored(PHOTOGRAPH)] * len(rows)
    table = datasets.Dataset.from_dict(
        {"image": images, "objects": rows, **more}, features=features
    )
    datasets.DatasetDict({"train": table, "val": table}).save_to_disk(root)
    return root


NUMBERS = datasets.Sequence(datasets.Value("float32"))
LISTS = {
    "bbox": datasets.Sequence(NUMBERS),
    "category": datasets.Sequence(datasets.ClassLabel(names=["cat", "dog"])),
}
OBJECTS = [{"bbox": NUMBERS, "label": datasets.Value("string")}]


class TestObjects:
    def test_lists_and_objects_of_either_box_format_are_read(self, tmp_path: Path) -> None:
        rows = [{"bbox": [[10, 5, 20, 30], [0, 0, 9, 9]], "category": [1, 0]}]
        lists = HubObjects(save_objects(tmp_path / "a", LISTS, rows), "train", "xywh")
        corners = [
            [{"bbox": [10, 5, 30, 35], "label": "dog"}, {"bbox": [0, 0, 9, 9], "label": "cat"}]
        ]
        objects = HubObjects(save_objects(tmp_path / "b", OBJECTS, corners), "train", "xyxy")
        for reader in (lists, objects):
            assert reader.class_names == ("cat", "dog")
            image, _, found = reader[0]
            assert image.size == (60, 40)
            assert found()["boxes"].tolist() == [[10, 5, 30, 35], [0, 0, 9, 9]]
            assert found()["labels"].tolist() == [2, 1]

    def test_a_broken_image_and_wrong_boxes_are_reported_as_of_files(self, tmp_path: Path) -> None:
        rows = [{"bbox": [[90, 5, 20, 30], [0, 0, 9, 9]], "category": [1, -1]}]
        reader: CocoImages = HubObjects(save_objects(tmp_path / "a", LISTS, rows), "train", "xywh")
        assert ["inside of its image" in each.reason for each in reader.bad] == [True, False]
        assert "must have one of the file's categories" in reader.bad[1].reason
        broken = save_objects(tmp_path / "b", LISTS, rows, image=BROKEN)
        sample = HubObjects(broken, "train", "xywh")[0]
        assert isinstance(sample, BrokenImage)
        assert "[train:0]" in sample.path

    def test_an_object_without_a_category_is_left_out(self, tmp_path: Path) -> None:
        boxes = [{"bbox": [10, 5, 20, 30], "label": label} for label in ("dog", None)]
        reader = HubObjects(save_objects(tmp_path, OBJECTS, [boxes]), "train", "xywh")
        assert reader.class_names == ("dog",)
        assert [each.reason[-8:] for each in reader.bad] == ["got None"]

    def test_lists_of_several_lengths_are_refused(self, tmp_path: Path) -> None:
        rows = [{"bbox": [[10, 5, 20, 30], [0, 0, 9, 9]], "category": [1]}]
        root = save_objects(tmp_path, LISTS, rows)
        with pytest.raises(ValueError, match=r"\[train:0\] .* 2 of bbox, 1 of category$"):
            HubObjects(root, "train", "xywh")

    def test_boxes_of_a_turned_image_need_its_size(self, tmp_path: Path) -> None:
        rows, turned = [{"bbox": [[0, 0, 9, 9]], "category": [1]}], stored(PHOTOGRAPH, "JPEG", 6)
        root = save_objects(tmp_path / "a", LISTS, rows, image=turned)
        with pytest.raises(ValueError, match="has an EXIF orientation"):
            HubObjects(root, "train", "xywh")
        root = save_objects(tmp_path / "b", LISTS, rows, image=turned, width=[40], height=[60])
        assert HubObjects(root, "train", "xywh")[0][0].size == (40, 60)

    def test_what_nothing_says_is_asked_for(self, tmp_path: Path) -> None:
        rows = [{"bbox": [[10, 5, 20, 30]], "category": [1]}]
        root = save_objects(tmp_path, LISTS, rows)
        options: dict[str, Any] = {"num_workers": 0, "batch_size": 1}
        with pytest.raises(ValueError, match=r"data\.box_format must be one of xywh, xyxy"):
            DetectionData(str(root), **options).setup()
        data = DetectionData(str(root), box_format="xywh", **options)
        data.setup()
        _, targets = next(iter(data.train_dataloader()))
        assert len(targets[0]["boxes"]) == 1
        with pytest.raises(ValueError, match=r"name one of image, objects as data\.objects_column"):
            DetectionData(str(root), box_format="xywh", objects_column="x", **options).setup()
