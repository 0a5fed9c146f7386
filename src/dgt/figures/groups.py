"""The paper's figures: query groups and the keys selected for them, drawn over the image.

All take plain arrays of token indices, as `dynamic_group_attention` returns them, so no model is
needed to draw. Tokens are numbered row by row over the grid. Figures are built on matplotlib's
object interface: neither import nor use of this package touches pyplot's backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from dgt.figures import drawing
from dgt.figures.panel import Array, GroupPanel, choose_groups
from dgt.utils.errors import UserError

# Lengths in inches.
CELL = 1.2
MARGIN = 0.08
LABEL = 0.2
FRAME = 0.045
THIN_GAP = 0.045
ROW_GAP = 0.13
PAIR_GAP = 0.15


def figure_groups(
    panels: Sequence[GroupPanel], groups: int | Sequence[int] | Sequence[Sequence[int]] = 3
) -> Figure:
    """Draw the paper's figure of query groups and their selected keys.

    It has a row for each panel: the image, then pairs of a group and its keys. Over the keys stands
    how much of the group's attention goes to residual keys, where there are some.

    Args:
        panels: what to draw.
        groups: how many groups `choose_groups` picks for every panel, or the indices of the groups
            to show in all of them, or in each.

    Returns:
        A figure whose axes run row by row: image, queries, keys, queries, keys, ... A panel with
        fewer groups leaves its last pairs blank.

    Raises:
        UserError: an argument is wrong; the message names it.

    Example:
        >>> save_figure(figure_groups(panels_of(records, image), groups=3), "groups.png")
    """
    images = drawing.images_of(panels, 384)
    each = _groups_of_each(groups, len(panels))
    shown = [_groups_to_show(panel, own) for panel, own in zip(panels, each, strict=True)]
    # room for titles where there are some
    left = MARGIN + (LABEL if any(panel.title for panel in panels) else 0)
    first, step = left + CELL + PAIR_GAP + FRAME, 2 * (CELL + FRAME) + THIN_GAP + PAIR_GAP
    starts = [first + pair * step for pair in range(max(len(row) for row in shown))]
    heights = [drawing.height_of(image, CELL) for image in images]
    top = LABEL + sum(heights) + ROW_GAP * (len(panels) - 1) + 2 * FRAME + MARGIN
    figure = Figure(
        figsize=(first + len(starts) * step - PAIR_GAP - FRAME + MARGIN, top), facecolor="white"
    )
    inches = figure.dpi_scale_trans
    say = partial(
        figure.text, transform=inches, ha="center", va="center", fontsize=7.5, color="#6b6b6b"
    )
    say(left + CELL / 2, top - LABEL / 2, "image")
    for start in starts:
        say(start + CELL / 2, top - LABEL / 2, "queries")
        say(start + CELL * 1.5 + THIN_GAP, top - LABEL / 2, "keys")
    bottom = top - LABEL - FRAME + ROW_GAP
    for panel, indices, image, height in zip(panels, shown, images, heights, strict=True):
        bottom -= ROW_GAP + height
        say(
            left - LABEL / 2 - 0.03, bottom + height / 2, panel.title, rotation=90, parse_math=False
        )
        drawing.show(figure, (left, bottom, CELL, height), image, panel.grid)
        for start, group, name in zip(
            starts, indices, drawing.PAIR_COLORS * len(indices), strict=False
        ):
            color = np.array(to_rgb(name))
            for left_edge, light in zip(
                (start, start + CELL + THIN_GAP), drawing.lights(panel, group), strict=True
            ):
                box = (left_edge, bottom, CELL, height)
                axes = drawing.show(figure, box, drawing.lit(image, light, color), panel.grid)
                drawing.outline(axes, light > 0, color)
            members = panel.group_ids == group
            if panel.residual_share is not None and members.any():
                drawing.note(axes, f"{panel.residual_share[members].mean():.0%} to residual keys")
            rounded = f"round,pad={FRAME},rounding_size={FRAME}"
            pair = FancyBboxPatch((start, bottom), 2 * CELL + THIN_GAP, height, rounded)
            pair.set(
                fill=False, linestyle=(0, (3, 2)), edgecolor=tuple(0.85 * color), transform=inches
            )
            figure.add_artist(pair)
    return figure


def figure_group_map(panels: Sequence[GroupPanel]) -> Figure:
    """Draw all groups at once: every token in the color of its group.

    It has a row for each panel: the image and the map. Over each map stand the number of groups
    with a query and the perplexity of the group sizes (the number of equal groups that would be as
    spread out).

    Args:
        panels: what to draw.

    Returns:
        A figure whose axes run row by row: image, map.

    Raises:
        UserError: an argument is wrong; the message names it.

    Example:
        >>> save_figure(figure_group_map(panels_of(records, image)), "maps.png")
    """
    cells: list[drawing.Cell] = []
    for panel, image in zip(panels, drawing.images_of(panels, 768), strict=True):
        sizes = np.bincount(panel.group_ids[panel.group_ids >= 0], minlength=len(panel.key_ids))
        shares = sizes[sizes > 0] / max(sizes.sum(), 1)
        perplexity = np.exp(-(shares * np.log(shares)).sum()) if len(shares) else 0.0
        caption = f"{len(shares)} of {len(sizes)} groups in use, perplexity {perplexity:.1f}"
        cells.append((image, panel.grid, panel.title or "image"))
        cells.append((drawing.group_colors(image, panel), panel.grid, caption))
    return drawing.sheet(cells, 2, 2.4)


def figure_contact_sheet(panels: Sequence[GroupPanel]) -> Figure:
    """Draw many maps at once: the first panel's image, then every panel's map of groups under its
    title, row by row, on a sheet slightly wider than tall.

    Args:
        panels: what to draw.

    Returns:
        A figure whose axes are the image and the maps, in order.

    Raises:
        UserError: an argument is wrong; the message names it.

    Example:
        >>> save_figure(figure_contact_sheet(panels_of(records, image, every=True)), "sheet.png")
    """
    columns = math.ceil(math.sqrt(1.5 * (len(panels) + 1)))
    images = drawing.images_of(panels, 512)
    cells: list[drawing.Cell] = [(images[0], panels[0].grid, "image")]
    for panel, image in zip(panels, images, strict=True):
        cells.append((drawing.group_colors(image, panel), panel.grid, panel.title))
    return drawing.sheet(cells, min(columns, len(cells)), 1.5)


def figure_titled(image: Array, title: str) -> Figure:
    """Draw an image under a title.

    Args:
        image: (H, W, 3).
        title: a line of text.

    Returns:
        A figure with one axis.

    Example:
        >>> save_figure(figure_titled(image, "input"), "input.png")
    """
    return drawing.sheet([(image, (1, 1), title)], 1, 2.2)


def _groups_of_each(groups: Any, panels: int) -> list[Any]:
    """The argument `groups` of each panel."""
    if isinstance(groups, int) or len(groups) != panels or not all(map(np.ndim, groups)):
        return [groups] * panels
    return list(groups)


def _groups_to_show(panel: GroupPanel, groups: int | Sequence[int]) -> list[int]:
    number = len(panel.key_ids)
    if isinstance(groups, int):
        if not 1 <= groups <= number:
            raise UserError(
                f"groups must be between 1 and {number}, the number of groups, got {groups}"
            )
        return choose_groups(panel.group_ids.reshape(panel.grid), panel.key_ids, groups)
    if len(groups) == 0 or min(groups) < 0 or max(groups) >= number:
        raise UserError(
            f"groups must name at least one group, each between 0 and {number - 1}, got {list(groups)}"
        )
    return list(groups)
