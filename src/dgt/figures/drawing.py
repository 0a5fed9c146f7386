"""Drawing a panel: light on tokens, colours that tell groups apart, and axes whose units are tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch.nn import functional

from dgt.figures.panel import Array, GroupPanel, to_array

# Okabe and Ito's colours, the bright ones first: told apart by colour-blind readers, and all stand out from grey.
PAIR_COLOURS = ("#56b4e9", "#ffa62b", "#e884b8", "#2fc79a", "#f0e442", "#ff6f3c", "#8f8cf2", "#c9c9c9")
LUMINANCE = np.array([0.299, 0.587, 0.114])
# Oklab (Ottosson 2020), transposed to be applied from the right.
RGB_TO_CONES = np.array([[0.41222, 0.2119, 0.0883], [0.53633, 0.6807, 0.28172], [0.05145, 0.1074, 0.62998]])
CONES_TO_LAB = np.array([[0.21045, 1.978, 0.0259], [0.79362, -2.42859, 0.78277], [-0.00407, 0.45059, -0.80868]])

LABEL: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5, "color": "#6b6b6b"}
DASHES: dict[str, Any] = {"fill": False, "linewidth": 1.0, "linestyle": (0, (3, 2))}
OUTLINE: dict[str, Any] = {"linewidths": 0.5, "capstyle": "projecting", "clip_on": False}

# Lengths in inches.
FRAME = 0.045
TALLEST = 1.6  # a cell's height over its width at most; a taller image is drawn narrower


def query_light(panel: GroupPanel, group: int) -> Array:
    """(h, w) in [0, 1]: 1 where the token belongs to the group."""
    light: Array = (panel.group_ids == group).astype(float).reshape(panel.grid)
    return light


def key_light(panel: GroupPanel, group: int) -> Array:
    """(h, w) in [0, 1]: how brightly the group's keys are lit, 0 where the token is none."""
    light = np.zeros(panel.grid[0] * panel.grid[1])
    used = panel.key_ids[group] >= 0
    strength = np.ones(int(used.sum()))
    if panel.key_weights is not None and used.any():
        weights = panel.key_weights[group][used]
        strength = 0.3 + 0.7 * weights / max(float(weights.max()), 1e-12)
    light[panel.key_ids[group][used]] = strength
    return light.reshape(panel.grid)


def resize(image: Array, long_side: int) -> Array:
    """The image as floats in [0, 1] with the given longer side, so that token cells come out crisp over any image."""
    height, width = image.shape[:2]
    scale = long_side / max(height, width)
    size = (max(round(height * scale), 1), max(round(width * scale), 1))
    pixels = torch.tensor(image).permute(2, 0, 1)[None].float() / 255
    resized = functional.interpolate(pixels, size=size, mode="bicubic", antialias=True, align_corners=False)
    return to_array(resized[0].clamp(0, 1).permute(1, 2, 0)).astype(float)


def spread(cells: Array, size: tuple[int, int]) -> Array:
    """(h, w, ...) over tokens to (H, W, ...) over pixels: every pixel takes the token its centre lies in."""
    rows = (2 * np.arange(size[0]) + 1) * cells.shape[0] // (2 * size[0])
    columns = (2 * np.arange(size[1]) + 1) * cells.shape[1] // (2 * size[1])
    spread: Array = cells[rows[:, None], columns[None, :]]
    return spread


def rgb(colour: str) -> Array:
    """A colour as (3,) in [0, 1]."""
    return np.array(to_rgb(colour))


def dimmed(picture: Array) -> Array:
    """The picture (H, W, 3), darker and nearly grey."""
    grey = (picture @ LUMINANCE)[..., None]
    dimmed: Array = 0.42 * (0.75 * grey + 0.25 * picture) + 0.05
    return dimmed


def lit(picture: Array, light: Array, colour: Array) -> Array:
    """The picture, dimmed and greyed where `light` (h, w) is 0, washed with the colour where it is 1."""
    amount = spread(light, (picture.shape[0], picture.shape[1]))[..., None]
    mixed: Array = (1 - amount) * dimmed(picture) + amount * (0.35 * picture + 0.65 * colour)
    return mixed


def group_colours(picture: Array, panel: GroupPanel) -> Array:
    """The picture with every token in its group's colour; light and dark shine through, padding stays dimmed."""
    ids = spread(panel.group_ids.reshape(panel.grid), (picture.shape[0], picture.shape[1]))
    colours = distinct_colours(len(panel.key_ids))[ids]
    shade = 0.72 + 0.42 * (picture @ LUMINANCE)[..., None]
    return np.where((ids >= 0)[..., None], np.clip(colours * shade, 0, 1), dimmed(picture))


def distinct_colours(number: int) -> Array:
    """(number, 3) colours, each as far from all before it as can be in the perceptual space Oklab."""
    steps = np.linspace(0, 1, 20)
    candidates = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1).reshape(-1, 3)
    lab = _oklab(candidates)
    chroma = np.hypot(lab[:, 1], lab[:, 2])
    quiet = (lab[:, 0] > 0.42) & (lab[:, 0] < 0.92) & (chroma > 0.03) & (chroma < 0.165)
    candidates, lab = candidates[quiet], lab[quiet]
    chosen = [int(np.linalg.norm(candidates - rgb(PAIR_COLOURS[0]), axis=1).argmin())]
    distance = np.full(len(lab), np.inf)
    while len(chosen) < number:
        distance = np.minimum(distance, np.linalg.norm(lab - lab[chosen[-1]], axis=1))
        chosen.append(int(distance.argmax()))
    colours: Array = candidates[chosen]
    return colours


def _oklab(colours: Array) -> Array:
    """sRGB (..., 3) in [0, 1] to Oklab."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    lab: Array = np.cbrt(linear @ RGB_TO_CONES) @ CONES_TO_LAB
    return lab


def panel_height(panel: GroupPanel, cell: float) -> float:
    """Height in inches of a panel whose cell is `cell` wide."""
    return cell * min(float(panel.image.shape[0] / panel.image.shape[1]), TALLEST)


def show(figure: Figure, box: tuple[float, float, float, float], picture: Array, panel: GroupPanel) -> Axes:
    """Axes with the picture, in the middle of a box (left, bottom, width, height) in inches; its units are tokens."""
    left, bottom, width, height = box
    fitted = min(width, height * panel.image.shape[1] / panel.image.shape[0])
    total_width, total_height = figure.get_size_inches()
    left += (width - fitted) / 2
    axes = figure.add_axes((left / total_width, bottom / total_height, fitted / total_width, height / total_height))
    rows, columns = panel.grid
    axes.imshow(picture, extent=(0, columns, rows, 0), aspect="auto", interpolation="antialiased", origin="upper")
    axes.set_axis_off()
    return axes


def outline(axes: Axes, mask: Array, colour: Array) -> None:
    """Lines where a token of the mask meets one outside it, or the border."""
    padded = np.pad(mask, 1).astype(int)
    across, down = np.argwhere(np.diff(padded, axis=1)[1:-1]), np.argwhere(np.diff(padded, axis=0)[:, 1:-1])
    segments = [[(column, row), (column, row + 1)] for row, column in across]
    segments += [[(column, row), (column + 1, row)] for row, column in down]
    axes.add_collection(LineCollection(segments, colors=[tuple(0.6 * colour + 0.4)], **OUTLINE))


def frame(figure: Figure, box: tuple[float, float, float, float], colour: Array) -> None:
    """A dashed, rounded frame around a box in inches."""
    left, bottom, width, height = box
    style = f"round,pad={FRAME},rounding_size={FRAME}"
    frame = FancyBboxPatch((left, bottom), width, height, style, edgecolor=tuple(0.85 * colour), **DASHES)
    frame.set_transform(figure.dpi_scale_trans)
    figure.add_artist(frame)


def text(figure: Figure, x: float, y: float, text: str, rotation: float = 0) -> None:
    """A small grey label around a place in inches."""
    figure.text(x, y, text, rotation=rotation, transform=figure.dpi_scale_trans, **LABEL)
