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

from dgt.figures.colors import IGNORED, class_colors, overlay
from dgt.figures.drawing import Cell, sheet
from dgt.figures.panel import Array, check_image
from dgt.utils.errors import UserError


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
    drawn = overlay(image, labels, class_colors(len(class_names)))
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
                    class_colors(len(class_names))[labels],
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
    present = [
        int(label) for label in np.argsort(-counts[:IGNORED], kind="stable") if counts[label] > 0
    ]
    names = [class_names[label] for label in present] + ["no label"] * int(
        len(counts) > IGNORED and counts[IGNORED] > 0
    )
    colors = class_colors(len(class_names))[[*present, IGNORED]]
    entry = 0.5 + 0.075 * max(map(len, names), default=0)
    across = max(1, int(columns * width / entry))
    figure = sheet(cells, columns, width, (entry, 0.21 * -(-len(names) // across) + 0.12))
    patches = [
        Patch(facecolor=color, edgecolor="0.4", linewidth=0.5) for color in colors[: len(names)]
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
