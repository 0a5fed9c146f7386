"""Detection end to end, in small: training, evaluation, predictions, initial weights, and bad settings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from dgt.data.detection import SceneObjects
from dgt.models.heads.mask_rcnn import PaddedMaskRCNN
from dgt.runs import LoadedRun, load_recipe, load_run
from dgt.tasks.detect import (
    DetectionMetrics,
    average_precision,
    build_detector,
    draw,
    files,
    losses,
    note_on_many_objects,
    predict,
)
from dgt.tasks.network import ModelSettings
from dgt.training import Result, evaluate, fit
from dgt_command.predict import predict_files, prediction_lines

from ..data.coco_files import write_coco

SMALL = [
    "--data.image_size=64",
    "--data.batch_size=4",
    "--data.train_size=8",
    "--data.val_size=5",
    "--schedule.epochs=1",
    "--schedule.warmup_epochs=0.5",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
]
SHRUNK = '{"stem_width": 8, "dims": [16, 16, 32, 32], "num_heads": [1, 1, 1, 1], "depths": [1, 1, 1, 1], "top_k": 16}'


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A detector after two steps."""
    folder = tmp_path_factory.mktemp("detect") / "run"
    return fit(load_recipe("scenes_detect", [*SMALL, f"--model.args={SHRUNK}", f"--out={folder}"]))


def test_a_training_reports_cocos_numbers(finished: Result) -> None:
    sizes = ("", "50", "75", "_small")  # these scenes hold no larger objects
    assert set(finished.metrics) == {
        f"{kind}_ap{size}" for kind in ("box", "mask") for size in sizes
    }
    assert all(0 <= value <= 1 for value in finished.metrics.values())
    rows = map(json.loads, (finished.folder / "metrics.jsonl").read_text().splitlines())
    columns = {name for row in rows for name in row}
    for name in (
        "train/loss_mask",
        "train/loss_classifier",
        "train/loss_objectness",
        "train/loss_epoch",
        "val/box_ap",
    ):
        assert name in columns


def test_an_evaluation_finds_the_same_and_writes_cocos_results(
    finished: Result, tmp_path: Path
) -> None:
    metrics = evaluate(finished.folder, predictions=tmp_path / "results.json")
    assert {key: metrics[key] for key in finished.metrics} == pytest.approx(finished.metrics)
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(
        set(entry) >= {"image_id", "category_id", "bbox", "score", "segmentation"}
        for entry in results
    )
    truth = SceneObjects("val", 5, 64).ground_truth()
    assert average_precision(truth, results) == pytest.approx(finished.metrics)


def test_a_perfect_network_has_precision_one(
    monkeypatch: pytest.MonkeyPatch, finished: Result
) -> None:
    run = load_run(finished.folder)
    scenes = SceneObjects("val", 5, 64)
    place = iter(range(5))

    def perfect(images: list[torch.Tensor], _: Any = None) -> list[dict[str, torch.Tensor]]:
        found = []
        for image, index in zip(images, place, strict=False):
            boxes, labels, masks = scenes.objects(index).values()
            assert image.shape[1:] == masks.shape[1:]
            found.append(
                {
                    "boxes": boxes,
                    "labels": labels,
                    "scores": torch.ones(len(boxes)),
                    "masks": masks[:, None].float(),
                }
            )
        return found

    monkeypatch.setattr(PaddedMaskRCNN, "forward", lambda _, images, targets=None: perfect(images))
    metrics = evaluate(run.source)
    assert metrics["box_ap"] == pytest.approx(1)
    assert metrics["mask_ap"] == pytest.approx(1)


def test_boxes_alone_train_and_predict_without_masks(tmp_path: Path) -> None:
    head = {"mask_channels": [], "fpn_channels": 16, "box_channels": 16}
    network = build_detector(ModelSettings("test_resnet", head=head), 8, 64)
    reader = SceneObjects("val", 2, 64)
    images = [pil_to_tensor(reader[index][0]) / 255 for index in range(2)]
    targets = [reader.objects(index) for index in range(2)]
    parts = losses(
        network.train(), images, [{k: v for k, v in t.items() if k != "masks"} for t in targets]
    )
    assert "loss_mask" not in parts
    parts["loss"].backward()
    network.eval()
    network.roi_heads.score_thresh = 0.0
    data: Any = SimpleNamespace(reader=reader, datasets={"val": SimpleNamespace(reader=reader)})
    metrics = DetectionMetrics(data)
    metrics.update(network, images, [{"image_id": torch.tensor(index)} for index in range(2)])
    assert metrics.results
    assert not any("segmentation" in entry for entry in metrics.results)
    found = metrics.compute()
    assert "box_ap" in found
    assert not any(name.startswith("mask") for name in found)
    reader[0][0].save(tmp_path / "scene.png")
    recipe = load_recipe("scenes_detect")
    run = LoadedRun(network, recipe, list(reader.class_names), tmp_path)
    prediction = predict(run, tmp_path / "scene.png", 5)
    assert prediction.objects
    assert draw(run, prediction).width >= 64
    written = json.loads(files(run, prediction, draw(run, prediction))["objects.json"])
    assert set(written[0]) == {"category", "score", "bbox"}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precisions(finished: Result, precision: str) -> None:
    assert 0 <= evaluate(finished.folder, [f"--trainer.precision={precision}"])["box_ap"] <= 1


def test_predictions_are_drawn_and_listed(finished: Result, tmp_path: Path) -> None:
    run = load_run(finished.folder)
    run.network.roi_heads.score_thresh = 0.0
    Image.new("RGB", (90, 70), "red").save(tmp_path / "red.png")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    Image.new("RGB", (1500, 2)).save(tmp_path / "thin.png")
    files = [tmp_path / name for name in ("red.png", "broken.jpg", "thin.png")]
    red, broken, thin = predict_files(run, files, tmp_path / "out")
    assert "broken.jpg' cannot be read as an image" in broken["error"]
    assert "thin.png': images must keep at least one pixel" in thin["error"]
    with pytest.raises(ValueError, match=r"images must have different .* got '.*red\.png' twice"):
        predict_files(run, [tmp_path / "red.png", tmp_path / "red.png"], tmp_path / "out")
    scores = [found["score"] for found in red["objects"]]
    assert scores == sorted(scores, reverse=True)
    assert 0 < len(scores) <= 20
    assert {found["category"] for found in red["objects"]} <= set(run.class_names)
    drawing, listing = map(Path, red["files"])
    assert Image.open(drawing).size == (640, 498)
    entries = json.loads(listing.read_text())
    assert [entry["score"] for entry in entries] == scores
    assert entries[0]["segmentation"]["size"] == [70, 90]
    assert json.loads(json.dumps(red)) == red


@pytest.mark.parametrize("part", ["backbone", "roi_heads.box_head.fc7"])
def test_an_output_of_nan_is_no_prediction(finished: Result, tmp_path: Path, part: str) -> None:
    Image.new("RGB", (90, 70), "red").save(tmp_path / "red.png")
    run = load_run(finished.folder)
    with torch.no_grad():
        for weight in run.network.get_submodule(part).parameters():
            last = weight
        last.fill_(torch.nan)
    (found,) = predict_files(run, [tmp_path / "red.png"], tmp_path / "out")
    assert found["error"].endswith("red.png': the model's output is not a number")
    with pytest.raises(ValueError, match="the model's output is not a number"):
        predict(run, tmp_path / "red.png", 1)


def test_what_is_drawn_is_reported_in_lines() -> None:
    box = (3.2, 4.0, 20.6, 31.0)
    objects = [
        {"category": name, "score": score, "box": box}
        for name, score in (("cat", 0.9), ("dog", 0.3))
    ]
    assert prediction_lines({"objects": objects, "files": ["a.png"]}) == [
        "   90.00 %  cat  (x 3 to 21, y 4 to 31)",
        "  1 objects with a score of at least 50 %; 1 below that are not drawn",
        "  a.png",
    ]
    assert prediction_lines({"classes": [("sky", 0.25)], "files": []}) == ["   25.00 %  sky"]


def test_first_weights_come_from_a_classifier(tmp_path: Path) -> None:
    keys = [f"--model.args={SHRUNK}", *SMALL[1:]]
    source = fit(
        load_recipe("scenes", ["--data.image_size=32", *keys, f"--out={tmp_path / 'classifier'}"])
    )
    still = ["--optimizer.lr=1e-12", "--schedule.warmup_lr=0", "--schedule.min_lr=0"]
    begun = [*SMALL, *still, f"--model.args={SHRUNK}", f"--model.init_from={source.folder}"]
    tuned = load_run(
        fit(load_recipe("scenes_detect", [*begun, f"--out={tmp_path / 'detector'}"])).folder
    )
    weights = {
        key: value
        for key, value in load_run(source.folder).network.state_dict().items()
        if value.ndim > 1
    }
    own = tuned.network.backbone.model.state_dict()
    shared = [key for key in weights if key in own and "centroids" not in key]
    assert len(shared) > 20
    assert all(torch.allclose(own[key], weights[key], atol=1e-6) for key in shared)


def test_coco_files_train_any_backbone(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "coco")
    keys = [
        f"--data.root={root}",
        "--data.dataset=coco",
        "--model.name=resnet10t",
        f"--out={tmp_path / 'run'}",
    ]
    keys += [*SMALL, "--data.batch_size=2", "--data.train_size=null", "--data.val_size=null"]
    result = fit(load_recipe("scenes_detect", keys))
    assert load_run(result.folder).class_names == ["cat", "dog"]
    assert evaluate(result.folder)["images"] == 4


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (ModelSettings("dgt_nano", head={"fpn": 3}), "model.head must only have keys .*, got fpn"),
        (ModelSettings("dgt_nano", head={"options": {"nms": 3}}), "options must be keyword"),
        (
            ModelSettings("dgt_nano", head={"options": {"image_mean": [123.7, 116.3, 103.5]}}),
            r"model\.head\.options\.image_mean must be at least 0 and at most 1, of pixels",
        ),
        (ModelSettings("dgt_huge"), "backbone must be a registered timm model"),
        (ModelSettings("vit_tiny_patch16_224"), "strides"),
    ],
)
def test_bad_settings_are_one_sentence(settings: ModelSettings, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build_detector(settings, 8, 64)


def test_images_of_more_objects_than_a_detector_gives_are_said() -> None:
    def objects(image: int, count: int, category: int, crowd: int = 0) -> list[dict[str, int]]:
        return [{"image_id": image, "category_id": category, "iscrowd": crowd}] * count

    truth = {
        "annotations": objects(1, 5, 1) + objects(1, 1, 2) + objects(2, 5, 1) + objects(2, 9, 1, 1)
    }
    assert note_on_many_objects(truth, [1, 2], 6) == []
    (note,) = note_on_many_objects(truth, [1, 2], 5)
    assert note.startswith("1 validation images have more objects")
    assert note_on_many_objects(truth, [2], 5) == []
    truth = {"annotations": objects(3, 60, 1) + objects(3, 60, 2) + objects(4, 101, 1)}
    (note,) = note_on_many_objects(truth, [3, 4], 300)
    assert note.startswith("1 validation images")


def test_detections_of_all_processes_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = SceneObjects("val", 2, 64)
    metrics = DetectionMetrics(
        SimpleNamespace(reader=scenes, datasets={"val": SimpleNamespace(reader=scenes)})
    )
    metrics.image_ids = [0]
    entry = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 4, 4], "score": 0.5}
    theirs = ([{**entry, "segmentation": {"size": [64, 64], "counts": "PP4"}}], [1])
    monkeypatch.setattr("dgt.tasks.detect.gather_objects", lambda mine: [mine, theirs])
    metrics.compute()
    assert (metrics.results, metrics.image_ids) == (theirs[0], [0, 1])
