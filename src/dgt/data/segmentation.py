"""The Lightning data module of semantic segmentation: pictures with label maps in folders, or the built-in scenes.

Training batches are `(images, LabelMaps)`: normalised crops (B, 3, S, S), padded with zeros on the right and below
where a picture is smaller. Validation batches are `(images, labels)`: lists of whole pictures (3, H, W) and label maps
(H, W) of the pictures' own size, so that metrics are those of the labels as they were drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.data.classification import SCENES_SIZE, TRAIN_SPLITS, VAL_SPLITS, choose_split
from dgt.data.decoding import BrokenImage
from dgt.data.images import folder_names
from dgt.data.loading import Batch, Key, Loader
from dgt.data.module import ImageData, check_at_least, subset_indices
from dgt.utils.seeding import seeded
from dgt.data.segmentation_maps import (
    IGNORED,
    LabelMapFolder,
    MappedPictures,
    SceneMaps,
    label_folder,
    read_class_names,
)
from dgt.data.segmentation_transforms import (
    SMALLEST,
    SegmentationAugmentation,
    SegmentationTransform,
    segmentation_training_transform,
)
from dgt.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Triple

DATASETS = ("auto", "scenes")


@dataclass(frozen=True)
class SegmentationTest:
    """How a label map is predicted, in validation, evaluation and prediction.

    Args:
        scales: factors on `data.scale`; the probabilities of all are averaged.
        flip: average with those of the mirrored picture, at every scale.
        window: side in pixels of a window that slides over the scaled picture; null for the whole picture at once.
        stride: pixels between two windows; null for two thirds of the window.

    Raises:
        ValueError: a value out of its range.
    """

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    window: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        if not self.scales or not all(scale > 0 for scale in self.scales):
            raise ValueError(f"test.scales must be at least one number above 0, got {list(self.scales)}")
        if self.window is not None and self.window < SMALLEST:
            raise ValueError(f"test.window must be null or at least {SMALLEST}, got {self.window}")
        if self.stride is not None and (self.window is None or not 1 <= self.stride <= self.window):
            raise ValueError(f"test.stride must be null or lie in 1 to test.window ({self.window}), got {self.stride}")


class LabelMaps(NamedTuple):
    """Targets of a training batch.

    `labels` uint8 (B, S, S), `IGNORED` in padding; `sizes` int64 (B, 2), each picture's own height and width in pixels
    from the upper left corner.
    """

    labels: Tensor
    sizes: Tensor


class SegmentationSample(NamedTuple):
    """A normalised picture (3, H, W) and its labels (H, W), uint8."""

    image: Tensor
    labels: Tensor


class SegmentationDataset:
    """A reader's pictures, some or all, through a transform whose random choices belong to (seed, epoch, item)."""

    def __init__(
        self, reader: MappedPictures, indices: Sequence[int] | None, transform: SegmentationTransform, seed: int
    ) -> None:
        self.reader, self.transform, self.seed = reader, transform, seed
        self.indices = range(len(reader)) if indices is None else indices
        self.class_names = reader.class_names

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, key: Key) -> SegmentationSample | BrokenImage:
        sample = self.reader[self.indices[key.item]]
        if isinstance(sample, BrokenImage):
            return sample
        with seeded("augment", self.seed, key.epoch, key.item):
            return SegmentationSample(*self.transform(sample))


class SegmentationData(ImageData):
    """Pictures and label maps for training and validation.

    Args:
        root: folder with `images/` and `labels/` or, as in ADE20K, `annotations/`; left out for the built-in scenes.
        dataset: "auto" to read `root`, or "scenes".
        classes: names of the classes in the order of their labels; null to read them from `classes.txt` or ADE20K's
            `objectInfo150.txt` in `root`.
        zero_is_ignored: whether label 0 means "none of the classes" and c + 1 class c; null: yes in `annotations/`.
        image_size: side of the training crops in pixels, and of the scenes; at least 32.
        scale: longer and shorter side of the frame that pictures are scaled to fit, times the ratios of the training or
            the scales of the test.
        batch_size: pictures per batch and process.
        num_workers: processes that prepare pictures; 0 for none beside the main one. Changes nothing but the speed.
        seed: order and augmentation are functions of it.
        train_size: number of training pictures: the first of one fixed permutation. Default all; 5000 for scenes.
        val_size: the same for validation. Default all; 1000 for scenes.
        augmentation: training augmentation.
        test: how label maps are predicted.
        mean: mean of each channel, in 0 to 1, to subtract.
        std: standard deviation of each channel, to divide by.
        max_broken_share: share of unreadable pictures, of those in a split, above which the run stops.
        train_split: name of the training split; by default "train" or "training", whichever is found.
        val_split: name of the validation split; by default "val", "validation", "valid" or "test", the first found.

    Raises:
        ValueError: a value out of its range; nothing to choose a data set by.
    """

    root_holds = "a folder with images/SPLIT/ and labels/SPLIT/, or annotations/SPLIT/ as in ADE20K"

    def __init__(
        self,
        root: str | None = None,
        dataset: str = "auto",
        classes: list[str] | None = None,
        zero_is_ignored: bool | None = None,
        image_size: int = 512,
        scale: tuple[int, int] = (2048, 512),
        batch_size: int = 16,
        num_workers: int = 4,
        seed: int = 0,
        train_size: int | None = None,
        val_size: int | None = None,
        augmentation: SegmentationAugmentation = SegmentationAugmentation(),  # noqa: B008  # frozen: one may serve all
        test: SegmentationTest = SegmentationTest(),
        mean: Triple = IMAGENET_MEAN,
        std: Triple = IMAGENET_STD,
        max_broken_share: float = 0.01,
        train_split: str | None = None,
        val_split: str | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, max_broken_share)
        if dataset not in DATASETS:
            raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {dataset!r}")
        if dataset == "auto" and root is None:
            raise ValueError(f"root: expected {self.root_holds}, got none (only 'scenes' needs none)")
        if dataset == "scenes" and (root is not None or classes is not None):
            raise ValueError("root and classes must be left out for dataset 'scenes'; for a folder set it to auto")
        check_at_least(SMALLEST, image_size=image_size, scale=min(scale))
        check_at_least(1, train_size=train_size, val_size=val_size)
        if not all(value > 0 for value in std):
            raise ValueError(f"std must be numbers above 0, got {', '.join(map(str, std))}")
        self.root, self.dataset, self.classes, self.zero_is_ignored = root, dataset, classes, zero_is_ignored
        self.image_size, self.scale, self.test, self.augmentation = image_size, scale, test, augmentation
        self.sizes, self.splits = {"train": train_size, "val": val_size}, {"train": train_split, "val": val_split}
        self.transforms = {
            "train": segmentation_training_transform(image_size, scale, augmentation, mean, std),
            "val": SegmentationTransform([], mean, std),
        }

    def open_part(self, part: str) -> tuple[SegmentationDataset, str]:
        """Open "train" or "val" and cut it to its size.

        Raises:
            FileNotFoundError, ValueError: nothing readable at `root`, unknown classes, no such split, pictures without
                label maps, a subset larger than its split.
        """
        reader, split = self._read(part)
        indices = subset_indices(part, split, len(reader), self.sizes[part])
        return SegmentationDataset(reader, indices, self.transforms[part], self.seed), split

    def collate(self, part: str) -> Callable[[list[Any]], Batch]:
        """Padded crops for training, lists of whole pictures for validation."""
        return PadToSquare(self.image_size) if part == "train" else whole_pictures

    def train_dataloader(self) -> Loader:
        """Shuffled, augmented, full batches; another order in each epoch.

        Raises:
            ValueError: fewer pictures than one batch of all processes, or batches of one picture.
        """
        if self.batch_size < 2:
            raise ValueError(
                f"batch_size must be at least 2 in training, got {self.batch_size}: the head's BatchNorm after pooling "
                "sees one value of each picture"
            )
        return super().train_dataloader()

    def _read(self, part: str) -> tuple[MappedPictures, str]:
        """The reader of one part, and the name of its split."""
        if self.root is None:
            return SceneMaps(part, self.sizes[part] or SCENES_SIZE[part], self.image_size), part
        found = folder_names(label_folder(self.root))
        usual = TRAIN_SPLITS if part == "train" else VAL_SPLITS
        split = choose_split(self.splits[part], usual, found) or usual[0]
        classes = read_class_names(self.root) if self.classes is None else self.classes
        return LabelMapFolder(self.root, split, classes, self.zero_is_ignored), split


class PadToSquare:
    """Makes a training batch of crops of at most `size` pixels a side: zeros and `IGNORED` on the right and below."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, items: list[SegmentationSample | BrokenImage]) -> Batch:
        samples, broken = _sorted_out(items)
        if len(samples) < 2:  # too few for the head's BatchNorm
            return Batch([], [], broken)
        sizes = torch.tensor([sample.labels.shape for sample in samples])
        margins = [(0, self.size - width, 0, self.size - height) for height, width in sizes.tolist()]
        pairs = list(zip(samples, margins, strict=True))
        images = torch.stack([F.pad(sample.image, margin) for sample, margin in pairs])
        labels = torch.stack([F.pad(sample.labels, margin, value=IGNORED) for sample, margin in pairs])
        return Batch(images, LabelMaps(labels, sizes), broken)


def whole_pictures(items: list[SegmentationSample | BrokenImage]) -> Batch:
    """Make a validation batch: pictures and label maps in lists."""
    samples, broken = _sorted_out(items)
    return Batch([sample.image for sample in samples], [sample.labels for sample in samples], broken)


def _sorted_out(
    items: list[SegmentationSample | BrokenImage],
) -> tuple[list[SegmentationSample], list[BrokenImage]]:
    samples = [item for item in items if isinstance(item, SegmentationSample)]
    return samples, [item for item in items if isinstance(item, BrokenImage)]
