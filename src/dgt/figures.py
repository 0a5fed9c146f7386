"""The paper's figures: which queries form a group, and which keys that group chose, drawn over the image.

`figure_groups` is the paper's visualization (one row per image, block or head; first the image, then pairs of a query
group and its selected keys); `figure_group_map` shows all groups at once. Both take plain arrays of token indices, as
`dynamic_group_attention` returns them, so no model is needed to draw. Tokens are numbered row by row over the grid.
Figures are built on matplotlib's object interface: neither import nor use of this module touches pyplot's backend.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from numpy.typing import NDArray
from torch.nn import functional

Array = NDArray[Any]

SUFFIXES = (".pdf", ".png", ".svg")
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
MARGIN, HEADER, CAPTION, TITLE = 0.08, 0.2, 0.2, 0.2
THIN_GAP, ROW_GAP, PAIR_GAP, FRAME = 0.045, 0.13, 0.15, 0.045
TALLEST = 1.6  # a cell's height over its width at most; a taller image is drawn narrower


@dataclass(frozen=True, eq=False)
class GroupPanel:
    """One image with the groups of its tokens: a row of a figure.

    image: (H, W, 3) uint8. grid: (h, w), the tokens' rows and columns, laid over the whole image. group_ids: (h*w,)
    integers, the group of every token, -1 for padding. key_ids: (G, k) integers, the tokens every group chose, -1 for
    an empty slot. title: a short label of the row. key_weights: (G, k), not negative; where given, a group's heaviest
    key is drawn brightest. Tensors are taken too and kept as arrays. Raises ValueError or TypeError naming the field.
    """

    image: Array
    grid: tuple[int, int]
    group_ids: Array
    key_ids: Array
    title: str = ""
    key_weights: Array | None = None

    def __post_init__(self) -> None:
        image = _array(self.image)
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
            raise ValueError(f"image must be (H, W, 3) uint8, got {image.shape} {image.dtype}")
        if len(self.grid) != 2 or min(self.grid) < 1:
            raise ValueError(f"grid must be (rows, columns), both at least 1, got {self.grid}")
        group_ids, key_ids = _check_ids(self.group_ids, self.key_ids)
        rows, columns = self.grid
        if group_ids.shape != (rows * columns,):
            raise ValueError(
                f"group_ids must be ({rows * columns},) for a grid of {rows} x {columns}, got {group_ids.shape}"
            )
        for name, value in (("image", image), ("group_ids", group_ids), ("key_ids", key_ids)):
            object.__setattr__(self, name, value)
        if self.key_weights is not None:
            weights = _array(self.key_weights)
            if weights.shape != key_ids.shape or not np.isfinite(weights).all() or (weights < 0).any():
                raise ValueError(
                    f"key_weights must be finite, not negative and {key_ids.shape} like key_ids, got {weights.shape}"
                )
            object.__setattr__(self, "key_weights", weights)


def denormalize(image: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> Array:
    """Undo the normalization of a model's input, to draw it.

    image: (3, H, W) floating point, as normalized by `(pixel / 255 - mean) / std` with three numbers each. Returns
    (H, W, 3) uint8. Raises ValueError naming the argument.
    """
    if image.ndim != 3 or image.shape[0] != 3 or not image.is_floating_point():
        raise ValueError(f"image must be (3, H, W) floating point, got {tuple(image.shape)} {image.dtype}")
    for name, numbers in (("mean", mean), ("std", std)):
        if len(numbers) != 3:
            raise ValueError(f"{name} must hold 3 numbers, got {len(numbers)}")
    pixels = image.detach().to("cpu", torch.float32)
    pixels = pixels * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    return _array((pixels * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0))


def choose_groups(group_ids: Array | torch.Tensor, key_ids: Array | torch.Tensor, count: int) -> list[int]:
    """Pick groups worth showing: large ones that differ from each other in place and in keys.

    group_ids: (L,) integers, or (h, w) to tell place by row and column, -1 for padding. key_ids: (G, k) integers, -1
    for an empty slot. Starts with the largest group, then takes again and again the one with the best product of size,
    distance to the groups taken and share of keys that those lack; ties go to the lowest index. Returns at most `count`
    indices, fewer where fewer groups have a query and a key. Raises ValueError or TypeError naming the argument.
    """
    group_ids, key_ids = _check_ids(group_ids, key_ids)
    if not 1 <= count <= len(key_ids):
        raise ValueError(f"count must be between 1 and the number of groups, {len(key_ids)}, got {count}")
    number = len(key_ids)
    sizes = np.bincount(group_ids[group_ids >= 0], minlength=number)
    places = np.zeros((number, group_ids.ndim))
    for group in np.flatnonzero(sizes):
        places[group] = (np.argwhere(group_ids == group).mean(axis=0) + 0.5) / group_ids.shape
    key_sets = [set(row[row >= 0].tolist()) for row in key_ids]
    # The square root keeps a huge background from deciding everything.
    worth = np.sqrt(sizes) * np.array([len(keys) > 0 for keys in key_sets])
    novelty = np.ones(number)
    chosen: list[int] = []
    while len(chosen) < count and worth.max() > 0:
        best = int((worth * novelty).argmax())
        chosen.append(best)
        worth[best] = 0
        apart = np.linalg.norm(places - places[best], axis=1)
        mine = key_sets[best]
        shared = np.array([len(keys & mine) / max(len(keys | mine), 1) for keys in key_sets])
        # Never quite zero, so that groups which agree with a chosen one still follow where nothing else is left.
        novelty = np.minimum(novelty, np.maximum((1 - shared) * np.minimum(apart + 0.25, 1.0), 1e-3))
    return chosen


def figure_groups(panels: Sequence[GroupPanel], groups: int | Sequence[int] = 3) -> Figure:
    """The paper's figure: a row per panel; its image, then pairs of a query group and the keys it selected.

    groups: how many groups `choose_groups` picks for every panel, or the indices of the groups to show in all of them.
    Returns a figure whose axes run row by row: image, queries, keys, queries, keys, ... A panel with fewer groups
    leaves its last pairs blank. Raises ValueError naming the argument.
    """
    left = _left_margin(panels)
    shown = [_groups_to_show(panel, groups) for panel in panels]
    cell = 1.2
    first = left + cell + PAIR_GAP + FRAME
    step = 2 * (cell + FRAME) + THIN_GAP + PAIR_GAP
    starts = [first + pair * step for pair in range(max(len(row) for row in shown))]
    heights = [_height(panel, cell) for panel in panels]
    total = HEADER + sum(heights) + ROW_GAP * (len(panels) - 1) + 2 * FRAME + MARGIN
    figure = Figure(figsize=(first + len(starts) * step - PAIR_GAP - FRAME + MARGIN, total), facecolor="white")
    _text(figure, left + cell / 2, total - HEADER / 2, "image")
    for start in starts:
        _text(figure, start + cell / 2, total - HEADER / 2, "queries")
        _text(figure, start + cell * 1.5 + THIN_GAP, total - HEADER / 2, "keys")
    bottom = total - HEADER - FRAME + ROW_GAP
    for panel, indices, height in zip(panels, shown, heights, strict=True):
        bottom -= ROW_GAP + height
        picture = _resize(panel.image, 384)
        _text(figure, left - TITLE / 2 - 0.03, bottom + height / 2, panel.title, rotation=90)
        _show(figure, (left, bottom, cell, height), picture, panel)
        for pair, group in enumerate(indices):
            colour = _rgb(PAIR_COLOURS[pair % len(PAIR_COLOURS)])
            lights = _query_light(panel, group), _key_light(panel, group)
            for start, light in zip((starts[pair], starts[pair] + cell + THIN_GAP), lights, strict=True):
                axes = _show(figure, (start, bottom, cell, height), _lit(picture, light, colour), panel)
                _outline(axes, light > 0, colour)
            _frame(figure, (starts[pair], bottom, 2 * cell + THIN_GAP, height), colour)
    return figure


def figure_group_map(panels: Sequence[GroupPanel]) -> Figure:
    """All groups at once: a row per panel; its image, and a map that gives every token the colour of its group.

    Under each row stand the number of groups with a query and the perplexity of the group sizes (the number of equal
    groups that would be as spread out). Returns a figure whose axes run row by row: image, map. Raises ValueError
    naming the argument.
    """
    left = _left_margin(panels)
    cell = 2.4
    heights = [_height(panel, cell) for panel in panels]
    total = sum(heights) + (CAPTION + MARGIN) * len(panels)
    figure = Figure(figsize=(left + 2 * cell + THIN_GAP + MARGIN, total), facecolor="white")
    bottom = total + CAPTION
    for panel, height in zip(panels, heights, strict=True):
        bottom -= CAPTION + MARGIN + height
        picture = _resize(panel.image, 768)
        _text(figure, left - TITLE / 2 - 0.03, bottom + height / 2, panel.title, rotation=90)
        _show(figure, (left, bottom, cell, height), picture, panel)
        _show(figure, (left + cell + THIN_GAP, bottom, cell, height), _group_colours(picture, panel), panel)
        sizes = np.bincount(panel.group_ids[panel.group_ids >= 0], minlength=len(panel.key_ids))
        caption = f"{np.count_nonzero(sizes)} of {len(sizes)} groups in use, perplexity {_perplexity(sizes):.1f}"
        _text(figure, left + cell + THIN_GAP / 2, bottom - CAPTION / 2, caption)
    return figure


def save_figure(figure: Figure, path: str | Path, dpi: int = 200) -> None:
    """Write a figure as PNG, SVG or PDF, by the path's suffix; the file appears whole or not at all.

    dpi: pixels per inch of a PNG, and of the pictures inside an SVG or PDF. Raises ValueError for another suffix or a
    dpi below 1, FileNotFoundError where the folder is missing.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"path must end in one of {', '.join(SUFFIXES)}, got {path.name!r}")
    if dpi < 1:
        raise ValueError(f"dpi must be at least 1, got {dpi}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path must lie in an existing folder, got {path}")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        figure.savefig(partial, dpi=dpi, format=path.suffix[1:].lower(), facecolor="white")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _array(value: Any) -> Array:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _check_ids(group_ids: Any, key_ids: Any) -> tuple[Array, Array]:
    """Both as integer arrays, every index in range."""
    groups, keys = _array(group_ids), _array(key_ids)
    for name, ids in (("group_ids", groups), ("key_ids", keys)):
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"{name} must hold integers, got {ids.dtype}")
    if groups.ndim not in (1, 2) or groups.size == 0:
        raise ValueError(f"group_ids must be (tokens,) or (rows, columns) with at least one token, got {groups.shape}")
    if keys.ndim != 2 or 0 in keys.shape:
        raise ValueError(f"key_ids must be (groups, keys) with at least one of each, got {keys.shape}")
    for name, ids, limit in (("group_ids", groups, len(keys)), ("key_ids", keys, groups.size)):
        if ids.min() < -1 or ids.max() >= limit:
            raise ValueError(f"{name} must lie between -1 and {limit - 1}, got {ids.min()} to {ids.max()}")
    return groups, keys


def _left_margin(panels: Sequence[GroupPanel]) -> float:
    """Where the images begin: room for row titles only where there are some."""
    if len(panels) == 0:
        raise ValueError("panels must hold at least one GroupPanel, got none")
    return MARGIN + (TITLE if any(panel.title for panel in panels) else 0)


def _groups_to_show(panel: GroupPanel, groups: int | Sequence[int]) -> list[int]:
    number = len(panel.key_ids)
    if isinstance(groups, (int, np.integer)):
        if not 1 <= groups <= number:
            raise ValueError(f"groups must be between 1 and {number}, the number of groups, got {groups}")
        return choose_groups(panel.group_ids.reshape(panel.grid), panel.key_ids, int(groups))
    if len(groups) == 0 or min(groups) < 0 or max(groups) >= number:
        raise ValueError(f"groups must name at least one group, each between 0 and {number - 1}, got {list(groups)}")
    return list(groups)


def _query_light(panel: GroupPanel, group: int) -> Array:
    """(h, w) in [0, 1]: 1 where the token belongs to the group."""
    light: Array = (panel.group_ids == group).astype(float).reshape(panel.grid)
    return light


def _key_light(panel: GroupPanel, group: int) -> Array:
    """(h, w) in [0, 1]: how brightly the group's keys are lit, 0 where the token is none."""
    light = np.zeros(panel.grid[0] * panel.grid[1])
    used = panel.key_ids[group] >= 0
    strength = np.ones(int(used.sum()))
    if panel.key_weights is not None and used.any():
        weights = panel.key_weights[group][used]
        strength = 0.3 + 0.7 * weights / max(float(weights.max()), 1e-12)
    light[panel.key_ids[group][used]] = strength
    return light.reshape(panel.grid)


def _resize(image: Array, long_side: int) -> Array:
    """The image as floats in [0, 1] with the given longer side, so that token cells come out crisp over any image."""
    height, width = image.shape[:2]
    scale = long_side / max(height, width)
    size = (max(round(height * scale), 1), max(round(width * scale), 1))
    pixels = torch.tensor(image).permute(2, 0, 1)[None].float() / 255
    resized = functional.interpolate(pixels, size=size, mode="bicubic", antialias=True, align_corners=False)
    return _array(resized[0].clamp(0, 1).permute(1, 2, 0)).astype(float)


def _spread(cells: Array, size: tuple[int, int]) -> Array:
    """(h, w, ...) over tokens to (H, W, ...) over pixels: every pixel takes the token its centre lies in."""
    rows = (2 * np.arange(size[0]) + 1) * cells.shape[0] // (2 * size[0])
    columns = (2 * np.arange(size[1]) + 1) * cells.shape[1] // (2 * size[1])
    spread: Array = cells[rows[:, None], columns[None, :]]
    return spread


def _rgb(colour: str) -> Array:
    return np.array(to_rgb(colour))


def _dimmed(picture: Array) -> Array:
    grey = (picture @ LUMINANCE)[..., None]
    dimmed: Array = 0.42 * (0.75 * grey + 0.25 * picture) + 0.05
    return dimmed


def _lit(picture: Array, light: Array, colour: Array) -> Array:
    """The picture, dimmed and greyed where `light` (h, w) is 0, washed with the colour where it is 1."""
    amount = _spread(light, (picture.shape[0], picture.shape[1]))[..., None]
    mixed: Array = (1 - amount) * _dimmed(picture) + amount * (0.35 * picture + 0.65 * colour)
    return mixed


def _group_colours(picture: Array, panel: GroupPanel) -> Array:
    """The picture with every token in its group's colour; light and dark shine through, padding stays dimmed."""
    ids = _spread(panel.group_ids.reshape(panel.grid), (picture.shape[0], picture.shape[1]))
    colours = distinct_colours(len(panel.key_ids))[ids]
    shade = 0.72 + 0.42 * (picture @ LUMINANCE)[..., None]
    return np.where((ids >= 0)[..., None], np.clip(colours * shade, 0, 1), _dimmed(picture))


def distinct_colours(number: int) -> Array:
    """(number, 3) colours, each as far from all before it as can be in the perceptual space Oklab."""
    steps = np.linspace(0, 1, 20)
    candidates = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1).reshape(-1, 3)
    lab = _oklab(candidates)
    chroma = np.hypot(lab[:, 1], lab[:, 2])
    quiet = (lab[:, 0] > 0.42) & (lab[:, 0] < 0.92) & (chroma > 0.03) & (chroma < 0.165)
    candidates, lab = candidates[quiet], lab[quiet]
    chosen = [int(np.linalg.norm(candidates - _rgb(PAIR_COLOURS[0]), axis=1).argmin())]
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


def _perplexity(sizes: Array) -> float:
    """exp(entropy) of the shares; 0 where there is nothing to share."""
    if sizes.sum() == 0:
        return 0.0
    shares = sizes[sizes > 0] / sizes.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def _height(panel: GroupPanel, cell: float) -> float:
    return cell * min(float(panel.image.shape[0] / panel.image.shape[1]), TALLEST)


def _show(figure: Figure, box: tuple[float, float, float, float], picture: Array, panel: GroupPanel) -> Axes:
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


def _outline(axes: Axes, mask: Array, colour: Array) -> None:
    """Lines where a token of the mask meets one outside it, or the border."""
    padded = np.pad(mask, 1).astype(int)
    across, down = np.argwhere(np.diff(padded, axis=1)[1:-1]), np.argwhere(np.diff(padded, axis=0)[:, 1:-1])
    segments = [[(column, row), (column, row + 1)] for row, column in across]
    segments += [[(column, row), (column + 1, row)] for row, column in down]
    axes.add_collection(LineCollection(segments, colors=[tuple(0.6 * colour + 0.4)], **OUTLINE))


def _frame(figure: Figure, box: tuple[float, float, float, float], colour: Array) -> None:
    """A dashed, rounded frame around a box in inches."""
    left, bottom, width, height = box
    style = f"round,pad={FRAME},rounding_size={FRAME}"
    frame = FancyBboxPatch((left, bottom), width, height, style, edgecolor=tuple(0.85 * colour), **DASHES)
    frame.set_transform(figure.dpi_scale_trans)
    figure.add_artist(frame)


def _text(figure: Figure, x: float, y: float, text: str, rotation: float = 0) -> None:
    figure.text(x, y, text, rotation=rotation, transform=figure.dpi_scale_trans, **LABEL)
