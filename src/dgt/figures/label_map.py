"""Label maps as pictures: classes in colours over the image, with a legend; truth and predictions side by side.

A class has the same colour in every figure of a model: colours depend on the number of classes alone.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from dgt.data.image_io import decode_image
from dgt.data.label_maps import IGNORED
from dgt.data.segmentation import SegmentationData
from dgt.figures.drawing import distinct_colours
from dgt.figures.files import save_figure
from dgt.figures.panel import Array
from dgt.tasks.scanning import predict_labels
from dgt.training import LoadedRun
from dgt.training.files import write_whole
from dgt.training.recipe import build_data

OPACITY = 0.6
UNLABELLED = 0.12  # grey of pixels without a label
LONGEST = 7.0  # inches of a picture's longer side
CELL = (2.6, 1.95)  # most inches of a picture in a comparison
LEGEND_ROW = 0.21


def class_colours(number: int) -> Array:
    """(256, 3) colours in [0, 1]: of each class, as far apart as can be; dark grey for what has no label.

    Raises:
        ValueError: fewer than 1 or more than 255 classes.
    """
    if not 1 <= number <= IGNORED:
        raise ValueError(f"number must lie in 1 to {IGNORED}, got {number}")
    colours = np.full((IGNORED + 1, 3), UNLABELLED)
    colours[:number] = distinct_colours(number)
    return colours


def label_png(labels: Array, number: int) -> bytes:
    """A label map as an 8-bit PNG whose numbers are the classes, with a palette so that it can be looked at.

    Args:
        labels: (H, W) uint8.
        number: number of classes.
    """
    picture = Image.fromarray(labels)
    picture.putpalette((class_colours(number) * 255).round().astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def overlay(image: Array, labels: Array, colours: Array) -> Array:
    """The picture (H, W, 3) uint8 under the colours of its labels (H, W), with outlines; floats (H, W, 3) in [0, 1]."""
    edges = np.zeros(labels.shape, dtype=bool)
    edges[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    edges[1:] |= labels[1:] != labels[:-1]
    grey = image.astype(float).mean(axis=2, keepdims=True) / 255
    mixed: Array = (1 - OPACITY) * (0.5 * grey + 0.5 * image / 255) + OPACITY * colours[labels]
    mixed[edges] = 0.5 * mixed[edges] + 0.5
    return mixed


def figure_label_map(image: Array, labels: Array, class_names: Sequence[str]) -> Figure:
    """The picture under its classes' colours; below, a legend of the classes that are there, the largest first.

    Args:
        image: (H, W, 3) uint8.
        labels: (H, W) uint8, 255 for none.
        class_names: of all classes.

    Raises:
        ValueError: shapes that do not fit, or labels that have no name.
    """
    colours = _check(image, labels, class_names)
    height, width = (side * LONGEST / max(labels.shape) for side in labels.shape)
    figure = _figure_with_legend([[overlay(image, labels, colours)]], [labels], class_names, (width, height), ())
    return figure


def figure_comparison(rows: Sequence[tuple[Array, Array, Array]], class_names: Sequence[str]) -> Figure:
    """A row for each picture: the picture, its true label map and the predicted one; below, the legend.

    Args:
        rows: of each picture the picture (H, W, 3), its labels and those predicted (H, W), all uint8.
        class_names: of all classes.

    Raises:
        ValueError: no rows, shapes that do not fit, or labels that have no name.
    """
    if not rows:
        raise ValueError("rows must hold at least one picture, got none")
    drawn = []
    for image, labels, predicted in rows:
        colours = _check(image, labels, class_names)
        _check(image, predicted, class_names)
        drawn.append([image / 255, colours[labels], colours[predicted]])
    height, width = rows[0][1].shape
    cell = min(CELL[0], CELL[1] * width / height)
    seen = [labels for _, truth, predicted in rows for labels in (truth, predicted)]
    return _figure_with_legend(
        drawn, seen, class_names, (cell, cell * height / width), ("image", "truth", "prediction")
    )


def draw_prediction(run: LoadedRun, image: Path, out: Path) -> dict[str, Any]:
    """Predict one image file: write `NAME_labels.png`, the label map, and `NAME_overlay.png`, with colours and legend.

    Args:
        run: a trained model of the task "segment".
        image: image file.
        out: folder to write into.

    Returns:
        `classes`, (name, share of the picture) of those that are there, the largest first, and the two `files`.

    Raises:
        ValueError: the file cannot be decoded.
    """
    try:
        picture = decode_image(image)
    except ValueError as error:
        raise ValueError(f"{str(image)!r} cannot be read as an image: {error}") from error
    labels = picture_labels(run, picture)
    pixels, number = np.asarray(picture), len(run.class_names)
    files = [out / f"{image.stem}_{what}.png" for what in ("labels", "overlay")]
    write_whole(files[0], label_png(labels, number))
    save_figure(figure_label_map(pixels, labels, run.class_names), files[1], dpi=150)
    shares = np.bincount(labels.ravel(), minlength=number) / labels.size
    order = [int(label) for label in np.argsort(-shares, kind="stable") if shares[label] > 0]
    classes = [(run.class_names[label], float(shares[label])) for label in order]
    return {"classes": classes, "files": [str(path) for path in files]}


@torch.inference_mode()
def picture_labels(run: LoadedRun, picture: Image.Image) -> Array:
    """The label map (H, W), uint8, that a model of the task "segment" gives a picture, as its recipe's test says."""
    data = build_data(run.recipe)
    if not isinstance(data, SegmentationData):
        raise ValueError(f"run must be of the task 'segment', got {run.recipe.task!r}")
    pixels = data.normalize(torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous())
    labels: Array = predict_labels(run.network, pixels[None], data.scale, data.test)[0].to(torch.uint8).numpy()
    return labels


def _check(image: Array, labels: Array, class_names: Sequence[str]) -> Array:
    """Raise ValueError for what cannot be drawn; return the colours."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
        raise ValueError(f"image must be (H, W, 3) uint8, got {image.shape} {image.dtype}")
    if labels.shape != image.shape[:2] or labels.dtype != np.uint8:
        raise ValueError(f"labels must be {image.shape[:2]} uint8 like the image, got {labels.shape} {labels.dtype}")
    labelled = labels[labels != IGNORED]
    if labelled.size and labelled.max() >= len(class_names):
        raise ValueError(f"labels must be below {len(class_names)}, the number of class_names, got {labelled.max()}")
    return class_colours(len(class_names))


def _figure_with_legend(
    rows: list[list[Array]],
    seen: Sequence[Array],
    class_names: Sequence[str],
    cell: tuple[float, float],
    titles: Sequence[str],
) -> Figure:
    """A grid of pictures, each `cell` (width, height) inches, with titles above and the legend of the labels below."""
    counts = np.bincount(np.concatenate([labels.ravel() for labels in seen]), minlength=IGNORED + 1)
    order = [int(label) for label in np.argsort(-counts[:IGNORED], kind="stable") if counts[label] > 0]
    colours = class_colours(len(class_names))
    entries = [Patch(facecolor=colours[label], edgecolor="0.4", linewidth=0.5) for label in order]
    names = [class_names[label] for label in order]
    if titles and counts[IGNORED]:
        entries.append(Patch(facecolor=colours[IGNORED], edgecolor="0.4", linewidth=0.5))
        names.append("no label")
    gap, header = 0.06, 0.24 if titles else 0.0
    legend_column = 0.5 + 0.075 * max((len(name) for name in names), default=0)
    wide = max(len(rows[0]) * (cell[0] + gap) + gap, legend_column)
    columns = max(1, min(len(entries), int(wide / legend_column)))
    legend = LEGEND_ROW * -(-len(entries) // columns) + 0.12
    high = header + len(rows) * (cell[1] + gap) + legend
    figure = Figure(figsize=(wide, high), facecolor="white")
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            left, bottom = gap + column * (cell[0] + gap), high - header - (row + 1) * (cell[1] + gap) + gap
            axes = figure.add_axes((left / wide, bottom / high, cell[0] / wide, cell[1] / high))
            axes.imshow(picture, aspect="auto", interpolation="antialiased")
            axes.set_axis_off()
            if row == 0 and titles:
                axes.set_title(titles[column], fontsize=8, color="0.35", pad=3)
    look = {"ncols": columns, "fontsize": 8, "frameon": False, "borderaxespad": 0.2, "handlelength": 1.2}
    figure.legend(entries, names, loc="lower left", columnspacing=1.2, **look)
    return figure
