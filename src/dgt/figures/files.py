"""Figures as files: PNG, SVG or PDF, and several of them as an animated GIF. A file appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

SUFFIXES = (".pdf", ".png", ".svg")


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
    _check_folder(path)
    write(path, lambda partial: figure.savefig(partial, dpi=dpi, format=path.suffix[1:].lower(), facecolor="white"))


def save_animation(figures: Sequence[Figure], path: str | Path, seconds: float = 0.7, dpi: int = 120) -> None:
    """Write figures of one size as the frames of a GIF that starts over; the file appears whole or not at all.

    seconds: how long each frame stands; the last one stands three times as long. dpi: pixels per inch. Raises
    ValueError naming the argument, FileNotFoundError where the folder is missing.
    """
    path = Path(path)
    if path.suffix.lower() != ".gif":
        raise ValueError(f"path must end in .gif, got {path.name!r}")
    if len(figures) == 0:
        raise ValueError("figures must hold at least one figure, got none")
    if dpi < 1 or seconds <= 0:
        raise ValueError(f"dpi must be at least 1 and seconds positive, got {dpi} and {seconds}")
    _check_folder(path)
    frames = [_raster(figure, dpi) for figure in figures]
    sizes = {frame.size for frame in frames}
    if len(sizes) > 1:
        raise ValueError(f"figures must be of one size, got {sorted(sizes)} pixels")
    # One palette for all frames: with its own each, what stands still would flicker.
    strip = Image.new("RGB", (frames[0].width, frames[0].height * len(frames)))
    for place, frame in enumerate(frames):
        strip.paste(frame, (0, place * frame.height))
    palette = strip.quantize(256, dither=Image.Dither.NONE)
    indexed = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [round(1000 * seconds)] * (len(frames) - 1) + [round(3000 * seconds)]
    options = {"save_all": True, "append_images": indexed[1:], "duration": durations, "loop": 0}
    write(path, lambda partial: indexed[0].save(partial, "GIF", **options))


def write(path: Path, draw: Callable[[Path], None]) -> None:
    """Have a file drawn under another name beside its place, then rename it onto it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        draw(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path must lie in an existing folder, got {path}")


def _raster(figure: Figure, dpi: int) -> Image.Image:
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
