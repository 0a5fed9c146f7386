"""The figure of `studies.residual_rivals`: error over time, of every method its best settings."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from dgt.figures.drawing import tidy
from dgt.utils.errors import UserError
from studies.rival_summary import MODEL, OURS, Point, points

# Okabe and Ito's colors; ours in red, drawn over the others.
STYLES: dict[str, tuple[str, str, str]] = {  # color, marker, line
    OURS: ("#c2410c", "o", "-"),
    "one residual key": ("#0072b2", "o", "-"),
    "pooled keys": ("#56b4e9", "v", "--"),
    "strided keys": ("#e69f00", "D", "--"),
    "merged tokens (ToMe)": ("#7a5ca8", "P", "--"),
    "windows": ("#cc79a7", "^", "-"),
    "blocks (SpargeAttn)": ("#8b5a2b", "*", ":"),
    "blocks of clusters (SVG 2)": ("#009e73", "x", ":"),
    "with compensation (SVG-EAR)": ("#111111", "s", ":"),
}
TICKS = (0.05, 0.1, 0.25, 0.5, 1.0)


def figure_rivals(content: dict[str, Any]) -> Figure:
    """One plot a size: the error of the model's tokens, or of the last layer, over the time of its attention.

    Raises UserError where nothing has both a time and an error.
    """
    sizes = [size for size in content["settings"]["sizes"] if places_of(content, size)]
    if not sizes:
        raise UserError("content must hold errors and times of at least one size, got none")
    width = 2.2 + 2.9 * len(sizes)
    figure = Figure(figsize=(width, 3.7), layout="constrained", facecolor="white")
    plots = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, size in zip(plots, sizes, strict=True):
        layer = places_of(content, size)[-1]
        _draw(axes, points(content, size, layer))
        tokens = (size // 14) ** 2
        what = "all layers" if layer == MODEL else f"layer {layer}"
        axes.set_title(f"{size} px, {tokens:,} tokens, {what}", loc="left", fontsize=9.5)
    plots[0].set_ylabel("relative error of the output")
    plots[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    tidy(*plots, size=8)
    handles = {}
    for axes in plots:
        lines, labels = axes.get_legend_handles_labels()
        handles.update(zip(labels, lines, strict=True))
    ordered = [name for name in STYLES if name in handles]
    figure.legend(
        [handles[name] for name in ordered],
        ordered,
        loc="outside right center",
        fontsize=8.5,
        frameon=False,
    )
    return figure


def places_of(content: dict[str, Any], size: int) -> list[int | str]:
    """The layers of a size that can be drawn, the whole model last."""
    if not any(row["size"] == size for row in content["times"]):
        return []
    layers: list[int | str] = [*content["settings"]["layers"], MODEL]
    return [layer for layer in layers if points(content, size, layer)]


def best_so_far(found: list[Point]) -> list[Point]:
    """The settings that no faster one beats."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda point: point.share):
        if not kept or point.error < kept[-1].error:
            kept.append(point)
    return kept


def _draw(axes: Axes, found: list[Point]) -> None:
    """A line for every method, over its best settings."""
    for name, (color, marker, line) in STYLES.items():
        best = best_so_far([point for point in found if point.method == name])
        ours = name == OURS
        axes.plot(
            [point.share for point in best],
            [point.error for point in best],
            marker + line,
            color=color,
            label=name,
            linewidth=2.4 if ours else 1.2,
            markersize=5 if ours else 4,
            zorder=4 if ours else 3,
        )
    axes.axvline(1, color="#8a8a8a", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="time, beside PyTorch's dense attention")
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(color="#eeeeee")
