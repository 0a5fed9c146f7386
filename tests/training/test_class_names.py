"""Classes are compared by name: in resuming, fine-tuning, testing; what the data lacks is said."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models._hub import save_for_hf
from torch import nn

from dgt.data.coco import CocoImages, draw_masks, encode_masks
from dgt.data.label_maps import LabelMapFolder
from dgt.data.segmentation import SegmentationData
from dgt.models.heads.mask_rcnn import build_mask_rcnn
from dgt.models.heads.upernet import build_upernet
from dgt.runs import load_recipe
from dgt.runs.model import export_model, initialize, make_record
from dgt.tasks.detect import average_precision
from dgt.training import evaluate, fit
from dgt.training.loop import Preempted, Training
from dgt.utils.class_names import changes, labels_by_name, readable

from ..data.coco_files import write_coco

TINY = (
    "--model.name=test_resnet",
    "--data.dataset=auto",
    "--data.image_size=32",
    "--data.batch_size=4",
    "--data.num_workers=0",
    "--data.train_size=null",
    "--data.val_size=null",
    "--data.cache=false",
    "--trainer.accelerator=cpu",
    "--schedule.epochs=4",
)


def class_folders(root: Path, names: Sequence[str], train: int = 4) -> Path:
    for split, count in (("train", train), ("val", 2)):
        for label, name in enumerate(names):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                color = (40 * label, 255 - 40 * index, 90)
                Image.new("RGB", (40, 40), color).save(root / split / name / f"{index}.png")
    return root


def train(root: Path, out: Path, *more: str, resume: bool = False) -> Any:
    keys = [*TINY, f"--data.root={root}", f"--out={out}", *more]
    return fit(load_recipe("scenes", keys), resume=resume)


def stopped(root: Path, out: Path, after: int) -> None:
    """A run that is asked to stop after some steps."""
    usual = Training.between_steps

    def between_steps(self: Training, due: bool) -> None:
        if self.progress.step == after:
            self.stops.append(signal.SIGTERM)
        usual(self, due)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "between_steps", between_steps)
        with pytest.raises(Preempted):
            train(root, out)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["cat", "cow", "dog"], "cow new"),
        (["Cat", "dog"], "cat gone; Cat new"),
    ],
)
def test_resuming_with_other_classes_is_refused_before_anything_runs(
    tmp_path: Path, names: list[str], told: str
) -> None:
    stopped(class_folders(tmp_path / "a", ["cat", "dog"]), tmp_path / "run", after=2)
    recipe = (tmp_path / "run" / "recipe.yaml").read_bytes()
    other = class_folders(tmp_path / "b", names, train=8 // len(names))
    with pytest.raises(ValueError, match=rf"was trained on other classes \({told}\)"):
        train(other, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == recipe


@pytest.mark.parametrize(("count", "after"), [(2, 6), (3, 2), (8, 3)])
def test_resuming_with_another_number_of_images_is_said_and_ends_well(
    tmp_path: Path, count: int, after: int
) -> None:
    """Also where the new last step has passed: 8 steps with 4 images a class, 4 with 2."""
    stopped(class_folders(tmp_path / "a", ["cat", "dog"]), tmp_path / "run", after)
    other = class_folders(tmp_path / "b", ["cat", "dog"], count)
    result = train(other, tmp_path / "run", resume=True)
    assert result.epochs == 4
    assert 0 <= result.metrics["top1"] <= 1
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"resumes with {2 * count} train images, which were 8" in log
    assert f"resumes with data.root {other}, which was {tmp_path / 'a'}" in log
    json.loads((tmp_path / "run" / "results.json").read_text())


def saved_classifier(folder: Path, names: list[str] | None, count: int) -> nn.Module:
    network: nn.Module = timm.create_model("test_resnet", num_classes=count)
    config = {} if names is None else {"label_names": names}
    save_for_hf(network, str(folder), config, safe_serialization=True)
    return network


class TestFirstWeights:
    @pytest.mark.parametrize("now", [["ant", "dog", "bee", "cat"], ["dog"]])
    def test_a_classifier_keeps_the_rows_of_classes_that_both_have(
        self, tmp_path: Path, now: list[str]
    ) -> None:
        theirs = saved_classifier(tmp_path, ["cat", "dog"], 2).state_dict()
        network = timm.create_model("test_resnet", num_classes=len(now))
        own = {key: value.clone() for key, value in network.state_dict().items()}
        initialize(network, tmp_path, now)
        with pytest.raises(ValueError, match="of a model other than the recipe's model"):
            initialize(timm.create_model("test_vit", num_classes=2), tmp_path, now)
        for key, value in network.state_dict().items():
            if not key.startswith("fc."):
                assert torch.equal(value, theirs[key])
                continue
            for label, name in enumerate(now):
                known = name in ("cat", "dog")
                row = theirs[key][["cat", "dog"].index(name)] if known else own[key][label]
                assert torch.equal(value[label], row)

    @pytest.mark.parametrize("task", ["segment", "detect"])
    def test_segmenters_and_detectors_do_so_too(self, tmp_path: Path, task: str) -> None:
        def build(count: int) -> nn.Module:
            if task == "segment":
                return build_upernet("test_resnet", count, channels=16, auxiliary_channels=16)
            return build_mask_rcnn("test_resnet", count + 1)  # with background

        recipe = load_recipe(f"scenes_{task}", ["--model.name=test_resnet"])
        theirs = build(3)
        export_model(tmp_path, theirs, make_record(recipe, ["cat", "dog", "owl"]))
        network = build(2)
        own = {key: value.clone() for key, value in network.state_dict().items()}
        initialize(network, tmp_path, ["owl", "ant"], task)
        first = int(task == "detect")
        kept, source = network.state_dict(), theirs.state_dict()
        seen = 0
        for key, value in kept.items():
            if value.shape == source[key].shape:
                assert torch.equal(value, source[key])
                continue
            rows = len(value) // (2 + first)
            parts = [each.unflatten(0, (-1, rows)) for each in (value, source[key], own[key])]
            assert torch.equal(parts[0][:first], parts[1][:first])
            assert torch.equal(parts[0][first], parts[1][first + 2])
            assert torch.equal(parts[0][first + 1], parts[2][first + 1])
            seen += 1
        assert seen == (6 if first else 4)

    def test_weights_without_names_are_taken_in_order_if_they_are_as_many(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        theirs = saved_classifier(tmp_path, None, 2).state_dict()
        network = timm.create_model("test_resnet", num_classes=2)
        initialize(network, tmp_path, ["cat", "dog"])
        assert torch.equal(network.state_dict()["fc.weight"], theirs["fc.weight"])
        assert "has no names for its 2 classes" in caplog.text
        network = timm.create_model("test_resnet", num_classes=3)
        before = network.fc.weight.clone()
        initialize(network, tmp_path, ["cat", "dog", "owl"])
        assert torch.equal(network.fc.weight, before)

    @pytest.mark.parametrize(
        ("before", "now"),
        [
            ([str(n) for n in range(11)], sorted(map(str, range(11)))),
            (["3", "1", "2"], ["01", "02", "03"]),
            (["cafe\u0301", "b"], ["b", "caf\u00e9"]),
        ],
    )
    def test_rows_go_by_numbers_and_by_accents(
        self, tmp_path: Path, before: list[str], now: list[str]
    ) -> None:
        theirs = saved_classifier(tmp_path, before, len(before)).state_dict()
        network = timm.create_model("test_resnet", num_classes=len(now))
        initialize(network, tmp_path, now)
        labels, _ = labels_by_name(now, before)
        assert labels != list(range(len(now)))
        assert torch.equal(network.state_dict()["fc.weight"], theirs["fc.weight"][labels])

    def test_a_training_says_what_it_takes(self, tmp_path: Path) -> None:
        saved_classifier(tmp_path / "model", ["dog", "owl"], 2)
        root = class_folders(tmp_path / "images", ["cat", "dog"])
        more = [f"--model.init_from={tmp_path / 'model'}", "--schedule.epochs=1"]
        train(root, tmp_path / "run", *more)
        assert "knows 1 of the 2 classes: dog" in (tmp_path / "run" / "log.txt").read_text()


class TestEvaluation:
    @pytest.mark.parametrize("of_data", [["dog"], ["ant", "cat", "dog"]])
    def test_labels_go_by_the_names_of_the_model(
        self, tmp_path: Path, of_data: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        names = ["dog", "cat", "ant"]  # not sorted
        network = saved_classifier(tmp_path / "model", names, 3)
        network.fc.weight.data.zero_()
        network.fc.bias.data.copy_(torch.tensor([1.0, 0.0, 0.0]))  # sees a dog everywhere
        save_for_hf(
            network, str(tmp_path / "model"), {"label_names": names}, safe_serialization=True
        )
        root = class_folders(tmp_path / "images", of_data)
        found = evaluate(tmp_path / "model", ["--data.root", str(root), "--data.image_size", "32"])
        assert (found["images"], found["top1"]) == (2 * len(of_data), 1 / len(of_data))
        assert f"the data has {len(of_data)} of its 3" in caplog.text

    def test_weights_without_names_take_folders_in_order(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        saved_classifier(tmp_path / "model", None, 2)
        root = class_folders(tmp_path / "images", ["n01", "n02"])
        keys = ["--data.root", str(root), "--data.image_size", "32"]
        assert evaluate(tmp_path / "model", keys)["images"] == 4
        assert "taken in their order, n01, n02" in caplog.text
        for split in ("train", "val"):
            (root / split / "n01").rename(root / f"{split}-n01")
        with pytest.raises(ValueError, match="the model does not know n02"):
            evaluate(tmp_path / "model", keys)

    def test_a_class_that_the_model_does_not_know_is_refused(self, tmp_path: Path) -> None:
        saved_classifier(tmp_path / "model", ["cat", "dog"], 2)
        root = class_folders(tmp_path / "images", ["cat", "owl"])
        with pytest.raises(ValueError, match="the model does not know owl"):
            evaluate(tmp_path / "model", ["--data.root", str(root)])


@pytest.mark.parametrize(
    ("data", "model", "labels"),
    [
        (["b", "a"], ["a", "b", "c"], [1, 0]),
        (["a", "b"], ["a", "b"], [0, 1]),
        (["x", "y"], ["0", "1"], [0, 1]),
        (["1"], ["0", "1"], [1]),
        (["0", "1"], ["a", "b", "c"], [0, 1]),
        (["crane"], ["crane", "owl", "crane"], None),
        (["x"], ["0", "1"], None),
        (["0", "1", "2"], ["a", "b"], None),
        (["0", "1", "10", "2"], [str(n) for n in range(11)], [0, 1, 10, 2]),
        (["0", "1", "2", "3"], ["0", "2", "3", "1"], [0, 3, 1, 2]),
        (["00", "01", "02"], ["2", "1", "0"], [2, 1, 0]),
        (
            [str(n) for n in sorted(range(11), key=str)],
            list("abcdefghijk"),
            sorted(range(11), key=str),
        ),
        (["1", "2", "3"], ["0", "1", "2"], None),
        (["0", "1"], ["1", "2"], None),
        (["caf\u00e9", "b"], ["b", "cafe\u0301"], [1, 0]),
        (["A\u030a"], ["a", "\u00c5"], [1]),
    ],
)
def test_labels_by_name(data: list[str], model: list[str], labels: list[int] | None) -> None:
    if labels is None:
        with pytest.raises(ValueError, match="of the data and of the model differ"):
            labels_by_name(data, model)
    else:
        assert labels_by_name(data, model)[0] == labels


def test_changes_are_named() -> None:
    assert changes(["a", "b"], ["b", "a"]) == "the same in another order"
    assert changes(["a", "b", "c"], ["c", "b"]) == "a gone; others in another order"
    assert changes(["a"], ["a", "b"]) == "b new"
    assert changes(["caf\u00e9"], ["cafe\u0301"]) == ""


def label_maps(root: Path, values: Sequence[int], folder: str = "labels") -> Path:
    """Images of four squares each, with the values in them."""
    for split in ("train", "val"):
        for index in range(4):
            pixels = np.zeros((64, 64), np.uint8)
            for place, value in enumerate(np.resize(values, 4)):
                pixels[32 * (place // 2) :][:32, 32 * (place % 2) :][:, :32] = value
            for name, image in (("images", np.stack([pixels] * 3, -1)), (folder, pixels)):
                (root / name / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(root / name / split / f"{index}.png")
    return root


MAPS = [
    (2, [0, 255], "labels", "c1 (1 of 2 classes); 255 is read as no label"),
    (3, [1, 2], "labels", "c0 (1 of 3 classes); label 0 is read as the first class"),
    (3, [0, 1, 2], "annotations", "c2 (1 of 3 classes); label 0 is read as none"),
    (4, [0, 2], "labels", "c1, c3 (2 of 4 classes)"),
    (3, [0, 1, 2], "labels", None),
    (3, [0, 1, 2, 3], "annotations", None),
]


@pytest.mark.parametrize(("count", "values", "folder", "told"), MAPS)
def test_classes_without_a_pixel_are_said_after_the_first_pass(
    tmp_path: Path, count: int, values: list[int], folder: str, told: str | None
) -> None:
    data = SegmentationData(
        str(label_maps(tmp_path, values, folder)),
        image_size=32,
        scale=(64, 64),
        batch_size=2,
        num_workers=0,
        classes=[f"c{number}" for number in range(count)],
    )
    data.setup()
    list(data.train_dataloader())
    remarks = data.remarks()
    assert [str(told) in remark for remark in remarks] == [True] * (told is not None)


def test_a_training_and_an_evaluation_say_them_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = label_maps(tmp_path / "data", [0, 255])
    (root / "classes.txt").write_text("background\nlane\n")
    keys = ["--data.scale=[64, 64]", "--schedule.epochs=2", "--trainer.pictures_every=null"]
    keys += ["--model.head={channels: 16, auxiliary_channels: 16}", f"--data.root={root}"]
    tiny = [key for key in TINY if "cache" not in key and "epochs" not in key]
    fit(load_recipe("scenes_segment", [*tiny, *keys, f"--out={tmp_path / 'run'}"]))
    log = (tmp_path / "run" / "log.txt").read_text()
    for split in ("training", "validation"):
        assert log.count(f"no pixel of the {split} images is labeled lane") == 1
    evaluate(tmp_path / "run")
    assert "no pixel of the validation images is labeled lane" in caplog.text


def test_label_maps_of_a_part_of_the_classes(tmp_path: Path) -> None:
    root = label_maps(tmp_path, [0, 1, 255])
    reader = LabelMapFolder(root, "val", ["road", "car"])
    stored = reader[0][1]
    reader.use_classes(["sky", "car", "road"], [2, 1])
    assert np.array_equal(reader[0][1], np.array([2, 1, *range(2, 256)], np.uint8)[stored])
    assert reader.class_names == ("sky", "car", "road")


def test_a_coco_file_of_a_part_of_the_classes(tmp_path: Path) -> None:
    file = write_coco(tmp_path) / "annotations" / "instances_val2017.json"
    reader = CocoImages(file)  # cat and dog
    truth = reader.ground_truth()
    reader.use_classes(["owl", "dog", "cat", "ant"], [2, 1])
    assert reader.objects(0)["labels"].tolist() == [3, 2]
    entry = truth["annotations"][0]
    mask = encode_masks(draw_masks([entry], 40, 48))[0]
    found = {"image_id": 1, "bbox": entry["bbox"], "segmentation": mask, "score": 1.0}
    detections = [{**found, "category_id": number} for number in reader.category_ids]
    alone = [each for each in detections if each["category_id"] in (3, 7)]
    assert average_precision(truth, detections) == average_precision(truth, alone)


def test_numbers_of_wordnet_are_read_as_nouns() -> None:
    assert readable("n02102040") == "English springer (n02102040)"
    assert [readable(name) for name in ("n99999999", "dog", "n021")] == ["n99999999", "dog", "n021"]
