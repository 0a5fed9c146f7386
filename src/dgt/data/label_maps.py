"""Images with label maps: folders of both, and the built-in scenes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile

from dgt.data.image_io import BrokenImage, StrPath, WrongLabels, decode_image, decoding
from dgt.data.readers import folder_names, image_files, some, split_folder
from dgt.data.scenes import Scenes
from dgt.utils.errors import UserError

IGNORED = 255

Mapped = tuple[Image.Image, NDArray[np.uint8]]
"""An RGB image and its label map (H, W): class numbers from 0, `IGNORED` where there is none."""


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
        self.class_names = tuple(class_names)
        self.zero_is_ignored = (
            LABEL_FOLDERS[maps.name] if zero_is_ignored is None else zero_is_ignored
        )
        self.samples = _pairs(split_folder(Path(root, "images"), split), split_folder(maps, split))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapped | BrokenImage:
        path, map_path = self.samples[index]
        name = path
        try:
            with decoding(path) as opened:
                pixels = StoredImage(
                    path, opened.size, opened.getexif().get(ExifTags.Base.Orientation, 1)
                )
            image = decode_image(path)
            name = map_path
            with decoding(map_path) as opened:
                fault = _kind_fault(opened) or _size_fault(opened.size, pixels)
                upright = opened if fault else _turned_with(opened, pixels)
                stored = np.array([] if fault else upright, dtype=np.uint8)
        except UserError as error:
            return BrokenImage(name, str(error))
        # 0 becomes 255
        labels = np.where(stored == IGNORED, stored, stored - np.uint8(self.zero_is_ignored))
        largest = labels[labels != IGNORED].max(initial=0)
        if largest >= len(self.class_names):
            fault = f"label {largest + self.zero_is_ignored} is not one of the {len(self.class_names)} classes"
        return WrongLabels(map_path, fault) if fault else (image, labels)


class SceneMaps(Scenes):
    """The built-in scenes with their label maps: background, and the kinds of shapes."""

    class_names = ("background", *Scenes.class_names)

    def __getitem__(self, index: int) -> Mapped:
        scene = super().__getitem__(index)
        return scene.to_pil(), scene.label_map.numpy().astype(np.uint8)


def label_folder(root: StrPath) -> Path:
    """The folder with the label maps of all splits.

    FileNotFoundError where there is not just one, beside `images`.
    """
    folders = folder_names(root)
    found = [name for name in LABEL_FOLDERS if name in folders]
    if len(found) != 1 or "images" not in folders:
        expected = f"images and one of {' and '.join(LABEL_FOLDERS)}"
        raise FileNotFoundError(
            f"data.root: expected the folders {expected} in {root}, found {some(folders)}"
        )
    return Path(root, found[0])


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


def _pairs(images: Path, maps: Path) -> list[tuple[str, str]]:
    """Image and label map of each name, in the order of names."""
    paths, labels = _by_name(images), _by_name(maps)
    if alone := sorted(paths.keys() ^ labels.keys()):
        files = some([paths.get(name) or labels[name] for name in alone], 3)
        raise UserError(
            f"{len(alone)} files in {images} and {maps} have no counterpart of the same name: {files}"
        )
    if not paths:
        raise UserError(f"no images in {images}")
    return [(paths[name], labels[name]) for name in sorted(paths)]


def _by_name(folder: Path) -> dict[str, str]:
    """Image files below a folder by their path in it without suffix."""
    found: dict[str, str] = {}
    for path in image_files(folder):
        first = found.setdefault(os.path.splitext(os.path.relpath(path, folder))[0], path)
        if first != path:
            raise UserError(f"two files have the same name: {first} and {path}")
    return found


def _kind_fault(opened: ImageFile.ImageFile) -> str:
    """Why a file cannot hold a label map; empty where it can.

    Fewer bits of gray are stretched in decoding.
    """
    stretched = bool(opened.tile) and opened.tile[0].args in ("L;2", "L;4")
    if opened.mode in ("L", "P") and opened.format != "JPEG" and not stretched:
        return ""
    got = f"{opened.mode}{' with fewer bits' if stretched else ''} in {opened.format}"
    return f"expected a lossless label map, such as PNG, with one 8-bit channel (gray or palette), got {got}"


class StoredImage(NamedTuple):
    """An image file: width and height of its pixels as stored, and its EXIF orientation."""

    path: str
    size: tuple[int, int]
    orientation: int

    @property
    def is_turned(self) -> bool:
        """Whether EXIF data turn or mirror it; values out of their range are ignored, as by Pillow."""
        return self.orientation in range(2, 9)

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height as EXIF data turn it."""
        width, height = self.size
        return (height, width) if self.orientation in QUARTER_TURNS else (width, height)


# What EXIF's orientations 5 to 8 do to the pixels as stored
QUARTER_TURNS = {
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _size_fault(size: tuple[int, int], image: StoredImage) -> str:
    """Why a label map of this width and height may not be that of an image; empty where it is.

    Beside an image that EXIF data turn, the sizes must show whether the label map is of the upright
    image or of the pixels as stored.
    """
    fits = size in (image.size, image.upright_size)
    shows = not image.is_turned or image.size != image.upright_size
    if fits and shows:
        return ""
    has, image_has = ("{} x {}".format(*pair) for pair in (size, image.upright_size))
    hint = (
        ", rotated by its EXIF orientation: store it upright, without that tag"
        if image.is_turned
        else ""
    )
    return f"the label map has {has} pixels, but its image {image.path} has {image_has}{hint}"


def _turned_with(opened: Image.Image, image: StoredImage) -> Image.Image:
    """A label map of the pixels as stored, turned as EXIF data turn its image; another as it is."""
    if not image.is_turned or opened.size == image.upright_size:
        return opened
    return opened.transpose(QUARTER_TURNS[image.orientation])
