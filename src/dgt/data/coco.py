"""COCO's annotation files, checked entry by entry, and the masks they describe.

What can be used and what cannot follows COCO's own evaluation: crowd regions and boxes without area are valid entries
that only training has no use for, and so is an image without any. An entry that contradicts the file (an image or a
category that it does not list, a polygon of two points, a run-length code that does not fill the image) is set aside
with its reason. COCO's own code would read a polygon of two points as a box, without a word.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as coco_mask
from numpy.typing import NDArray

from dgt.data.image_io import BrokenImage, StrPath
from dgt.utils.errors import UserError

Entry = dict[str, Any]
SECTIONS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id",),
    "categories": ("id", "name"),
}


@dataclass(frozen=True)
class CocoAnnotations:
    """One annotation file.

    `images` in the file's order; `categories` by rising id, which is the order of classes and labels; `by_image` the
    usable annotations of each image id, crowd among them; `bad` the others, each with its reason; `total` all of them.
    """

    images: list[Entry]
    categories: list[Entry]
    by_image: dict[int, list[Entry]]
    bad: list[BrokenImage]
    total: int

    def ground_truth(self) -> dict[str, list[Entry]]:
        """The file again, without the annotations that cannot be used: what detections are compared with."""
        annotations = [entry for entries in self.by_image.values() for entry in entries]
        return {"images": self.images, "annotations": annotations, "categories": self.categories}


def read_annotations(path: StrPath) -> CocoAnnotations:
    """Read and check a COCO file of instances: JSON with the lists `images`, `annotations` and `categories`.

    Raises:
        FileNotFoundError: no such file.
        UserError: not JSON, a list is missing or holds something else than entries with COCO's keys, an id is no
            64-bit integer, two entries of a list have one id or two categories one name. A single annotation that
            cannot be used raises nothing: it is listed in `bad`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no annotation file {str(path)!r}")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    listed, annotations, categories = (_section(content, name, path) for name in SECTIONS)
    images = {entry["id"]: entry for entry in listed}
    known = {entry["id"] for entry in categories}
    by_image: dict[int, list[Entry]] = {number: [] for number in images}
    bad: list[BrokenImage] = []
    for entry in annotations:
        problem = annotation_problem(entry, images, known)
        if problem is None:
            by_image[entry["image_id"]].append({"iscrowd": 0, **entry})
        else:
            bad.append(BrokenImage(f"{path}: annotation {entry['id']}", problem))
    return CocoAnnotations(listed, sorted(categories, key=lambda entry: entry["id"]), by_image, bad, len(annotations))


def _section(content: Any, name: str, path: StrPath) -> list[Entry]:
    """One of the file's lists, whose entries have COCO's keys, ids of their own, and texts for names.

    Two categories of one name are refused: what is told by name, as metrics and predictions are, would mean both.
    """
    found = content.get(name) if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise UserError(f"{path} is not in COCO's format: it has no list {name!r}")
    if name != "annotations" and not found:
        raise UserError(f"{path}: the list {name!r} is empty")
    keys = SECTIONS[name]
    for place, entry in enumerate(found):
        missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
        if missing:
            raise UserError(f"{path}: {name}[{place}] lacks {', '.join(missing)}")
        if not _is_id(entry["id"]):
            raise UserError(f"{path}: {name}[{place}] must have a 64-bit integer as its id, got {entry['id']!r}")
        for key in keys[1:2]:
            if not isinstance(entry[key], str) or not entry[key]:
                raise UserError(f"{path}: {name} {entry['id']} must have a text as its {key}, got {entry[key]!r}")
        if not all(isinstance(entry[side], int) and entry[side] > 0 for side in keys[2:]):
            raise UserError(f"{path}: image {entry['id']!r} is {entry['width']!r} x {entry['height']!r} pixels")
    for key in ("id", "name") if "name" in keys else ("id",):
        value, times = Counter(entry[key] for entry in found).most_common(1)[0] if found else (None, 0)
        if times > 1:
            raise UserError(f"{path}: two entries of {name!r} have the {key} {value!r}")
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def annotation_problem(entry: Entry, images: Mapping[int, Entry], categories: set[int]) -> str | None:
    """Why an annotation cannot be used, or None where it can, by the file's images by id and its category ids."""
    missing = [key for key in ("image_id", "category_id", "bbox", "area", "segmentation") if key not in entry]
    if missing:
        return f"lacks {', '.join(missing)}"
    if not _is_id(entry["image_id"]) or entry["image_id"] not in images:
        return f"is of image {entry['image_id']!r}, which the file does not list"
    if not _is_id(entry["category_id"]) or entry["category_id"] not in categories:
        return f"has category {entry['category_id']!r}, which the file does not list"
    if not _numbers(entry["bbox"]) or len(entry["bbox"]) != 4 or min(entry["bbox"][2:]) < 0:
        return f"has no box x, y, width, height of finite numbers, but {entry['bbox']!r}"
    if not _numbers([entry["area"]]):
        return f"has no number as its area, but {entry['area']!r}"
    if entry.get("iscrowd", 0) not in (0, 1):
        return f"has neither 0 nor 1 as its iscrowd, but {entry['iscrowd']!r}"
    image, segmentation = images[entry["image_id"]], entry["segmentation"]
    if isinstance(segmentation, dict):
        return _run_length_problem(segmentation, [image["height"], image["width"]])
    return _polygon_problem(segmentation)


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )


def _polygon_problem(polygons: Any) -> str | None:
    if not isinstance(polygons, list) or not polygons:
        return "has neither polygons nor a run-length code"
    if not all(_numbers(polygon) and len(polygon) % 2 == 0 for polygon in polygons):
        return "has a polygon that is no list of finite x and y"
    points = min(len(polygon) // 2 for polygon in polygons)
    return f"has a polygon of {points} points, fewer than 3" if points < 3 else None


def _run_length_problem(code: Entry, size: list[int]) -> str | None:
    if code.get("size") != size:
        return f"has a run-length code of size {code.get('size')!r} in an image of {size}"
    try:
        coco_mask.decode(coco_mask.segmToRle(code, size[1], size[0]))
    except ValueError as error:
        return f"has a run-length code that does not decode: {error}"
    except (KeyError, TypeError, RuntimeError):
        return "has a run-length code whose counts are no integers of at least 0"
    return None


def draw_masks(entries: Sequence[Entry], height: int, width: int) -> NDArray[np.uint8]:
    """uint8 (N, height, width), 1 inside: masks of polygons or run-length codes, as COCO's own code draws them."""
    if not entries:
        return np.zeros((0, height, width), dtype=np.uint8)
    codes = [coco_mask.segmToRle(entry["segmentation"], width, height) for entry in entries]
    return np.ascontiguousarray(coco_mask.decode(codes).transpose(2, 0, 1))


def encode_masks(masks: NDArray[np.uint8]) -> list[Entry]:
    """Masks (N, H, W) of 0 and 1 as compressed run-length codes that JSON can hold: `size` and `counts`."""
    if not len(masks):
        return []
    codes = coco_mask.encode(np.asfortranarray(masks.transpose(1, 2, 0)))
    return [{"size": [int(side) for side in code["size"]], "counts": str(code["counts"], "ascii")} for code in codes]
