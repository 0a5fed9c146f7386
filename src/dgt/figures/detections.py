"""Detections drawn over their image: a wash of color on every mask, a box, the category's name and
its score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from dgt.figures.colors import distinct_colors
from dgt.figures.panel import Array
from dgt.utils.errors import UserError

SHOWN_SCORE = 0.5  # detections below it are listed, not drawn
LONG_SIDE = 640  # a smaller image is enlarged to it, or names would not fit
LABEL_HEIGHT = 18


class Detections(NamedTuple):
    """Objects in one image, by falling score.

    `boxes` (N, 4) x0 y0 x1 y1 in pixels; `labels` (N,) from 0 on; `scores` (N,); `masks` bool (N,
    H, W), None for boxes alone.
    """

    boxes: Array
    labels: Array
    scores: Array
    masks: Array | None = None


def draw_detections(
    image: Image.Image, detections: Detections, class_names: Sequence[str]
) -> Image.Image:
    """Draw the confident detections over an image, enlarged to a longer side of 640 pixels where it
    is smaller.

    Args:
        image: RGB.
        detections: those with a score of `SHOWN_SCORE` or more are drawn, the most confident on
            top.
        class_names: of all classes; each has its color.

    Raises:
        UserError: masks have another size than the image.
    """
    masks = detections.masks
    if masks is not None and masks.shape[1:] != (image.height, image.width):
        raise UserError(
            f"masks must have the image's size {image.size[::-1]}, got {masks.shape[1:]}"
        )
    scale = max(1.0, LONG_SIDE / max(image.size))
    image = image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
    )
    shown = np.flatnonzero(detections.scores >= SHOWN_SCORE)[::-1]
    if len(shown) == 0:
        return image
    # light enough for black text
    palette = (255 * (0.35 + 0.65 * distinct_colors(len(class_names)))).astype(int)
    colors = [tuple(palette[label].tolist()) for label in detections.labels[shown]]
    boxes = scale * detections.boxes[shown]
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    if masks is not None:
        small = torch.from_numpy(masks[shown].astype(np.float32))
        size = (image.height, image.width)
        large = functional.interpolate(small[None], size, mode="bilinear")[0] > 0.5
        inner = -functional.max_pool2d(-large.float(), 5, 1, 2) > 0.5
        pixels = draw_segmentation_masks(pixels, large & ~inner, alpha=1.0, colors=colors)
        pixels = draw_segmentation_masks(pixels, inner, alpha=0.5, colors=colors)
    pixels = draw_bounding_boxes(pixels, torch.from_numpy(boxes), colors=colors, width=2)
    drawn = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    pen, font = ImageDraw.Draw(drawn), ImageFont.load_default(14)
    for (left, top, *_), color, index in zip(boxes.tolist(), colors, shown, strict=True):
        words = class_names[detections.labels[index]].split()  # of several lines, too
        name = f"{' '.join(words)} {100 * detections.scores[index]:.0f}"
        width = pen.textlength(name, font=font) + 6
        x = min(max(left, 0), image.width - width)  # names stay inside the image
        y = min(max(top - LABEL_HEIGHT, 0), image.height - LABEL_HEIGHT)
        pen.rectangle((x, y, x + width, y + LABEL_HEIGHT), fill=color)
        pen.text((x + 3, y), name, fill="black", font=font)
    return drawn
