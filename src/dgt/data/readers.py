"""Readers of labelled images: class folders, Hugging Face `datasets`, CIFAR-10 as torchvision keeps it, the scenes.

Every reader is a plain sequence with `class_names`, whose items are pairs of an RGB image and its label, or a
`BrokenImage`. Augmentation, order and batches are the matter of `dgt.data.dataset` and `dgt.data.loader`.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dgt.data.dataset import Reader
from dgt.data.image_io import BrokenImage, Source, try_decode
from dgt.data.scenes import Scenes
from dgt.utils.errors import UserError

Labelled = tuple[Image.Image, int]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
CIFAR_FOLDER = "cifar-10-batches-py"
USUAL_COLUMNS = {"image": ("image", "img", "jpg", "jpeg", "png"), "label": ("label", "labels", "class", "cls")}
"""Names that decide where the types of a data set's columns do not."""


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


def _some(names: Sequence[str]) -> str:
    """The first five of some names, for a message."""
    return ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])]) or "none"


def _labelled(source: Source, name: str, label: int) -> Labelled | BrokenImage:
    image = try_decode(source, name)
    return image if isinstance(image, BrokenImage) else (image, label)


class ImageFolder:
    """Images in `<root>/<split>/<class>/`, at any depth below the class; the classes are the sorted folder names.

    Args:
        root: the data set's folder.
        split: the split's folder name.
        class_names: the classes in the order of their labels, where another split has fixed them already: a split may
            lack some of them, and may not have others.

    Raises:
        FileNotFoundError: the root or the split does not exist.
        UserError: no class folders, unknown ones, or no image in any.
    """

    def __init__(
        self, root: str | os.PathLike[str], split: str = "train", class_names: Sequence[str] | None = None
    ) -> None:
        folder = Path(root) / split
        if not Path(root).is_dir():
            raise FileNotFoundError(f"root: expected a folder of images, but {Path(root)} is not a folder")
        if not folder.is_dir():
            found = ", ".join(folder_names(root)) or "none"
            raise FileNotFoundError(f"split: {split!r} is not a folder in {root}; folders found there: {found}")
        found_classes = folder_names(folder)
        if not found_classes:
            raise UserError(f"expected one folder per class in {folder}, found no folder")
        self.class_names = tuple(class_names if class_names is not None else found_classes)
        unknown = sorted(set(found_classes) - set(self.class_names))
        if unknown:
            raise UserError(f"{folder} has classes that the training split lacks: {_some(unknown)}")
        labels = {name: label for label, name in enumerate(self.class_names)}
        self.samples = [(path, labels[name]) for name in found_classes for path in image_files(folder / name)]
        if not self.samples:
            raise UserError(
                f"no image in any of the {len(found_classes)} class folders of {folder} "
                f"(looked for {', '.join(SUFFIXES)})"
            )

    def empty_classes(self) -> list[str]:
        """The classes without an image: stray folders, or a download that broke off."""
        return sorted(set(self.class_names) - {self.class_names[label] for _, label in self.samples})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Labelled | BrokenImage:
        path, label = self.samples[index]
        return _labelled(path, path, label)


class HubImages:
    """One split of a Hugging Face data set, read by index: its images as stored, decoded here.

    Args:
        root: a folder of `save_to_disk` or of parquet files in the hub's layout, or the name of a set on the hub.
        split: name of the split.
        class_names: the training split's classes, to hold this one to the same labels.
        image_column: the column of images; None for the only one whose type or name tells that it is.
        label_column: the column of class labels or numbers; None to find it likewise.

    Raises:
        UserError: nothing readable there, no such split or column, more than one to choose from, other classes, or
            labels outside the classes.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str,
        class_names: Sequence[str] | None = None,
        image_column: str | None = None,
        label_column: str | None = None,
    ) -> None:
        import datasets  # slow to import

        splits = _open_hub(root)
        if split not in splits:
            raise UserError(f"split: {split!r} is not in {root}; splits found there: {', '.join(splits)}")
        self.place, table = f"{root}[{split}", splits[split]
        image = _choose_column(table, "image", image_column, lambda feature: isinstance(feature, datasets.Image))
        label = _choose_column(table, "label", label_column, lambda feature: isinstance(feature, datasets.ClassLabel))
        self.class_names = tuple(getattr(table.features[label], "names", class_names or ()))
        if class_names is not None and self.class_names != tuple(class_names):
            raise UserError(f"{self.place}] has other classes than the training split: {_some(self.class_names)}")
        self.labels = self._read_labels(table, label)
        try:
            self.images = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UserError(f"image_column: {image!r} of {root} does not hold images: {error}") from error
        self.column = image

    def _read_labels(self, table: Any, column: str) -> NDArray[np.int64]:
        """All labels, checked; they are the classes themselves where the column names none."""
        found = table.select_columns([column]).with_format("arrow")[:].column(column)
        if "int" not in str(found.type):
            raise UserError(f"label_column: {column!r} of {self.place}] holds no class numbers, but {found.type}")
        if not len(found):
            raise UserError(f"{self.place}] holds no image")
        labels = np.array(found.to_numpy(), np.int64) if not found.null_count else np.array([-1])
        self.class_names = self.class_names or tuple(str(number) for number in range(labels.max() + 1))
        if labels.min() < 0 or labels.max() >= len(self.class_names):
            raise UserError(
                f"{self.place}]: labels in {column!r} must lie in 0 to {len(self.class_names) - 1}, "
                f"got {labels.min()} to {labels.max()}"
            )
        return labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Labelled | BrokenImage:
        stored, name = self.images[int(index)][self.column] or {}, f"{self.place}:{index}]"
        source = stored.get("bytes") or stored.get("path")
        return BrokenImage(name, "is missing") if source is None else _labelled(source, name, int(self.labels[index]))


def _choose_column(table: Any, kind: str, wanted: str | None, fits: Callable[[Any], bool]) -> str:
    """The column that the user named, or the only one whose type fits, or else whose name is usual."""
    columns = list(table.features)
    found = [name for name in columns if fits(table.features[name])] if wanted is None else [wanted]
    found = found or [name for name in columns if name in USUAL_COLUMNS[kind]]
    if len(found) == 1 and found[0] in columns:
        return found[0]
    many = f"has several {kind} columns ({_some(found)})" if len(found) > 1 else f"has no {kind} column"
    named = "" if wanted is None else f" {wanted!r}"
    raise UserError(f"the data set {many}{named}: name one of {_some(columns)} as data.{kind}_column")


def _is_hub(root: Path) -> bool:
    """Whether `root` is what `save_to_disk` writes, a folder of parquet files, or like the name of a set on the hub."""
    if root.is_dir():
        marks = ("dataset_dict.json", "state.json", "*.parquet", "*/*.parquet")
        return any(next(root.glob(mark), None) for mark in marks)
    return not root.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(root)) is not None and str(root)[0] != "."


def _open_hub(root: str | os.PathLike[str]) -> dict[str, Any]:
    """The splits of a Hugging Face data set by name."""
    import datasets

    saved = any((Path(root) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        opened = datasets.load_from_disk(os.fspath(root)) if saved else datasets.load_dataset(os.fspath(root))
    except Exception as error:  # a missing set, no network, damaged files: whatever its many parts raise
        missing = "" if Path(root).exists() else "there is no such folder, and "
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"root: {missing}{root} cannot be read as a Hugging Face data set ({type(error).__name__}: {reason})"
        ) from error
    return dict(opened) if isinstance(opened, dict) else {str(opened.split or "train"): opened}


class CifarImages:
    """CIFAR-10 in the python layout (`cifar-10-batches-py`), read through torchvision; splits "train" and "test".

    Raises:
        UserError: another split, or files that torchvision finds missing or corrupted.
    """

    def __init__(self, root: str | os.PathLike[str], split: str = "train") -> None:
        from torchvision.datasets import CIFAR10  # slow to import, and rarely needed

        if split not in ("train", "test"):
            raise UserError(f"split: CIFAR-10 has 'train' and 'test', got {split!r}")
        try:
            loaded = CIFAR10(os.fspath(root), train=split == "train", download=False)
        except RuntimeError as error:
            raise UserError(f"root: {Path(root) / CIFAR_FOLDER} is not a whole copy of CIFAR-10 ({error})") from error
        self.pixels: NDArray[np.uint8] = loaded.data
        self.labels: list[int] = loaded.targets
        self.class_names = tuple(loaded.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Labelled:
        return Image.fromarray(self.pixels[index]), self.labels[index]


class SceneImages(Scenes):
    """The built-in scenes as labelled images, without the maps, boxes and masks."""

    def __getitem__(self, index: int) -> Labelled:  # type: ignore[override]
        scene = super().__getitem__(index)
        return scene.to_pil(), scene.label


def _cifar_parent(root: Path) -> Path | None:
    if root.name == CIFAR_FOLDER and root.is_dir():
        return root.parent
    return root if (root / CIFAR_FOLDER).is_dir() else None


def _refuse_old_formats(root: Path) -> None:
    """Raise UserError for formats of earlier versions."""
    old, packed = "", [root] if root.suffix == ".npz" else sorted(root.glob("*.npz"))
    if (root / "shards.json").is_file() or next(root.glob("*-[0-9][0-9][0-9][0-9][0-9][0-9].index"), None):
        old = f"{root} holds shards of `dgt shard`"
    elif len(packed) == 1 and packed[0].is_file():
        old = f"{packed[0]} is a packed .npz file"
    if old:
        raise UserError(
            f"root: {old}, which are no longer read: unpack them to folders SPLIT/CLASS/ of images, or give the "
            "folders that they were made of (docs/scaling.md has the lines that unpack them)"
        )


def available_splits(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """Names of the splits found at `root`, whatever its format.

    Raises:
        FileNotFoundError: nothing is there.
        UserError: an unreadable data set, or a format of earlier versions.
    """
    path = Path(root)
    if _is_hub(path):
        return tuple(sorted(_open_hub(root)))
    _refuse_old_formats(path)
    if _cifar_parent(path) is not None:
        return ("test", "train")
    if not path.is_dir():
        raise FileNotFoundError(f"root: there is no folder {path}")
    return folder_names(path)


def open_images(
    root: str | os.PathLike[str],
    split: str,
    train_split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
) -> Reader:
    """The reader for what lies at `root`: a Hugging Face data set, a folder that is or holds `cifar-10-batches-py`, or
    else `<root>/<split>/<class>/` folders.

    Args:
        root: folder, or name of a set on the hub.
        split: name of the split.
        train_split: the split whose classes another split is held to, if it is there.
        image_column, label_column: of a Hugging Face data set; None to find them.

    Raises:
        FileNotFoundError, UserError: as the readers do.
    """
    path, classes = Path(root), None
    train = train_split if train_split not in (None, split) and train_split in available_splits(root) else None
    if _is_hub(path):
        if train is not None:
            classes = HubImages(root, train, None, image_column, label_column).class_names
        return HubImages(root, split, classes, image_column, label_column)
    _refuse_old_formats(path)
    cifar = _cifar_parent(path)
    if cifar is not None:
        return CifarImages(cifar, split)
    return ImageFolder(path, split, None if train is None else folder_names(path / train))
