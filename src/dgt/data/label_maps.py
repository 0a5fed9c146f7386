"""Images with label maps: folders of both, Hugging Face `datasets`, and the built-in scenes."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dgt.data.folders import folder_names, images_by_name, listed_names, split_lists
from dgt.data.image_io import (
    UPRIGHT,
    BrokenImage,
    Source,
    Stored,
    StrPath,
    WrongLabels,
    beginning_of,
    decode_stored,
    note_on_bits,
    turned,
    upright_rgb,
)
from dgt.data.readers import (
    choose_column,
    open_hub_split,
    split_folder,
    stored_images,
    stored_source,
)
from dgt.data.scenes import Scenes
from dgt.utils.class_names import some
from dgt.utils.errors import UserError

IGNORED = 255
HUB_ROWS = 100
"""Rows of a Hugging Face data set whose sizes and palettes are compared before anything runs."""

Named = tuple[str, Source | None]

Mapped = tuple[Image.Image, NDArray[np.uint8]]
"""An RGB image and its label map (H, W): class numbers from 0, `IGNORED` where there is none."""

LOSSLESS = ("PNG", "BMP", "DIB", "GIF", "TIFF", "PPM")
"""Formats of label maps. WebP, JPEG 2000 and AVIF, which may be without loss, do not say whether they are."""
CLASS_FILES = ("classes.txt", "objectInfo150.txt")
TOOLS_CLASS_FILES = ("labelmap.txt", "class_names.txt")
"""Where CVAT and labelme list the classes of what they write in Pascal VOC's layout."""
LABELME_IGNORE = "__ignore__"
"""The first line of labelme's lists of labels, which has no label of its own."""
# A line of a list whose lines have numbers of their own
NUMBERED = re.compile(r"(\d+)[\s:,;.=-]+\D")
NUMBERED_BEHIND = re.compile(r"(.*\S)[\s:,;=]+(\d+)")


@dataclass(frozen=True)
class Layout:
    """How a data set lays out images and label maps.

    Args:
        name: for messages.
        images: folder of the images in the root.
        maps: folder of the label maps.
        zero_is_ignored: whether label 0 is none of the classes.
        ends: of the names of images and of label maps before the suffix; others are no part of it.
        lists: folder with a text file for each split, of the names in it; None for folders of them.
        classes: their names, where the data set fixes them and its folder does not list others.
        remedy: what to do where there are no label maps.
    """

    name: str
    images: str
    maps: str
    zero_is_ignored: bool = False
    ends: tuple[str, str] = ("", "")
    lists: str | None = None
    classes: tuple[str, ...] | None = None
    remedy: str = ""

    def splits(self, root: StrPath) -> tuple[str, ...]:
        """Names of the splits in a root."""
        if self.lists is None:
            return folder_names(Path(root, self.maps))
        return split_lists(Path(root, self.lists))

    def pairs(self, root: StrPath, split: str, notes: list[str]) -> list[tuple[str, str]]:
        """Paths of every image and its label map in a split, in the order of names; what is left
        out goes to `notes`.
        """
        images, maps = Path(root, self.images), Path(root, self.maps)
        if self.lists is None:
            folders = split_folder(images, split), split_folder(maps, split)
            paths, labels = (
                images_by_name(folder, notes, end)
                for folder, end in zip(folders, self.ends, strict=True)
            )
            if not labels and self.remedy:
                raise UserError(f"no label maps in {folders[1]}: {self.remedy}")
            return _pairs(*folders, paths, labels)
        listed, names = listed_names(Path(root, self.lists), split)
        found = [
            {name: path for name, path in images_by_name(folder, []).items() if name in names}
            for folder in (images, maps)
        ]
        if missing := sorted(names - (found[0].keys() & found[1].keys())):
            raise UserError(
                f"{len(missing)} names in {listed} have no image in {images} or no label map in "
                f"{maps}: {some(missing, 3)}"
            )
        return _pairs(images, maps, *found)


CITYSCAPES = """
    road, sidewalk, building, wall, fence, pole, traffic light, traffic sign, vegetation, terrain, sky,
    person, rider, car, truck, bus, train, motorcycle, bicycle
"""
VOC = """
    background, aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, diningtable, dog,
    horse, motorbike, person, pottedplant, sheep, sofa, train, tvmonitor
"""


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


LAYOUTS = (
    Layout("ADE20K", "images", "annotations", zero_is_ignored=True),
    Layout("plain", "images", "labels"),
    Layout(
        "Cityscapes",
        "leftImg8bit",
        "gtFine",
        ends=("_leftImg8bit", "_gtFine_labelTrainIds"),
        classes=_names(CITYSCAPES),
        remedy="*_gtFine_labelTrainIds.png are made by csCreateTrainIdLabelImgs of cityscapesscripts",
    ),
    Layout(
        "Pascal VOC",
        "JPEGImages",
        "SegmentationClass",
        lists="ImageSets/Segmentation",
        classes=_names(VOC),
    ),
)


class MappedImages(ABC):
    """Images and label maps by index.

    `class_names`, 2 to 255, are in the order of their labels; `zero_is_ignored` says whether label 0
    means "none of the classes" and label c + 1 class c; `bits` is as of `decode_image`. UserError
    for two classes of one name, one class, none or too many, and for a name of none.
    """

    def __init__(
        self, class_names: Sequence[str], zero_is_ignored: bool, bits: int | None = None
    ) -> None:
        if not 2 <= len(set(class_names)) == len(class_names) <= IGNORED:
            raise UserError(
                f"data.classes must be 2 to {IGNORED} different names, such as background and the only "
                f"kind of object, got {', '.join(class_names) or 'none'}"
            )
        if LABELME_IGNORE in class_names:
            raise UserError(
                f"data.classes must not have {LABELME_IGNORE!r}, labelme's name of what is 255 in label maps and no "
                "class: leave it out, so that each name has its label"
            )
        self.bits = bits
        self.class_names = self.stored_names = tuple(class_names)
        self.labels = np.arange(256, dtype=np.uint8)
        self.zero_is_ignored = zero_is_ignored
        self.notes: list[str] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def pair(self, index: int) -> tuple[Named, Named]:
        """An image and its label map: each a name, and the file or its bytes, None for none."""

    def check_beginnings(self, count: int | None = None) -> None:
        """Raise UserError for a label map of another size than its image, and for label maps whose
        palettes have other colors for a label, by the beginnings of the first `count` files, or all;
        files that cannot be read are left to their reading.
        """
        palettes: dict[bytes, str] = {}
        for index in range(len(self) if count is None else min(count, len(self))):
            (name, image), (map_name, label_map) = self.pair(index)
            begun = image and beginning_of(image)
            map_begun = label_map and beginning_of(label_map)
            if not (begun and map_begun):
                continue
            (width, height), (map_width, map_height) = begun.size, map_begun.size
            if {width, height} != {map_width, map_height}:
                raise UserError(
                    f"{map_name}: the label map has {map_width} x {map_height} pixels, but its image "
                    f"{name} has {width} x {height}"
                )
            if map_begun.palette:
                palettes.setdefault(map_begun.palette, map_name)
        self._check_colors(palettes)

    def _check_colors(self, palettes: Mapping[bytes, str]) -> None:
        """UserError where palettes, each with a label map that has it, do not agree on a label's color:
        programs that reduce colors number them anew in each file.
        """
        colors: dict[int, tuple[bytes, str]] = {}
        labels = len(self.stored_names) + self.zero_is_ignored
        for palette, name in palettes.items():
            for label in range(min(labels, len(palette) // 3)):
                color = palette[3 * label : 3 * label + 3]
                first, first_name = colors.setdefault(label, (color, name))
                if first != color:
                    raise UserError(
                        f"{name}: its palette has another color for number {label} than that of {first_name}, "
                        "as after a program that reduces colors or files, which numbers them anew: save "
                        "label maps as gray images of the labels"
                    )

    def notes_on_bits(self, place: StrPath) -> list[str]:
        """As `note_on_bits`, of the images."""
        return note_on_bits(lambda index: self.pair(index)[0][1], len(self), self.bits, place)

    def __getitem__(self, index: int) -> Mapped | BrokenImage:
        (path, image_source), (map_path, map_source) = self.pair(index)
        name = path
        try:
            stored = _decode(image_source)
            image = upright_rgb(stored, self.bits)
            name = map_path
            label_map = _decode(map_source)
        except UserError as error:
            return BrokenImage(name, str(error))
        try:
            _check_palette(_checked(label_map).image, len(self.stored_names) + self.zero_is_ignored)
            values = np.asarray(_aligned(label_map, stored, path))
        except UserError as error:
            return WrongLabels(map_path, str(error))
        # 0 becomes 255
        labels = np.where(values == IGNORED, values, values - np.uint8(self.zero_is_ignored))
        largest = int(labels[labels != IGNORED].max(initial=0))
        if largest >= len(self.stored_names):
            return WrongLabels(map_path, self._unknown_label(largest))
        return image, self.labels[labels]

    def use_classes(self, names: Sequence[str], labels: Sequence[int]) -> None:
        """Take the class names of a model, and the label there of each class here."""
        self.labels[: len(labels)] = labels
        self.class_names = tuple(names)

    def _unknown_label(self, label: int) -> str:
        """What to say of a label that no class has."""
        count, stored = len(self.stored_names), label + self.zero_is_ignored
        hint = ""
        if label == count and not self.zero_is_ignored:
            hint = (
                "; if labels count from 1, and 0 is none of the classes, set data.zero_is_ignored"
            )
        return f"label {stored} is not one of the {count} classes{hint}"


def _decode(source: Source | None) -> Stored:
    if source is None:
        raise UserError("is missing")
    return decode_stored(source)


class LabelMapFolder(MappedImages):
    """Images and label maps of the same names in one of the `LAYOUTS`, also in sub-folders.

    `zero_is_ignored` None: as the layout has it. FileNotFoundError for a root, folder or split that
    is not there; `bits` as of `decode_image`; UserError for no images, files without their partner, two files
    of one name, a label map of another size than its image, palettes that do not agree.
    """

    def __init__(
        self,
        root: StrPath,
        split: str,
        class_names: Sequence[str],
        zero_is_ignored: bool | None = None,
        bits: int | None = None,
    ) -> None:
        layout = find_layout(root)
        zero = layout.zero_is_ignored if zero_is_ignored is None else zero_is_ignored
        super().__init__(class_names, zero, bits)
        self.samples = layout.pairs(root, split, self.notes)
        self.check_beginnings()
        self.notes += self.notes_on_bits(root)

    def __len__(self) -> int:
        return len(self.samples)

    def pair(self, index: int) -> tuple[Named, Named]:
        """As of all."""
        path, map_path = self.samples[index]
        return (path, path), (map_path, map_path)


class HubLabelMaps(MappedImages):
    """One split of a Hugging Face data set with a column of images and one of label maps.

    Args:
        root: as of `HubImages`.
        split: name of the split.
        class_names: names of the classes in the order of their labels.
        zero_is_ignored: whether label 0 is none of the classes: no data set says.
        bits: as of `decode_image`.
        columns: `image_column` and `label_column`; None for the only column of images whose name is
            usual for images, and the only one whose name is usual for label maps.

    UserError for no such split or column or several, and what is unreadable.
    """

    def __init__(
        self,
        root: StrPath,
        split: str,
        class_names: Sequence[str],
        zero_is_ignored: bool,
        bits: int | None = None,
        **columns: str | None,
    ) -> None:
        super().__init__(class_names, zero_is_ignored, bits)
        table, self.place = open_hub_split(root, split)
        self.columns = [
            choose_column(table, kind, columns, by_name=True) for kind in ("image", "label map")
        ]
        if self.columns[0] == self.columns[1]:
            raise UserError(f"data.label_column: {self.columns[0]!r} holds the images already")
        self.table = stored_images(table, self.columns, root)
        self.check_beginnings(HUB_ROWS)
        self.notes += self.notes_on_bits(f"{self.place}]")

    def __len__(self) -> int:
        return len(self.table)

    def pair(self, index: int) -> tuple[Named, Named]:
        """As of all."""
        row = self.table[int(index)]
        image, label_map = (
            (f"{self.place}:{index}].{column}", stored_source(row[column]))
            for column in self.columns
        )
        return image, label_map


class SceneMaps(Scenes):
    """The built-in scenes with their label maps: background, and the kinds of shapes."""

    class_names = ("background", *Scenes.class_names)

    def __getitem__(self, index: int) -> Mapped:
        scene = super().__getitem__(index)
        return scene.to_pil(), scene.label_map.numpy().astype(np.uint8)


def find_layout(root: StrPath) -> Layout:
    """The one layout whose folders are in a root.

    FileNotFoundError where there is none, UserError where there are several.
    """
    folders = folder_names(root)
    found = [layout for layout in LAYOUTS if {layout.images, layout.maps} <= set(folders)]
    if len(found) > 1:
        names = " and ".join(f"{layout.images} and {layout.maps}" for layout in found)
        raise UserError(
            f"data.root: {root} has the folders of several layouts, {names}: leave one of them"
        )
    if not found:
        expected = " or ".join(f"{layout.images} and {layout.maps}" for layout in LAYOUTS)
        raise FileNotFoundError(
            f"data.root: expected the folders {expected} in {root}, found {some(folders)}"
        )
    return found[0]


def read_class_names(root: StrPath, usual: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """The classes that a file beside the images lists: `classes.txt`, a name a line, or ADE20K's
    `objectInfo150.txt`; the `usual` ones of a layout where there is neither.

    FileNotFoundError where there is neither and nothing usual; UserError for a file that is not in
    UTF-8, an empty line before a name, lines with numbers that are not their labels, or behind names,
    and for a list of a tool in place of the usual classes.
    """
    path = next(
        (path for path in (Path(root, name) for name in CLASS_FILES) if path.is_file()), None
    )
    if path is None and usual is not None:
        if tools := [name for name in TOOLS_CLASS_FILES if Path(root, name).is_file()]:
            raise UserError(
                f"{root} has a list of classes, {tools[0]}, so they are others than those of its layout: "
                f"list them in data.classes, or in {root}/{CLASS_FILES[0]}, one per line in the order of "
                "their labels"
            )
        return usual
    if path is None:
        hint = f"list them in data.classes, or in {root}/{CLASS_FILES[0]}, one per line"
        raise FileNotFoundError(f"the classes of {root} are not known: {hint}")
    try:
        lines = [line.strip() for line in path.read_text("utf-8-sig").rstrip().splitlines()]
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    if path.name != CLASS_FILES[0]:  # a table whose last column holds synonyms, the usual one first
        rows = [line.split("\t") for line in lines[1:]]
        if [row[0] for row in rows] != [str(label) for label in range(1, len(rows) + 1)]:
            raise UserError(f"{path} must have the labels 1 to {len(rows)} in this order")
        return tuple(row[-1].split(",")[0].strip() for row in rows)
    if "" in lines:
        raise UserError(f"{path}: line {1 + lines.index('')} is empty, and lines are labels")
    numbers = [NUMBERED.match(line) for line in lines]
    if all(numbers) and [int(each[1]) for each in numbers if each] != list(range(len(lines))):
        raise UserError(
            f"{path}: lines are labels from 0 on, but their own numbers are others, as of {lines[0]!r}: "
            "leave the numbers out, and put the names in the order of their labels"
        )
    behind = [NUMBERED_BEHIND.fullmatch(line) for line in lines]
    names, labels = {each[1] for each in behind if each}, {int(each[2]) for each in behind if each}
    count = len(lines)
    # "class 0" and "class 1" are names, "person 0" and "car 1" a name and its number
    if (
        all(behind)
        and len(names) == count
        and labels in (set(range(count)), set(range(1, count + 1)))
    ):
        raise UserError(
            f"{path}: lines are labels from 0 on, but numbers stand behind their names, as of {lines[0]!r}: "
            "leave the numbers out, and put the names in the order of their labels"
        )
    return tuple(lines)


def _pairs(
    images: Path, maps: Path, paths: dict[str, str], labels: dict[str, str]
) -> list[tuple[str, str]]:
    """Image and label map of each name, in the order of names."""
    if alone := sorted(paths.keys() ^ labels.keys()):
        files = some([paths.get(name) or labels[name] for name in alone], 3)
        raise UserError(
            f"{len(alone)} files in {images} and {maps} have no counterpart of the same name: {files}"
        )
    if not paths:
        raise UserError(f"no images in {images}")
    return [(paths[name], labels[name]) for name in sorted(paths)]


def _checked(stored: Stored) -> Stored:
    """A decoded label map; UserError for a file that cannot hold one, as decoding stretches fewer bits of
    gray, or that may have lost labels.
    """
    image = stored.image
    kind = str(stored.format)
    is_lossless = kind in LOSSLESS
    if kind == "TIFF":
        compression = str(image.info.get("compression", "raw"))
        kind = f"TIFF ({compression})"
        is_lossless = not compression.endswith(("jpeg", "webp"))
    if image.mode in ("L", "P") and is_lossless and not stored.is_stretched:
        return stored
    bits = " with fewer bits" if stored.is_stretched else ""
    got = f"{image.mode}{bits} in {kind}"
    raise UserError(
        f"expected a lossless label map, such as PNG, with one 8-bit channel (gray or palette), got {got}"
    )


def _check_palette(image: Image.Image, count: int) -> None:
    """UserError for a palette of grays that are labels below `count` themselves, but others than their
    numbers: programs that reduce files or colors give gray images one, in any order.
    """
    if image.mode != "P":
        return
    palette = np.array(image.getpalette()).reshape(-1, 3)
    numbers = np.unique(np.asarray(image))
    numbers = numbers[numbers < len(palette)]
    grays = palette[numbers, 0]
    are_grays = (palette == palette[:, :1]).all() and len(np.unique(grays)) == len(grays)
    are_labels = ((grays < count) | (grays == IGNORED)).all()
    differ = np.flatnonzero((grays != numbers) & (grays != IGNORED))
    if are_grays and are_labels and len(differ):
        first = differ[0]
        raise UserError(
            f"its palette has grays that may be the labels, but not in their order (number {numbers[first]} "
            f"is gray {grays[first]}): save it as a gray image of the labels"
        )


def _aligned(labels: Stored, image: Stored, path: str) -> Image.Image:
    """A label map turned as its upright image; UserError where that cannot be known.

    A label map may be of the upright image, of the pixels as stored, or be turned by a tag of its
    own: its size must show which, unless both have the same tag.
    """
    readings = {UPRIGHT, labels.orientation, image.orientation}
    fitting = {
        reading
        for reading in readings
        if Stored(labels.image, reading).upright_size == image.upright_size
    }
    if labels.orientation == image.orientation and image.orientation in fitting:
        fitting = {image.orientation}
    if len(fitting) == 1:
        return turned(labels.image, fitting.pop())
    has, image_has = ("{} x {}".format(*pair) for pair in (labels.image.size, image.upright_size))
    if not fitting:
        raise UserError(
            f"the label map has {has} pixels, but its image {path} has {image_has}"
            + ("" if image.orientation == UPRIGHT else " when turned as its EXIF orientation says")
        )
    which = "its image" if labels.orientation == UPRIGHT else "it"
    raise UserError(
        f"{which} has an EXIF orientation, and its {has} pixels do not show whether the label map is "
        f"of the upright image: store both upright, without that tag ({path})"
    )
