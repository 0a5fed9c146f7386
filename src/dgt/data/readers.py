"""Readers of labeled images: class folders, Hugging Face `datasets`, the built-in scenes.

Every reader is a plain sequence with `class_names`, whose items are an RGB image and its label, or
a `BrokenImage`.
"""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dgt.data.folders import folder_names, image_files, left_out_note
from dgt.data.image_io import BrokenImage, Source, StrPath, note_on_bits, try_decode
from dgt.data.scenes import Scenes
from dgt.utils.class_names import changes, composed, some
from dgt.utils.errors import UserError
from dgt.utils.hub import check_on_hub

Labeled = tuple[Image.Image, int]

LOOKED_FOR = "(JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, JPEG 2000 or AVIF)"
SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` writes
CIFAR_FOLDER = "cifar-10-batches-py"
# Names that decide where the types of a data set's columns do not.
USUAL_COLUMNS = {
    "image": ("image", "img", "jpg", "jpeg", "png"),
    "label": ("label", "labels", "class", "cls"),
    "label map": ("label", "labels", "mask", "annotation", "segmentation", "semantic", "label_map"),
    "objects": ("objects", "annotations"),
}


def split_folder(parent: StrPath, split: str) -> Path:
    """The folder of a split.

    Raises FileNotFoundError, listing the existing ones, if there is none.
    """
    if not os.path.isdir(os.path.join(parent, split)):
        splits = some(folder_names(parent))
        raise FileNotFoundError(f"split: {parent} has no folder {split!r}; it has: {splits}")
    return Path(parent, split)


def class_folders(folder: StrPath) -> dict[str, list[str]]:
    """The classes of a split's folder, sorted, and the names of the folders of each: several where
    their names differ only in how accents are composed.
    """
    folders: dict[str, list[str]] = {}
    for name in folder_names(folder):
        folders.setdefault(composed(name), []).append(name)
    return dict(sorted(folders.items()))


class ImageFolder:
    """Images in `<root>/<split>/<class>/`, at any depth below the class.

    The classes are the sorted folder names, composed, or the `class_names` of another split, of
    which this one may lack some. FileNotFoundError for a split that is not there, UserError for no class
    folders, unknown ones, or no image in any.
    """

    def __init__(
        self,
        root: StrPath,
        split: str = "train",
        class_names: Sequence[str] | None = None,
        bits: int | None = None,
    ) -> None:
        self.folder, self.bits = split_folder(root, split), bits
        folders = class_folders(self.folder)
        if not folders:
            raise UserError(
                f"expected one folder per class in {self.folder}, found none; where the images of a "
                "validation split lie together, data.val_class_map names the class of each"
            )
        self.class_names = tuple(folders if class_names is None else class_names)
        if unknown := sorted(set(folders).difference(map(composed, self.class_names))):
            raise UserError(
                f"{self.folder} has classes that are not in the training split: {some(unknown)}"
            )
        names = [name for of_class in folders.values() for name in of_class]
        beside = len(os.listdir(self.folder)) - len(names)
        left_out = Counter({"beside the class folders": beside} if beside else {})
        labeled = enumerate(self.class_names)
        self.samples = [
            (path, label)
            for label, class_name in labeled
            for name in folders.get(composed(class_name), ())
            for path in image_files(self.folder / name, left_out)
        ]
        if not self.samples:
            raise UserError(
                f"no images in any of the {len(names)} class folders of {self.folder} {LOOKED_FOR}"
            )
        self.notes = [*left_out_note(self.folder, left_out), *self._notes_on_folders()]
        self.notes += self._notes_on_bits()

    def _notes_on_folders(self) -> list[str]:
        """A sentence on classes whose images lie in several folders, which may be meant as classes."""
        below: dict[str, set[str]] = {}
        start = len(f"{self.folder}{os.sep}")
        for path, _ in self.samples:
            name, *folders, _ = path[start:].split(os.sep)
            below.setdefault(name, set()).add(folders[0] if folders else ".")
        several = [
            f"{name} ({some(sorted(inner))})" for name, inner in below.items() if len(inner) > 1
        ]
        if not several:
            return []
        return [
            f"images of {len(several)} class folders of {self.folder} lie in several folders, which are "
            f"one class: {some(several)}"
        ]

    def _notes_on_bits(self) -> list[str]:
        return note_on_bits(lambda index: self.samples[index][0], len(self), self.bits, self.folder)

    def use_classes(self, names: Sequence[str], labels: Sequence[int]) -> None:
        """Take the class names of a model, and the label there of each class here."""
        self.samples = [(path, labels[label]) for path, label in self.samples]
        self.class_names = tuple(names)

    def check_classes(self) -> None:
        """Raise UserError for classes without an image: stray folders, or a download that broke
        off.
        """
        if empty := sorted(
            set(self.class_names) - {self.class_names[label] for _, label in self.samples}
        ):
            problem = f"class folders of {self.folder} without images"
            raise UserError(f"{problem}: {some(empty)} {LOOKED_FOR}; fill or remove them")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Labeled | BrokenImage:
        path, label = self.samples[index]
        return try_decode(path, path, label, self.bits)


class ImagesByClassMap(ImageFolder):
    """Images of a split that lie together, as in ImageNet's `val`, with their classes in a file.

    Args:
        root: folder with the folder of the split.
        split: its name.
        class_map: text file with a line for each image: the name of its file and its class, with a
            space, tab or comma between, or the class alone, in the order of the files' names, where
            these have one order: padded numbers, but not 1, 2, ... 10.
        class_names: of the training split; None for those of the file.

    FileNotFoundError for no such split or file; UserError for a file that does not fit: a line that
    cannot be read, an image without a line or with two, a line without an image, classes alone for
    names that sort in several ways, a class that is not in the training split.
    """

    def __init__(
        self,
        root: StrPath,
        split: str,
        class_map: StrPath,
        class_names: Sequence[str] | None = None,
        bits: int | None = None,
    ) -> None:
        self.folder, self.bits = split_folder(root, split), bits
        if folders := class_folders(self.folder):
            raise UserError(
                f"data.val_class_map is for images that lie together, but {self.folder} has folders: "
                f"{some(list(folders))}"
            )
        left_out = Counter[str]()
        paths = image_files(self.folder, left_out)
        self.notes = left_out_note(self.folder, left_out)
        names = [composed(os.path.basename(path)) for path in paths]
        classes = _read_class_map(class_map, names)
        self.class_names = tuple(sorted(set(classes)) if class_names is None else class_names)
        labels = {composed(name): label for label, name in enumerate(self.class_names)}
        if unknown := sorted(set(classes).difference(labels)):
            raise UserError(
                f"data.val_class_map: {class_map} has classes that are not in the training split: "
                f"{some(unknown)}"
            )
        self.samples = [(path, labels[name]) for path, name in zip(paths, classes, strict=True)]
        self.notes += self._notes_on_bits()


def _read_class_map(path: StrPath, files: Sequence[str]) -> list[str]:
    """The class of each of the files of an image folder, by a text file; UserError where it does not
    fit them.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"data.val_class_map: file {path} does not exist")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data.val_class_map: {path} is not UTF-8 text: {error}") from error
    lines = [composed(line.strip()) for line in text.splitlines() if line.strip()]
    fields = [re.split(r"[\t,]\s*|\s+", line, maxsplit=1) for line in lines]
    if all(len(each) == 1 for each in fields):
        if len(lines) != len(files):
            raise UserError(
                f"data.val_class_map: {path} has {len(lines)} lines of a class alone for "
                f"{len(files)} images"
            )
        if list(files) != sorted(files, key=_as_people_sort):
            first, other = next(
                pair
                for pair in zip(files, sorted(files, key=_as_people_sort), strict=True)
                if pair[0] != pair[1]
            )
            raise UserError(
                f"data.val_class_map: {path} has a class alone in each line, and the names of the images "
                f"sort in several ways ({first} or {other} first): write the name of its file before "
                "each class"
            )
        return lines
    if wrong := [line for line, each in zip(lines, fields, strict=True) if len(each) != 2]:
        raise UserError(
            f"data.val_class_map: {path} must have a file and its class in each line, got {wrong[0]!r}"
        )
    named = Counter(os.path.basename(name) for name, _ in fields)
    if twice := [name for name, times in named.items() if times > 1]:
        raise UserError(f"data.val_class_map: {path} has several lines for {some(twice)}")
    classes = {os.path.basename(name): of for name, of in fields}
    for what, missing in (
        ("has no line for", [name for name in files if name not in classes]),
        ("has lines without an image:", sorted(set(classes).difference(files))),
    ):
        if missing:
            raise UserError(
                f"data.val_class_map: {path} {what} {some(missing)} ({len(missing)} of {len(files)})"
            )
    return [classes[name] for name in files]


def _as_people_sort(name: str) -> list[Any]:
    """A key that sorts numbers in names by their value, and letters whatever their case and accents."""
    parts = re.split(r"(\d+)", unicodedata.normalize("NFD", name.casefold()))
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


class HubImages:
    """One split of a Hugging Face data set, read by index: its images as stored, decoded here.

    Args:
        root: a folder of `save_to_disk` or of parquet files in the hub's layout, or the name of a
            set on the hub.
        split: name of the split.
        class_names: the training split's classes, to hold this one to the same labels.
        columns: `image_column` and `label_column`; None for the only column of images, and the
            only one of labels, going by types and names.

    UserError for no such split or column or several, other classes, labels outside the classes, and
    what is unreadable.
    """

    def __init__(
        self,
        root: StrPath,
        split: str,
        class_names: Sequence[str] | None = None,
        bits: int | None = None,
        **columns: str | None,
    ) -> None:
        self.bits = bits
        table, self.place = open_hub_split(root, split)
        self.column = choose_column(table, "image", columns)
        label = choose_column(table, "label", columns)
        column = table.select_columns([label]).with_format("arrow")[:].column(label)
        if not str(column.type).lstrip("u").startswith("int"):
            raise UserError(
                f"data.label_column: {label!r} of {self.place}] must hold class numbers, got {column.type}"
            )
        self.notes: list[str] = []
        self.labels = column.cast("int64").fill_null(-1).to_numpy()
        low, high = self.labels.min(), self.labels.max()
        # else the numbers themselves are the classes
        named = getattr(table.features[label], "names", class_names)
        self.class_names = tuple(named or map(str, range(high + 1)))
        if class_names is not None and changes(class_names, self.class_names):
            raise UserError(
                f"the classes of {self.place}] differ from those of the training split: {some(self.class_names)}"
            )
        if low < 0 or high >= len(self.class_names):
            last = len(self.class_names) - 1
            raise UserError(
                f"{self.place}]: labels in {label!r} must lie in 0 to {last}, got {low} to {high}"
            )
        present = set(self.labels.tolist())
        if empty := [name for at, name in enumerate(self.class_names) if at not in present]:
            self.notes.append(
                f"{len(empty)} of {len(self.class_names)} classes have no image in {self.place}]: {some(empty)}"
            )
        self.images = stored_images(table, [self.column], root)
        self.notes += note_on_bits(self._source, len(self), bits, f"{self.place}]")

    def __len__(self) -> int:
        return len(self.labels)

    def _source(self, index: int) -> Source | None:
        return stored_source(self.images[int(index)][self.column])

    def use_classes(self, names: Sequence[str], labels: Sequence[int]) -> None:
        """Take the class names of a model, and the label there of each class here."""
        self.labels = np.asarray(labels)[self.labels]
        self.class_names = tuple(names)

    def __getitem__(self, index: int) -> Labeled | BrokenImage:
        name = f"{self.place}:{index}]"
        source = self._source(index)
        return (
            BrokenImage(name, "is missing")
            if source is None
            else try_decode(source, name, int(self.labels[index]), self.bits)
        )


def choose_column(
    table: Any, kind: str, columns: dict[str, str | None], by_name: bool = False
) -> str:
    """The column that the user named, or the only one whose type fits, or else whose name is usual.

    Args:
        table: a split of a Hugging Face data set.
        kind: a key of `USUAL_COLUMNS`.
        columns: what the user named, by `image_column`, `label_column` and `objects_column`.
        by_name: whether the name must be usual, too: label maps are images as well.

    UserError for none or several.
    """
    import datasets  # slow to import

    setting = {"label map": "label"}.get(kind, kind) + "_column"
    types = {"image": datasets.Image, "label map": datasets.Image, "label": datasets.ClassLabel}
    names, wanted = list(table.features), columns.get(setting)
    usual = [name for name in names if name in USUAL_COLUMNS[kind]]
    fitting = [
        name
        for name in (usual if by_name else names)
        if kind in types and isinstance(table.features[name], types[kind])
    ]
    fitting = fitting or usual if wanted is None else [wanted]
    if len(fitting) == 1 and fitting[0] in names:
        return fitting[0]
    many = (
        f"has several {kind} columns ({some(fitting)})"
        if len(fitting) > 1
        else f"has no {kind} column"
    )
    named = "" if wanted is None else f" {wanted!r}"
    raise UserError(f"the data set {many}{named}: name one of {some(names)} as data.{setting}")


def open_hub_split(root: StrPath, split: str) -> tuple[Any, str]:
    """A split of a Hugging Face data set, and how the names of its rows begin; UserError where there
    is none, or it is empty.
    """
    splits = open_hub(root)
    if split not in splits:
        raise UserError(f"split: {root} has no split {split!r}; it has: {', '.join(splits)}")
    place = f"{root}[{split}"
    if not len(splits[split]):
        raise UserError(f"{place}] has no images")
    return splits[split], place


def stored_images(table: Any, columns: Sequence[str], root: StrPath) -> Any:
    """Columns of images of a table, as stored; UserError for one that does not hold images."""
    import datasets

    table = table.select_columns(list(columns))
    for column in columns:
        try:
            table = table.cast_column(column, datasets.Image(decode=False))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"data.image_column: {column!r} of {root} does not hold images: {error}"
            ) from error
    return table


def stored_source(stored: Any) -> Source | None:
    """The bytes or the path of an image as a data set stores it; None where it is missing."""
    return (stored or {}).get("bytes") or (stored or {}).get("path")


def open_hub(root: StrPath) -> dict[str, Any]:
    """The splits of a Hugging Face data set, or of CIFAR-10's python layout, by name."""
    import datasets

    if _is_cifar(Path(root)):
        return _open_cifar(Path(root).resolve())
    saved = any((Path(root) / name).is_file() for name in SAVED)
    place = str(Path(root).resolve()) if Path(root).is_dir() else os.fspath(root)
    special = ["::"] if saved else ["*", "?", "[", "]", "::"]
    if found := [mark for mark in special if mark in place]:
        raise UserError(
            f"data.root: {place!r} has {' '.join(found)} in its name, which the library that reads "
            "Hugging Face data sets takes for a pattern or for several addresses: rename the folder"
        )
    load: Any = datasets.load_from_disk if saved else datasets.load_dataset
    try:
        opened = load(place)
    except Exception as error:
        # a missing data set, no network, damaged files: many kinds of errors, some of which say no more
        # than that one happened
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
        raise UserError(
            f"data.root: cannot read a Hugging Face data set from {root} ({reason})"
        ) from error
    splits = opened if isinstance(opened, dict) else {str(opened.split or "train"): opened}
    # a format that it was saved with would hide columns, or give tensors for texts
    return {name: split.with_format(None) for name, split in splits.items()}


def _is_cifar(root: Path) -> bool:
    """Whether `root` is or holds CIFAR-10 in its python layout."""
    return (root / CIFAR_FOLDER).is_dir() or (root.name == CIFAR_FOLDER and root.is_dir())


@lru_cache(maxsize=1)
def _open_cifar(root: Path) -> dict[str, Any]:
    """CIFAR-10's python layout, read and checked by torchvision, as a data set in memory."""
    import datasets
    from torchvision.datasets import CIFAR10

    parent = root.parent if root.name == CIFAR_FOLDER else root
    splits = {}
    for split in ("train", "test"):
        try:
            images: Any = CIFAR10(str(parent), train=split == "train", download=False)
        except (RuntimeError, OSError) as error:
            place = parent / CIFAR_FOLDER
            raise UserError(
                f"data.root: {place} is not a complete copy of CIFAR-10 ({error})"
            ) from error
        features = datasets.Features(
            img=datasets.Image(), label=datasets.ClassLabel(names=list(images.classes))
        )
        columns = {"img": list(images.data), "label": list(images.targets)}
        splits[split] = datasets.Dataset.from_dict(columns, features=features)
    return splits


class SceneImages(Scenes):
    """The built-in scenes as labeled images, without the maps, boxes and masks."""

    def __getitem__(self, index: int) -> Labeled:
        scene = super().__getitem__(index)
        return scene.to_pil(), scene.label


def is_hub(root: Path) -> bool:
    """Whether `root` is a Hugging Face data set (`save_to_disk`, parquet files, a name on the hub),
    or class folders.

    FileNotFoundError where it is no folder either, UserError where the hub does not have the name.
    """
    if _is_cifar(root):
        return True
    marks = (*SAVED, "*.parquet", "[!.]*/*.parquet")
    if root.is_dir() and any(next(root.glob(mark), None) for mark in marks):
        return True
    if not root.exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(root)):
        check_on_hub("data.root: cannot read a Hugging Face data set from", str(root), "dataset")
        return True
    if not root.is_dir():
        raise FileNotFoundError(f"data.root: folder {root} does not exist")
    return False


def available_splits(root: StrPath) -> tuple[str, ...]:
    """Names of the splits found at `root`, whatever its format. Raises as `open_images`."""
    return tuple(sorted(open_hub(root))) if is_hub(Path(root)) else folder_names(root)


def open_images(
    root: StrPath,
    split: str,
    train_split: str | None = None,
    bits: int | None = None,
    **columns: str | None,
) -> HubImages | ImageFolder:
    """Open a split of what lies at `root`: a Hugging Face data set, on the hub or not, CIFAR-10's
    python layout, or class folders.

    Args:
        root: folder, or name on the hub.
        split: name of the split.
        train_split: the reader is held to the classes of this split, if it is there.
        bits: as of `decode_image`.
        columns: `image_column` and `label_column` of a Hugging Face data set; None to find them.

    Raises:
        FileNotFoundError: nothing is there.
        UserError: as the readers.
    """
    hub, classes = is_hub(Path(root)), None
    if train_split not in (None, split) and train_split in available_splits(root):
        train = str(train_split)
        classes = (
            HubImages(root, train, None, bits, **columns).class_names
            if hub
            else tuple(class_folders(Path(root, train)))
        )
    if hub:
        return HubImages(root, split, classes, bits, **columns)
    return ImageFolder(root, split, classes, bits)
