"""Base of the data modules of all tasks: two splits, their loaders, and the report of unreadable images."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from dgt.data.image_io import BrokenImages, StrPath
from dgt.data.loader import Key, Loader, SeededDataset
from dgt.data.scenes import Scenes
from dgt.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalize, Triple
from dgt.utils.atomic_write import atomic_write
from dgt.utils.class_names import are_numbers, labels_by_name, note_on_alike
from dgt.utils.distributed import world_size
from dgt.utils.errors import UserError, check_range
from dgt.utils.seeding import generator

USUAL_SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test")}


def note_on_one_split(name: str) -> str:
    """A sentence on a split that training and validation both have."""
    return (
        f"split {name!r} is that of training and of validation: what is measured is how well images are "
        "known that are trained on"
    )


@dataclass
class ImageData(ABC):
    """Images for training and validation; subclasses define splits, transforms, and batches.

    Its arguments are the section `data` of a recipe. Nothing is read before `setup`.

    Args:
        root: where the images lie; left out for the built-in scenes.
        dataset: what to read; "scenes" for the built-in scenes.
        image_size: side in pixels, at least 32.
        batch_size: images per batch and process.
        num_workers: worker processes that prepare images; 0 to use only the main process. Affects
            only the speed.
        seed: order and augmentation are functions of it; which images the subsets hold is not.
        train_size: number of training images, the first of one fixed permutation. Default all, of
            scenes 5000 or 4000.
        val_size: the same for validation. Default all, of scenes 1000, or 500 with boxes.
        max_broken_share: share of unreadable images, of those in a split, above which the run
            stops.
        bits: how many bits the gray values of images use, 8 to 16, in files of 16 that do not say: 12
            for many cameras and X-rays; null takes all 16, and says so.

    Raises UserError for a value out of its range.
    """

    root: str | None = None
    dataset: str = "auto"
    image_size: int = 224
    batch_size: int = 128
    num_workers: int = 4
    seed: int = 0
    train_size: int | None = None
    val_size: int | None = None
    max_broken_share: float = 0.01
    bits: int | None = None
    datasets: dict[str, SeededDataset] = field(default_factory=dict, init=False, compare=False)
    broken_images: dict[str, BrokenImages] = field(default_factory=dict, init=False, compare=False)
    notes: list[str] = field(default_factory=list, init=False, compare=False)

    # what the argument `root` of a subclass is, human-readable
    root_holds = "the folder with the images"
    scenes: ClassVar[type[Scenes]] = Scenes  # the reader of the built-in ones
    scenes_size = {"train": 5000, "val": 1000}  # noqa: RUF012
    smallest_batch = 1  # in training
    cache = False
    # arguments that say how `root` is read: left out for the built-in scenes
    root_options: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        reads = type(self).dataset  # the default, for a root
        if self.dataset not in (reads, "scenes"):
            raise UserError(f"data.dataset must be one of {reads}, scenes, got {self.dataset!r}")
        for name in self.root_options if self.dataset == "scenes" else ():
            if self.is_named(name):
                raise UserError(
                    f"data.{name} must be left out for data.dataset 'scenes', got {getattr(self, name)!r}"
                )
        check_range(1, section="data", batch_size=self.batch_size)
        check_range(1, section="data", train_size=self.train_size, val_size=self.val_size)
        check_range(0, section="data", num_workers=self.num_workers)
        check_range(0, seed=self.seed)
        check_range(0, 1, section="data", max_broken_share=self.max_broken_share)
        check_range(8, 16, section="data", bits=self.bits)

    def is_named(self, option: str) -> bool:
        """Whether an option is another than the default."""
        return bool(getattr(self, option) != getattr(type(self), option))

    @abstractmethod
    def open_root(self, root: str, part: str) -> tuple[str, Any]:
        """Open "train" or "val" of `root`: its split's name and its reader, or FileNotFoundError or UserError."""

    @abstractmethod
    def transform(self, part: str, sample: Any) -> tuple[Any, Any]:
        """Make an 8-bit image and its target of the reader's sample, in a worker; at random for "train"."""

    def collate(self, part: str, key: Key, samples: list[Any]) -> tuple[Any, Any]:
        """Make 8-bit images and their targets of a batch's samples, in a worker; none of too few samples."""
        return [image for image, _ in samples], [target for _, target in samples]

    @abstractmethod
    def finish(self, part: str, key: Key, images: Any, targets: Any) -> tuple[Any, Any]:
        """Convert a batch's bytes, on the loader's device, to the network's input."""

    def choose(
        self, part: str, split: str, reader: Any, indices: Sequence[int] = ()
    ) -> Sequence[int]:
        """Which of a split's images, of those at `indices` if there are any, "train" or "val"
        holds: all, or the first of a permutation by the split's name. UserError where more are
        wanted than there are.
        """
        indices = indices or range(len(reader))
        size, total = getattr(self, f"{part}_size"), len(indices)
        if size is not None and size > total:
            raise UserError(
                f"data.{part}_size: expected at most {total}, the images of split {split!r}, got {size}"
            )
        if size in (None, total):
            return indices
        return [indices[place] for place in generator("subset", split).permutation(total)[:size]]

    def choose_split(self, part: str, splits: Sequence[str]) -> str:
        """The split of "train" or "val" that the user named, or the first usual one among those
        found.
        """
        usual = USUAL_SPLITS[part]
        return getattr(self, f"{part}_split", None) or next(
            (name for name in usual if name in splits), usual[0]
        )

    def setup(self, stage: str | None = None, class_names: Sequence[str] | None = None) -> None:
        """Open both splits for "fit" or None, else the validation split; `notes` gets what was left
        out or changed in reading them, a sentence each.

        Args:
            stage: what for.
            class_names: of a model whose labels the images are to have, by name.

        Raises as `open_root` and `choose`; UserError where nothing says which data set is meant, for
        images below 32 pixels, and for classes that such a model does not have.
        """
        if (self.root is None) != (self.dataset == "scenes"):
            reads = type(self).dataset
            expected = (
                f"{self.root_holds} with data.dataset {reads!r}, none with data.dataset 'scenes'"
            )
            raise UserError(
                f"data.root: expected {expected}, got {self.root!r} with {self.dataset!r}"
            )
        check_range(32, section="data", image_size=self.image_size)
        for part in ("train", "val") if stage in ("fit", None) else ("val",):
            if part in self.datasets:
                continue
            if self.root is None:
                count = getattr(self, f"{part}_size") or self.scenes_size[part]
                split, reader = part, self.scenes(part, count, self.image_size)
            else:
                split, reader = self.open_root(self.root, part)
            self.notes += getattr(reader, "notes", ())
            self.notes += note_on_alike(reader.class_names) if part == "train" else []
            if class_names is not None:
                self._use_classes(reader, class_names)
            indices = self.choose(part, split, reader)
            transform = partial(self.transform, part)
            self.datasets[part] = SeededDataset(reader, transform, self.seed, indices, self.cache)
            self.broken_images[part] = BrokenImages(split, len(indices), self.max_broken_share)
        if [self.broken_images[part].split for part in self.datasets].count(split) > 1:
            self.notes.append(note_on_one_split(split))

    def _use_classes(self, reader: Any, names: Sequence[str]) -> None:
        """Give a split the labels that a model has for classes of the same names."""
        labels, note = labels_by_name(reader.class_names, names)
        if not note:
            return
        if self.root is None:
            raise UserError(f"the built-in scenes have other classes than the model: {note}")
        self.notes.append(note)
        if not are_numbers(names) or labels != list(range(len(names))):
            reader.use_classes(names, labels)

    @property
    def reader(self) -> Any:
        """Of the first split that is open; all have the same classes."""
        if not self.datasets:
            raise RuntimeError("call setup() first: the classes are known once the data is open")
        return next(iter(self.datasets.values())).reader

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names in the order of their labels; after `setup`."""
        return tuple(self.reader.class_names)

    @property
    def num_classes(self) -> int:
        """Number of classes; after `setup`."""
        return len(self.class_names)

    def train_dataloader(self) -> Loader:
        """Shuffled, augmented, full batches, another order in each epoch; UserError where there is not one batch."""
        check_range(self.smallest_batch, section="data", batch_size=self.batch_size)
        loader = Loader(self, "train")
        if len(loader) == 0:
            images = len(self.datasets["train"])
            batches = f"{self.batch_size} on each of {world_size()} processes"
            raise UserError(
                f"data.batch_size: {images} training images do not fill one batch of {batches}"
            )
        return loader

    def val_dataloader(self) -> Loader:
        """Every validation image once, in order."""
        return Loader(self, "val")

    def remarks(self) -> list[str]:
        """What a first epoch showed of the training images that should be said, in sentences; all
        processes must call it.
        """
        return []

    def state_dict(self) -> dict[str, Any]:
        """What goes into checkpoints: how many images there are, and the unreadable ones met so far,
        without the root, which may move.
        """
        root = self._root()
        broken = {part: report.broken.items() for part, report in self.broken_images.items()}
        return {
            "images": {part: len(dataset) for part, dataset in self.datasets.items()},
            "broken": {
                part: {name.removeprefix(root): why for name, why in of}
                for part, of in broken.items()
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume with the unreadable images of a checkpoint."""
        root = self._root()
        for part, broken in state_dict["broken"].items():
            names = (name if name.startswith(root) else root + name for name in broken)
            self.broken_images[part].broken.update(zip(names, broken.values(), strict=True))

    def _root(self) -> str:
        return "" if self.root is None else str(Path(self.root))  # what names of images begin with

    def write_broken_images(self, path: StrPath) -> int:
        """Write a line `split <tab> path <tab> reason` for each unreadable image met so far, and return how many."""
        lines = [
            f"{report.split}\t{name}\t{' '.join(reason.split())}\n"
            for report in self.broken_images.values()
            for name, reason in sorted(report.broken.items())
        ]
        atomic_write(Path(path), "".join(lines).encode("utf-8", "surrogateescape"))
        return len(lines)


@dataclass
class NormalizedData(ImageData):
    """Images that are normalized by the loader, in splits with names of their own.

    Args:
        mean: mean of each channel, in 0 to 1, to subtract.
        std: standard deviation of each channel, to divide by.
        train_split: name of the training split; by default "train" or "training", whichever is
            found.
        val_split: name of the validation split; by default "val", "validation", "valid" or "test",
            the first found.
    """

    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    train_split: str | None = None
    val_split: str | None = None

    root_options: ClassVar[tuple[str, ...]] = ("train_split", "val_split")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.normalize = Normalize(self.mean, self.std)
