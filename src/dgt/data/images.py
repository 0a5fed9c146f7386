"""Readers of labelled images: folders per class, packed JPEG bytes, CIFAR-10 as torchvision keeps it, and the scenes.

Every reader is a plain sequence of `(picture, label)` with `class_names`; a picture is a PIL image in RGB, or a
`BrokenImage`. Transforms, order and batches are the business of `dgt.data.loading`.
"""

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dgt.data.decoding import BrokenImage, try_decode
from dgt.data.scenes import Scenes
from dgt.data.shards import ShardImages, is_sharded, shard_splits

Labelled = tuple[Image.Image | BrokenImage, int]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
CIFAR_FOLDER = "cifar-10-batches-py"


class LabelledImages(Protocol):
    """What every reader offers."""

    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Labelled: ...


def folder_names(parent: str | os.PathLike[str]) -> tuple[str, ...]:
    """Sorted names of the folders in `parent`, hidden ones left out."""
    return tuple(sorted(entry.name for entry in os.scandir(parent) if entry.is_dir() and entry.name[0] != "."))


def image_files(folder: Path) -> list[str]:
    """Every image file below `folder`, sorted."""
    return sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    )


class ImageFolder:
    """Images in `<root>/<split>/<class>/`, at any depth below the class; the classes are the sorted folder names.

    Args:
        root: the data set's folder.
        split: the split's folder name.
        class_names: the classes in the order of their labels, where another split has fixed them already. A split may
            lack some of them, and may not have others.

    Raises:
        FileNotFoundError: the root or the split does not exist.
        ValueError: no class folders, unknown ones, or no image in any.
    """

    def __init__(
        self, root: str | os.PathLike[str], split: str = "train", class_names: Sequence[str] | None = None
    ) -> None:
        folder = Path(root) / split
        if not Path(root).is_dir():
            raise FileNotFoundError(f"root: expected a folder of images, but {Path(root)} is not a folder")
        if not folder.is_dir():
            found = ", ".join(folder_names(Path(root))) or "none"
            raise FileNotFoundError(f"split: {split!r} is not a folder in {root}; folders found there: {found}")
        found_classes = folder_names(folder)
        if not found_classes:
            raise ValueError(f"expected one folder per class in {folder}, found no folder")
        self.class_names = tuple(class_names if class_names is not None else found_classes)
        unknown = sorted(set(found_classes) - set(self.class_names))
        if unknown:
            raise ValueError(f"{folder} has classes that the training split lacks: {', '.join(unknown[:5])}")
        labels = {name: label for label, name in enumerate(self.class_names)}
        self.samples = [(path, labels[name]) for name in found_classes for path in image_files(folder / name)]
        if not self.samples:
            raise ValueError(
                f"no image in any of the {len(found_classes)} class folders of {folder} "
                f"(looked for {', '.join(SUFFIXES)})"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Labelled:
        path, label = self.samples[index]
        return try_decode(path, path), label


class PackedImages:
    """Images in one `.npz`: `<split>_jpg` uint8, all encoded files joined; `<split>_off` int64, the n + 1 places where
    they start and end; `<split>_y`, n labels; `classes`, the class names.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an npz, no such split in it, or arrays that contradict each other.
    """

    def __init__(self, path: str | os.PathLike[str], split: str = "train") -> None:
        self.path, self.split = Path(path), split
        with _open_npz(self.path) as arrays:
            missing = [name for name in (f"{split}_jpg", f"{split}_off", f"{split}_y", "classes") if name not in arrays]
            if missing:
                raise ValueError(f"{path} lacks {', '.join(missing)}; it has {', '.join(arrays.files) or 'no arrays'}")
            self.data: NDArray[np.uint8] = arrays[f"{split}_jpg"]
            self.offsets = arrays[f"{split}_off"].astype(np.int64)
            self.labels = arrays[f"{split}_y"].astype(np.int64)
            self.class_names = tuple(str(name) for name in arrays["classes"])
        self._check()

    def _check(self) -> None:
        count, offsets = len(self.labels), self.offsets
        if count == 0:
            raise ValueError(f"{self.path}: split {self.split!r} holds no image")
        if offsets.shape != (count + 1,):
            raise ValueError(f"{self.path}: expected {count + 1} offsets for {count} labels, got shape {offsets.shape}")
        if offsets[0] != 0 or offsets[-1] != len(self.data) or (np.diff(offsets) < 0).any():
            raise ValueError(f"{self.path}: offsets must rise from 0 to {len(self.data)}, the number of bytes")
        if self.labels.min() < 0 or self.labels.max() >= len(self.class_names):
            raise ValueError(
                f"{self.path}: labels must lie in 0 to {len(self.class_names) - 1}, "
                f"got {self.labels.min()} to {self.labels.max()}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Labelled:
        encoded = self.data[self.offsets[index] : self.offsets[index + 1]].tobytes()
        return try_decode(encoded, f"{self.path}[{self.split}:{index}]"), int(self.labels[index])


class CifarImages:
    """CIFAR-10 in the python layout (`cifar-10-batches-py`), read through torchvision; splits "train" and "test".

    Raises:
        ValueError: another split, or files that torchvision finds missing or corrupted.
    """

    def __init__(self, root: str | os.PathLike[str], split: str = "train") -> None:
        from torchvision.datasets import CIFAR10  # slow to import, and rarely needed

        if split not in ("train", "test"):
            raise ValueError(f"split: CIFAR-10 has 'train' and 'test', got {split!r}")
        try:
            loaded = CIFAR10(os.fspath(root), train=split == "train", download=False)
        except RuntimeError as error:
            raise ValueError(f"root: {Path(root) / CIFAR_FOLDER} is not a whole copy of CIFAR-10 ({error})") from error
        self.pixels: NDArray[np.uint8] = loaded.data
        self.labels: list[int] = loaded.targets
        self.class_names = tuple(loaded.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Labelled:
        return Image.fromarray(self.pixels[index]), self.labels[index]


class SceneImages:
    """The built-in scenes as labelled images: `Scenes` without the maps, boxes and masks."""

    def __init__(self, split: str, length: int, image_size: int) -> None:
        self.scenes = Scenes(split, length, image_size)
        self.class_names = self.scenes.class_names

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Labelled:
        scene = self.scenes[index]
        return Image.fromarray(scene.image.permute(1, 2, 0).numpy()), scene.label


def _open_npz(path: Path) -> np.lib.npyio.NpzFile:
    try:
        opened = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"root: there is no file {path}") from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"root: {path} is not a readable .npz file ({error})") from error
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise ValueError(f"root: {path} is a single array, expected an .npz of several")
    return opened


def _packed_file(root: Path) -> Path | None:
    """The packed file that `root` is, or the only one that it holds."""
    if root.suffix == ".npz":
        return root
    found = sorted(root.glob("*.npz")) if root.is_dir() else []
    return found[0] if len(found) == 1 else None


def _cifar_parent(root: Path) -> Path | None:
    if root.name == CIFAR_FOLDER and root.is_dir():
        return root.parent
    return root if (root / CIFAR_FOLDER).is_dir() else None


def available_splits(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """Names of the splits found at `root`, whatever its format.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: an unreadable packed file, or shards that are unfinished.
    """
    root = Path(root)
    if is_sharded(root):
        return shard_splits(root)
    packed = _packed_file(root)
    if packed is not None:
        with _open_npz(packed) as arrays:
            return tuple(sorted(name[: -len("_jpg")] for name in arrays.files if name.endswith("_jpg")))
    if _cifar_parent(root) is not None:
        return ("test", "train")
    if not root.is_dir():
        raise FileNotFoundError(f"root: there is no folder or .npz file {root}")
    return folder_names(root)


def open_images(
    root: str | os.PathLike[str], split: str, class_names: Sequence[str] | None = None
) -> ImageFolder | PackedImages | CifarImages | ShardImages:
    """The reader for what lies at `root`: shards of `dgt shard`, a packed `.npz` (or a folder with just one), a folder
    that is or holds `cifar-10-batches-py`, or else `<root>/<split>/<class>/` folders.

    Args:
        root: file or folder.
        split: name of the split.
        class_names: the training split's classes, to hold image folders to the same labels.

    Raises:
        FileNotFoundError, ValueError: as the readers do.
    """
    root = Path(root)
    if is_sharded(root):
        return ShardImages(root, split)
    packed, cifar = _packed_file(root), _cifar_parent(root)
    if packed is not None:
        return PackedImages(packed, split)
    if cifar is not None:
        return CifarImages(cifar, split)
    return ImageFolder(root, split, class_names)
