"""COCO's annotation files, checked entry by entry, and the masks they describe.

What can be used and what cannot follows COCO's own evaluation: crowd regions and boxes without area are valid entries
that only training has no use for, and so is an image without any. An entry that contradicts the file (an image or a
category that it does not list, a polygon of two points, a run-length code that does not fill the image) is set aside
with its reason. COCO's own code would read a polygon of two points as a box, without a word.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as coco_mask
from numpy.typing import NDArray

from dgt.data.image_io import BrokenImage
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


def read_annotations(path: str | os.PathLike[str]) -> CocoAnnotations:
    """Read and check a COCO file of instances.

    Args:
        path: JSON with the lists `images`, `annotations` and `categories`.

    Raises:
        FileNotFoundError: no such file.
        UserError: not JSON, a list is missing or holds something else than entries with COCO's keys, an id is no
            64-bit integer, two entries of a list have one id or two categories one name. A single annotation that
            cannot be used raises nothing: it is listed in `bad`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no annotation file {os.fspath(path)!r}")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    sections = {name: _section(content, name, path) for name in SECTIONS}
    images = {entry["id"]: entry for entry in sections["images"]}
    _check_texts(sections, path)
    categories = sorted(sections["categories"], key=lambda entry: entry["id"])
    known = {entry["id"] for entry in categories}
    by_image: dict[int, list[Entry]] = {number: [] for number in images}
    bad = []
    for entry in sections["annotations"]:
        problem = annotation_problem(entry, images, known)
        if problem is None:
            by_image[entry["image_id"]].append({"iscrowd": 0, **entry})
        else:
            bad.append(BrokenImage(f"{path}: annotation {entry['id']}", problem))
    return CocoAnnotations(sections["images"], categories, by_image, bad, len(sections["annotations"]))


def _section(content: Any, name: str, path: str | os.PathLike[str]) -> list[Entry]:
    """One of the file's lists, whose entries have COCO's keys and ids of their own."""
    found = content.get(name) if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise UserError(f"{path} is not in COCO's format: it has no list {name!r}")
    seen = set()
    for place, entry in enumerate(found):
        missing = [key for key in SECTIONS[name] if not isinstance(entry, dict) or key not in entry]
        if missing:
            raise UserError(f"{path}: {name}[{place}] lacks {', '.join(missing)}")
        if not _is_id(entry["id"]):
            raise UserError(f"{path}: {name}[{place}] must have a 64-bit integer as its id, got {entry['id']!r}")
        if entry["id"] in seen:
            raise UserError(f"{path}: two entries of {name!r} have the id {entry['id']!r}")
        seen.add(entry["id"])
        sides = (entry["width"], entry["height"]) if name == "images" else ()
        if not all(isinstance(side, int) and side > 0 for side in sides):
            raise UserError(f"{path}: image {entry['id']!r} is {entry['width']!r} x {entry['height']!r} pixels")
    if name != "annotations" and not found:
        raise UserError(f"{path}: the list {name!r} is empty")
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _check_texts(sections: Mapping[str, Sequence[Entry]], path: str | os.PathLike[str]) -> None:
    """Raise UserError for a file's or category's name that is no text, and for two categories of one name: what is
    told by name, as metrics and predictions are, would mean both.
    """
    for name, key in (("images", "file_name"), ("categories", "name")):
        for entry in sections[name]:
            if not isinstance(entry[key], str) or not entry[key]:
                raise UserError(f"{path}: {name} {entry['id']} must have a text as its {key}, got {entry[key]!r}")
    names = Counter(entry["name"] for entry in sections["categories"])
    name, times = names.most_common(1)[0]
    if times > 1:
        raise UserError(f"{path}: two entries of 'categories' have the name {name!r}")


def annotation_problem(entry: Entry, images: Mapping[int, Entry], categories: set[int]) -> str | None:
    """Why an annotation cannot be used, or None where it can.

    Args:
        entry: the annotation.
        images: the file's images by id.
        categories: the file's category ids.
    """
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
    image = images[entry["image_id"]]
    if isinstance(entry["segmentation"], dict):
        return _run_length_problem(entry["segmentation"], image["height"], image["width"])
    return _polygon_problem(entry["segmentation"])


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )


def _polygon_problem(polygons: Any) -> str | None:
    if not isinstance(polygons, list) or not polygons:
        return "has neither polygons nor a run-length code"
    for polygon in polygons:
        if not _numbers(polygon) or len(polygon) % 2:
            return "has a polygon that is no list of finite x and y"
        if len(polygon) < 6:
            return f"has a polygon of {len(polygon) // 2} points, fewer than 3"
    return None


def _run_length_problem(code: Entry, height: int, width: int) -> str | None:
    if code.get("size") != [height, width]:
        return f"has a run-length code of size {code.get('size')!r} in an image of {[height, width]}"
    counts: Any = code.get("counts")
    if isinstance(counts, str):
        try:
            coco_mask.decode(code)
        except (ValueError, RuntimeError) as error:
            return f"has a run-length code that does not decode: {error}"
        return None
    if not _numbers(counts) or any(run < 0 or run != int(run) for run in counts):
        return "has a run-length code whose counts are no integers of at least 0"
    total = sum(counts)
    return None if total == height * width else f"has a run-length code of {total} pixels for {height * width}"


def draw_masks(entries: Sequence[Entry], height: int, width: int) -> NDArray[np.uint8]:
    """Masks of annotations, as COCO's own code draws them.

    Args:
        entries: annotations with polygons or a run-length code.
        height: of the image in pixels.
        width: of the image in pixels.

    Returns:
        uint8 (N, height, width), 1 inside.
    """
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
