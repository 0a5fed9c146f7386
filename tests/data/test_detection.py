"""The detection data module: images for training and evaluation, and bad files reported, skipped, or fatal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dgt.data.detection import DetectionData
from dgt.data.image_io import BrokenImagesError
from dgt.data.loader import Key

from .coco_files import crowd, entry, write_coco


def open_data(root: Path | None, **options: Any) -> DetectionData:
    """The data module over a folder, or over small scenes, set up."""
    scenes = {"dataset": "scenes", "image_size": 48, "train_size": 12, "val_size": 5}
    place: dict[str, Any] = scenes if root is None else {"root": str(root)}
    data = DetectionData(**{**place, "batch_size": 2, "num_workers": 0, **options})
    data.setup()
    return data


def test_training_leaves_out_crowds_empty_images_and_boxes_without_area(tmp_path: Path) -> None:
    data = open_data(write_coco(tmp_path), flip=0.0)
    samples = [
        data.datasets["train"][Key(0, 0, item)] for item in range(len(data.datasets["train"]))
    ]
    assert len(samples) == 2
    first, third = (sample[1] for sample in samples)
    assert first["boxes"].tolist() == [[4, 6, 24, 30], [26, 8, 44, 36]]
    assert first["labels"].tolist() == [1, 2]
    assert first["masks"].shape == (2, 40, 48)
    assert first["masks"].sum(dim=(1, 2)).tolist() == [20 * 24, 18 * 28]
    assert third["boxes"].tolist() == [[10, 4, 50, 36]]
    assert samples[0][0].shape == (3, 40, 48)
    image = next(iter(data.train_dataloader()))[0][0]
    assert image.dtype == torch.float32
    assert 0 <= image.min() < image.max() <= 1


def test_a_validation_on_the_training_file_is_said(tmp_path: Path) -> None:
    root = write_coco(tmp_path)
    paths = {"val_images": "train2017", "val_annotations": DetectionData.train_annotations}
    for options, told in ((paths, 1), ({}, 0)):
        notes = open_data(root, **options).notes
        assert sum("is that of training and of validation" in note for note in notes) == told


def test_empty_images_are_trained_on_if_asked_for(tmp_path: Path) -> None:
    left_out = "2 of 4 training images have no object to train on and are left out"
    assert any(note.startswith(left_out) for note in open_data(write_coco(tmp_path)).notes)
    data = open_data(tmp_path, keep_empty=True)
    assert not any(note.startswith(left_out) for note in data.notes)
    assert any(re.match("2 of 6 annotations of .* are regions to ignore", n) for n in data.notes)
    targets = [data.datasets["train"][Key(0, 0, item)][1] for item in range(4)]
    assert [len(target["boxes"]) for target in targets] == [2, 0, 1, 0]
    assert targets[3]["boxes"].shape == (0, 4)
    assert targets[3]["masks"].shape == (0, 40, 40)


def test_evaluation_sees_every_image_and_keeps_every_annotation(tmp_path: Path) -> None:
    data = open_data(write_coco(tmp_path))
    seen = [int(target["image_id"]) for _, targets in data.val_dataloader() for target in targets]
    assert seen == [1, 2, 3, 4]
    truth = data.datasets["val"].reader.ground_truth()
    assert [item["id"] for item in truth["annotations"]] == [1, 2, 3, 4, 5, 6]
    assert data.class_names == ("cat", "dog")
    assert data.reader.category_ids == (3, 7)


def test_a_flip_moves_pixels_boxes_and_masks_alike(tmp_path: Path) -> None:
    root = write_coco(tmp_path)
    plain, flipped = (
        open_data(root, flip=flip).datasets["train"][Key(0, 0, 0)] for flip in (0.0, 1.0)
    )
    assert torch.equal(flipped[0], plain[0].flip(-1))
    assert torch.equal(flipped[1]["masks"], plain[1]["masks"].flip(-1))
    assert flipped[1]["boxes"].tolist() == [[24, 6, 44, 30], [4, 8, 22, 36]]


def test_boxes_end_at_the_border_and_slivers_go(tmp_path: Path) -> None:
    root = write_coco(tmp_path, entry(20, 1, (40, 30, 60, 50)), entry(21, 1, (47.6, 3, 50, 9)))
    target = open_data(root, flip=0.0).datasets["train"][Key(0, 0, 0)][1]
    assert target["boxes"].tolist() == [[4, 6, 24, 30], [26, 8, 44, 36], [40, 30, 48, 40]]
    assert len(target["masks"]) == len(target["labels"]) == 3


def test_flips_are_a_function_of_seed_epoch_and_item() -> None:
    passes = [
        [
            [
                image
                for images, _ in open_data(None, num_workers=workers).train_dataloader()
                for image in images
            ]
        ][0]
        for workers in (0, 2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*passes, strict=True))
    other = [image for images, _ in open_data(None, seed=1).train_dataloader() for image in images]
    assert not all(torch.equal(a, b) for a, b in zip(passes[0], other, strict=True))


def test_scenes_have_boxes_tight_around_their_masks() -> None:
    data = open_data(None)
    for images, targets in data.train_dataloader():
        for image, target in zip(images, targets, strict=True):
            assert image.shape == (3, 48, 48)
            assert 1 <= target["labels"].min() <= target["labels"].max() <= 8
            for (x0, y0, x1, y1), mask in zip(
                target["boxes"].int().tolist(), target["masks"], strict=True
            ):
                assert mask[y0:y1, x0:x1].sum() == mask.sum() > 0
    truth = data.datasets["val"].reader.ground_truth()
    assert len(truth["images"]) == 5
    assert {item["image_id"] for item in truth["annotations"]} == {0, 1, 2, 3, 4}
    assert [category["name"] for category in truth["categories"]] == list(data.class_names)


class TestBadData:
    def test_annotations_that_cannot_be_used_stop_the_run_or_are_left_out_and_listed(
        self, tmp_path: Path
    ) -> None:
        extra = [
            entry(70, 99, (1, 1, 5, 5)),
            entry(71, 1, (1, 1, 5, 5), category_id=50),
            entry(72, 1, (1, 1, 5, 5), bbox=None, segmentation=None),
        ]
        root = write_coco(tmp_path, *extra)
        with pytest.raises(BrokenImagesError, match="3 of the 9 annotations of") as raised:
            open_data(root)
        for reason in (
            "annotation 70: must have one of the file's images as its image_id, got 99",
            "annotation 71: must have one of the file's categories as its category_id, got 50",
            "annotation 72: must have [x, y, width, height], or a mask that can be drawn",
        ):
            assert reason in str(raised.value)
        data = open_data(root, max_broken_share=0.5)
        assert sum("3 of 9 annotations" in note for note in data.notes) == 2  # one a split
        assert len(data.broken_images["train annotations"]) == 3
        assert len(data.datasets["train"][Key(0, 0, 0)][1]["boxes"]) == 2
        assert len(data.datasets["val"].reader.ground_truth()["annotations"]) == 6
        assert data.write_broken_images(tmp_path / "broken.txt") == 6
        assert "annotation 72\tmust have [x, y" in (tmp_path / "broken.txt").read_text()

    def test_unreadable_images_stop_the_run_or_are_left_out_and_listed(
        self, tmp_path: Path
    ) -> None:
        root = write_coco(tmp_path)
        (root / "val2017" / "000000000003.png").write_bytes(b"no image")
        (root / "val2017" / "000000000004.png").unlink()
        with pytest.raises(BrokenImagesError, match="the 4 images of split 'val' cannot be read"):
            list(open_data(root).val_dataloader())
        data = open_data(root, max_broken_share=0.5)
        assert [
            int(target["image_id"]) for _, targets in data.val_dataloader() for target in targets
        ] == [1, 2]
        broken = {Path(name).name for name in data.broken_images["val"].broken}
        assert broken == {"000000000003.png", "000000000004.png"}

    def test_an_image_of_another_size_than_annotated_is_broken(self, tmp_path: Path) -> None:
        root = write_coco(tmp_path)
        (root / "train2017" / "000000000001.png").write_bytes(
            (root / "train2017" / "000000000004.png").read_bytes()
        )
        broken = open_data(root).datasets["train"][Key(0, 0, 0)]
        assert broken.reason == "is 40 x 40, annotated as 48 x 40"

    def test_splits_must_agree_on_their_categories(self, tmp_path: Path) -> None:
        root = write_coco(tmp_path)
        file = root / "annotations" / "instances_val2017.json"
        content = json.loads(file.read_text())
        content["categories"].append({"id": 9, "name": "owl"})
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"instances_val2017\.json differ .* the training"):
            open_data(root)

    def test_nothing_to_train_on_is_reported(self, tmp_path: Path) -> None:
        root = write_coco(tmp_path)
        file = root / "annotations" / "instances_train2017.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "annotations": []}))
        with pytest.raises(ValueError, match="the 4 images of train contain no annotated object"):
            open_data(root)

    def test_nothing_to_compare_with_is_reported(self, tmp_path: Path) -> None:
        root = write_coco(tmp_path)
        file = root / "annotations" / "instances_val2017.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "annotations": [crowd(5, 3)]}))
        with pytest.raises(
            ValueError,
            match=r"4 images of val contain no .* object, but 1 regions to ignore \(iscrowd",
        ):
            open_data(root)

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"dataset": "voc"}, r"data\.dataset must be one of coco, scenes, got 'voc'"),
            ({"root": None}, r"data\.root: expected a folder with train2017"),
            ({"flip": 2.0}, r"flip must lie in \[0, 1\], got 2\.0"),
        ],
    )
    def test_values_out_of_range_are_named(self, options: dict[str, Any], sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence):
            DetectionData(**{"root": "images", **options}).setup()

    def test_places_that_are_not_there_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"image folder .* does not exist"):
            open_data(tmp_path)
        root = write_coco(tmp_path)
        with pytest.raises(FileNotFoundError, match=r"image folder .* does not exist"):
            open_data(root, train_images="photos")


def test_paths_are_free(tmp_path: Path) -> None:
    root = write_coco(tmp_path)
    (root / "train2017").rename(tmp_path / "photos")
    (root / "annotations" / "instances_train2017.json").rename(tmp_path / "mine.json")
    data = open_data(
        root / "val2017",
        train_images=str(tmp_path / "photos"),
        train_annotations="../mine.json",
        val_images=".",
        val_annotations="../annotations/instances_val2017.json",
    )
    assert len(data.datasets["train"]) == 2
    assert len(data.datasets["val"]) == 4


def test_real_annotations(shared_data: Path) -> None:
    data = open_data(shared_data / "coco-mini", image_size=64, train_size=8, val_size=4)
    assert data.num_classes == 80
    assert data.reader.category_ids[-1] == 90
    assert (
        sum(item["iscrowd"] for item in data.datasets["val"].reader.ground_truth()["annotations"])
        == 21
    )
    for images, targets in data.train_dataloader():
        for image, target in zip(images, targets, strict=True):
            assert target["masks"].shape == (len(target["boxes"]), *image.shape[1:])
            assert len(target["boxes"]) > 0
