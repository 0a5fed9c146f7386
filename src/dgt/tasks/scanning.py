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

from dgt.data.segmentation import SegmentationTest
from dgt.data.segmentation_transforms import fitting_size


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
    return predict_probabilities(network, images, scale, test).argmax(dim=1)


def predict_probabilities(network: nn.Module, images: Tensor, scale: tuple[int, int], test: SegmentationTest) -> Tensor:
    """The probability of every class at every pixel, averaged over scales and mirroring; arguments as in
    :func:`predict_labels`.

    Returns:
        float32 (B, classes, H, W).
    """
    parts = [(ratio, flip) for ratio in test.scales for flip in ((False, True) if test.flip else (False,))]
    total: Tensor | None = None
    for ratio, flip in parts:
        size = fitting_size((images.shape[2], images.shape[3]), scale, ratio)
        scaled = _resize(images, size)
        logits = _scan(network, scaled.flip(-1) if flip else scaled, test).float()
        logits = _resize(logits.flip(-1) if flip else logits, (images.shape[2], images.shape[3]))
        part = _softmax(logits)
        total = part if total is None else total.add_(part)
    if total is None:
        raise ValueError("test.scales must be at least one number above 0, got []")
    return total if len(parts) == 1 else total.div_(len(parts))


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
        raise ValueError(f"images must not be empty, got {tuple(images.shape)}")
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


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the classes in the memory of the logits, which for a large picture is most of what there is."""
    if torch.is_grad_enabled():
        return logits.softmax(dim=1)
    logits -= logits.amax(dim=1, keepdim=True)
    logits.exp_()
    return logits.div_(logits.sum(dim=1, keepdim=True))
