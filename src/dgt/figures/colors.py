"""Distinct colors, label maps drawn with them, and PNG output, all without matplotlib."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from dgt.figures.panel import Array
from dgt.utils.errors import UserError

IGNORED = 255  # the label of pixels that have none
OPACITY = 0.6
UNLABELLED = 0.12  # gray of pixels without a label
FIRST_COLOR = np.array([0x56, 0xB4, 0xE9]) / 255
# Oklab (Ottosson 2020), transposed to be applied from the right.
RGB_TO_CONES = np.array(
    [[0.41222, 0.2119, 0.0883], [0.53633, 0.6807, 0.28172], [0.05145, 0.1074, 0.62998]]
)
CONES_TO_LAB = np.array(
    [[0.21045, 1.978, 0.0259], [0.79362, -2.42859, 0.78277], [-0.00407, 0.45059, -0.80868]]
)


def distinct_colors(number: int) -> Array:
    """Choose distinct colors.

    Each is as far from all before it as can be in the perceptual space Oklab.

    Args:
        number: how many.

    Returns:
        (number, 3) colors in [0, 1].

    Example:
        >>> distinct_colors(48).shape
        (48, 3)
    """
    steps = np.linspace(0, 1, 20)
    candidates = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1).reshape(-1, 3)
    linear = np.where(
        candidates <= 0.04045, candidates / 12.92, ((candidates + 0.055) / 1.055) ** 2.4
    )
    lab = np.cbrt(linear @ RGB_TO_CONES) @ CONES_TO_LAB
    chroma = np.hypot(lab[:, 1], lab[:, 2])
    quiet = (lab[:, 0] > 0.42) & (lab[:, 0] < 0.92) & (chroma > 0.03) & (chroma < 0.165)
    candidates, lab = candidates[quiet], lab[quiet]
    chosen = [int(np.linalg.norm(candidates - FIRST_COLOR, axis=1).argmin())]
    distance = np.full(len(lab), np.inf)
    while len(chosen) < number:
        distance = np.minimum(distance, np.linalg.norm(lab - lab[chosen[-1]], axis=1))
        chosen.append(int(distance.argmax()))
    return np.asarray(candidates[chosen])


def png(image: Image.Image) -> bytes:
    """Encode an image as a PNG.

    Args:
        image: any image of Pillow.

    Returns:
        The content of the file.

    Example:
        >>> content = png(raster(figure, 120))
    """
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def class_colors(number: int) -> Array:
    """(256, 3) colors in [0, 1]: of each class, as far apart as can be; dark gray for what has no
    label.

    Raises UserError for fewer than 1 or more than 255 classes.
    """
    if not 1 <= number <= IGNORED:
        raise UserError(f"number must lie in 1 to {IGNORED}, got {number}")
    colors = np.full((IGNORED + 1, 3), UNLABELLED)
    colors[:number] = distinct_colors(number)
    return colors


def label_png(labels: Array, number: int) -> bytes:
    """A label map (H, W) uint8 as a PNG whose numbers are the `number` classes, with a palette to
    look at them.
    """
    image = Image.fromarray(labels)
    image.putpalette((class_colors(number) * 255).round().astype(np.uint8).tobytes())
    return png(image)


def overlay(image: Array, labels: Array, colors: Array) -> Array:
    """The image (H, W, 3) uint8 under the colors of its labels (H, W), with outlines, as floats in [0, 1]."""
    edges = np.zeros(labels.shape, dtype=bool)
    edges[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    edges[1:] |= labels[1:] != labels[:-1]
    gray = image.astype(float).mean(axis=2, keepdims=True) / 255
    mixed = (1 - OPACITY) * (0.5 * gray + 0.5 * image / 255) + OPACITY * colors[labels]
    mixed[edges] = 0.5 * mixed[edges] + 0.5
    return np.asarray(mixed)
