"""COCO files of instances: read, checked entry by entry, and masks in their encodings.

An annotation of which something is missing or wrong is used as far as the rest says what it is: a
box from its mask, an area from its mask, a mask from its box, the good parts of a polygon. One that
contradicts its file, such as by a category that it does not list, is skipped. Both are counted, by
reason.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dgt.data.folders import existing
from dgt.data.image_io import (
    UPRIGHT,
    BrokenImage,
    Source,
    StrPath,
    decode_stored,
    note_on_bits,
    upright_rgb,
)
from dgt.utils.class_names import some
from dgt.utils.errors import UserError
from dgt.utils.extras import require

Objects = dict[str, Tensor]
"""What to train on: `boxes` float32 (N, 4) x0 y0 x1 y1; `labels` int64 (N,) from 1 on.

`masks` uint8 (N, H, W).
"""
Sample = tuple[Image.Image, int, Callable[[], Objects]]
"""An image, its id, and a function for its objects, which only training needs."""

Entry = dict[str, Any]
Rules = dict[str, tuple[str, Callable[[Any], bool]]]
"""Keys that an entry must have: what is expected there, for a message, and whether a value is that.
"""


def _is_id(value: Any) -> bool:
    """An integer as NumPy and COCO's code hold it."""
    return type(value) is int and -(2**63) <= value < 2**63


def _numbers(values: Any) -> bool:
    """A list of finite numbers."""
    return isinstance(values, list) and all(
        type(value) in (int, float) and math.isfinite(value) for value in values
    )


ROUNDING = 1.0  # pixels by which boxes of correct files reach beyond their image
SMALL = 32**2  # pixels that an object has to have to be no small one
LEAST_FILLED = 0.05  # share of their boxes that nearly all objects fill
SAMPLE = 1000  # boxes of a file that are compared with their polygons

ID = ("a 64-bit integer", _is_id)
TEXT = ("a text", lambda value: isinstance(value, str) and value != "")
SIDE = ("an integer above 0", lambda value: _is_id(value) and value > 0)
NO_CATEGORY = (None, "", "none", "None")  # what a root has for its supercategory
BOX = ("[x, y, width, height], or a mask that can be drawn,", lambda box: False)

# The lists of a file, and what each of their entries must have: else the file is not read at all.
SECTIONS: dict[str, Rules] = {
    "images": {"id": ID, "file_name": TEXT, "width": SIDE, "height": SIDE},
    "annotations": {},
    "categories": {"id": ID, "name": TEXT},
}


class CocoImages:
    """Images of a COCO instances file, which lie in `folder`: JSON with `images`, `annotations`
    and `categories`.

    `images` in the file's order; `categories` by rising id: label l is category `category_ids[l -
    1]`; `by_image` the usable annotations of each image id, crowd among them; `bad` the others,
    each with its reason; `total` all of them; `ignored` how many usable ones are crowd; `notes` what
    was left out or changed, in sentences; `bits` is as of `decode_image`; `class_names` are those of
    the training split, of which this one may have no object.
    FileNotFoundError for no such file or folder; UserError for what is not JSON, a missing list, an
    entry without what `SECTIONS` requires, two images of one id or file, two categories of one id or
    name.
    """

    def __init__(
        self,
        path: StrPath,
        folder: StrPath = ".",
        bits: int | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"image folder {str(folder)!r} does not exist")
        try:
            content = json.loads(Path(path).read_bytes())  # with or without a byte order mark
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not JSON: {error}") from error
        self.folder, self.bits = folder, bits
        self._read(content, path, class_names or ())

    def _read(self, content: Any, path: StrPath, known_classes: Sequence[str] = ()) -> None:
        """Check and keep the content of a file; raises as the class."""
        self.notes: list[str] = []
        self.images, annotations, categories = (_section(content, name, path) for name in SECTIONS)
        self.categories = self._without_root(categories, annotations, path, known_classes)
        _check_unique(self.images, "images", ("id", "file_name"), path)
        _check_unique(self.categories, "categories", ("id", "name"), path)
        self.class_names = tuple(str(entry["name"]) for entry in self.categories)
        self.category_ids = tuple(int(entry["id"]) for entry in self.categories)
        images, known = {entry["id"]: entry for entry in self.images}, set(self.category_ids)
        self.check_boxes(annotations, images, path)
        self.by_image: dict[int, list[Entry]] = {number: [] for number in images}
        self.bad, self.total = list[BrokenImage](), len(annotations)
        changes, reasons = Counter[str](), Counter[str]()
        for place, entry in enumerate(annotations):
            try:
                usable, changed = self.usable(entry, images, known)
            except UserError as error:
                self.bad.append(BrokenImage(self.place_of(entry, place, path), str(error)))
                reasons[str(error).partition(", got")[0]] += 1
            else:
                self.by_image[usable["image_id"]].append(usable)
                changes.update(changed)
        used = {entry["category_id"] for entries in self.by_image.values() for entry in entries}
        if empty := [each["name"] for each in self.categories if each["id"] not in used]:
            self.notes.append(
                f"{len(empty)} of {len(known)} categories have no object in {path}: {some(empty)}"
            )
        if changes:
            self.notes.append(f"annotations of {path} were used with a change: {_counted(changes)}")
        if reasons:
            left_out = f"{len(self.bad)} of {self.total} annotations of {path} are left out"
            self.notes.append(f"{left_out}: {_counted(reasons)}")
        doubles = sum(
            times - 1
            for entries in self.by_image.values()
            for times in Counter((each["category_id"], *each["bbox"]) for each in entries).values()
        )
        if doubles:
            self.notes.append(
                f"{doubles} annotations of {path} repeat the category and the box of another in their "
                "image: they count as objects of their own"
            )
        self.ignored = sum(
            entry["iscrowd"] for of_one in self.by_image.values() for entry in of_one
        )
        if self.ignored:
            self.notes.append(
                f"{self.ignored} of {self.total} annotations of {path} are regions to ignore (iscrowd 1, as "
                "of a crowd, ignore 1, or difficult): they are not trained on"
            )
        thin = sum(
            not entry["iscrowd"] and not _is_trainable(entry, images[number])
            for number, entries in self.by_image.items()
            for entry in entries
        )
        if thin:
            self.notes.append(
                f"{thin} objects of {path} have a box thinner than a pixel: they are not trained on"
            )
        self.notes += note_on_bits(
            lambda index: self.source(self.images[index])[1], len(self), self.bits, path
        )

    def check_boxes(
        self, annotations: list[Entry], images: Mapping[int, Entry], path: StrPath
    ) -> None:
        """Raise UserError where the boxes of a file as a whole are not what they must be."""
        _check_boxes(annotations, images, path)

    def usable(
        self, entry: Entry, images: Mapping[int, Entry], categories: set[int]
    ) -> tuple[Entry, list[str]]:
        """As `usable_annotation`."""
        return usable_annotation(entry, images, categories)

    def place_of(self, entry: Entry, number: int, path: StrPath) -> str:
        """Where the annotation of a number in the file is, for reports."""
        return f"{path}: annotation {entry.get('id', f'number {number}')}"

    def _without_root(
        self,
        categories: list[Entry],
        annotations: list[Entry],
        path: StrPath,
        known_classes: Sequence[str],
    ) -> list[Entry]:
        """The categories by rising id, without those that have no annotation and are no class: one
        that only stands above others, unless it is a known class, and one with the name of another.
        """
        used = {str(entry.get("category_id")) for entry in annotations}
        above = {entry.get("supercategory") for entry in categories}
        kept: list[Entry] = []
        for entry in sorted(
            categories, key=lambda entry: (str(entry["id"]) not in used, -entry["id"])
        ):
            is_root = (
                entry["name"] in above
                and entry.get("supercategory") in NO_CATEGORY
                and entry["name"] not in known_classes
            )
            is_double = entry["name"] in {other["name"] for other in kept}
            if str(entry["id"]) not in used and (is_root or is_double):
                what = "only stands above others" if is_root else "has the name of another"
                self.notes.append(
                    f"category {entry['id']} {entry['name']!r} of {path} is no class: it has no "
                    f"annotation and {what}"
                )
            else:
                kept.append(entry)
        return sorted(kept, key=lambda entry: entry["id"])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample | BrokenImage:
        """One image, upright or as stored, as its annotations are; broken if it is of another size than
        these, or where its size does not show which they are of.
        """
        entry = self.images[index]
        path, source = self.source(entry)
        if source is None:
            return BrokenImage(path, "is missing")
        try:
            stored = decode_stored(source)
            annotated, is_of = (entry["width"], entry["height"]), stored.image.size
            if annotated == is_of != stored.upright_size:
                stored = stored._replace(orientation=UPRIGHT)
            is_open = stored.orientation != UPRIGHT and is_of == stored.upright_size
            if is_open and self.by_image[entry["id"]]:
                raise UserError(
                    f"has EXIF orientation {stored.orientation}, and its {is_of[0]} x {is_of[1]} pixels do "
                    "not show whether its boxes are of the upright image: store it upright, without "
                    "that tag"
                )
            image = upright_rgb(stored, self.bits)
        except UserError as error:
            return BrokenImage(path, str(error))
        if image.size != annotated:
            width, height = image.size
            return BrokenImage(
                path, f"is {width} x {height}, annotated as {entry['width']} x {entry['height']}"
            )
        return image, entry["id"], partial(self.objects, index)

    def source(self, entry: Entry) -> tuple[str, Source | None]:
        """The name of an image for reports, and its file or bytes; None where it is missing."""
        path = existing(os.path.join(self.folder, entry["file_name"]))
        return path, path

    def use_classes(self, names: Sequence[str], labels: Sequence[int]) -> None:
        """Take the class names of a model, and the label there of each class here; classes that the
        file does not have get ids that no category has.
        """
        ids = dict(zip(labels, self.category_ids, strict=True))
        unused = min(0, *self.category_ids) - 1
        self.category_ids = tuple(ids.get(at, unused - at) for at in range(len(names)))
        self.class_names = tuple(names)

    def objects(self, index: int) -> Objects:
        """What of one image can be trained on: neither crowd regions nor boxes without area."""
        image, entries = self.images[index], self._trainable(index)
        boxes = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float32).reshape(
            -1, 4
        )
        boxes[:, 2:] += boxes[:, :2]
        labels = [1 + self.category_ids.index(entry["category_id"]) for entry in entries]
        masks = draw_masks(entries, image["height"], image["width"])
        return {
            "boxes": boxes,
            "labels": torch.tensor(labels, dtype=torch.int64),
            "masks": torch.from_numpy(masks),
        }

    def with_objects(self) -> list[int]:
        """Indices of the images that hold anything to train on."""
        return [index for index in range(len(self)) if self._trainable(index)]

    def ground_truth(self) -> dict[str, list[Entry]]:
        """The file again, without the annotations that cannot be used: what detections are compared
        with.
        """
        annotations = [entry for entries in self.by_image.values() for entry in entries]
        return {"images": self.images, "annotations": annotations, "categories": self.categories}

    def _trainable(self, index: int) -> list[Entry]:
        image = self.images[index]
        return [
            entry
            for entry in self.by_image[image["id"]]
            if not entry["iscrowd"] and _is_trainable(entry, image)
        ]


def _is_trainable(entry: Entry, image: Entry) -> bool:
    """Whether a box is a pixel wide and high within its image: no thinner one is trained on."""
    return min(_inside(entry["bbox"], image)[2:]) >= 1


def _inside(box: Sequence[float], image: Entry) -> list[float]:
    """x, y, width and height of what of a box lies within its image: no width or height above 0
    where nothing does.
    """
    x, y, width, height = box
    left, top = max(x, 0), max(y, 0)
    right, bottom = min(x + width, image["width"]), min(y + height, image["height"])
    return [left, top, right - left, bottom - top]


def _reaches_beyond(box: Sequence[float], image: Entry) -> bool:
    """Whether a box ends more than `ROUNDING` outside of its image."""
    return any(
        abs(given - kept) > ROUNDING for given, kept in zip(box, _inside(box, image), strict=True)
    )


def _check_boxes(annotations: list[Entry], images: Mapping[int, Entry], path: StrPath) -> None:
    """Raise UserError where the boxes of a file as a whole are not x, y, width and height in pixels."""
    placed = [
        (entry["bbox"], images[entry["image_id"]], entry.get("segmentation"))
        for entry in annotations
        if _is_box(entry.get("bbox"))
        and min(entry["bbox"][2:]) > 0
        and _is_id(entry.get("image_id"))
        and entry["image_id"] in images
    ]
    if placed and all(max(box) <= 1 for box, _, _ in placed):
        raise UserError(
            f"{path}: no box exceeds 1: they seem to be in shares of their image, but COCO has x, y, "
            "width and height in pixels"
        )
    beyond = sum(_reaches_beyond(box, image) for box, image, _ in placed)
    could_be_corners = all(
        box[0] < box[2] <= image["width"] + ROUNDING
        and box[1] < box[3] <= image["height"] + ROUNDING
        for box, image, _ in placed
    )
    outlined = [
        (box, outline)
        for box, image, mask in placed[:SAMPLE]
        if (outline := _outline(mask, image)) is not None and max(outline[2:]) >= 1
    ]
    are_outlines = [
        _are_close(box, (x, y, x + width, y + height)) and not _are_close(box, outline)
        for box, outline in outlined
        for x, y, width, height in [outline]
    ]
    if could_be_corners and (2 * beyond > len(placed) or 2 * sum(are_outlines) > len(placed)):
        raise UserError(
            f"{path}: boxes seem to be corners, x0, y0, x1 and y1, but COCO has x, y, width and height"
        )
    outside = [box for box, outline in outlined if _share_in(box, outline) < 0.5]
    if 2 * len(outside) > len(outlined):
        raise UserError(
            f"{path}: {len(outside)} of {len(outlined)} masks lie mostly outside of their boxes, as that "
            f"of {outside[0]}: COCO has x, y, width and height, from the upper left corner, points x, y, "
            "and run lengths down the columns"
        )


def _are_close(box: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(one - two) <= ROUNDING for one, two in zip(box, other, strict=True))


def _share_in(box: Sequence[float], outline: Sequence[float]) -> float:
    """The share of an outline that a box covers, both x, y, width and height."""
    shared = 1.0
    for axis in (0, 1):
        start = max(box[axis], outline[axis])
        end = min(box[axis] + box[axis + 2], outline[axis] + outline[axis + 2])
        shared *= max(0.0, end - start) / max(outline[axis + 2], 1e-9)
    return shared


def _outline(mask: Any, image: Entry) -> list[float] | None:
    """x, y, width and height of polygons, in the image or not, or of run lengths; None for a mask that
    cannot be drawn.
    """
    if isinstance(mask, dict) and _usable_mask(mask, image)[0] is not None:
        coco_mask = _coco_mask()
        code = coco_mask.segmToRle(mask, image["width"], image["height"])
        return [float(value) for value in coco_mask.toBbox(code)]
    if not isinstance(mask, list) or not mask:
        return None
    parts = [mask] if _numbers(mask) else [part for part in mask if _numbers(part) and part]
    if not parts:
        return None
    xs, ys = ([value for part in parts for value in part[axis::2]] for axis in (0, 1))
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def _counted(reasons: Counter[str]) -> str:
    return "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())


def _section(content: Any, name: str, path: StrPath) -> list[Entry]:
    """One of the file's lists, checked by `SECTIONS`."""
    entries = content.get(name) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not (entries or name == "annotations"):
        raise UserError(f"{path} is not in COCO format: its list {name!r} is missing or empty")
    for place, entry in enumerate(entries):
        fault = _fault(entry, SECTIONS[name])
        if fault or not isinstance(entry, dict):
            raise UserError(f"{path}: {name}[{place}] {fault or 'must be an object of JSON'}")
    return entries


def _check_unique(entries: list[Entry], name: str, keys: tuple[str, ...], path: StrPath) -> None:
    """Raise UserError for two entries with one value of a key: metrics tell them apart by it."""
    for key in keys:
        for value, times in Counter(entry[key] for entry in entries).most_common(1):
            if times > 1:
                raise UserError(f"{path}: two entries of {name!r} have the {key} {value!r}")


def _fault(entry: Any, rules: Rules) -> str | None:
    """The first rule that an entry breaks, as a message; None where it keeps them all."""
    for key, (wanted, fits) in rules.items():
        value = entry.get(key) if isinstance(entry, dict) else None
        if not fits(value):
            return f"must have {wanted} as its {key}, got {value!r:.100}"
    return None


def usable_annotation(
    entry: Entry, images: Mapping[int, Entry], categories: set[int]
) -> tuple[Entry, list[str]]:
    """An annotation as COCO's code takes it, and what had to be changed.

    Args:
        entry: an annotation of the file.
        images: the file's images by id.
        categories: the file's category ids.

    Raises:
        UserError: it cannot be used, and why.
    """
    rules: Rules = {
        "image_id": ("one of the file's images", lambda value: _is_id(value) and value in images),
        "category_id": (
            "one of the file's categories",
            lambda value: _is_id(value) and value in categories,
        ),
        "iscrowd": ("0 or 1", lambda value: value in (0, 1, None)),
        "ignore": ("0 or 1", lambda value: value in (0, 1, None)),
        "attributes": (
            "no rotation, unless there is a mask,",
            lambda value: not _angle(value) or bool(entry.get("segmentation")),
        ),
    }
    if fault := _fault(entry, rules):
        raise UserError(fault)
    changed = []
    image = images[entry["image_id"]]
    mask, bad_parts = _usable_mask(entry.get("segmentation"), image)
    # one that is turned is that of its object before
    box: Any = None if _angle(entry.get("attributes")) else entry.get("bbox")
    has_box = _is_box(box)
    if has_box and min(box[2:]) == 0 and mask is not None:
        has_box = not _area(mask, image)  # a box without area, of an object that has one
    if has_box and min(box[2:]) > 0:
        has_box, mask = _agreeing(box, mask, image)
    if mask is None and not has_box:
        raise UserError(str(_fault(entry, {"bbox": BOX})))
    if mask is not None and bad_parts:
        changed.append("without a part of their polygon, which has no 3 points")
    has_mask = mask is not None
    if not has_mask:
        x, y, width, height = box
        mask = [[x, y, x + width, y, x + width, y + height, x, y + height]]
        had = entry.get("segmentation") not in (None, [], [[]], {}, "")
        changed.append(
            f"with their box for a mask, which {'cannot be drawn' if had else 'is missing'}"
        )
    if not has_box:
        box = _box_around(mask, image)
        changed.append("with the box of their mask for one that is missing or wrong")
    elif _reaches_beyond(box, image) and min(box[2:]) > 0:
        box = _inside(box, image)
        changed.append("with their box cut at the border of the image")
    area: Any = entry.get("area")
    if not (_numbers([area]) and 0 <= area <= image["width"] * image["height"]):
        area = _area(mask, image)
        changed.append("with the area of their mask for one that is missing or cannot be")
    elif not _is_area_of(area, mask, image, 0.5 if has_mask else LEAST_FILLED):
        area = _area(mask, image)
        changed.append("with the area of their mask for one of another size")
    crowd = int(bool(entry.get("iscrowd") or entry.get("ignore")))
    return {**entry, "bbox": box, "segmentation": mask, "area": area, "iscrowd": crowd}, changed


def _angle(attributes: Any) -> float:
    """The degrees by which a box is turned, as CVAT has it among the attributes of an annotation."""
    angle = attributes.get("rotation") if isinstance(attributes, dict) else None
    return float(angle) if isinstance(angle, int | float) else 0.0


def _is_area_of(area: float, mask: Any, image: Entry, least: float) -> bool:
    """Whether an area is from `least` to 2 times that of a mask, or both are of small objects; what
    polygons enclose mostly shows it, without drawing them.
    """

    def fits(measured: float) -> bool:
        return least * measured <= area <= 2 * measured or max(area, measured) < SMALL

    return (isinstance(mask, list) and fits(_enclosed(mask))) or fits(_area(mask, image))


def _enclosed(polygons: list[list[float]]) -> float:
    """Pixels within polygons, as if none were outside of its image or in another."""
    total = 0.0
    for part in polygons:
        xs, ys = part[::2], part[1::2]
        corners = zip(xs, ys, xs[1:] + xs[:1], ys[1:] + ys[:1], strict=True)
        total += abs(sum(x * next_y - next_x * y for x, y, next_x, next_y in corners)) / 2
    return total


def _is_box(box: Any) -> bool:
    return _numbers(box) and len(box) == 4 and min(box[2:]) >= 0


def _agreeing(box: list[float], mask: Any, image: Entry) -> tuple[bool, Any]:
    """Whether a box with an area is in its image, and the mask unless it has no pixel where the box
    has some; UserError where neither can be used, or the two contradict each other.
    """
    is_inside = min(_inside(box, image)[2:]) > 0
    if not is_inside and (mask is None or not _area(mask, image)):
        raise UserError(f"must have a bbox inside of its image, got {box}")
    if is_inside and isinstance(mask, list) and not _begins_in(mask, box):
        outline = _outline(mask, image) or box
        is_point = max(outline[2:]) < 1 <= min(box[2:])  # as of points in shares of the image
        if is_point or not _area(mask, image):
            return True, None
        for axis in (0, 1):
            start = max(outline[axis], box[axis])
            end = min(outline[axis] + outline[axis + 2], box[axis] + box[axis + 2])
            if end < start - ROUNDING:
                raise UserError(f"must have a bbox that meets its mask, got {box}")
    return is_inside, mask


def _begins_in(polygons: list[Any], box: Sequence[float]) -> bool:
    """Whether the first point of polygons lies in a box: then they need no closer look."""
    across, down = polygons[0][:2]
    x, y, width, height = box
    return bool(
        x - ROUNDING <= across <= x + width + ROUNDING
        and y - ROUNDING <= down <= y + height + ROUNDING
    )


def _area(mask: Any, image: Entry) -> float:
    """Pixels of a mask that can be drawn."""
    coco_mask = _coco_mask()
    return float(coco_mask.area(coco_mask.segmToRle(mask, image["width"], image["height"])))


def _box_around(mask: Any, image: Entry) -> list[float]:
    """x, y, width and height of a mask that can be drawn; UserError for one without a pixel."""
    if not _area(mask, image):
        raise UserError("must have a bbox, or a mask with a pixel in the image")
    return _inside(_outline(mask, image) or [], image)


def _usable_mask(mask: Any, image: Entry) -> tuple[Any, bool]:
    """A mask without what cannot be drawn in an image, None for nothing left; and whether parts of
    it went.
    """
    height, width = image["height"], image["width"]
    if isinstance(mask, list):
        parts = [mask] if mask and _numbers(mask) else mask  # one polygon, not in a list
        good = [part for part in parts if _numbers(part) and len(part) >= 6 and len(part) % 2 == 0]
        return good or None, len(good) < len(parts)
    if not isinstance(mask, dict) or mask.get("size") != [height, width]:
        return None, False
    coco_mask = _coco_mask()
    try:
        coco_mask.decode(coco_mask.segmToRle(mask, width, height))
    except (KeyError, TypeError, ValueError, RuntimeError):
        return None, False
    return mask, False


@cache
def _coco_mask() -> Any:
    """COCO's own code for masks, of the extra `detect`; UserError where it is missing."""
    require("masks of objects", ("faster_coco_eval",), "detect")
    from faster_coco_eval.core import mask

    return mask


def draw_masks(entries: Sequence[Entry], height: int, width: int) -> NDArray[np.uint8]:
    """uint8 (N, height, width), 1 inside: masks of polygons or run-length codes, as COCO's own code
    draws them.
    """
    if not entries:
        return np.zeros((0, height, width), dtype=np.uint8)
    coco_mask = _coco_mask()
    codes = [coco_mask.segmToRle(entry["segmentation"], width, height) for entry in entries]
    return np.ascontiguousarray(coco_mask.decode(codes).transpose(2, 0, 1))


def encode_masks(masks: NDArray[np.uint8]) -> list[Entry]:
    """Masks (N, H, W) of 0 and 1 as compressed run-length codes that JSON can hold: `size` and
    `counts`.
    """
    if not len(masks):
        return []
    codes = _coco_mask().encode(np.asfortranarray(masks.transpose(1, 2, 0)))
    return [{"size": code["size"], "counts": code["counts"].decode("ascii")} for code in codes]


def coco_places(boxes: Sequence[Sequence[float]], masks: NDArray[np.uint8] | None) -> list[Entry]:
    """Boxes x0 y0 x1 y1 and masks uint8 (N, H, W), None for boxes alone, as COCO has them: `bbox` and
    `segmentation`.
    """
    places: list[Entry] = [{"bbox": [x0, y0, x1 - x0, y1 - y0]} for x0, y0, x1, y1 in boxes]
    if masks is None:
        return places
    codes = zip(places, encode_masks(masks), strict=True)
    return [{**place, "segmentation": code} for place, code in codes]
