"""What happens to a picture on its way into the network: the paper's training augmentation, and its evaluation crop.

The augmentation is that of Swin and CSWin, from timm: random resized crop, flip, rand-augment or colour jitter, random
erasing, then mixup and cutmix over the batch. Small pictures may be padded, cropped and flipped instead of resized. The
pieces draw from the global random generators; `dgt.data.loading` seeds these for every image.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import RandAugment, posterize
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, mixup_target
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision import transforms

from dgt.utils.seeding import seeded

Triple = tuple[float, float, float]

LONGEST = 16  # a picture's longer side in shorter ones, before its middle is cut out

IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
# timm skips parts that it does not know, so a slip of the pen would train with something else.
_RAND_AUGMENT = re.compile(r"rand(-((m|n|p|mstd|mmax|inc)\d+(\.\d+)?|mstdinf|t(weights|3a|3aw)))*")
_MODES = {
    "nearest": transforms.InterpolationMode.NEAREST,
    "bilinear": transforms.InterpolationMode.BILINEAR,
    "bicubic": transforms.InterpolationMode.BICUBIC,
    "lanczos": transforms.InterpolationMode.LANCZOS,
}


class Patch(NamedTuple):
    """A box of a normalised image that random erasing fills: its first row and column, and noise (3, h, w)."""

    top: int
    left: int
    noise: Tensor


class Transform:
    """From a PIL picture to a normalised float tensor, in two halves: every random choice falls in the first.

    Args:
        on_picture: what is done to the picture; the result must be RGB.
        mean: mean of each channel, in 0 to 1, to subtract.
        std: standard deviation of each channel, to divide by.
        erasing: timm's random erasing of the normalised tensor.
    """

    def __init__(
        self,
        on_picture: Callable[[Image.Image], Image.Image],
        mean: Triple,
        std: Triple,
        erasing: RandomErasing | None = None,
    ) -> None:
        self.on_picture, self.erasing = on_picture, erasing
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, picture: Image.Image) -> Tensor:
        """A picture to (3, H, W) float32."""
        pixels, patches = self.prepare(picture)
        return self.finish(pixels, patches, torch.empty(3, *pixels.shape[:2]))

    def prepare(self, picture: Image.Image) -> tuple[Tensor, list[Patch]]:
        """A picture to uint8 (H, W, 3), and what will be erased of it."""
        pixels = torch.from_numpy(np.array(self.on_picture(picture)))
        erased = _Erased()
        if self.erasing is not None:
            height, width, channels = pixels.shape
            self.erasing._erase(erased, channels, height, width, torch.float32)
        return pixels, erased.patches

    def finish(self, pixels: Tensor, patches: Sequence[Patch], out: Tensor) -> Tensor:
        """What `prepare` gave to (3, H, W) float32, written to `out`."""
        out.copy_(pixels.permute(2, 0, 1)).div_(255).sub_(self.mean).div_(self.std)
        for top, left, noise in patches:
            out[:, top : top + noise.shape[1], left : left + noise.shape[2]] = noise
        return out


class _Erased:
    """Stands in for an image under timm's random erasing, and keeps what is written to it."""

    def __init__(self) -> None:
        self.patches: list[Patch] = []

    def __setitem__(self, place: tuple[slice, slice, slice], noise: Tensor) -> None:
        self.patches.append(Patch(place[1].start, place[2].start, noise))


@dataclass(frozen=True)
class Augmentation:
    """Training augmentation; the defaults are the paper's for ImageNet.

    Args:
        rand_augment: rand-augment in timm's notation, or null for none.
        color_jitter: strength of brightness, contrast and saturation jitter; rand-augment takes its place where given.
        erasing: probability of random erasing.
        mixup: alpha of mixup, 0 for none.
        cutmix: alpha of cutmix, 0 for none.
        mixup_switch_prob: probability of cutmix rather than mixup, where both are on.
        smoothing: label smoothing, 0 to 1.
        min_scale: smallest share of the area that the random resized crop keeps; 1 for the centre square, always.
        flip: probability of a horizontal flip.
        pad_crop: pad by so many pixels and crop at random, in place of the random resized crop; 0 for not.
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos".

    Raises:
        ValueError: a value out of its range.
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
        for name in ("erasing", "mixup_switch_prob", "smoothing", "flip"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        for name in ("color_jitter", "mixup", "cutmix", "pad_crop"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.rand_augment is not None and not _RAND_AUGMENT.fullmatch(self.rand_augment):
            raise ValueError(
                f"rand_augment must be null or in timm's notation, such as 'rand-m9-mstd0.5-inc1', "
                f"got {self.rand_augment!r}"
            )
        if not 0 < self.min_scale <= 1:
            raise ValueError(f"min_scale must lie in (0, 1], got {self.min_scale}")
        if self.interpolation not in _MODES:
            raise ValueError(f"interpolation must be one of {', '.join(_MODES)}, got {self.interpolation!r}")

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0

    @classmethod
    def none(cls) -> "Augmentation":
        """No augmentation at all: the centre square, hard labels."""
        return cls(None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def _posterize(picture: Image.Image, bits: int, **options: Any) -> Image.Image:
    """timm's posterize; where rand-augment at its strongest asks for 0 bits, a black picture."""
    if bits < 1:
        return Image.new(picture.mode, picture.size)
    posterized: Image.Image = posterize(picture, bits, **options)
    return posterized


def _allow_zero_bits(steps: transforms.Compose) -> None:
    """Make timm's rand-augment among `steps` work with Pillow 13, which refuses to posterize to 0 bits; in place."""
    for step in steps.transforms:
        for operation in step.ops if isinstance(step, RandAugment) else ():
            if operation.aug_fn is posterize:
                operation.aug_fn = _posterize


class CropLong:
    """Cut a picture longer than `LONGEST` times its width (or height) down to that, around its middle.

    Of such a strip a centre crop shows a small part, which stays; resizing its shorter side would first make gigabytes.
    """

    def __call__(self, picture: Image.Image) -> Image.Image:
        width, height = (min(side, LONGEST * min(picture.size)) for side in picture.size)
        if (width, height) == picture.size:
            return picture
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        return picture.crop((left, top, left + width, top + height))


def training_transform(
    image_size: int, augmentation: Augmentation, mean: Triple = IMAGENET_MEAN, std: Triple = IMAGENET_STD
) -> Transform:
    """From a PIL image to a normalised float tensor (3, image_size, image_size), augmented at random."""
    crop, colour, finish = create_transform(
        image_size,
        is_training=True,
        scale=(augmentation.min_scale, 1.0),
        hflip=augmentation.flip,
        color_jitter=augmentation.color_jitter,
        auto_augment=augmentation.rand_augment,
        interpolation=augmentation.interpolation,
        mean=mean,
        std=std,
        re_prob=augmentation.erasing,
        re_mode="pixel",
        separate=True,
    )
    _allow_zero_bits(colour)
    if augmentation.pad_crop or augmentation.min_scale == 1:
        crop = transforms.Compose(
            [
                CropLong(),
                transforms.Resize(image_size, _MODES[augmentation.interpolation]),
                transforms.RandomCrop(image_size, padding=augmentation.pad_crop, padding_mode="reflect")
                if augmentation.pad_crop
                else transforms.CenterCrop(image_size),
                transforms.RandomHorizontalFlip(augmentation.flip),
            ]
        )
    erasing = finish.transforms[-1] if augmentation.erasing else None
    return Transform(transforms.Compose([crop, colour]), mean, std, erasing)


def evaluation_transform(
    image_size: int,
    crop_ratio: float = 0.875,
    mean: Triple = IMAGENET_MEAN,
    std: Triple = IMAGENET_STD,
    interpolation: str = "bicubic",
) -> Transform:
    """From a PIL image to a normalised float tensor (3, image_size, image_size).

    The shorter side is resized to `image_size / crop_ratio` (256 for 224 and 0.875) and the centre is cropped.

    Raises:
        ValueError: `crop_ratio` outside (0, 1].
    """
    if not 0 < crop_ratio <= 1:
        raise ValueError(f"crop_ratio must lie in (0, 1], got {crop_ratio}")
    *on_picture, _, _ = create_transform(
        image_size, crop_pct=crop_ratio, crop_mode="center", interpolation=interpolation
    ).transforms
    return Transform(transforms.Compose([CropLong(), *on_picture]), mean, std)


class Mix(NamedTuple):
    """What image i of a batch takes over from image -1 - i, and the other way round: a share of all, or a box whole."""

    share: float
    box: tuple[slice, slice] | None


class _DrawnMixup(Mixup):
    """timm's mixup and cutmix, drawn now and done later."""

    def draw(self, shape: tuple[int, ...], labels: Tensor) -> tuple[Mix | None, Tensor]:
        """How to mix a batch of this shape (B, 3, H, W) with these labels (B,), and the targets (B, classes) then."""
        share, use_cutmix = self._params_per_batch()
        mix = None if share == 1.0 else Mix(float(share), None)
        if mix is not None and use_cutmix:
            (top, bottom, left, right), share = cutmix_bbox_and_lam(
                shape, share, ratio_minmax=self.cutmix_minmax, correct_lam=self.correct_lam
            )
            mix = Mix(float(share), (slice(top, bottom), slice(left, right)))
        return mix, mixup_target(labels, self.num_classes, share, self.label_smoothing)


def mix_images(images: Tensor, mix: Mix) -> None:
    """Mix (B, 3, H, W) images in place, two at a time: timm's bits without copies of the whole batch."""
    rows, columns = mix.box or (slice(None), slice(None))
    for first in range(len(images) // 2):
        one, other = images[first, :, rows, columns], images[-1 - first, :, rows, columns]
        before = one.clone()
        if mix.box is None:
            one.mul_(mix.share).add_(other * (1.0 - mix.share))
            other.mul_(mix.share).add_(before.mul_(1.0 - mix.share))
        else:
            one.copy_(other)
            other.copy_(before)


class BatchTargets:
    """Turns a training batch's labels into targets: mixup and cutmix over the batch, and label smoothing.

    Targets are soft (batch, classes), each row summing to one, where mixup, cutmix or smoothing is on; else the labels.
    What is mixed with what is a function of the `place` it is called with.
    """

    def __init__(self, augmentation: Augmentation, num_classes: int) -> None:
        self.smoothing, self.num_classes = augmentation.smoothing, num_classes
        self.mixer = (
            _DrawnMixup(
                augmentation.mixup,
                augmentation.cutmix,
                switch_prob=augmentation.mixup_switch_prob,
                label_smoothing=augmentation.smoothing,
                num_classes=num_classes,
            )
            if augmentation.mixes
            else None
        )

    def __call__(
        self, shape: tuple[int, ...], labels: Tensor, place: tuple[int | str, ...]
    ) -> tuple[Mix | None, Tensor]:
        """How to mix images of a shape (B, 3, H, W) with int64 labels (B,), and their targets.

        Mixing drops the last of an odd number: there are then as many targets as images that stay.
        """
        if self.mixer is None:
            if self.smoothing:
                labels = mixup_target(labels, self.num_classes, smoothing=self.smoothing)
            return None, labels
        even = len(labels) - len(labels) % 2
        if even == 0:
            return None, torch.zeros(0, self.num_classes)
        with seeded("mixup", *place):
            return self.mixer.draw((even, *shape[1:]), labels[:even])
