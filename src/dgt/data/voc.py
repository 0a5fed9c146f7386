"""Pascal VOC's layout of detection, read as COCO's files are.

```
ROOT/JPEGImages/NAME.jpg  ROOT/Annotations/NAME.xml     names in ROOT/ImageSets/Main/<split>.txt
```

A box is in pixels that count from 1, its last ones included, as VOC defines it: `xmin` 1 and `xmax`
10 are the first ten columns. Parts of an object, its pose, truncation and occlusion are not read.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn
from xml.etree import ElementTree

from dgt.data.coco import CocoImages, Entry, Sample
from dgt.data.folders import existing, folder_names, images_by_name, listed_names
from dgt.data.image_io import BrokenImage, StrPath
from dgt.data.label_maps import CLASS_FILES, read_class_names
from dgt.utils.class_names import composed, some
from dgt.utils.errors import UserError

IMAGES, ANNOTATIONS = "JPEGImages", "Annotations"
LISTS = Path("ImageSets", "Main")
DIFFICULT = ("ignore", "keep")
"""What objects that are marked as difficult may be."""
SIDES = ("xmin", "ymin", "xmax", "ymax")
UPRIGHT_BOX = (None, "", "0", "0.0")
"""What CVAT writes as the rotation of a box that is none."""


def is_voc(root: StrPath) -> bool:
    """Whether a folder has those of this layout."""
    return {IMAGES, ANNOTATIONS} <= set(folder_names(root))


class VocObject(NamedTuple):
    """An object as its file has it: where it stands there, its name, the texts of its sides in the
    order of `SIDES`, of its mark as difficult and of its rotation; None for what is missing.
    """

    place: str
    name: str | None
    sides: tuple[str | None, ...]
    difficult: str | None
    rotation: str | None

    @property
    def corners(self) -> list[float] | None:
        """The sides as numbers; None where one is not finite."""
        try:
            values = [float(side or "") for side in self.sides]
        except ValueError:
            return None
        return values if all(map(math.isfinite, values)) else None

    def check(self, class_names: Sequence[str]) -> None:
        """Raise UserError for what is missing or wrong."""
        if self.name not in class_names:
            raise UserError(f"must have one of the classes as its name, got {self.name!r:.100}")
        if self.difficult not in (None, "0", "1"):
            raise UserError(f"must have 0 or 1 as its difficult, got {self.difficult!r:.100}")
        if self.rotation not in UPRIGHT_BOX:
            raise UserError(
                f"must have no rotation among its attributes, got {self.rotation!r:.100}"
            )
        if self.corners is None:
            raise UserError(f"must have numbers as its {', '.join(SIDES)}, got {self.sides!r:.100}")


class VocImages(CocoImages):
    """One split of a folder in VOC's layout.

    The image of a file of annotations that is not XML, or does not say the image's size, is a
    `BrokenImage`. Classes are those that `classes.txt` in the root lists, or all names of objects,
    sorted.

    Args:
        root: the folder.
        split: name of a list in `ImageSets/Main`.
        difficult: what objects that are marked as difficult are: "ignore" for regions that are not
            trained on and in which detections count neither as right nor as wrong, as in COCO's
            crowds; "keep" for objects as others are. None where none is marked.
        class_names: of the training split; None for those of this one.
        bits: as of `decode_image`.

    FileNotFoundError for no such list; UserError for an empty one, names in it without an image or
    annotations, objects marked as difficult where `difficult` is None, no object with a name, boxes
    in shares, and as `CocoImages`.
    """

    def __init__(
        self,
        root: StrPath,
        split: str,
        difficult: str | None = None,
        class_names: Sequence[str] | None = None,
        bits: int | None = None,
    ) -> None:
        self.folder, self.bits = Path(root, IMAGES), bits
        place, files = self._files(root, split)
        self.unread: dict[int, BrokenImage] = {}
        self.found: list[VocObject] = []
        images, annotations = list[Entry](), list[Entry]()
        for number, (image, file) in enumerate(files):
            size, found = (1, 1), list[VocObject]()
            try:
                size, found = read_annotations(file)
            except UserError as error:
                self.unread[number] = BrokenImage(file, str(error))
            name, (width, height) = os.path.relpath(image, self.folder), size
            images.append({"id": number, "file_name": name, "width": width, "height": height})
            annotations += [{"image_id": number} for _ in found]
            self.found += found
        marked = sum(each.difficult == "1" for each in self.found)
        if marked and difficult not in DIFFICULT:
            raise UserError(
                f"data.difficult must be one of {', '.join(DIFFICULT)}: {marked} of {len(self.found)} "
                f"objects of {place} are marked as difficult, which are either neither trained on nor "
                f"counted, or objects as others are; got {difficult!r}"
            )
        names = self._class_names(root, place) if class_names is None else class_names
        names = [composed(name) for name in names]
        labels: dict[str | None, int] = {name: label for label, name in enumerate(names)}
        for number, (entry, each) in enumerate(zip(annotations, self.found, strict=True)):
            is_ignored = each.difficult == "1" and difficult == "ignore"
            entry |= {
                "id": number,
                "iscrowd": int(is_ignored),
                "category_id": labels.get(each.name),
            }
            if each.corners is not None:
                left, top, right, bottom = each.corners
                across, down = right - left + 1, bottom - top + 1
                entry |= {"bbox": [left - 1, top - 1, across, down], "area": across * down}
        categories = [{"id": label, "name": name} for label, name in enumerate(names)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        self._read(content, place)
        early = sum(each.corners is not None and min(each.corners[:2]) < 1 for each in self.found)
        if early:
            self.notes.append(
                f"{early} boxes of {place} begin before pixel 1, the first of Pascal VOC: if all boxes "
                "count from 0, they are read a pixel too far left and up"
            )

    def _files(self, root: StrPath, split: str) -> tuple[Path, list[tuple[str, str]]]:
        """The list of a split, and the files of each image in it and of its annotations, by name."""
        place, names = listed_names(Path(root, LISTS), split)
        if not names:
            raise UserError(f"no names in {place}")
        paths = images_by_name(Path(self.folder), [])
        files = {name: existing(str(Path(root, ANNOTATIONS, f"{name}.xml"))) for name in names}
        missing = [
            name for name in sorted(names) if name not in paths or not os.path.isfile(files[name])
        ]
        if missing:
            raise UserError(
                f"{len(missing)} names in {place} have no image in {self.folder} or no XML file in "
                f"{Path(root, ANNOTATIONS)}: {some(missing, 3)}"
            )
        return place, [(paths[name], files[name]) for name in sorted(names)]

    def _class_names(self, root: StrPath, place: Path) -> Sequence[str]:
        """The classes that the root lists, or those of all objects."""
        if Path(root, CLASS_FILES[0]).is_file():
            return read_class_names(root)
        names = sorted({each.name for each in self.found if each.name})
        if not names:
            first = next(iter(self.unread.values()), None)
            reason = "" if first is None else f"; {first.path} {first.reason}"
            raise UserError(f"no object of the images in {place} has a name{reason}")
        return names

    def __getitem__(self, index: int) -> Sample | BrokenImage:
        """As of all; broken, too, where the annotations cannot be read."""
        return self.unread.get(index) or super().__getitem__(index)

    def with_objects(self) -> list[int]:
        """As of all, and those whose annotations cannot be read, to be reported."""
        return sorted({*super().with_objects(), *self.unread})

    def check_boxes(
        self, annotations: list[Entry], images: Mapping[int, Entry], path: StrPath
    ) -> None:
        """As of all."""
        corners = [each.corners for each in self.found if each.corners is not None]
        if corners and all(max(sides) <= 1 for sides in corners):
            raise UserError(
                f"{path}: no box exceeds 1: they seem to be in shares of their image, but Pascal VOC "
                "has pixels"
            )

    def usable(
        self, entry: Entry, images: Mapping[int, Entry], categories: set[int]
    ) -> tuple[Entry, list[str]]:
        """As of all."""
        self.found[entry["id"]].check([each["name"] for each in self.categories])
        return super().usable(entry, images, categories)

    def place_of(self, entry: Entry, number: int, path: StrPath) -> str:
        """As of all."""
        return self.found[number].place


class _WithoutDoctype(ElementTree.TreeBuilder):
    """Of a file without a document type: there entities are defined, which may expand to gigabytes
    or name other files, and annotations need none.
    """

    def doctype(self, name: str, pubid: str | None, system: str | None) -> NoReturn:
        raise UserError("has a document type, which annotations of Pascal VOC do not have")


def read_annotations(path: str) -> tuple[tuple[int, int], list[VocObject]]:
    """Width and height of an image, and its objects, of a file of annotations.

    UserError for a file that cannot be read, is not XML, has a document type, or does not say the
    image's size.
    """
    try:
        parser = ElementTree.XMLParser(target=_WithoutDoctype())
        root = ElementTree.parse(path, parser).getroot()
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}") from error
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # an encoding, too
        raise UserError(f"is not XML: {error}") from error
    sides = [_text(root, f"size/{side}") for side in ("width", "height")]
    if not all(side and side.isdecimal() and int(side) for side in sides):
        raise UserError(
            f"must have integers above 0 as its size's width and height, got {sides!r:.100}"
        )
    width, height = (int(side or 0) for side in sides)
    return (width, height), [
        VocObject(
            f"{path}: object {number}",
            composed(_text(element, "name") or "") or None,
            tuple(_text(element, f"bndbox/{side}") for side in SIDES),
            _text(element, "difficult") or None,
            _attribute(element, "rotation"),
        )
        for number, element in enumerate(root.findall("object"), start=1)
    ]


def _attribute(element: ElementTree.Element, name: str) -> str | None:
    """The value of an object's attribute of a name, as CVAT writes them; None where it has none."""
    attributes = element.findall("attributes/attribute")
    return next((_text(each, "value") for each in attributes if _text(each, "name") == name), None)


def _text(element: ElementTree.Element, path: str) -> str | None:
    """The text at a path; None for nothing there, all texts where there are several: no value that is
    expected, as of an object with several boxes.
    """
    found = element.findall(path)
    return " and ".join((each.text or "").strip() for each in found) if found else None
