"""Drawing a panel: light on tokens, distinct colors for groups, and axes whose units are
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from dgt.figures.colors import distinct_colors
from dgt.figures.panel import Array, GroupPanel
from dgt.utils.errors import UserError

# Okabe and Ito's colors, the bright ones first: color-blind readers can distinguish them, and all
# stand out from gray.
PAIR_COLORS = (
    "#56b4e9",
    "#ffa62b",
    "#e884b8",
    "#2fc79a",
    "#f0e442",
    "#ff6f3c",
    "#8f8cf2",
    "#c9c9c9",
)
LUMINANCE = np.array([0.299, 0.587, 0.114])

# Lengths in inches.
MARGIN, CAPTION, GAP = 0.08, 0.2, 0.12
TALLEST = 1.6  # a cell's height over its width at most; a taller image is drawn narrower

Cell = tuple[Array, tuple[int, int], str]
"""An image (H, W, 3), the rows and columns laid over it as units, and a label."""


def lights(panel: GroupPanel, group: int) -> tuple[Array, Array]:
    """Return two (h, w) in [0, 1]: whether a token belongs to the group, and how brightly it is lit as a key of it."""
    used = panel.key_ids[group] >= 0
    weights = (
        np.ones(len(used))
        if panel.key_weights is None
        else np.asarray(panel.key_weights[group], float)
    )
    keys = np.zeros(panel.group_ids.shape)
    keys[panel.key_ids[group][used]] = 0.3 + 0.7 * weights[used] / weights[used].max(initial=1e-12)
    return (panel.group_ids == group).astype(float).reshape(panel.grid), keys.reshape(panel.grid)


def images_of(panels: Sequence[GroupPanel], long_side: int) -> list[Array]:
    """The images as floats in [0, 1] with this longer side, so that token cells come out crisp over
    any of them.
    """
    if len(panels) == 0:
        raise UserError("panels must hold at least one GroupPanel, got none")
    images = [
        ImageOps.contain(Image.fromarray(panel.image), (long_side, long_side)) for panel in panels
    ]
    return [np.asarray(image) / 255 for image in images]


def spread(cells: Array, size: tuple[int, ...]) -> Array:
    """(h, w, ...) over tokens to (H, W, ...) over pixels: every pixel takes the token its center
    lies in.
    """
    rows = (2 * np.arange(size[0]) + 1) * cells.shape[0] // (2 * size[0])
    columns = (2 * np.arange(size[1]) + 1) * cells.shape[1] // (2 * size[1])
    return np.asarray(cells[rows[:, None], columns])


def dimmed(image: Array) -> Array:
    """The image (H, W, 3), darker and nearly gray."""
    return np.asarray(0.42 * (0.75 * (image @ LUMINANCE)[..., None] + 0.25 * image) + 0.05)


def lit(image: Array, light: Array, color: Array) -> Array:
    """The image, dimmed and grayed where `light` (h, w) is 0, washed with the color where it is 1."""
    amount = spread(light, image.shape)[..., None]
    return np.asarray((1 - amount) * dimmed(image) + amount * (0.35 * image + 0.65 * color))


def group_colors(image: Array, panel: GroupPanel) -> Array:
    """The image with every token in its group's color.

    Light and dark shine through, padding stays dimmed.
    """
    ids = spread(panel.group_ids.reshape(panel.grid), image.shape)
    colors = distinct_colors(len(panel.key_ids))[ids] * (
        0.72 + 0.42 * (image @ LUMINANCE)[..., None]
    )
    return np.where((ids >= 0)[..., None], np.clip(colors, 0, 1), dimmed(image))


def height_of(image: Array, width: float) -> float:
    """Height in inches of a cell for the image, `width` inches wide."""
    return width * min(image.shape[0] / image.shape[1], TALLEST)


def show(figure: Figure, box: tuple[float, ...], image: Array, grid: tuple[int, int]) -> Axes:
    """Axes in units of the grid, with the image, in the middle of a box (left, bottom, width, height) in inches."""
    left, bottom, width, height = box
    fitted = min(width, height * image.shape[1] / image.shape[0])
    wide, high = figure.get_size_inches()
    axes = figure.add_axes(
        ((left + (width - fitted) / 2) / wide, bottom / high, fitted / wide, height / high)
    )
    axes.imshow(
        image,
        extent=(0, grid[1], grid[0], 0),
        aspect="auto",
        interpolation="antialiased",
        origin="upper",
    )
    axes.set_axis_off()
    return axes


def sheet(
    cells: Sequence[Cell], columns: int, width: float, room: tuple[float, float] = (0, 0)
) -> Figure:
    """Lay images out row by row, each under its label; a row is as high as its highest image.

    Args:
        cells: the images.
        columns: cells per row.
        width: of a cell, in inches.
        room: least width of the figure, and what is left free at its lower edge, in inches.
    """
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [max(height_of(image, width) for image, *_ in row) for row in rows]
    captions = [
        max((CAPTION * (1 + label.count("\n")) for *_, label in row if label), default=0)
        for row in rows
    ]
    wide = max(room[0], 2 * MARGIN + columns * (width + GAP) - GAP)
    bottom = MARGIN + sum(heights) + sum(captions) + GAP * len(rows) + room[1]
    figure = Figure(figsize=(wide, bottom), facecolor="white")
    for row, height, caption in zip(rows, heights, captions, strict=True):
        bottom -= height + caption + (GAP if row is not rows[0] else MARGIN)
        for column, (image, grid, label) in enumerate(row):
            axes = show(
                figure, (MARGIN + column * (width + GAP), bottom, width, height), image, grid
            )
            # names of users
            axes.set_title(label, fontsize=7.5, color="0.42", pad=3, parse_math=False)
    return figure


def outline(axes: Axes, mask: Array, color: Array) -> None:
    """Lines where a token of the mask meets one outside it, or the border."""
    padded = np.pad(mask, 1).astype(int)
    across = np.argwhere(np.diff(padded, axis=1)[1:-1])
    down = np.argwhere(np.diff(padded, axis=0)[:, 1:-1])
    lines = [[(column, row), (column, row + 1)] for row, column in across]
    lines += [[(column, row), (column + 1, row)] for row, column in down]
    light = tuple(0.6 * color + 0.4)
    axes.add_collection(
        LineCollection(lines, colors=[light], linewidths=0.5, capstyle="projecting", clip_on=False)
    )


def note(axes: Axes, text: str) -> None:
    """A line of small letters in the lower left corner of an image, on a dark ground."""
    box = {"boxstyle": "square,pad=0.25", "facecolor": (0, 0, 0, 0.62), "linewidth": 0}
    drawn = axes.text(0.025, 0.03, text, fontsize=5, color="white", ha="left", va="bottom")
    drawn.set(bbox=box, transform=axes.transAxes)


def tidy(*plots: Axes, size: float) -> None:
    """Axes of numbers with small letters, a faint grid behind the marks, and no lines above and at
    the right.
    """
    for axes in plots:
        axes.tick_params(labelsize=size, length=0)
        axes.xaxis.label.set_fontsize(size + 0.5)
        axes.yaxis.label.set_fontsize(size + 0.5)
        axes.grid(axis="x", color="#eeeeee", zorder=0)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
