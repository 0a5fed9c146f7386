"""Label maps as images: classes in colours over the image, with a legend; truth and predictions side by side.

A class has the same colour in every figure of a model: colours depend on the number of classes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from dgt.figures.drawing import distinct_colours
from dgt.figures.io import png
from dgt.figures.panel import Array
from dgt.utils.errors import UserError

IGNORED = 255  # the label of pixels that have none
OPACITY = 0.6
UNLABELLED = 0.12  # grey of pixels without a label
LONGEST = 7.0  # inches of an image's longer side
CELL = (2.6, 1.95)  # most inches of an image in a comparison
GAP, HEADER, LEGEND_ROW = 0.06, 0.24, 0.21  # inches


def class_colours(number: int) -> Array:
    """(256, 3) colours in [0, 1]: of each class, as far apart as can be; dark grey for what has no label.

    Raises:
        UserError: fewer than 1 or more than 255 classes.
    """
    if not 1 <= number <= IGNORED:
        raise UserError(f"number must lie in 1 to {IGNORED}, got {number}")
    colours = np.full((IGNORED + 1, 3), UNLABELLED)
    colours[:number] = distinct_colours(number)
    return colours


def label_png(labels: Array, number: int) -> bytes:
    """A label map (H, W) uint8 as a PNG whose numbers are the `number` classes, with a palette to look at them."""
    image = Image.fromarray(labels)
    image.putpalette((class_colours(number) * 255).round().astype(np.uint8).tobytes())
    return png(image)


def overlay(image: Array, labels: Array, colours: Array) -> Array:
    """The image (H, W, 3) uint8 under the colours of its labels (H, W), with outlines; floats (H, W, 3) in [0, 1]."""
    edges = np.zeros(labels.shape, dtype=bool)
    edges[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    edges[1:] |= labels[1:] != labels[:-1]
    grey = image.astype(float).mean(axis=2, keepdims=True) / 255
    mixed: Array = (1 - OPACITY) * (0.5 * grey + 0.5 * image / 255) + OPACITY * colours[labels]
    mixed[edges] = 0.5 * mixed[edges] + 0.5
    return mixed


def figure_label_map(image: Array, labels: Array, class_names: Sequence[str]) -> Figure:
    """The image under its classes' colours; below, a legend of the classes that are there, the largest first.

    Args:
        image: (H, W, 3) uint8.
        labels: (H, W) uint8, 255 for none.
        class_names: of all classes.

    Raises:
        UserError: shapes that do not fit, or labels that have no name.
    """
    colours = _check(image, labels, class_names)
    height, width = (side * LONGEST / max(labels.shape) for side in labels.shape)
    return _figure_with_legend([[overlay(image, labels, colours)]], [labels], class_names, (width, height), ())


def figure_comparison(rows: Sequence[tuple[Array, Array, Array]], class_names: Sequence[str]) -> Figure:
    """A row for each image: the image, its true label map and the predicted one; below, the legend.

    Args:
        rows: of each image the image (H, W, 3), its labels and those predicted (H, W), all uint8.
        class_names: of all classes.

    Raises:
        UserError: no rows, shapes that do not fit, or labels that have no name.
    """
    if not rows:
        raise UserError("rows must hold at least one image, got none")
    seen = [labels for _, truth, predicted in rows for labels in (truth, predicted)]
    colours = class_colours(len(class_names))
    for image, *maps in rows:
        for labels in maps:
            _check(image, labels, class_names)
    drawn = [[image / 255, colours[truth], colours[predicted]] for image, truth, predicted in rows]
    height, width = rows[0][1].shape
    cell = min(CELL[0], CELL[1] * width / height)
    titles = ("image", "truth", "prediction")
    return _figure_with_legend(drawn, seen, class_names, (cell, cell * height / width), titles)


def _check(image: Array, labels: Array, class_names: Sequence[str]) -> Array:
    """Raise UserError for what cannot be drawn; return the colours."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
        raise UserError(f"image must be (H, W, 3) uint8, got {image.shape} {image.dtype}")
    if labels.shape != image.shape[:2] or labels.dtype != np.uint8:
        raise UserError(f"labels must be {image.shape[:2]} uint8 like the image, got {labels.shape} {labels.dtype}")
    labelled = labels[labels != IGNORED]
    if labelled.size and labelled.max() >= len(class_names):
        raise UserError(f"labels must be below {len(class_names)}, the number of class_names, got {labelled.max()}")
    return class_colours(len(class_names))


def _figure_with_legend(
    rows: list[list[Array]],
    seen: Sequence[Array],
    class_names: Sequence[str],
    cell: tuple[float, float],
    titles: Sequence[str],
) -> Figure:
    """A grid of images, each `cell` (width, height) inches, with titles above and the legend of the labels below."""
    counts = np.bincount(np.concatenate([labels.ravel() for labels in seen]), minlength=IGNORED + 1)
    order = [int(label) for label in np.argsort(-counts[:IGNORED], kind="stable") if counts[label] > 0]
    names = [class_names[label] for label in order]
    if titles and counts[IGNORED]:
        order, names = [*order, IGNORED], [*names, "no label"]
    colours = class_colours(len(class_names))
    entries = [Patch(facecolor=colours[label], edgecolor="0.4", linewidth=0.5) for label in order]
    entry = 0.5 + 0.075 * max((len(name) for name in names), default=0)
    wide = max(len(rows[0]) * (cell[0] + GAP) + GAP, entry)
    columns = max(1, min(len(entries), int(wide / entry)))
    header = HEADER if titles else 0.0
    legend = LEGEND_ROW * -(-len(entries) // columns) + 0.12
    high = header + len(rows) * (cell[1] + GAP) + legend
    figure = Figure(figsize=(wide, high), facecolor="white")
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            left, bottom = GAP + column * (cell[0] + GAP), high - header - (row + 1) * (cell[1] + GAP) + GAP
            axes = figure.add_axes((left / wide, bottom / high, cell[0] / wide, cell[1] / high))
            axes.imshow(image, aspect="auto", interpolation="antialiased")
            axes.set_axis_off()
            if row == 0 and titles:
                axes.set_title(titles[column], fontsize=8, color="0.35", pad=3)
    look = {"ncols": columns, "fontsize": 8, "frameon": False, "borderaxespad": 0.2, "handlelength": 1.2}
    figure.legend(entries, names, loc="lower left", columnspacing=1.2, **look)
    return figure
