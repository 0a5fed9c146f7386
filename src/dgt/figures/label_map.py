"""Label maps as images: classes in colors over the image, with a legend; truth and predictions
side by side.

A class has the same color in every figure of a model: colors depend on the number of classes
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from dgt.figures.drawing import Cell, distinct_colours, sheet
from dgt.figures.io import png
from dgt.figures.panel import Array, check_image
from dgt.utils.errors import UserError

IGNORED = 255  # the label of pixels that have none
OPACITY = 0.6
UNLABELLED = 0.12  # gray of pixels without a label


def class_colours(number: int) -> Array:
    """(256, 3) colors in [0, 1]: of each class, as far apart as can be; dark gray for what has no
    label.

    Raises UserError for fewer than 1 or more than 255 classes.
    """
    if not 1 <= number <= IGNORED:
        raise UserError(f"number must lie in 1 to {IGNORED}, got {number}")
    colours = np.full((IGNORED + 1, 3), UNLABELLED)
    colours[:number] = distinct_colours(number)
    return colours


def label_png(labels: Array, number: int) -> bytes:
    """A label map (H, W) uint8 as a PNG whose numbers are the `number` classes, with a palette to
    look at them.
    """
    image = Image.fromarray(labels)
    image.putpalette((class_colours(number) * 255).round().astype(np.uint8).tobytes())
    return png(image)


def overlay(image: Array, labels: Array, colours: Array) -> Array:
    """The image (H, W, 3) uint8 under the colors of its labels (H, W), with outlines.

    Floats (H, W, 3) in [0, 1].
    """
    edges = np.zeros(labels.shape, dtype=bool)
    edges[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    edges[1:] |= labels[1:] != labels[:-1]
    grey = image.astype(float).mean(axis=2, keepdims=True) / 255
    mixed = (1 - OPACITY) * (0.5 * grey + 0.5 * image / 255) + OPACITY * colours[labels]
    mixed[edges] = 0.5 * mixed[edges] + 0.5
    return np.asarray(mixed)


def figure_label_map(image: Array, labels: Array, class_names: Sequence[str]) -> Figure:
    """Draw an image under its classes' colors; below, a legend of the classes that are there, largest
    first.

    Args:
        image: uint8 (H, W, 3).
        labels: uint8 (H, W), 255 for none.
        class_names: of all classes.

    Raises:
        UserError: shapes do not fit, or labels have no name.
    """
    _check(image, labels, class_names)
    drawn = overlay(image, labels, class_colours(len(class_names)))
    width = 7.0 * min(1.0, labels.shape[1] / labels.shape[0])
    return _with_legend(
        [(drawn, labels.shape, "")], 1, width, np.bincount(labels.ravel())[:IGNORED], class_names
    )


def figure_comparison(
    rows: Sequence[tuple[Array, Array, Array]], class_names: Sequence[str]
) -> Figure:
    """Draw a row for each image: the image, its true label map and the predicted one; below, the
    legend.

    Args:
        rows: an image (H, W, 3), its labels and those predicted (H, W), all uint8, for each row.
        class_names: of all classes.

    Raises:
        UserError: there are no rows; and as `figure_label_map`.
    """
    if not rows:
        raise UserError("rows must hold at least one image, got none")
    cells: list[Cell] = []
    counts = np.zeros(IGNORED + 1, int)
    for image, *maps in rows:
        cells.append((image, image.shape[:2], "" if cells else "image"))
        for title, labels in zip(("truth", "prediction"), maps, strict=True):
            _check(image, labels, class_names)
            counts += np.bincount(labels.ravel(), minlength=len(counts))
            cells.append(
                (
                    class_colours(len(class_names))[labels],
                    labels.shape,
                    "" if len(cells) > 2 else title,
                )
            )
    return _with_legend(cells, 3, 2.6, counts, class_names)


def _check(image: Array, labels: Array, class_names: Sequence[str]) -> None:
    """Raise UserError for what cannot be drawn."""
    check_image(image)
    if labels.shape != image.shape[:2] or labels.dtype != np.uint8:
        raise UserError(
            f"labels must be {image.shape[:2]} uint8 like the image, got {labels.shape} {labels.dtype}"
        )
    largest = labels.max(where=labels != IGNORED, initial=0)
    if largest >= len(class_names):
        raise UserError(
            f"labels must be below {len(class_names)}, the number of class_names, got {largest}"
        )


def _with_legend(
    cells: Sequence[Cell], columns: int, width: float, counts: Array, class_names: Sequence[str]
) -> Figure:
    """A sheet, and below it a legend of the labels that `counts` has, the most frequent first, then
    "no label".
    """
    found = [
        int(label) for label in np.argsort(-counts[:IGNORED], kind="stable") if counts[label] > 0
    ]
    names = [class_names[label] for label in found] + ["no label"] * int(
        len(counts) > IGNORED and counts[IGNORED] > 0
    )
    colours = class_colours(len(class_names))[[*found, IGNORED]]
    entry = 0.5 + 0.075 * max(map(len, names), default=0)
    across = max(1, int(columns * width / entry))
    figure = sheet(cells, columns, width, (entry, 0.21 * -(-len(names) // across) + 0.12))
    patches = [
        Patch(facecolor=colour, edgecolor="0.4", linewidth=0.5) for colour in colours[: len(names)]
    ]
    look = {
        "fontsize": 8,
        "frameon": False,
        "borderaxespad": 0.2,
        "handlelength": 1.2,
        "columnspacing": 1.2,
    }
    # between two, matplotlib reads mathematics
    plain = [name.replace("$", r"\$") for name in names]
    figure.legend(patches, plain, loc="lower left", ncols=min(len(names), across) or 1, **look)
    return figure
