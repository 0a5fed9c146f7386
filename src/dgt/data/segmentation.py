"""The data module of semantic segmentation: images with label maps in folders, or the built-in
scenes.

```
ROOT/images/<split>/NAME.jpg  ROOT/annotations/<split>/NAME.png     ADE20K: label 0 is ignored, c + 1 is class c
ROOT/images/<split>/NAME.jpg  ROOT/labels/<split>/NAME.png          plain: label c is class c
ROOT/leftImg8bit/<split>/CITY/NAME_leftImg8bit.png  ROOT/gtFine/<split>/CITY/NAME_gtFine_labelTrainIds.png
                                                                    Cityscapes: 19 classes
ROOT/JPEGImages/NAME.jpg      ROOT/SegmentationClass/NAME.png       Pascal VOC, the names in
                                                                    ROOT/ImageSets/Segmentation/<split>.txt
```

Or a Hugging Face data set with a column of images and one of label maps.

A label map is an 8-bit image of one channel (gray or palette), of its image's size; 255 is ignored
in both layouts. What cannot be decoded is a `BrokenImage`, left out and counted; a label map that
can be read but is wrong stops the run: a `WrongLabels`, which names the file. Beside an image that
EXIF data turn by a quarter, a label map may be of the upright image or of the pixels as stored,
with which it is turned; where sizes cannot show which (a half turn, a mirror, a square), it is
wrong.

Training follows Swin's recipe for ADE20K: rescale to fit a frame times a random ratio, crop, flip,
distort the colors. Its batches are normalized crops (B, 3, S, S), zero where an image is smaller,
and `LabelMaps`; those of validation lists of whole images (3, H, W) and label maps (H, W), of their
own size: `dgt.tasks.segment` scales them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from dgt.data.label_maps import (
    IGNORED,
    HubLabelMaps,
    LabelMapFolder,
    MappedImages,
    SceneMaps,
    find_layout,
    read_class_names,
)
from dgt.data.loader import Key
from dgt.data.module import NormalizedData
from dgt.data.readers import available_splits, is_hub
from dgt.utils.class_names import some
from dgt.utils.distributed import gather_objects
from dgt.utils.errors import UserError, check_range

SMALLEST = 32  # least side in pixels of a scaled image: the minimum of the backbones
CROP_TRIES = 10


@dataclass(frozen=True)
class SegmentationAugmentation:
    """Training augmentation; the defaults are the paper's for ADE20K. UserError for a value out of
    its range.

    Args:
        min_ratio: smallest factor on `data.scale`.
        max_ratio: largest factor on `data.scale`.
        max_class_share: largest share that one class may have in a crop, unless ten tries find none
            better.
        flip: probability of a horizontal flip.
        distortion: probability of each of four changes of color: brightness, contrast, saturation,
            hue.
    """

    min_ratio: float = 0.5
    max_ratio: float = 2.0
    max_class_share: float = 0.75
    flip: float = 0.5
    distortion: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.min_ratio <= self.max_ratio:
            raise UserError(
                f"data.augmentation: expected 0 < min_ratio <= max_ratio, "
                f"got {self.min_ratio} and {self.max_ratio}"
            )
        section = "data.augmentation"
        check_range(0, 1, section=section, max_class_share=self.max_class_share)
        check_range(0, 1, section=section, flip=self.flip, distortion=self.distortion)


@dataclass(frozen=True)
class SegmentationTest:
    """How a label map is predicted, in validation and afterwards. UserError for a value out of its
    range.

    Args:
        scales: factors on `data.scale`; the probabilities of all are averaged.
        flip: average with those of the mirrored image, at every scale.
        window: side in pixels of a window that slides over the scaled image; null for the whole
            image at once.
        stride: pixels between two windows; null for two thirds of the window.
    """

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    window: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        if not self.scales or not all(scale > 0 for scale in self.scales):
            raise UserError(
                f"data.test.scales must be at least one number above 0, got {list(self.scales)}"
            )
        if self.window is not None and self.window < SMALLEST:
            raise UserError(
                f"data.test.window must be null or at least {SMALLEST}, got {self.window}"
            )
        if self.stride is not None and (self.window is None or not 1 <= self.stride <= self.window):
            raise UserError(
                f"data.test.stride must be null or lie in 1 to data.test.window ({self.window}), "
                f"got {self.stride}"
            )


def fitting_size(
    size: tuple[int, int], frame: tuple[int, int], ratio: float = 1.0
) -> tuple[int, int]:
    """Compute the size of an image scaled to fit a frame, its shape kept; with sides of at least 32 pixels.

    Args:
        size: height and width of the image.
        frame: longest longer and longest shorter side, in either order.
        ratio: the frame is multiplied by it.

    Returns:
        Height and width.
    """
    longer, shorter = (int(side * ratio) for side in sorted(frame, reverse=True))
    factor = min(longer / max(size), shorter / min(size))
    height, width = (max(SMALLEST, int(side * factor + 0.5)) for side in size)
    return height, width


def choose_crop(labels: Tensor, size: int, max_share: float) -> list[int]:
    """Choose a random square crop, or less where the label map is smaller.

    Drawn again, up to ten times, where one class has too many of the labeled pixels.

    Args:
        labels: (H, W).
        size: side of the square in pixels.
        max_share: share of the labeled pixels from which on a class has too many.

    Returns:
        Top, left, height and width.
    """
    height, width = labels.shape
    for _ in range(CROP_TRIES):
        top, left = (int(torch.randint(0, max(0, side - size) + 1, ())) for side in (height, width))
        if max_share == 1:
            break
        counts = torch.bincount(
            labels[top : top + size, left : left + size].flatten(), minlength=256
        )[:IGNORED]
        if (counts > 0).sum() > 1 and counts.max() < max_share * counts.sum():
            break
    return [top, left, min(height, size), min(width, size)]


# bounds of a strength, and what it does to 8-bit pixels
_CHANGES: list[tuple[float, float, Any]] = [
    (
        -32 / 255,
        32 / 255,
        lambda image, by: (image.int() + round(255 * by)).clamp(0, 255).to(torch.uint8),
    ),
    # contrast: a factor on the values; torchvision's own pulls towards their mean
    (0.5, 1.5, F.adjust_brightness),
    (0.5, 1.5, F.adjust_saturation),
    (-0.1, 0.1, F.adjust_hue),
]


def distort_colors(image: Tensor, probability: float) -> Tensor:
    """Brightness, contrast, saturation and hue of uint8 (3, H, W), each changed with one probability.

    Contrast comes second or last. Unlike torchvision's `RandomPhotometricDistort` it leaves the
    order of the channels alone, as Swin's recipe does.
    """
    *drawn, (last, _) = torch.rand(len(_CHANGES) + 1, 2).tolist()
    steps = list(zip(drawn, _CHANGES, strict=True))
    if last < 0.5:
        steps.append(steps.pop(1))
    for (chance, place), (low, high, change) in steps:
        image = change(image, low + (high - low) * place) if chance < probability else image
    return image


def augment(
    pixels: Tensor,
    labels: Tensor,
    crop: int,
    frame: tuple[int, int],
    options: SegmentationAugmentation,
) -> tuple[Tensor, Tensor]:
    """uint8 (3, H, W) and (H, W) rescaled, cropped to at most `crop` x `crop` pixels, flipped and
    distorted; unpadded.
    """
    ratio = options.min_ratio + (options.max_ratio - options.min_ratio) * float(torch.rand(()))
    height, width = labels.shape
    size = list(fitting_size((height, width), frame, ratio))
    pixels = F.resize(pixels, size)
    labels = F.resize(tv_tensors.Mask(labels), size).as_subclass(Tensor)
    place = choose_crop(labels, crop, options.max_class_share)
    pixels, labels = F.crop(pixels, *place), F.crop(labels, *place)
    if torch.rand(1) < options.flip:
        pixels, labels = pixels.flip(-1), labels.flip(-1)
    return distort_colors(pixels, options.distortion), labels


class LabelMaps(NamedTuple):
    """Targets of a training batch: `labels` uint8 (B, S, S), `IGNORED` in padding; `sizes` int64
    (B, 2), each image's own height and width in pixels from the upper left corner; `present` bool
    (B, 256), which labels there are in the whole label map of each.
    """

    labels: Tensor
    sizes: Tensor
    present: Tensor


@dataclass
class SegmentationData(NormalizedData):
    """Images and label maps for training and validation; raises as `ImageData`, and for a size
    below 32 in `scale`.

    Args:
        root: folder in one of the layouts above, or a Hugging Face data set (its folder or name);
            left out for the built-in scenes.
        dataset: "auto" to read `root`, or "scenes".
        image_size: side of the training crops in pixels, and of the scenes; at least 32.
        classes: names of the classes in the order of their labels; null to read them from
            `classes.txt` or ADE20K's `objectInfo150.txt` in `root`, or for those of Cityscapes or
            Pascal VOC in their layouts.
        zero_is_ignored: whether label 0 means "none of the classes" and c + 1 class c; null: yes in
            `annotations/`.
        scale: longer and shorter side of the frame that images are scaled to fit, times the ratios
            of the training or the scales of the test.
        augmentation: training augmentation.
        test: how label maps are predicted.
        image_column: column of a Hugging Face data set with the images; null to find it.
        label_column: its column with the label maps; null to find it.
    """

    image_size: int = 512
    batch_size: int = 16
    classes: list[str] | None = None
    zero_is_ignored: bool | None = None
    scale: tuple[int, int] = (2048, 512)
    augmentation: SegmentationAugmentation = SegmentationAugmentation()  # frozen: one may serve all
    test: SegmentationTest = SegmentationTest()
    image_column: str | None = None
    label_column: str | None = None

    root_holds = (
        "a folder with images/SPLIT/ and labels/SPLIT/, or annotations/SPLIT/ as in ADE20K, or laid out "
        "as Cityscapes or Pascal VOC, or a Hugging Face data set"
    )
    scenes = SceneMaps
    smallest_batch = 2  # the head's BatchNorm would see one value
    root_options = (
        *NormalizedData.root_options,
        "image_column",
        "label_column",
        "classes",
        "zero_is_ignored",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(SMALLEST, section="data", scale=min(self.scale))
        self.present = torch.zeros(256, dtype=torch.bool)  # the labels met in training

    def open_root(self, root: str, part: str) -> tuple[str, MappedImages]:
        """As of all tasks; UserError, too, for a Hugging Face data set where nothing says what its
        labels mean.
        """
        columns = {"image_column": self.image_column, "label_column": self.label_column}
        if is_hub(Path(root)):
            split = self.choose_split(part, available_splits(root))
            if self.zero_is_ignored is None:
                raise UserError(
                    "data.zero_is_ignored must be true or false for a Hugging Face data set: whether "
                    "label 0 means none of the classes, or the first of them"
                )
            classes = self._named_classes(root)
            return split, HubLabelMaps(
                root, split, classes, self.zero_is_ignored, self.bits, **columns
            )
        if named := [name for name, value in columns.items() if value is not None]:
            raise UserError(f"data.{named[0]} is for a Hugging Face data set, not for folders")
        layout = find_layout(root)
        split = self.choose_split(part, layout.splits(root))
        classes = self._named_classes(root, layout.classes)
        return split, LabelMapFolder(root, split, classes, self.zero_is_ignored, self.bits)

    def _named_classes(self, root: str, usual: tuple[str, ...] | None = None) -> Sequence[str]:
        """The names of the classes of a root, of whose layout they are `usual`; UserError where
        `data.classes`, as a recipe has them for its own data, are others than those of the root's list,
        and not only other names.
        """
        if self.classes is None:
            return read_class_names(root, usual)
        try:
            listed = read_class_names(root)
        except (FileNotFoundError, UserError):  # a list need not be there, or be readable
            return self.classes
        labels = {name: label for label, name in enumerate(listed)}
        moved = any(labels.get(name, at) != at for at, name in enumerate(self.classes))
        if moved or len(listed) != len(self.classes):
            raise UserError(
                f"data.classes names {len(self.classes)} classes ({some(self.classes)}), but {root} lists "
                f"{len(listed)} ({some(listed)}): set data.classes to null for those that it lists"
            )
        return self.classes

    def transform(self, part: str, sample: Any) -> tuple[Tensor, Any]:
        """An image uint8 (3, H, W) and its labels (H, W).

        In training augmented, and padded on the right and below.
        """
        pixels, labels = F.pil_to_tensor(sample[0]), torch.from_numpy(sample[1])
        if part == "val":
            return pixels, labels
        present = torch.bincount(labels.flatten(), minlength=256) > 0
        pixels, labels = augment(pixels, labels, self.image_size, self.scale, self.augmentation)
        height, width = labels.shape
        margin = (0, self.image_size - width, 0, self.image_size - height)
        return pad(pixels, margin), LabelMaps(
            pad(labels, margin, value=IGNORED), torch.tensor([height, width]), present
        )

    def collate(self, part: str, key: Key, samples: list[Any]) -> tuple[Any, Any]:
        """Crops for training; lists of whole images for validation."""
        if part == "val":
            return super().collate(part, key, samples)
        return default_collate(samples) if len(samples) >= self.smallest_batch else ([], [])

    def finish(self, part: str, key: Key, images: Any, targets: Any) -> tuple[Any, Any]:
        """Normalize; padding becomes zeros."""
        if part == "val":
            return [self.normalize(image) for image in images], targets
        self.present = self.present.to(images.device) | targets.present.any(dim=0)
        images = self.normalize(images)
        pixel, (height, width) = (
            torch.arange(self.image_size, device=images.device),
            targets.sizes.T[:, :, None],
        )
        real = (pixel < height)[:, None, :, None] & (pixel < width)[:, None, None]
        return images.mul_(real), targets

    def remarks(self) -> list[str]:
        """Of classes that no pixel of the training images has."""
        present = [False] * 256
        for of_one in gather_objects(self.present.tolist()):
            present = [any(pair) for pair in zip(present, of_one, strict=True)]
        return self.missing_classes("training", present)

    def missing_classes(self, images: str, present: Sequence[bool]) -> list[str]:
        """A sentence on the classes that no pixel has, and on what that may come of; or nothing.

        Args:
            images: which, for the sentence.
            present: whether each label is there; maybe 255, for pixels without one, too.
        """
        names = self.class_names
        missing = [name for name, is_there in zip(names, present, strict=False) if not is_there]
        if not missing:
            return []
        message = f"no pixel of the {images} images is labeled {some(missing)} "
        message += f"({len(missing)} of {len(names)} classes)"
        has_zero_ignored = getattr(self.reader, "zero_is_ignored", False)
        has_255 = len(present) == 256 and present[IGNORED]
        only_first = has_255 and missing == list(names[1:])
        if has_zero_ignored and missing[-1] == names[-1]:
            message += (
                "; label 0 is read as none of the classes: if it is the first of them, set "
                "data.zero_is_ignored to false"
            )
        elif only_first and not has_zero_ignored:
            message += "; 255 is read as no label: in masks of 0 and 255 the second class must be 1"
        elif missing[0] == names[0] and not has_zero_ignored:
            message += (
                "; label 0 is read as the first class: if labels count from 1, set "
                "data.zero_is_ignored to true"
            )
        return [message]
