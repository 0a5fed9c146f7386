"""The data module of classification: any set that `dgt.data.readers` reads, or the built-in scenes.

Batches are `(images, targets)`: float images (B, 3, S, S), normalized; int64 labels (B,), or soft
targets (B, classes) summing to one where mixup, cutmix or label smoothing is on in training.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.data.mixup import FastCollateMixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.utils.data import default_collate

from dgt.data.loader import Key
from dgt.data.module import NormalizedData
from dgt.data.readers import (
    HubImages,
    ImageFolder,
    ImagesByClassMap,
    SceneImages,
    available_splits,
    class_folders,
    is_hub,
    open_images,
)
from dgt.data.transforms import Augmentation, evaluation_transform, training_transform
from dgt.utils.errors import UserError
from dgt.utils.seeding import seeded


@dataclass
class ClassificationData(NormalizedData):
    """Images and labels for training and validation; raises as `ImageData`.

    Args:
        root: folder of images in train/CLASS/ and val/CLASS/, or of a Hugging Face data set
            (`save_to_disk`, or parquet files), or the name of one on the hub. Left out for the
            built-in scenes.
        dataset: "auto" to see what lies at `root`, or "scenes".
        batch_size: images per batch and process; even where mixup or cutmix is on.
        crop_ratio: in validation, side of the center crop over the shorter side of the image.
        augmentation: training augmentation.
        cache: decode every image once, into memory: for small sets.
        image_column: column of a Hugging Face data set with the images; null to find it.
        label_column: its column with the class labels; null to find it.
        val_class_map: text file with the class of each validation image, where these lie together,
            as in ImageNet's `val`: lines of a file's name and its class, or of the class alone in
            the order of the names.
    """

    crop_ratio: float = 0.875
    augmentation: Augmentation = Augmentation()  # noqa: RUF009  # frozen: one instance may serve all
    cache: bool = False
    image_column: str | None = None
    label_column: str | None = None
    val_class_map: str | None = None

    root_holds = "a folder with images in train/CLASS/ and val/CLASS/, or a Hugging Face data set (its folder or name)"
    scenes = SceneImages
    root_options = (
        *NormalizedData.root_options,
        "image_column",
        "label_column",
        "val_class_map",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        augmentation = self.augmentation
        if augmentation.mixes and self.batch_size % 2:
            raise UserError(
                f"data.batch_size must be even with mixup or cutmix, got {self.batch_size}"
            )
        self.erasing = RandomErasing(augmentation.erasing, mode="pixel")
        self.transforms = {
            "train": training_transform(self.image_size, augmentation, self.mean),
            "val": evaluation_transform(
                self.image_size, self.crop_ratio, augmentation.interpolation
            ),
        }

    def open_root(self, root: str, part: str) -> tuple[str, HubImages | ImageFolder]:
        """As of all tasks. Raises UserError, too, for a class folder without an image to train on, and
        for one class alone.
        """
        splits = available_splits(root)
        split, train = self.choose_split(part, splits), self.choose_split("train", splits)
        if part == "val" and self.val_class_map is not None:
            if is_hub(Path(root)):
                raise UserError(
                    "data.val_class_map is for folders, not for a Hugging Face data set"
                )
            classes = tuple(class_folders(Path(root, train))) or None
            return split, ImagesByClassMap(root, split, self.val_class_map, classes, self.bits)
        reader = open_images(
            root,
            split,
            train,
            self.bits,
            image_column=self.image_column,
            label_column=self.label_column,
        )
        if isinstance(reader, ImageFolder) and part == "train":
            reader.check_classes()
        names = reader.class_names
        if isinstance(reader, HubImages):
            names = tuple(names[label] for label in set(reader.labels.tolist()))
        if part == "train" and len(names) == 1:
            raise UserError(
                f"{root} has only one class to train on, {names[0]!r}, and a classifier needs "
                "two: if that is a folder around those of the classes, move them up"
            )
        return split, reader

    def transform(self, part: str, sample: Any) -> tuple[Tensor, int]:
        """An image uint8 (3, S, S), in training augmented, and its label."""
        image, label = sample
        return self.transforms[part](image), label

    def collate(self, part: str, key: Key, samples: list[Any]) -> tuple[Any, Any]:
        """Images uint8 (B, 3, S, S) and targets, mixed and smoothed in training.

        Mixing drops an odd last image.
        """
        augmentation, training = self.augmentation, part == "train"
        if training and augmentation.mixes:
            samples = samples[: len(samples) // 2 * 2]
        if not samples:
            return [], []
        if training and augmentation.mixes:
            options = {
                "switch_prob": augmentation.mixup_switch_prob,
                "label_smoothing": augmentation.smoothing,
            }
            mixup = FastCollateMixup(
                augmentation.mixup, augmentation.cutmix, num_classes=self.num_classes, **options
            )
            with seeded("mixup", self.seed, *key):
                return mixup(samples)
        images, targets = default_collate(samples)
        if training and augmentation.smoothing:
            targets = mixup_target(targets, self.num_classes, smoothing=augmentation.smoothing)
        return images, targets

    def finish(self, part: str, key: Key, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize, and in training erase."""
        images = self.normalize(images)
        if part == "train" and self.augmentation.erasing:
            self.erasing.device = images.device
            with seeded("erase", self.seed, *key, device=images.device):
                self.erasing(images)
        return images, targets
