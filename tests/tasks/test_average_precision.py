"""Average precision equals COCO's own code, on real annotations with crowds and on the built-in scenes."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dgt.data.coco import CocoImages, draw_masks, encode_masks
from dgt.data.detection import SceneObjects
from dgt.tasks.detect import average_precision, coco_results

Truth = dict[str, list[dict[str, Any]]]


def perfect(truth: Truth, crowds: bool = False) -> list[dict[str, Any]]:
    """The ground truth as detections of score 1; with `crowds`, crowd regions are detected too, which is no mistake."""
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    found = []
    for entry in truth["annotations"]:
        if crowds or not entry["iscrowd"]:
            mask = encode_masks(draw_masks([entry], *sizes[entry["image_id"]]))[0]
            kept = {key: entry[key] for key in ("image_id", "category_id", "bbox")}
            found.append({**kept, "score": 1.0, "segmentation": mask})
    return found


def perturbed(truth: Truth, seed: int) -> list[dict[str, Any]]:
    """Detections with shifted boxes, masks of other objects, wrong categories, duplicates, and misses, with crowds."""
    rng = random.Random(seed)
    categories = [category["id"] for category in truth["categories"]]
    found = []
    for entry in perfect(truth, crowds=True):
        for _ in range(rng.choice((0, 1, 1, 2))):
            x, y, width, height = entry["bbox"]
            box = [x + rng.gauss(0, 0.08) * width, y + rng.gauss(0, 0.08) * height]
            box += [width * rng.uniform(0.75, 1.25), height * rng.uniform(0.75, 1.25)]
            category = rng.choice(categories) if rng.random() < 0.1 else entry["category_id"]
            found.append({**entry, "bbox": box, "category_id": category, "score": rng.random()})
    by_image: dict[int, list[dict[str, Any]]] = {}
    for entry in found:
        by_image.setdefault(entry["image_id"], []).append(entry)
    for entries in by_image.values():
        if len(entries) > 1 and rng.random() < 0.3:
            entries[0]["segmentation"] = entries[1]["segmentation"]
    return found


def official(truth: Truth, detections: list[dict[str, Any]]) -> list[float]:
    """pycocotools' results: six numbers for boxes, six for masks."""
    coco, cocoeval = (
        pytest.importorskip("pycocotools.coco"),
        pytest.importorskip("pycocotools.cocoeval"),
    )
    numbers: list[float] = []
    for kind, left_out in (("bbox", ()), ("segm", ("bbox",))):
        with contextlib.redirect_stdout(io.StringIO()):
            known = coco.COCO()
            known.dataset = copy.deepcopy(truth)
            known.createIndex()
            given = [
                {key: value for key, value in entry.items() if key not in left_out}
                for entry in detections
            ]
            evaluation = cocoeval.COCOeval(known, known.loadRes(copy.deepcopy(given)), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        numbers += evaluation.stats[:6].tolist()
    return numbers


@pytest.fixture(scope="module")
def scenes() -> Truth:
    """The ground truth of a few scenes, in which the first small object is a crowd."""
    truth = copy.deepcopy(SceneObjects("val", 12, 96).ground_truth())
    for entry in truth["annotations"][1::5]:
        entry["iscrowd"] = 1
    return truth


def assert_equals_official(truth: Truth, detections: list[dict[str, Any]]) -> None:
    """All twelve numbers, to 1e-6; where no object is of a size, theirs is -1 and ours is missing."""
    numbers = list(average_precision(truth, detections).values())
    theirs = [number for number in official(truth, detections) if number != -1]
    assert 0 < numbers[0] < 1
    assert numbers == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_equals_pycocotools_on_scenes(scenes: Truth, seed: int) -> None:
    assert_equals_official(scenes, perturbed(scenes, seed))


def test_equals_pycocotools_on_real_annotations(shared_data: Path) -> None:
    whole = CocoImages(
        shared_data / "coco-mini" / "annotations" / "instances_val2017.json"
    ).ground_truth()
    crowded = {entry["image_id"] for entry in whole["annotations"] if entry["iscrowd"]}
    chosen = crowded | {image["id"] for image in whole["images"][:40]}
    truth = {
        "images": [image for image in whole["images"] if image["id"] in chosen],
        "annotations": [entry for entry in whole["annotations"] if entry["image_id"] in chosen],
        "categories": whole["categories"],
    }
    assert len(crowded) > 10
    assert_equals_official(truth, perturbed(truth, 0))
    found = average_precision(truth, perfect(truth))
    assert list(found.values()) == pytest.approx([1.0] * 12, abs=1e-9)


def test_ground_truth_has_precision_one_and_nothing_has_none(scenes: Truth) -> None:
    before = copy.deepcopy(scenes)
    whole = average_precision(scenes, perfect(scenes))
    assert whole == pytest.approx(  # nothing large
        {
            f"{kind}_{name}": 1.0
            for kind in ("box", "mask")
            for name in ("ap", "ap50", "ap75", "ap_small", "ap_medium")
        }
    )
    assert average_precision(scenes, [])["box_ap"] == 0
    assert scenes == before


def test_annotations_may_be_numbered_from_zero(scenes: Truth) -> None:
    numbered = [{**entry, "id": number} for number, entry in enumerate(scenes["annotations"])]
    found = perturbed(scenes, 3)
    assert average_precision({**scenes, "annotations": numbered}, found) == average_precision(
        scenes, found
    )
    assert average_precision({**scenes, "annotations": numbered}, perfect(scenes))[
        "box_ap"
    ] == pytest.approx(1)


def test_only_the_named_images_count(scenes: Truth) -> None:
    found = [entry for entry in perfect(scenes) if entry["image_id"] < 4]
    assert average_precision(scenes, found)["mask_ap"] < 0.9
    assert average_precision(scenes, found, range(4))["mask_ap"] == pytest.approx(1)


def test_detections_of_unknown_images_are_refused(scenes: Truth) -> None:
    with pytest.raises(ValueError, match=r"detections must refer to images in .*, got \[77\]"):
        average_precision(scenes, [{**perfect(scenes)[0], "image_id": 77}])


def test_results_are_as_coco_wants_them() -> None:
    masks = torch.zeros(2, 1, 6, 8)
    masks[0, 0, 1:4, 2:5] = 0.9
    masks[1, 0, :, :] = 0.4
    boxes = torch.tensor([[2.0, 1.0, 5.0, 4.0], [0.0, 0.0, 8.0, 6.0]])
    found = {
        "boxes": boxes,
        "labels": torch.tensor([2, 1]),
        "scores": torch.tensor([0.75, 0.5]),
        "masks": masks,
    }
    nothing = {key: value[:0] for key, value in found.items()}
    entries = coco_results([found, nothing], [41, 42], (10, 20))
    assert json.loads(json.dumps(entries)) == entries
    assert [(entry["image_id"], entry["category_id"], entry["score"]) for entry in entries] == [
        (41, 20, 0.75),
        (41, 10, 0.5),
    ]
    assert [entry["bbox"] for entry in entries] == [[2, 1, 3, 3], [0, 0, 8, 6]]
    assert draw_masks(entries, 6, 8).sum(axis=(1, 2)).tolist() == [9, 0]
