"""From a segmentation network to the label map of a whole picture: scaled, in windows, several times over.

Picture and answer have the same size, whatever the network looked at. Probabilities of all scales and of the mirrored
picture are averaged in the order of mmsegmentation: logits are brought to the picture's size, then turned to
probabilities, then averaged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.data.joint_transforms import fitting_size
from dgt.data.segmentation import SegmentationTest
from dgt.utils.errors import UserError

PIXELS_AT_ONCE = 2**26  # logits brought to a picture's size at a time, 256 MiB of them


def predict_labels(network: nn.Module, images: Tensor, scale: tuple[int, int], test: SegmentationTest) -> Tensor:
    """The most probable class of every pixel.

    Args:
        network: images (B, 3, h, w) -> logits (B, classes, h, w), in evaluation mode.
        images: (B, 3, H, W), normalised, of any size.
        scale: longer and shorter side of the frame that pictures are scaled to fit.
        test: scales, mirroring and windows.

    Returns:
        int64 (B, H, W).
    """
    size = (images.shape[2], images.shape[3])
    if len(test.scales) == 1 and not test.flip:  # no mean to take: the largest logit is the most probable class
        return _best(_look(network, images, scale, test, test.scales[0], False), size)
    return predict_probabilities(network, images, scale, test).argmax(dim=1)


def predict_probabilities(network: nn.Module, images: Tensor, scale: tuple[int, int], test: SegmentationTest) -> Tensor:
    """The probability of every class at every pixel, averaged over scales and mirroring.

    Arguments as in :func:`predict_labels`.

    Returns:
        float32 (B, classes, H, W).
    """
    size = (images.shape[2], images.shape[3])
    total: Tensor | None = None
    for ratio in test.scales:
        for flip in (False, True) if test.flip else (False,):
            logits = _resize(_look(network, images, scale, test, ratio, flip), size)
            part = logits.float().softmax(dim=1)
            total = part if total is None else total.add_(part)
    if total is None:
        raise UserError("test.scales must be at least one number above 0, got []")
    return total.div_(len(test.scales) * (1 + test.flip))


def _look(
    network: nn.Module, images: Tensor, scale: tuple[int, int], test: SegmentationTest, ratio: float, flip: bool
) -> Tensor:
    """Logits (B, classes, h, w) of the pictures at one scale, the right way round again where they were mirrored."""
    scaled = _resize(images, fitting_size((images.shape[2], images.shape[3]), scale, ratio))
    return _scan(network, scaled.flip(-1), test).flip(-1) if flip else _scan(network, scaled, test)


def _scan(network: nn.Module, images: Tensor, test: SegmentationTest) -> Tensor:
    """Logits of the pictures as they are, whole or as the mean of overlapping windows."""
    height, width = images.shape[2:]
    if test.window is None or max(height, width) <= test.window:
        logits: Tensor = network(images)
        return logits
    stride = test.stride or max(1, test.window * 2 // 3)
    total: Tensor | None = None
    seen = images.new_zeros(1, 1, height, width)
    for top in _starts(height, test.window, stride):
        for left in _starts(width, test.window, stride):
            place = (..., slice(top, top + test.window), slice(left, left + test.window))
            logits = network(images[place])
            if total is None:
                total = logits.new_zeros(len(images), logits.shape[1], height, width)
            total[place] += logits
            seen[place] += 1
    if total is None:
        raise UserError(f"images must not be empty, got {tuple(images.shape)}")
    return total.div_(seen)


def _starts(length: int, window: int, stride: int) -> Iterator[int]:
    """First pixels of windows that cover `length`, the last one moved back inside."""
    for start in range(0, max(0, length - window) + stride, stride):
        yield min(start, max(0, length - window))
        if start >= length - window:
            return


def _resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, smoothed where it shrinks; unchanged where the size fits."""
    if x.shape[2:] == size:
        return x
    shrinks = size[0] < x.shape[2] or size[1] < x.shape[3]
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False, antialias=shrinks)


def _best(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """The class of the largest logit at every pixel of a picture of `size`, the lowest class where several are.

    A few classes at a time: all the logits of a photograph at its own size would fill a memory.
    """
    at_once = max(1, PIXELS_AT_ONCE // (len(logits) * size[0] * size[1]))
    best, classes = None, torch.empty(0)
    for first in range(0, logits.shape[1], at_once):
        value, index = _resize(logits[:, first : first + at_once].float(), size).max(dim=1)
        if best is None:
            best, classes = value, index
        else:
            classes = torch.where(value > best, index + first, classes)
            best = torch.maximum(best, value)
    return classes
