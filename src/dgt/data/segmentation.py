"""The data module of semantic segmentation: images with label maps in folders, or the built-in scenes.

Training batches are `(images, LabelMaps)`: normalised crops (B, 3, S, S), padded with zeros on the right and below
where an image is smaller. Validation batches are `(images, labels)`: lists of whole images (3, H, W) and label maps
(H, W) of the images' own size, so that metrics are those of the labels as they were drawn.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.data.dataset import Drawn, Key, SeededDataset
from dgt.data.joint_transforms import SMALLEST, SegmentationAugmentation, evaluation_pair, training_pair_transform
from dgt.data.label_maps import IGNORED, LabelMapFolder, SceneMaps, label_folder, read_class_names
from dgt.data.loader import Batch, Loader
from dgt.data.module import NormalizedData, subset_indices
from dgt.data.readers import folder_names
from dgt.utils.errors import UserError, check_range


@dataclass(frozen=True)
class SegmentationTest:
    """How a label map is predicted, in validation, evaluation and prediction.

    Args:
        scales: factors on `data.scale`; the probabilities of all are averaged.
        flip: average with those of the mirrored image, at every scale.
        window: side in pixels of a window that slides over the scaled image; null for the whole image at once.
        stride: pixels between two windows; null for two thirds of the window.

    Raises:
        UserError: a value out of its range.
    """

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    window: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        if not self.scales or not all(scale > 0 for scale in self.scales):
            raise UserError(f"test.scales must be at least one number above 0, got {list(self.scales)}")
        if self.window is not None and self.window < SMALLEST:
            raise UserError(f"test.window must be null or at least {SMALLEST}, got {self.window}")
        if self.stride is not None and (self.window is None or not 1 <= self.stride <= self.window):
            raise UserError(f"test.stride must be null or lie in 1 to test.window ({self.window}), got {self.stride}")


class LabelMaps(NamedTuple):
    """Targets of a training batch.

    `labels` uint8 (B, S, S), `IGNORED` in padding; `sizes` int64 (B, 2), each image's own height and width in pixels
    from the upper left corner.
    """

    labels: Tensor
    sizes: Tensor


@dataclass(eq=False)
class SegmentationData(NormalizedData):
    """Images and label maps for training and validation.

    Args:
        root: folder with `images/` and `labels/` or, as in ADE20K, `annotations/`; left out for the built-in scenes.
        dataset: "auto" to read `root`, or "scenes".
        image_size: side of the training crops in pixels, and of the scenes; at least 32.
        classes: names of the classes in the order of their labels; null to read them from `classes.txt` or ADE20K's
            `objectInfo150.txt` in `root`.
        zero_is_ignored: whether label 0 means "none of the classes" and c + 1 class c; null: yes in `annotations/`.
        scale: longer and shorter side of the frame that images are scaled to fit, times the ratios of the training or
            the scales of the test.
        augmentation: training augmentation.
        test: how label maps are predicted.

    Raises:
        UserError: a value out of its range; nothing to choose a data set by.
    """

    image_size: int = 512
    batch_size: int = 16
    classes: list[str] | None = None
    zero_is_ignored: bool | None = None
    scale: tuple[int, int] = (2048, 512)
    augmentation: SegmentationAugmentation = SegmentationAugmentation()  # noqa: RUF009  # frozen: one may serve all
    test: SegmentationTest = SegmentationTest()

    root_holds = "a folder with images/SPLIT/ and labels/SPLIT/, or annotations/SPLIT/ as in ADE20K"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset == "scenes" and self.classes is not None:
            raise UserError("classes must be left out for dataset 'scenes'")
        check_range(SMALLEST, scale=min(self.scale))

    def open_part(self, part: str) -> tuple[SeededDataset, str]:
        """Open "train" or "val" and cut it to its size.

        Raises:
            FileNotFoundError, UserError: nothing readable at `root`, unknown classes, no such split, images without
                label maps, a subset larger than its split.
        """
        reader: LabelMapFolder | SceneMaps
        if self.root is None:
            split, reader = part, SceneMaps(part, self.size(part) or self.scenes_size[part], self.image_size)
        else:
            split = self.choose_split(part, folder_names(label_folder(self.root)))
            classes = read_class_names(self.root) if self.classes is None else self.classes
            reader = LabelMapFolder(self.root, split, classes, self.zero_is_ignored)
        indices = subset_indices(part, split, len(reader), self.size(part))
        training = training_pair_transform(self.image_size, self.scale, self.augmentation)
        return SeededDataset(reader, training if part == "train" else evaluation_pair, self.seed, indices), split

    def collate(self, part: str, drawn: Drawn) -> Batch:
        """Crops for training, padded on the right and below; lists of whole images for validation."""
        key, samples, broken = drawn
        images, labels = [image for image, _ in samples], [labels for _, labels in samples]
        if part == "val":
            return Batch(key, images, labels, broken)
        if len(samples) < 2:  # too few for the head's BatchNorm
            return Batch(key, [], [], broken)
        sizes = torch.tensor([labels.shape for _, labels in samples])
        margins = [(0, self.image_size - width, 0, self.image_size - height) for height, width in sizes.tolist()]
        padded = [F.pad(image, margin) for image, margin in zip(images, margins, strict=True)]
        maps = [F.pad(one, margin, value=IGNORED) for one, margin in zip(labels, margins, strict=True)]
        return Batch(key, torch.stack(padded), LabelMaps(torch.stack(maps), sizes), broken)

    def finish(self, part: str, key: Key, images: Any, targets: Any) -> tuple[Any, Any]:
        """Normalise; padding becomes zeros."""
        if part == "val":
            return [self.normalize(image) for image in images], targets
        images = self.normalize(images)
        rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
        real = (rows[:, None] < targets.sizes[:, 0, None, None]) & (columns < targets.sizes[:, 1, None, None])
        return images.mul_(real[:, None]), targets

    def train_dataloader(self) -> Loader:
        """Shuffled, augmented, full batches; another order in each epoch.

        Raises:
            UserError: fewer images than one batch of all processes, or batches of one image.
        """
        if self.batch_size < 2:
            raise UserError(
                f"batch_size must be at least 2 in training, got {self.batch_size}: the head's BatchNorm after pooling "
                "sees one value of each image"
            )
        return super().train_dataloader()
