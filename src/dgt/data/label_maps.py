"""Readers of images with label maps: ADE20K's layout, a plain one, and the built-in scenes.

```
ROOT/images/<split>/NAME.jpg  ROOT/annotations/<split>/NAME.png     ADE20K: label 0 is ignored, c + 1 is class c
ROOT/images/<split>/NAME.jpg  ROOT/labels/<split>/NAME.png          plain: label c is class c
```

A label map is an 8-bit image of one channel (grey or palette), of its image's size; 255 is ignored in both layouts.
An image whose EXIF data say how to turn it upright is turned, so its label map must be that of the upright image: a
size with the sides exchanged shows that it is, and where none can show it (a half turn, a mirror, a square) the file is
refused.
What cannot be decoded is a `BrokenImage`, left out and counted; a label map that can be read but is wrong would teach
the model something wrong, so it stops the run: a `WrongLabels`, which names the file.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from dgt.data.image_io import BrokenImage, StrPath, WrongLabels, decode_oriented, decoding
from dgt.data.readers import folder_names, image_files, some, split_folder
from dgt.data.scenes import Scenes
from dgt.utils.errors import UserError

IGNORED = 255
CLASS_FILES = ("classes.txt", "objectInfo150.txt")
LABEL_FOLDERS = {"annotations": True, "labels": False}  # of label maps -> whether label 0 is ignored there


class MappedImage(NamedTuple):
    """An RGB image and its label map (H, W): class numbers from 0, `IGNORED` where there is none."""

    image: Image.Image
    labels: NDArray[np.uint8]


class LabelMapFolder:
    """Images in `<root>/images/<split>/` with label maps of the same names in `<root>/labels/<split>/` or
    `<root>/annotations/<split>/`. Sub-folders are fine where both have the same.

    `class_names`, 255 at most, are in the order of their labels; `zero_is_ignored` says whether label 0 means "none of
    the classes" and label c + 1 class c; None: in `annotations/`.

    Raises:
        FileNotFoundError: the root, the folders or the split do not exist.
        UserError: no images, images without a label map or the other way round, or two of one name; two classes
            of one name, or too many.
    """

    def __init__(
        self, root: StrPath, split: str, class_names: Sequence[str], zero_is_ignored: bool | None = None
    ) -> None:
        if not 1 <= len(class_names) <= IGNORED:
            raise UserError(f"classes must be 1 to {IGNORED} names, got {len(class_names)}")
        name, times = Counter(class_names).most_common(1)[0]
        if times > 1:
            raise UserError(f"classes must have names of their own, got {name!r} {times} times")
        maps = label_folder(root)
        self.class_names = tuple(class_names)
        self.zero_is_ignored = LABEL_FOLDERS[maps.name] if zero_is_ignored is None else zero_is_ignored
        self.samples = _pairs(split_folder(Path(root, "images"), split), split_folder(maps, split))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> MappedImage | BrokenImage:
        path, map_path = self.samples[index]
        name = path
        try:
            image, orientation = decode_oriented(path)
            name = map_path
            with decoding(map_path) as opened:
                fault = _kind_fault(opened) or _size_fault(opened.size, path, image.size, orientation)
                stored = np.array([] if fault else opened, dtype=np.uint8)
        except UserError as error:
            return BrokenImage(name, str(error))
        labels = np.where(stored == IGNORED, stored, stored - np.uint8(self.zero_is_ignored))  # 0 becomes 255
        largest = labels[labels != IGNORED].max(initial=0)
        if largest >= len(self.class_names):
            first, also = (1, "0 and 255") if self.zero_is_ignored else (0, "255")
            last = first + len(self.class_names) - 1
            fault = f"expected labels {first} to {last}, {also} for none, got {largest + first}"
        return WrongLabels(map_path, fault) if fault else MappedImage(image, labels)


class SceneMaps(Scenes):
    """The built-in scenes with their label maps: background, and the kinds of shapes."""

    class_names = ("background", *Scenes.class_names)

    def __getitem__(self, index: int) -> MappedImage:
        scene = super().__getitem__(index)
        return MappedImage(scene.to_pil(), scene.label_map.numpy().astype(np.uint8))


def label_folder(root: StrPath) -> Path:
    """The folder with the label maps of all splits; FileNotFoundError where there is not just one, beside `images`."""
    folders = folder_names(root)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"root: there is no folder {root}")
    found = [name for name in LABEL_FOLDERS if name in folders]
    if len(found) != 1 or "images" not in folders:
        expected = f"images and one of {' and '.join(LABEL_FOLDERS)}"
        raise FileNotFoundError(f"root: expected the folders {expected} in {root}, found {some(folders)}")
    return Path(root, found[0])


def read_class_names(root: StrPath) -> tuple[str, ...]:
    """The classes that a file beside the images lists: `classes.txt`, a name a line, or ADE20K's `objectInfo150.txt`.

    FileNotFoundError where there is neither, UserError for a file without names or not in UTF-8.
    """
    path = next((path for path in (Path(root, name) for name in CLASS_FILES) if path.is_file()), None)
    if path is None:
        hint = f"name them in data.classes, or in {root}/{CLASS_FILES[0]}, one a line"
        raise FileNotFoundError(f"the classes of {root} are not known: {hint}")
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text in UTF-8: {error}") from error
    if path.name != CLASS_FILES[0]:  # a table whose last column holds synonyms, the usual one first
        lines = [line.split("\t")[-1].split(",")[0].strip() for line in lines[1:]]
    if not lines:
        raise UserError(f"{path} lists no classes")
    return tuple(lines)


def _pairs(images: Path, maps: Path) -> list[tuple[str, str]]:
    """Image and label map of each name, in the order of names."""
    paths, labels = _by_name(images), _by_name(maps)
    if not paths and not labels:
        raise UserError(f"no image in {images}")
    if alone := [path for name, path in paths.items() if name not in labels]:
        raise UserError(f"{len(alone)} images without a label map in {maps}: {some(alone, 3)}")
    if alone := [path for name, path in labels.items() if name not in paths]:
        raise UserError(f"{len(alone)} label maps without an image in {images}: {some(alone, 3)}")
    return [(paths[name], labels[name]) for name in sorted(paths)]


def _by_name(folder: Path) -> dict[str, str]:
    """Image files below a folder by their path in it without suffix."""
    found: dict[str, str] = {}
    for path in image_files(folder):
        first = found.setdefault(os.path.splitext(os.path.relpath(path, folder))[0], path)
        if first != path:
            raise UserError(f"two files of one name: {first} and {path}")
    return found


def _kind_fault(opened: Image.Image) -> str:
    """Why a file cannot hold a label map; empty where it can."""
    if opened.mode not in ("L", "P"):
        kind = "16-bit" if opened.mode.startswith("I") else opened.mode
        return f"expected a label map of one 8-bit channel (grey or palette), got {kind}"
    stored_as = opened.tile[0][3] if isinstance(opened, ImageFile.ImageFile) and opened.tile else ""
    if opened.mode == "L" and stored_as in ("L;2", "L;4"):
        return f"expected 8 bits a label, got {str(stored_as)[-1]} bits of grey, which decoding stretches"
    return "expected a lossless label map such as PNG, got JPEG, which blurs labels" if opened.format == "JPEG" else ""


def _size_fault(stored: tuple[int, int], image: str, size: tuple[int, int], orientation: int) -> str:
    """Why a label map of width and height `stored` cannot be taken for that of the upright image; empty where it can.

    The image, now of `size`, was turned by its EXIF `orientation`; above 4 its sides changed places.
    """
    if stored != size:
        turned = "" if orientation == 1 else f" once it is upright, as its EXIF orientation {orientation} says"
        has, image_has = ("{} x {}".format(*pair) for pair in (stored, size))
        return f"the label map has {has} pixels, its image {image} has {image_has}{turned}"
    if orientation == 1 or (orientation > 4 and size[0] != size[1]):
        return ""
    return (
        f"the label map may be of {image} as it is stored or as it is upright by its EXIF orientation {orientation}, "
        "nothing tells: store the image's pixels as the label map has them, without an orientation"
    )
