"""A small data set in COCO's format for tests: few objects, and every special case that COCO allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
SIZES = [(48, 40), (40, 56), (64, 40), (40, 40)]  # width, height


def entry(
    number: int, image: int, box: tuple[float, float, float, float], **more: Any
) -> dict[str, Any]:
    """An annotation whose polygon is its box, x0 y0 x1 y1."""
    x0, y0, x1, y1 = box
    width, height = x1 - x0, y1 - y0
    place = {
        "bbox": [x0, y0, width, height],
        "area": width * height,
        "segmentation": [[x0, y0, x1, y0, x1, y1, x0, y1]],
    }
    return {"id": number, "image_id": image, "category_id": 3, "iscrowd": 0, **place, **more}


def crowd(number: int, image: int) -> dict[str, Any]:
    """A crowd region over the left half of an image."""
    width, height = SIZES[image - 1]
    counts = [0, height * (width // 2), height * (width - width // 2)]
    code = {"size": [height, width], "counts": counts}
    return entry(number, image, (0, 0, width // 2, height), iscrowd=1, segmentation=code)


def annotations() -> list[dict[str, Any]]:
    """Image 1: a cat and a dog; 2: only a crowd; 3: a cat, a crowd, and a box without area; 4: nothing."""
    return [
        entry(1, 1, (4, 6, 24, 30)),
        entry(2, 1, (26, 8, 44, 36), category_id=7),
        crowd(3, 2),
        entry(4, 3, (10, 4, 50, 36)),
        crowd(5, 3),
        entry(6, 3, (20, 20, 20, 30), area=0),
    ]


def write_coco(
    root: Path, *extra: dict[str, Any], parts: tuple[str, ...] = ("train", "val")
) -> Path:
    """Write images and annotations in COCO's layout; `extra` annotations are added to every part."""
    rng = np.random.default_rng(0)
    for part in parts:
        folder = root / f"{part}2017"
        folder.mkdir(parents=True)
        images = []
        for number, (width, height) in enumerate(SIZES, start=1):
            name = f"{number:012d}.png"
            Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(
                folder / name
            )
            images.append({"id": number, "file_name": name, "width": width, "height": height})
        (root / "annotations").mkdir(exist_ok=True)
        content = {
            "images": images,
            "annotations": [*annotations(), *extra],
            "categories": CATEGORIES,
        }
        (root / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(content))
    return root
