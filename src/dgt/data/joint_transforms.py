"""What happens to an image and its label map on their way into the network, after Swin's recipe for ADE20K.

Training: rescale to fit a frame (2048 x 512) times a random ratio, crop a square in which no class has more than 75 %,
flip, distort the colours, pad with nothing. Evaluation leaves size and place alone: scaling to the frame, windows and
test-time augmentation are the business of `dgt.tasks.segment`. The transforms are torchvision's v2 and its kind; they
draw from PyTorch's global generator, which `dgt.data.segmentation` seeds for every image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from dgt.data.label_maps import IGNORED
from dgt.utils.errors import UserError, check_range

SMALLEST = 32
"""Fewest pixels a side that a image is scaled to: what the backbones take."""
CROP_TRIES = 10


@dataclass(frozen=True)
class SegmentationAugmentation:
    """Training augmentation; the defaults are the paper's for ADE20K.

    Args:
        min_ratio: smallest factor on `data.scale`.
        max_ratio: largest factor on `data.scale`.
        max_class_share: largest share that one class may have in a crop, unless ten tries find none better.
        flip: probability of a horizontal flip.
        distortion: probability of each of four changes of colour: brightness, contrast, saturation, hue.

    Raises:
        UserError: a value out of its range.
    """

    min_ratio: float = 0.5
    max_ratio: float = 2.0
    max_class_share: float = 0.75
    flip: float = 0.5
    distortion: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.min_ratio <= self.max_ratio:
            raise UserError(f"expected 0 < min_ratio <= max_ratio, got {self.min_ratio} and {self.max_ratio}")
        check_range(0, 1, max_class_share=self.max_class_share, flip=self.flip, distortion=self.distortion)

    @classmethod
    def none(cls) -> SegmentationAugmentation:
        """No augmentation but the place of the crop."""
        return cls(1.0, 1.0, 1.0, 0.0, 0.0)


def fitting_size(size: tuple[int, int], frame: tuple[int, int], ratio: float = 1.0) -> tuple[int, int]:
    """Height and width of an image scaled to fit a frame, its shape kept.

    Args:
        size: height and width in pixels.
        frame: longest longer side and longest shorter side in pixels, in either order.
        ratio: factor on the frame.

    Returns:
        The largest height and width that fit `ratio * frame`, either way round; at least 32 each.
    """
    longer, shorter = (int(side * ratio) for side in sorted(frame, reverse=True))
    factor = min(longer / max(size), shorter / min(size))
    height, width = (max(SMALLEST, int(side * factor + 0.5)) for side in size)
    return height, width


class RandomRescale(v2.Transform):  # type: ignore[misc]  # torchvision is not typed
    """Scale to fit a frame times a random ratio, uniform between two bounds.

    Args:
        frame: longest longer and shorter side in pixels.
        min_ratio, max_ratio: bounds of the ratio.
    """

    def __init__(self, frame: tuple[int, int], min_ratio: float, max_ratio: float) -> None:
        super().__init__()
        self.frame, self.min_ratio, self.max_ratio = frame, min_ratio, max_ratio

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the size for all inputs of one sample."""
        ratio = self.min_ratio + (self.max_ratio - self.min_ratio) * float(torch.rand(()))
        height, width = flat_inputs[0].shape[-2:]
        return {"size": list(fitting_size((height, width), self.frame, ratio))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Resize: images bilinearly, label maps by the nearest pixel."""
        return F.resize(inpt, **params)


class RandomClassCrop(v2.Transform):  # type: ignore[misc]
    """Crop a square at random, again where one class fills too much of it; smaller images keep their size.

    Args:
        size: side of the square in pixels.
        max_share: largest share of the labelled pixels that one class may have; after ten tries it may have more.
    """

    def __init__(self, size: int, max_share: float) -> None:
        super().__init__()
        self.size, self.max_share = size, max_share

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the place for all inputs of one sample."""
        height, width = flat_inputs[0].shape[-2:]
        labels = next((x for x in flat_inputs if isinstance(x, tv_tensors.Mask)), None)
        for _ in range(CROP_TRIES):
            top = int(torch.randint(0, max(0, height - self.size) + 1, ()))
            left = int(torch.randint(0, max(0, width - self.size) + 1, ()))
            if labels is None or self.max_share == 1:
                break
            counts = torch.bincount(labels[top : top + self.size, left : left + self.size].flatten(), minlength=256)
            counts = counts[:IGNORED]
            if (counts > 0).sum() > 1 and counts.max() < self.max_share * counts.sum():
                break
        return {"top": top, "left": left, "height": min(height, self.size), "width": min(width, self.size)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Crop."""
        return F.crop(inpt, **params)


class PhotometricDistortion(v2.Transform):  # type: ignore[misc]
    """Change brightness, contrast, saturation and hue, each with one probability, contrast before or after the rest.

    Brightness by up to an eighth of the range, hue by up to a tenth of the circle, the others by 0.5 to 1.5.
    Unlike torchvision's `RandomPhotometricDistort` it leaves the order of the channels alone, as Swin's recipe does.

    Args:
        probability: of each change.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the changes: functions of torchvision with their strengths, in order."""
        strengths = {
            "brightness": (-32 / 255, 32 / 255),
            "contrast": (0.5, 1.5),
            "saturation": (0.5, 1.5),
            "hue": (-0.1, 0.1),
        }
        drawn = torch.rand(len(strengths) + 1, 2).tolist()
        contrast_last = drawn[-1][0] < 0.5
        names = ["brightness", "saturation", "hue"]
        names.insert(3 if contrast_last else 1, "contrast")
        chances = dict(zip(strengths, drawn, strict=False))
        return {
            name: strengths[name][0] + (strengths[name][1] - strengths[name][0]) * chances[name][1]
            for name in names
            if chances[name][0] < self.probability
        }

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Change the colours of images; label maps stay."""
        if not isinstance(inpt, tv_tensors.Image):
            return inpt
        pixels = inpt.as_subclass(Tensor)
        for name, strength in params.items():
            if name == "brightness":
                pixels = (pixels.int() + round(255 * strength)).clamp(0, 255).to(torch.uint8)
            elif name == "contrast":  # a factor on the values themselves; torchvision's pulls towards their mean
                pixels = F.adjust_brightness(pixels, strength)
            else:
                adjust = F.adjust_saturation if name == "saturation" else F.adjust_hue
                pixels = adjust(pixels, strength)
        return tv_tensors.wrap(pixels, like=inpt)


class PairTransform:
    """From an image and its label map to bytes of the image, uint8 (3, H, W), and labels (H, W), uint8.

    Args:
        steps: torchvision transforms of the pair.
    """

    def __init__(self, *steps: v2.Transform) -> None:
        self.steps = steps

    def __call__(self, image: Image.Image, labels: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
        pair = tv_tensors.Image(image), tv_tensors.Mask(torch.from_numpy(labels))
        for step in self.steps:
            pair = step(*pair)
        return pair[0].as_subclass(Tensor), pair[1].as_subclass(Tensor)


evaluation_pair = PairTransform()


def training_pair_transform(crop: int, frame: tuple[int, int], augmentation: SegmentationAugmentation) -> PairTransform:
    """Rescaled, cropped to at most `crop` pixels a side, flipped and distorted; not yet padded."""
    return PairTransform(
        RandomRescale(frame, augmentation.min_ratio, augmentation.max_ratio),
        RandomClassCrop(crop, augmentation.max_class_share),
        v2.RandomHorizontalFlip(augmentation.flip),
        PhotometricDistortion(augmentation.distortion),
    )
