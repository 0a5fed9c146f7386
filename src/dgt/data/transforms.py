"""What happens to an image on its way into the network: the paper's training augmentation, and its
evaluation crop.

The augmentation is that of Swin and CSWin, from timm: random resized crop, flip, rand-augment or
color jitter for each 8-bit image; mixup and cutmix over the batch of them; normalization and
random erasing on the device. Small images may be padded, cropped and flipped instead of resized.
All of it draws from the global generators; the callers seed these.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from timm.data.auto_augment import RandAugment, posterize
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision import transforms
from torchvision.transforms.functional import center_crop

from dgt.utils.errors import UserError, check_range

Triple = tuple[float, float, float]

MAX_ASPECT = 16  # an image's longer side in shorter ones, before its middle is cut out

IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
# timm skips parts that it does not know, so a typo would train with something else.
_RAND_AUGMENT = re.compile(r"rand(-((m|n|p|mstd|mmax|inc)\d+(\.\d+)?|mstdinf|t(weights|3a|3aw)))*")
_MODES = ("nearest", "bilinear", "bicubic", "lanczos")


def check_scale(start: str, mean: Sequence[float], std: Sequence[float]) -> None:
    """UserError, naming what begins with `start`, where mean or deviation are not of pixels in 0 to 1,
    but of bytes.
    """
    most = "and at most 1, of pixels in 0 to 1 and not in 0 to 255"
    if not all(0 <= value <= 1 for value in mean):
        raise UserError(f"{start}mean must be at least 0 {most}, got {', '.join(map(str, mean))}")
    if not all(0 < value <= 1 for value in std):
        raise UserError(f"{start}std must be above 0 {most}, got {', '.join(map(str, std))}")


class Normalize:
    """From bytes to floats: uint8 (..., 3, H, W) to float32 of zero mean and unit deviation, on any
    device.

    Each channel less `mean`, divided by `std`; UserError as of `check_scale`.
    """

    def __init__(self, mean: Triple, std: Triple) -> None:
        check_scale("data.", mean, std)
        self.mean, self.std = (255 * torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, images: Tensor) -> Tensor:
        self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        return images.float().sub_(self.mean).div_(self.std)


@dataclass(frozen=True)
class Augmentation:
    """Training augmentation; the defaults are the paper's for ImageNet. UserError for a value out
    of its range.

    Args:
        rand_augment: rand-augment in timm's notation, or null for none.
        color_jitter: strength of brightness, contrast and saturation jitter; rand-augment takes its
            place where given.
        erasing: probability of random erasing.
        mixup: alpha of mixup, 0 for none.
        cutmix: alpha of cutmix, 0 for none.
        mixup_switch_prob: probability of cutmix rather than mixup, where both are on.
        smoothing: label smoothing, 0 to 1.
        min_scale: smallest share of the area that the random resized crop keeps; 1 for the center
            square, always.
        flip: probability of a horizontal flip.
        pad_crop: pixels of padding before a random crop, in place of the random resized crop; 0
            for not.
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos".
    """

    rand_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float = 0.4
    erasing: float = 0.25
    mixup: float = 0.8
    cutmix: float = 1.0
    mixup_switch_prob: float = 0.5
    smoothing: float = 0.1
    min_scale: float = 0.08
    flip: float = 0.5
    pad_crop: int = 0
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        shares = ("erasing", "mixup_switch_prob", "smoothing", "flip")
        check_range(
            0, 1, section="data.augmentation", **{name: getattr(self, name) for name in shares}
        )
        check_range(
            0,
            section="data.augmentation",
            color_jitter=self.color_jitter,
            mixup=self.mixup,
            cutmix=self.cutmix,
            pad_crop=self.pad_crop,
        )
        if self.rand_augment is not None and not _RAND_AUGMENT.fullmatch(self.rand_augment):
            notation = "null or in timm's notation, such as 'rand-m9-mstd0.5-inc1'"
            raise UserError(
                f"data.augmentation.rand_augment must be {notation}, got {self.rand_augment!r}"
            )
        if not 0 < self.min_scale <= 1:
            raise UserError(f"data.augmentation.min_scale must lie in (0, 1], got {self.min_scale}")
        if self.interpolation not in _MODES:
            raise UserError(
                f"data.augmentation.interpolation must be one of {', '.join(_MODES)}, "
                f"got {self.interpolation!r}"
            )

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0


def allow_zero_bits(steps: transforms.Compose) -> None:
    """Make timm's rand-augment among `steps` work with Pillow 13, which refuses to posterize to 0
    bits; in place.
    """
    for step in steps.transforms:
        for operation in step.ops if isinstance(step, RandAugment) else ():
            if operation.aug_fn is posterize:
                operation.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **options: Any) -> Any:
    """timm's posterize; where rand-augment at its strongest asks for 0 bits, a black image."""
    return posterize(image, bits, **options) if bits >= 1 else Image.new(image.mode, image.size)


def crop_long(image: Image.Image) -> Image.Image:
    """Cut an image longer than `MAX_ASPECT` times its width (or height) down to that, around its
    middle.

    Resizing such a strip's shorter side would make gigabytes, of which a center crop shows a small
    part.
    """
    width, height = (min(side, MAX_ASPECT * min(image.size)) for side in image.size)
    return image if (width, height) == image.size else center_crop(image, [height, width])


def training_transform(
    image_size: int, augmentation: Augmentation, mean: Triple = IMAGENET_MEAN
) -> Callable[[Image.Image], Tensor]:
    """Make the random transform for training, except for mixing and erasing.

    Args:
        image_size: side of the result in pixels.
        augmentation: what is drawn at random.
        mean: fills what rand-augment moves in from outside the image.

    Returns:
        A function from a PIL image to uint8 (3, image_size, image_size).
    """
    crop, color, _ = create_transform(
        image_size,
        is_training=True,
        scale=(augmentation.min_scale, 1.0),
        hflip=augmentation.flip,
        color_jitter=augmentation.color_jitter,
        auto_augment=augmentation.rand_augment,
        interpolation=augmentation.interpolation,
        mean=mean,
        separate=True,
    )
    allow_zero_bits(color)
    if augmentation.pad_crop or augmentation.min_scale == 1:
        resize = transforms.Resize(
            image_size, transforms.InterpolationMode(augmentation.interpolation)
        )
        moved = transforms.RandomCrop(
            image_size, padding=augmentation.pad_crop, padding_mode="reflect"
        )
        placed = moved if augmentation.pad_crop else transforms.CenterCrop(image_size)
        crop = transforms.Compose(
            [crop_long, resize, placed, transforms.RandomHorizontalFlip(augmentation.flip)]
        )
    return transforms.Compose([crop, color, transforms.PILToTensor()])


def evaluation_transform(
    image_size: int, crop_ratio: float = 0.875, interpolation: str = "bicubic"
) -> Callable[[Image.Image], Tensor]:
    """From a PIL image to uint8 (3, image_size, image_size): resized to 1 / `crop_ratio` of that,
    its center cropped.

    UserError for a `crop_ratio` outside (0, 1].
    """
    if not 0 < crop_ratio <= 1:
        raise UserError(f"data.crop_ratio must lie in (0, 1], got {crop_ratio}")
    resize = transforms.Resize(
        int(image_size / crop_ratio), transforms.InterpolationMode(interpolation)
    )
    return transforms.Compose(
        [crop_long, resize, transforms.CenterCrop(image_size), transforms.PILToTensor()]
    )
