"""Figures as images and files: PNG, SVG or PDF, and several as an animated GIF.

A file appears whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from dgt.utils.atomic_write import replacing
from dgt.utils.errors import UserError

SUFFIXES = (".pdf", ".png", ".svg")
FRAME_MS = 700  # how long a frame of an animation is shown


def save_figure(figure: Figure, path: str | Path, dpi: int = 200) -> None:
    """Write a figure as PNG, SVG or PDF, by the path's suffix.

    The file appears whole or not at all.

    Args:
        figure: what to write.
        path: ends in .png, .svg or .pdf.
        dpi: pixels per inch of a PNG, and of the images inside an SVG or PDF.

    Raises:
        UserError: another suffix, or a dpi below 1.
        FileNotFoundError: the folder is missing.

    Example:
        >>> save_figure(figure_group_map(panels), "maps.svg")
    """
    path = check_path(path)
    if dpi < 1:
        raise UserError(f"dpi must be at least 1, got {dpi}")
    with replacing(path) as partial:
        figure.savefig(partial, dpi=dpi, format=path.suffix[1:].lower(), facecolor="white")


def save_animation(figures: Sequence[Figure], path: str | Path) -> None:
    """Write figures of one size as the frames of a GIF that repeats, the last shown longest.

    The file appears whole or not at all.

    Args:
        figures: the frames.
        path: ends in .gif.

    Raises:
        UserError: an argument is wrong; the message names it.
        FileNotFoundError: the folder is missing.

    Example:
        >>> save_animation([figure_group_map([panel]) for panel in panels], "maps.gif")
    """
    path = check_path(path, (".gif",))
    if len(figures) == 0:
        raise UserError("figures must hold at least one figure, got none")
    frames = [raster(figure, dpi=120) for figure in figures]
    if len(sizes := {frame.size for frame in frames}) > 1:
        raise UserError(f"figures must have the same size, got {sorted(sizes)} pixels")
    # One palette for all frames: with separate ones, static parts would flicker.
    strip = Image.fromarray(np.concatenate([np.asarray(frame) for frame in frames]))
    palette = strip.quantize(256, dither=Image.Dither.NONE)
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [FRAME_MS] * len(others) + [3 * FRAME_MS]
    with replacing(path) as partial:
        first.save(partial, "GIF", save_all=True, append_images=others, duration=durations, loop=0)


def raster(figure: Figure, dpi: int) -> Image.Image:
    """Draw a figure as an image.

    Args:
        figure: what to draw.
        dpi: pixels per inch.

    Returns:
        An RGB image.

    Example:
        >>> raster(figure, 120).save("figure.jpg")
    """
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])


def check_path(path: str | Path, suffixes: Sequence[str] = SUFFIXES) -> Path:
    """The path of a figure; UserError for another suffix, FileNotFoundError for no such folder."""
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise UserError(
            f"path must end in {'one of ' * (len(suffixes) > 1)}{', '.join(suffixes)}, got {path.name!r}"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path must lie in an existing folder, got {path}")
    return path
