"""The paper's figures: which queries form a group, and which keys that group chose, drawn over the image.

`figure_groups` is the paper's visualization (one row per image, block or head; first the image, then pairs of a query
group and its selected keys); `figure_group_map` shows all groups at once, and `figure_contact_sheet` many such maps.
All take plain arrays of token indices, as `dynamic_group_attention` returns them, so no model is needed to draw. Tokens
are numbered row by row over the grid. Figures are built on matplotlib's object interface: neither import nor use of
this package touches pyplot's backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from dgt.figures.drawing import (
    FRAME,
    PAIR_COLOURS,
    frame,
    group_colours,
    key_light,
    lit,
    outline,
    panel_height,
    query_light,
    resize,
    rgb,
    show,
    text,
)
from dgt.figures.panel import Array, GroupPanel, choose_groups
from dgt.utils.errors import UserError

# Lengths in inches.
MARGIN, HEADER, CAPTION, TITLE = 0.08, 0.2, 0.2, 0.2
THIN_GAP, ROW_GAP, PAIR_GAP = 0.045, 0.13, 0.15


def figure_groups(panels: Sequence[GroupPanel], groups: int | Sequence[int] = 3) -> Figure:
    """The paper's figure: a row per panel; its image, then pairs of a query group and the keys it selected.

    groups: how many groups `choose_groups` picks for every panel, or the indices of the groups to show in all of them.
    Returns a figure whose axes run row by row: image, queries, keys, queries, keys, ... A panel with fewer groups
    leaves its last pairs blank. Raises UserError naming the argument.
    """
    left = _left_margin(panels)
    shown = [_groups_to_show(panel, groups) for panel in panels]
    cell = 1.2
    first = left + cell + PAIR_GAP + FRAME
    step = 2 * (cell + FRAME) + THIN_GAP + PAIR_GAP
    starts = [first + pair * step for pair in range(max(len(row) for row in shown))]
    heights = [panel_height(panel, cell) for panel in panels]
    total = HEADER + sum(heights) + ROW_GAP * (len(panels) - 1) + 2 * FRAME + MARGIN
    figure = Figure(figsize=(first + len(starts) * step - PAIR_GAP - FRAME + MARGIN, total), facecolor="white")
    text(figure, left + cell / 2, total - HEADER / 2, "image")
    for start in starts:
        text(figure, start + cell / 2, total - HEADER / 2, "queries")
        text(figure, start + cell * 1.5 + THIN_GAP, total - HEADER / 2, "keys")
    bottom = total - HEADER - FRAME + ROW_GAP
    for panel, indices, height in zip(panels, shown, heights, strict=True):
        bottom -= ROW_GAP + height
        picture = resize(panel.image, 384)
        text(figure, left - TITLE / 2 - 0.03, bottom + height / 2, panel.title, rotation=90)
        show(figure, (left, bottom, cell, height), picture, panel)
        for pair, group in enumerate(indices):
            colour = rgb(PAIR_COLOURS[pair % len(PAIR_COLOURS)])
            lights = query_light(panel, group), key_light(panel, group)
            for start, light in zip((starts[pair], starts[pair] + cell + THIN_GAP), lights, strict=True):
                axes = show(figure, (start, bottom, cell, height), lit(picture, light, colour), panel)
                outline(axes, light > 0, colour)
            frame(figure, (starts[pair], bottom, 2 * cell + THIN_GAP, height), colour)
    return figure


def figure_group_map(panels: Sequence[GroupPanel]) -> Figure:
    """All groups at once: a row per panel; its image, and a map that gives every token the colour of its group.

    Under each row stand the number of groups with a query and the perplexity of the group sizes (the number of equal
    groups that would be as spread out). Returns a figure whose axes run row by row: image, map. Raises UserError
    naming the argument.
    """
    left = _left_margin(panels)
    cell = 2.4
    heights = [panel_height(panel, cell) for panel in panels]
    total = sum(heights) + (CAPTION + MARGIN) * len(panels)
    figure = Figure(figsize=(left + 2 * cell + THIN_GAP + MARGIN, total), facecolor="white")
    bottom = total + CAPTION
    for panel, height in zip(panels, heights, strict=True):
        bottom -= CAPTION + MARGIN + height
        picture = resize(panel.image, 768)
        text(figure, left - TITLE / 2 - 0.03, bottom + height / 2, panel.title, rotation=90)
        show(figure, (left, bottom, cell, height), picture, panel)
        show(figure, (left + cell + THIN_GAP, bottom, cell, height), group_colours(picture, panel), panel)
        sizes = np.bincount(panel.group_ids[panel.group_ids >= 0], minlength=len(panel.key_ids))
        caption = f"{np.count_nonzero(sizes)} of {len(sizes)} groups in use, perplexity {_perplexity(sizes):.1f}"
        text(figure, left + cell + THIN_GAP / 2, bottom - CAPTION / 2, caption)
    return figure


def figure_contact_sheet(panels: Sequence[GroupPanel], columns: int | None = None) -> Figure:
    """Many maps at once: the image first, then every panel's map of groups under its title, row by row.

    panels: of one image, or the first one's image stands for all. columns: cells in a row; None for a sheet that is
    somewhat wider than tall. Returns a figure whose axes are the image and the maps, in order. Raises UserError naming
    the argument.
    """
    _left_margin(panels)
    count = len(panels) + 1
    columns = math.ceil(math.sqrt(1.5 * count)) if columns is None else columns
    if columns < 1:
        raise UserError(f"columns must be at least 1, got {columns}")
    columns = min(columns, count)
    cell, rows = 1.5, math.ceil(count / columns)
    tall = max(panel_height(panel, cell) for panel in panels)
    step = tall + CAPTION + THIN_GAP
    size = (2 * MARGIN + columns * cell + (columns - 1) * PAIR_GAP, 2 * MARGIN + rows * step)
    figure = Figure(figsize=size, facecolor="white")
    for place, panel in enumerate([panels[0], *panels]):
        left = MARGIN + place % columns * (cell + PAIR_GAP)
        bottom = size[1] - MARGIN - (place // columns + 1) * step + THIN_GAP
        picture = resize(panel.image, 512)
        show(figure, (left, bottom, cell, tall), group_colours(picture, panel) if place else picture, panel)
        text(figure, left + cell / 2, bottom + tall + CAPTION / 2, panel.title if place else "image")
    return figure


def _left_margin(panels: Sequence[GroupPanel]) -> float:
    """Where the images begin: room for row titles only where there are some."""
    if len(panels) == 0:
        raise UserError("panels must hold at least one GroupPanel, got none")
    return MARGIN + (TITLE if any(panel.title for panel in panels) else 0)


def _groups_to_show(panel: GroupPanel, groups: int | Sequence[int]) -> list[int]:
    number = len(panel.key_ids)
    if isinstance(groups, (int, np.integer)):
        if not 1 <= groups <= number:
            raise UserError(f"groups must be between 1 and {number}, the number of groups, got {groups}")
        return choose_groups(panel.group_ids.reshape(panel.grid), panel.key_ids, int(groups))
    if len(groups) == 0 or min(groups) < 0 or max(groups) >= number:
        raise UserError(f"groups must name at least one group, each between 0 and {number - 1}, got {list(groups)}")
    return list(groups)


def _perplexity(sizes: Array) -> float:
    """exp(entropy) of the shares; 0 where there is nothing to share."""
    if sizes.sum() == 0:
        return 0.0
    shares = sizes[sizes > 0] / sizes.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def figure_titled(image: Array, title: str) -> Figure:
    """An image (H, W, 3) under a title of two lines."""
    width = 2.2
    figure = Figure(figsize=(width, width * image.shape[0] / image.shape[1] + 0.45), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1 - 0.45 / figure.get_figheight()))
    axes.imshow(image)
    axes.set_axis_off()
    axes.set_title(title, fontsize=9, pad=3)
    return figure
