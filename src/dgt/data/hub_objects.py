"""Hugging Face `datasets` of images with boxes, read as COCO's files are."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dgt.data.coco import CocoImages, Entry
from dgt.data.image_io import UPRIGHT, Source, StrPath, beginning_of
from dgt.data.readers import choose_column, open_hub_split, stored_images, stored_source
from dgt.utils.class_names import is_number
from dgt.utils.errors import UserError

BOX_FORMATS = ("xywh", "xyxy")
# Names of what the objects of an image have
USUAL_FIELDS = {
    "box": ("bbox", "bboxes", "box", "boxes"),
    "category": ("category", "categories", "category_id", "label", "labels", "class"),
}
FURTHER = ("iscrowd", "ignore", "area")
"""Names of what they may have, as in COCO's files."""


class HubObjects(CocoImages):
    """One split of a Hugging Face data set with a column of images and one of their objects: for each
    image a list of objects, or lists of their boxes, categories and maybe those of `FURTHER`.

    Args:
        root: as of `HubImages`.
        split: name of the split.
        box_format: "xywh" for left, top, width and height in pixels, as in COCO, "xyxy" for corners:
            no data set says.
        class_names: of the training split; None for those of this one.
        bits: as of `decode_image`.
        columns: `image_column` and `objects_column`; None for the only column of images, and the only
            one whose name is usual for objects.

    UserError for no such split, column or field, for categories that the training split does not
    have, and as `CocoImages`.
    """

    def __init__(
        self,
        root: StrPath,
        split: str,
        box_format: str,
        class_names: Sequence[str] | None = None,
        bits: int | None = None,
        **columns: str | None,
    ) -> None:
        self.bits = bits
        table, self.place = open_hub_split(root, split)
        self.column = choose_column(table, "image", columns)
        objects = choose_column(table, "objects", columns)
        self.table = stored_images(table, [self.column], root)
        fields = _fields(table.features[objects], objects)
        box_field, category_field = (_choose_field(fields, kind, objects) for kind in USUAL_FIELDS)
        rows = [_as_lists(row, fields) for row in table.select_columns([objects])[:][objects]]
        for number, row in enumerate(rows):
            if len({len(values) for values in row.values() if values}) > 1:
                counts = ", ".join(f"{len(values)} of {name}" for name, values in row.items())
                raise UserError(
                    f"{self.place}:{number}] must have lists of one length in {objects!r}, got {counts}"
                )
        named = [_names(row[category_field], fields[category_field]) for row in rows]
        if class_names is None:
            class_names = _all_names(named, fields[category_field])
        labels: dict[str | None, Any] = {name: label for label, name in enumerate(class_names)}
        annotations: list[Entry] = []
        for number, (row, names) in enumerate(zip(rows, named, strict=True)):
            for at, (box, name) in enumerate(zip(row[box_field], names, strict=True)):
                placed = _as_sizes(box, box_format)
                entry = {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": labels.get(name, name),
                    "bbox": placed,
                    "area": _area(placed),
                }
                further = {key: row[key][at] for key in FURTHER if row.get(key)}
                annotations.append(entry | further)
        images = [
            {"id": number, "file_name": str(number), "width": width, "height": height}
            for number, (width, height) in enumerate(self._sizes(table, annotations))
        ]
        categories = [{"id": label, "name": name} for name, label in labels.items()]
        content = {"images": images, "annotations": annotations, "categories": categories}
        self._read(content, f"{self.place}]")

    def source(self, entry: Entry) -> tuple[str, Source | None]:
        """As of all."""
        number = entry["id"]
        return f"{self.place}:{number}]", stored_source(self.table[number][self.column])

    def _sizes(self, table: Any, annotations: Iterable[Entry]) -> list[tuple[int, int]]:
        """Width and height of each image, as the data set says or its file begins; of one that cannot
        be read, which is reported in reading it, what its boxes need.
        """
        if {"width", "height"} <= set(table.features):
            said = table.select_columns(["width", "height"])[:]
            return list(zip(said["width"], said["height"], strict=True))
        needed = [(1, 1)] * len(self.table)
        for entry in annotations:
            # What is no box is reported by the entry's own check.
            with suppress(TypeError, ValueError, OverflowError):
                x, y, width, height = entry["bbox"]
                before = needed[entry["image_id"]]
                needed[entry["image_id"]] = (
                    max(before[0], math.ceil(x + width)),
                    max(before[1], math.ceil(y + height)),
                )
        sizes = []
        for number, at_least in enumerate(needed):
            source = stored_source(self.table[number][self.column])
            found = None if source is None else beginning_of(source)
            if found is not None and found.orientation != UPRIGHT:
                raise UserError(
                    f"{self.place}:{number}] has an EXIF orientation, and without columns width and "
                    "height nothing shows whether its boxes are of the upright image: store it upright"
                )
            sizes.append(at_least if found is None else found.size)
        return sizes


def _fields(feature: Any, column: str) -> dict[str, Any]:
    """The fields of objects by name, with the type of one value; UserError for a column of others."""
    inner = getattr(feature, "feature", feature)  # of a list
    inner = inner[0] if isinstance(inner, list) else inner
    if not isinstance(inner, dict):
        raise UserError(
            f"data.objects_column: {column!r} must hold boxes and categories of objects, got {feature}"
        )
    is_list_of_objects = inner is not feature
    return {
        name: kind if is_list_of_objects else getattr(kind, "feature", kind)
        for name, kind in inner.items()
    }


def _choose_field(fields: Mapping[str, Any], kind: str, column: str) -> str:
    """The only field of objects whose name is usual for a kind; UserError for none or several."""
    found = [name for name in fields if name in USUAL_FIELDS[kind]]
    if len(found) != 1:
        raise UserError(
            f"data.objects_column: objects in {column!r} must have one field for their {kind}, named "
            f"one of {', '.join(USUAL_FIELDS[kind])}, got {', '.join(fields)}"
        )
    return found[0]


def _as_lists(row: Any, fields: Iterable[str]) -> dict[str, list[Any]]:
    """The objects of an image as lists by field."""
    if isinstance(row, list):
        return {name: [each.get(name) for each in row] for name in fields}
    return {name: list((row or {}).get(name) or []) for name in fields}


def _names(categories: Iterable[Any], feature: Any) -> list[str | None]:
    """The categories of objects by name, None for a missing one; numbers without names are the names."""
    known = getattr(feature, "names", None) or []

    def name_of(category: Any) -> str | None:
        if category is None:
            return None
        is_number = type(category) is int and 0 <= category < len(known)
        return known[category] if is_number else str(category)

    return [name_of(category) for category in categories]


def _all_names(named: Iterable[Iterable[str | None]], feature: Any) -> tuple[str, ...]:
    """The names of all categories of a split, in the order of their labels."""
    if known := getattr(feature, "names", None):
        return tuple(known)
    found = {name for names in named for name in names if name is not None}
    if found and all(map(is_number, found)):
        return tuple(str(number) for number in range(max(map(int, found)) + 1))
    return tuple(sorted(found))


def _as_sizes(box: Any, box_format: str) -> Any:
    """A box as x, y, width and height; what is no box stays, for the report."""
    if not isinstance(box, list) or len(box) != 4 or None in box:
        return box
    x, y, right, bottom = box
    return [x, y, right - x, bottom - y] if box_format == "xyxy" else list(box)


def _area(box: Any) -> Any:
    return box[2] * box[3] if isinstance(box, list) and len(box) == 4 and None not in box else None
