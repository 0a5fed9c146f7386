"""Images with label maps: folders of both, and the built-in scenes."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dgt.data.folders import folder_names, image_files, left_out_note
from dgt.data.image_io import (
    UPRIGHT,
    BrokenImage,
    Stored,
    StrPath,
    WrongLabels,
    decode_stored,
    turned,
    upright_rgb,
)
from dgt.data.readers import split_folder
from dgt.data.scenes import Scenes
from dgt.utils.class_names import composed, some
from dgt.utils.errors import UserError

IGNORED = 255

Mapped = tuple[Image.Image, NDArray[np.uint8]]
"""An RGB image and its label map (H, W): class numbers from 0, `IGNORED` where there is none."""


SUFFIX = re.compile(r"\.[A-Za-z]\w*$")
"""The end of a file's name that its partner need not have; `.001` is a part of the name."""
CLASS_FILES = ("classes.txt", "objectInfo150.txt")


# of label maps -> whether label 0 is ignored there
LABEL_FOLDERS = {"annotations": True, "labels": False}


class LabelMapFolder:
    """Images and label maps of the same names in one of the two layouts, also in sub-folders.

    `class_names`, 255 at most, are in the order of their labels; `zero_is_ignored` says whether
    label 0 means "none of the classes" and label c + 1 class c; None: in `annotations/`.
    FileNotFoundError for a root, folder or split that is not there; UserError for no images, files
    without their partner, two files or classes of one name.
    """

    def __init__(
        self,
        root: StrPath,
        split: str,
        class_names: Sequence[str],
        zero_is_ignored: bool | None = None,
    ) -> None:
        if not 1 <= len(set(class_names)) == len(class_names) <= IGNORED:
            raise UserError(
                f"data.classes must be 1 to {IGNORED} different names, got {', '.join(class_names) or 'none'}"
            )
        maps = label_folder(root)
        self.class_names = self.stored_names = tuple(class_names)
        self.labels = np.arange(256, dtype=np.uint8)
        self.zero_is_ignored = (
            LABEL_FOLDERS[maps.name] if zero_is_ignored is None else zero_is_ignored
        )
        folders = split_folder(Path(root, "images"), split), split_folder(maps, split)
        self.notes: list[str] = []
        self.samples = _pairs(*folders, self.notes)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapped | BrokenImage:
        path, map_path = self.samples[index]
        name = path
        try:
            stored = decode_stored(path)
            image = upright_rgb(stored)
            name = map_path
            label_map = decode_stored(map_path)
        except UserError as error:
            return BrokenImage(name, str(error))
        try:
            values = np.asarray(_aligned(_checked(label_map), stored, path))
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


class SceneMaps(Scenes):
    """The built-in scenes with their label maps: background, and the kinds of shapes."""

    class_names = ("background", *Scenes.class_names)

    def __getitem__(self, index: int) -> Mapped:
        scene = super().__getitem__(index)
        return scene.to_pil(), scene.label_map.numpy().astype(np.uint8)


def label_folder(root: StrPath) -> Path:
    """The folder with the label maps of all splits; FileNotFoundError unless there is just one, beside `images`."""
    folders = folder_names(root)
    names = [name for name in LABEL_FOLDERS if name in folders]
    if len(names) != 1 or "images" not in folders:
        expected = f"images and one of {' and '.join(LABEL_FOLDERS)}"
        raise FileNotFoundError(
            f"data.root: expected the folders {expected} in {root}, found {some(folders)}"
        )
    return Path(root, names[0])


def read_class_names(root: StrPath) -> tuple[str, ...]:
    """The classes that a file beside the images lists: `classes.txt`, a name a line, or ADE20K's
    `objectInfo150.txt`.

    FileNotFoundError where there is neither, UserError for a file that is not in UTF-8.
    """
    path = next(
        (path for path in (Path(root, name) for name in CLASS_FILES) if path.is_file()), None
    )
    if path is None:
        hint = f"list them in data.classes, or in {root}/{CLASS_FILES[0]}, one per line"
        raise FileNotFoundError(f"the classes of {root} are not known: {hint}")
    try:
        lines = [
            line.strip()
            for line in path.read_text(encoding="utf-8-sig").splitlines()
            if line.strip()
        ]
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    if path.name != CLASS_FILES[0]:  # a table whose last column holds synonyms, the usual one first
        lines = [line.split("\t")[-1].split(",")[0].strip() for line in lines[1:]]
    return tuple(lines)


def _pairs(images: Path, maps: Path, notes: list[str]) -> list[tuple[str, str]]:
    """Image and label map of each name, in the order of names; what is left out goes to `notes`."""
    paths, labels = _by_name(images, notes), _by_name(maps, notes)
    if alone := sorted(paths.keys() ^ labels.keys()):
        files = some([paths.get(name) or labels[name] for name in alone], 3)
        raise UserError(
            f"{len(alone)} files in {images} and {maps} have no counterpart of the same name: {files}"
        )
    if not paths:
        raise UserError(f"no images in {images}")
    return [(paths[name], labels[name]) for name in sorted(paths)]


def _by_name(folder: Path, notes: list[str]) -> dict[str, str]:
    """Image files below a folder by their path in it, composed, without suffix."""
    left_out = Counter[str]()
    paths: dict[str, str] = {}
    for path in image_files(folder, left_out):
        name = composed(SUFFIX.sub("", os.path.relpath(path, folder)))
        first = paths.setdefault(name, path)
        if first != path:
            raise UserError(f"two files have the same name: {first} and {path}")
    notes += left_out_note(folder, left_out)
    return paths


def _checked(stored: Stored) -> Stored:
    """A decoded label map; UserError for a file that cannot hold one, as decoding stretches fewer bits of gray."""
    image = stored.image
    if image.mode in ("L", "P") and stored.format != "JPEG" and not stored.is_stretched:
        return stored
    got = f"{image.mode}{' with fewer bits' if stored.is_stretched else ''} in {stored.format}"
    raise UserError(
        f"expected a lossless label map, such as PNG, with one 8-bit channel (gray or palette), got {got}"
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
