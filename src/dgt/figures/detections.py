"""Detections drawn over their picture: a wash of colour on every mask, a box, the category's name and its score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torchvision.transforms.v2 import functional

from dgt.data.coco import encode_masks
from dgt.data.image_io import decode_image
from dgt.figures.drawing import distinct_colours
from dgt.figures.files import write
from dgt.figures.panel import Array
from dgt.training import LoadedRun
from dgt.training.files import write_json

SHOWN_SCORE = 0.5  # detections below it are told, not drawn
LONG_SIDE = 640  # a smaller picture is enlarged to it, or names would not fit
WASH, OUTLINE = 0.5, 1.0


class Detections(NamedTuple):
    """Objects in one picture, by falling score.

    `boxes` (N, 4) x0 y0 x1 y1 in pixels; `labels` (N,) from 0 on; `scores` (N,); `masks` bool (N, H, W).
    """

    boxes: Array
    labels: Array
    scores: Array
    masks: Array


def draw_detections(
    picture: Image.Image, found: Detections, class_names: Sequence[str], threshold: float = SHOWN_SCORE
) -> Image.Image:
    """Draw the detections whose score reaches the threshold, the surest on top.

    Args:
        picture: in RGB.
        found: what was detected in it.
        class_names: name of each label; every class has its colour.
        threshold: lowest score to draw, 0 to 1.

    Returns:
        The picture, enlarged to a longer side of 640 pixels where it is smaller, with the detections.

    Raises:
        ValueError: `threshold` outside [0, 1], or masks of another size than the picture.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must lie in [0, 1], got {threshold}")
    expected = (picture.height, picture.width)
    if found.masks.shape[1:] != expected:
        raise ValueError(f"masks must be of the picture's size {expected}, got {found.masks.shape[1:]}")
    scale = max(1.0, LONG_SIDE / max(picture.size))
    size = (round(picture.width * scale), round(picture.height * scale))
    pixels = np.asarray(picture.resize(size, Image.Resampling.BICUBIC), dtype=np.float64)
    shown = [index for index in range(len(found.scores)) if found.scores[index] >= threshold][::-1]
    colours = 255 * (0.35 + 0.65 * distinct_colours(len(class_names)))  # light enough for black text
    for index in shown:
        pixels = _washed(pixels, _enlarged(found.masks[index], size), colours[found.labels[index]])
    drawn = Image.fromarray(pixels.round().astype(np.uint8))
    pen = ImageDraw.Draw(drawn)
    for index in shown:
        colour = tuple(colours[found.labels[index]].astype(int).tolist())
        text = f"{class_names[found.labels[index]]} {100 * found.scores[index]:.0f}"
        _box(pen, [float(side) * scale for side in found.boxes[index]], text, colour, size)
    return drawn


def predict_objects(run: LoadedRun, image: Path, out: Path) -> dict[str, Any]:
    """Detect the objects of an image file; write `NAME_objects.png`, and `NAME_objects.json` with boxes and masks.

    Args:
        run: a trained detector.
        image: image file.
        out: existing folder to write into.

    Returns:
        `objects`, one {category, score, box (x0, y0, x1, y1)} for each detection, by falling score, and `files`. The
        JSON file holds them as COCO's results do, with `bbox` (x, y, width, height) and `segmentation`, and the
        category's name in place of a data set's number.

    Raises:
        ValueError: the file cannot be read as an image, or the network refuses it.
    """
    try:
        picture = decode_image(image)
    except ValueError as error:
        raise ValueError(f"{str(image)!r} cannot be read as an image: {error}") from error
    try:
        found = detect(run, picture)
    except ValueError as error:
        raise ValueError(f"{str(image)!r}: {error}") from error
    names = [run.class_names[label] for label in found.labels]
    boxes, scores = found.boxes.tolist(), found.scores.tolist()
    drawing, listing = out / f"{image.stem}_objects.png", out / f"{image.stem}_objects.json"
    write(drawing, lambda partial: draw_detections(picture, found, run.class_names).save(partial, "PNG"))
    entries = [
        {"category": name, "score": score, "bbox": [x0, y0, x1 - x0, y1 - y0], "segmentation": mask}
        for name, score, (x0, y0, x1, y1), mask in zip(
            names, scores, boxes, encode_masks(found.masks.astype(np.uint8)), strict=True
        )
    ]
    write_json(listing, entries)
    objects = [
        {"category": name, "score": score, "box": box} for name, score, box in zip(names, scores, boxes, strict=True)
    ]
    return {"objects": objects, "files": [str(drawing), str(listing)]}


@torch.inference_mode()
def detect(run: LoadedRun, picture: Image.Image) -> Detections:
    """What a trained detector finds in a picture, by falling score."""
    pixels = functional.to_dtype(functional.to_image(picture), torch.float32, scale=True)
    found = run.network([pixels.as_subclass(torch.Tensor)])[0]
    masks = (found["masks"][:, 0] > 0.5).numpy()
    return Detections(found["boxes"].numpy(), found["labels"].numpy() - 1, found["scores"].numpy(), masks)


def _enlarged(mask: Array, size: tuple[int, int]) -> Array:
    """A mask (H, W) at another size, its border smooth."""
    grey = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BILINEAR)
    return np.asarray(grey) > 127


def _washed(pixels: Array, mask: Array, colour: Array) -> Array:
    """Pixels (H, W, 3) with the colour laid thinly over the mask (H, W), and thickly on its border."""
    padded = np.pad(mask, 2)
    inner = mask.copy()
    for rows, columns in ((0, 2), (4, 2), (2, 0), (2, 4)):
        inner &= padded[rows : rows + mask.shape[0], columns : columns + mask.shape[1]]
    share = np.where(inner, WASH, OUTLINE * mask)[..., None]
    washed: Array = (1 - share) * pixels + share * colour
    return washed


def _box(
    pen: ImageDraw.ImageDraw, box: Sequence[float], text: str, colour: tuple[int, ...], size: tuple[int, int]
) -> None:
    """A box with its text on the upper edge, moved inwards where the picture ends."""
    pen.rectangle(tuple(box), outline=colour, width=2)
    font = ImageFont.load_default(14)
    width, height = pen.textlength(text, font=font) + 6, 18
    x = min(max(box[0], 0), size[0] - width)
    y = min(max(box[1] - height, 0), size[1] - height)
    pen.rectangle((x, y, x + width, y + height), fill=colour)
    pen.text((x + 3, y), text, fill="black", font=font)
