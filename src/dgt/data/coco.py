"""COCO's annotation files, checked entry by entry, their images, and the masks they describe.

What can be used and what cannot follows COCO's own evaluation: crowd regions and boxes without area are valid entries
that only training has no use for, and so is an image without any. An entry that contradicts the file (an image or a
category that it does not list, a polygon of two points, a run-length code that does not fill the image) is set aside
with its reason. COCO's own code would read a polygon of two points as a box, without a word.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as coco_mask
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dgt.data.image_io import BrokenImage, StrPath, try_decode
from dgt.utils.errors import UserError

Entry = dict[str, Any]
Objects = dict[str, Tensor]
"""What to train on: `boxes` float32 (N, 4) x0 y0 x1 y1; `labels` int64 (N,) from 1 on; `masks` uint8 (N, H, W)."""
Sample = tuple[Image.Image, int, Callable[[], Objects]]
"""An image, its id, and a function for its objects, which only training needs."""
SECTIONS = {"images": ("id", "file_name", "width", "height"), "annotations": ("id",), "categories": ("id", "name")}


class CocoImages:
    """Images of a COCO file of instances: JSON with the lists `images`, `annotations` and `categories`.

    `images` in the file's order; `categories` by rising id, which is the order of classes and labels; `by_image` the
    usable annotations of each image id, crowd among them; `bad` the others, each with its reason; `total` all of them.
    Label l is category `category_ids[l - 1]`. The images lie in `folder`.

    Raises:
        FileNotFoundError: no such file or folder.
        UserError: not JSON, a list is missing or holds something else than entries with COCO's keys, an id is no
            64-bit integer, two entries of a list have one id or two categories one name. A single annotation that
            cannot be used raises nothing: it is listed in `bad`.
    """

    def __init__(self, path: StrPath, folder: StrPath = ".") -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no annotation file {str(path)!r}")
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no folder of images {str(folder)!r}")
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not JSON: {error}") from error
        self.folder = folder
        self.images, annotations, categories = (_section(content, name, path) for name in SECTIONS)
        self.categories = sorted(categories, key=lambda entry: entry["id"])
        self.class_names = tuple(str(entry["name"]) for entry in self.categories)
        self.category_ids = tuple(int(entry["id"]) for entry in self.categories)
        images, known = {entry["id"]: entry for entry in self.images}, set(self.category_ids)
        self.by_image: dict[int, list[Entry]] = {number: [] for number in images}
        self.bad, self.total = list[BrokenImage](), len(annotations)
        for entry in annotations:
            problem = annotation_problem(entry, images, known)
            if problem is None:
                self.by_image[entry["image_id"]].append({"iscrowd": 0, **entry})
            else:
                self.bad.append(BrokenImage(f"{path}: annotation {entry['id']}", problem))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample | BrokenImage:
        """One image, upright where its EXIF data say how to turn it: annotations are of the upright image.

        One of another size than annotated is broken: its objects would lie elsewhere.
        """
        entry = self.images[index]
        path = os.path.join(self.folder, entry["file_name"])
        found = try_decode(path, path, entry["id"])
        if isinstance(found, BrokenImage):
            return found
        width, height = found[0].size
        if (width, height) != (entry["width"], entry["height"]):
            return BrokenImage(path, f"is {width} x {height}, annotated as {entry['width']} x {entry['height']}")
        return *found, partial(self.objects, index)

    def objects(self, index: int) -> Objects:
        """What of one image can be trained on: neither crowd regions nor boxes without area."""
        image, entries = self.images[index], self._trainable(index)
        boxes = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = [1 + self.category_ids.index(entry["category_id"]) for entry in entries]
        masks = draw_masks(entries, image["height"], image["width"])
        return {"boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64), "masks": torch.from_numpy(masks)}

    def with_objects(self) -> list[int]:
        """Indices of the images that hold anything to train on."""
        return [index for index in range(len(self)) if self._trainable(index)]

    def ground_truth(self) -> dict[str, list[Entry]]:
        """The file again, without the annotations that cannot be used: what detections are compared with."""
        annotations = [entry for entries in self.by_image.values() for entry in entries]
        return {"images": self.images, "annotations": annotations, "categories": self.categories}

    def _trainable(self, index: int) -> list[Entry]:
        entries = self.by_image[self.images[index]["id"]]
        return [entry for entry in entries if not entry["iscrowd"] and min(entry["bbox"][2:]) > 0]


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
    for key in {"id", "name"}.intersection(keys):
        for value, times in Counter(entry[key] for entry in found).most_common(1):
            if times > 1:
                raise UserError(f"{path}: two entries of {name!r} have the {key} {value!r}")
    return found


def _is_id(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)


def annotation_problem(entry: Entry, images: Mapping[int, Entry], categories: set[int]) -> str | None:
    """Why an annotation cannot be used, or None where it can, by the file's images by id and its category ids."""
    missing = [key for key in ("image_id", "category_id", "bbox", "area", "segmentation") if key not in entry]
    if missing:
        return f"lacks {', '.join(missing)}"
    image_id, category, box, area = (entry[key] for key in ("image_id", "category_id", "bbox", "area"))
    if not _is_id(image_id) or image_id not in images:
        return f"is of image {image_id!r}, which the file does not list"
    if not _is_id(category) or category not in categories:
        return f"has category {category!r}, which the file does not list"
    if not _numbers(box) or len(box) != 4 or min(box[2:]) < 0:
        return f"has no box x, y, width, height of finite numbers, but {box!r}"
    if not _numbers([area]):
        return f"has no number as its area, but {area!r}"
    if entry.get("iscrowd", 0) not in (0, 1):
        return f"has neither 0 nor 1 as its iscrowd, but {entry['iscrowd']!r}"
    return _mask_problem(entry["segmentation"], images[image_id]["height"], images[image_id]["width"])


def _mask_problem(mask: Any, height: int, width: int) -> str | None:
    if isinstance(mask, dict):
        if mask.get("size") != [height, width]:
            return f"has a run-length code of size {mask.get('size')!r} in an image of {[height, width]}"
        try:
            coco_mask.decode(coco_mask.segmToRle(mask, width, height))
        except ValueError as error:
            return f"has a run-length code that does not decode: {error}"
        except (KeyError, TypeError, RuntimeError):
            return "has a run-length code whose counts are no integers of at least 0"
        return None
    if not isinstance(mask, list) or not mask:
        return "has neither polygons nor a run-length code"
    if not all(_numbers(polygon) and len(polygon) % 2 == 0 for polygon in mask):
        return "has a polygon that is no list of finite x and y"
    points = min(len(polygon) // 2 for polygon in mask)
    return f"has a polygon of {points} points, fewer than 3" if points < 3 else None


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
