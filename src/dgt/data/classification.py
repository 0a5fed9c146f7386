"""The Lightning data module of classification: any set that `dgt.data.images` reads, or the built-in scenes.

Batches are `(images, targets)`: float images (B, 3, S, S), normalised; int64 labels (B,), or soft targets (B, classes)
summing to one where mixup, cutmix or label smoothing is on in training.
"""

from collections.abc import Sequence
from pathlib import Path

from dgt.data.images import (
    SUFFIXES,
    ImageFolder,
    LabelledImages,
    SceneImages,
    available_splits,
    folder_names,
    open_images,
)
from dgt.data.loading import CachedImages, Collate, SubsetImages, TransformedImages
from dgt.data.module import ImageData, check_at_least, process, subset_indices
from dgt.data.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Augmentation,
    BatchTargets,
    Triple,
    evaluation_transform,
    training_transform,
)

DATASETS = ("auto", "scenes")
SCENES_SIZE = {"train": 5000, "val": 1000}
TRAIN_SPLITS = ("train", "training")
VAL_SPLITS = ("val", "validation", "valid", "test")
NO_ROOT = "root: expected the folder or .npz file of the images, got none (only 'scenes' needs none)"


def choose_split(wanted: str | None, usual: Sequence[str], found: Sequence[str]) -> str | None:
    """The split the user named, or the first usual one that was found, or none."""
    return wanted or next((name for name in usual if name in found), None)


def _folder_classes(root: str, train_split: str | None) -> tuple[str, ...] | None:
    """The classes of the training split, where `root` is a set of class folders that has one."""
    folder = Path(root) / train_split if train_split else None
    return folder_names(folder) if folder and folder.is_dir() else None


def _refuse_empty_classes(images: ImageFolder, folder: Path) -> None:
    """Raise ValueError for a class without images to learn it from: a stray folder, or a download that broke off."""
    empty = sorted(set(images.class_names) - {images.class_names[label] for _, label in images.samples})
    if empty:
        raise ValueError(
            f"class folders of {folder} without an image: {', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''} "
            f"(looked for {', '.join(SUFFIXES)}); fill or remove them"
        )


class ClassificationData(ImageData):
    """Images and labels for training and validation.

    Args:
        root: folder or `.npz` file with the images; left out for the built-in scenes.
        dataset: "auto" to see what lies at `root` (class folders, a packed `.npz`, CIFAR-10), or "scenes".
        image_size: side of the square images in pixels, at least 32.
        batch_size: images per batch and process; even where mixup or cutmix is on.
        num_workers: processes that prepare images; 0 for none beside the main one. Changes nothing but the speed.
        seed: order, augmentation and mixing are functions of it. Which images the subsets hold is not, so that runs
            with other seeds compare.
        train_size: number of training images: the first of one fixed permutation. Default all; 5000 for scenes.
        val_size: the same for validation. Default all; 1000 for scenes.
        crop_ratio: in validation, side of the centre crop over the shorter side of the picture.
        augmentation: training augmentation.
        mean: mean of each channel, in 0 to 1, to subtract.
        std: standard deviation of each channel, to divide by.
        max_broken_share: share of unreadable images, of those in a split, above which the run stops.
        train_split: name of the training split; by default "train" or "training", whichever is found.
        val_split: name of the validation split; by default "val", "validation", "valid" or "test", the first found.
        cache: decode every image once, into memory: for small sets.

    Raises:
        ValueError: a value out of its range; nothing to choose a data set by.
    """

    root_holds = (
        "a folder with train/CLASS/ and val/CLASS/ folders of images, a packed .npz file, or the folder of CIFAR-10"
    )

    def __init__(
        self,
        root: str | None = None,
        dataset: str = "auto",
        image_size: int = 224,
        batch_size: int = 128,
        num_workers: int = 4,
        seed: int = 0,
        train_size: int | None = None,
        val_size: int | None = None,
        crop_ratio: float = 0.875,
        augmentation: Augmentation = Augmentation(),  # noqa: B008  # frozen: one instance may serve all
        mean: Triple = IMAGENET_MEAN,
        std: Triple = IMAGENET_STD,
        max_broken_share: float = 0.01,
        train_split: str | None = None,
        val_split: str | None = None,
        cache: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, max_broken_share)
        if dataset not in DATASETS:
            raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {dataset!r}")
        if dataset == "auto" and root is None:
            raise ValueError(NO_ROOT)
        if dataset == "scenes" and root is not None:
            raise ValueError(
                f"root must be left out for dataset 'scenes', got {root!r}; for a folder set --data.dataset auto"
            )
        check_at_least(32, image_size=image_size)
        check_at_least(1, train_size=train_size, val_size=val_size)
        if not all(value > 0 for value in std):
            raise ValueError(f"std must be numbers above 0, got {', '.join(map(str, std))}")
        if augmentation.mixes and batch_size % 2:
            raise ValueError(f"batch_size must be even where mixup or cutmix is on, got {batch_size}")
        self.root, self.dataset = root, dataset
        self.image_size, self.train_size, self.val_size = image_size, train_size, val_size
        self.cache, self.augmentation = cache, augmentation
        self.train_split, self.val_split = train_split, val_split
        self.train_transform = training_transform(image_size, augmentation, mean, std)
        self.val_transform = evaluation_transform(image_size, crop_ratio, mean, std, augmentation.interpolation)

    def collate(self, part: str) -> Collate:
        """Stacks images and labels; in training, mixes and smooths them as the augmentation says."""
        targets = BatchTargets(self.augmentation, self.num_classes) if part == "train" else None
        return Collate(targets, self.seed, process()[0])

    def open_part(self, part: str) -> tuple[TransformedImages, str]:
        """Open "train" or "val", cut it to its size and cache it.

        Raises:
            FileNotFoundError, ValueError: nothing readable at `root`, no such split, a subset larger than its split, a
                class folder without an image to train on.
        """
        size = self.train_size if part == "train" else self.val_size
        images, split = self._read(part, size)
        indices = subset_indices(part, split, len(images), size)
        images = images if indices is None else SubsetImages(images, indices)
        transform = self.train_transform if part == "train" else self.val_transform
        return TransformedImages(CachedImages(images) if self.cache else images, transform, self.seed), split

    def _read(self, part: str, size: int | None) -> tuple[LabelledImages, str]:
        """The reader of one part, and the name of its split."""
        if self.dataset == "scenes":
            return SceneImages(part, size or SCENES_SIZE[part], self.image_size), part
        if self.root is None:
            raise ValueError(NO_ROOT)
        found = available_splits(self.root)
        train = choose_split(self.train_split, TRAIN_SPLITS, found)
        if part == "train":
            split = train or TRAIN_SPLITS[0]
            images = open_images(self.root, split)
            if isinstance(images, ImageFolder):
                _refuse_empty_classes(images, Path(self.root) / split)
            return images, split
        split = choose_split(self.val_split, VAL_SPLITS, found) or VAL_SPLITS[0]
        return open_images(self.root, split, _folder_classes(self.root, train)), split
