"""The figure of `studies.residual_rivals`: error over time for the best settings of each method."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from dgt.figures.drawing import tidy
from studies.captured_attention import PATCH
from studies.rival_summary import OURS, Point, points

# Okabe and Ito's colors; our method in red, drawn on top.
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


def figure_rivals(content: dict[str, Any]) -> Figure | None:
    """One row per size, one column per layer: the error of its output over its time.

    None if nothing has both a time and an error yet.
    """
    layers = content["settings"]["layers"]
    sizes = [size for size in content["settings"]["sizes"] if is_timed(content, size)]
    if not sizes:
        return None
    shape = (1.0 + 2.7 * len(layers), 1.0 + 2.2 * len(sizes))
    figure = Figure(figsize=shape, layout="constrained", facecolor="white")
    plots = figure.subplots(len(sizes), len(layers), sharex=True, sharey=True, squeeze=False)
    for row, size in zip(plots, sizes, strict=True):
        for axes, layer in zip(row, layers, strict=True):
            _draw(axes, points(content, size, layer))
            tokens = (size // PATCH) ** 2
            axes.set_title(f"{size} px, {tokens:,} tokens, layer {layer}", loc="left", fontsize=9)
        row[0].set_ylabel("relative error")
        row[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in plots[-1]:
        axes.set_xlabel("time, PyTorch's dense attention: 100 %")
    tidy(*plots.flat, size=8)
    lines, labels = plots[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    return figure


def is_timed(content: dict[str, Any], size: int) -> bool:
    """Whether all layers have times at this size."""
    layers = {row["layer"] for row in content["times"] if row["size"] == size}
    return layers >= set(content["settings"]["layers"])


def best_so_far(found: list[Point]) -> list[Point]:
    """The settings that no faster setting beats."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda point: point.share):
        if not kept or point.error < kept[-1].error:
            kept.append(point)
    return kept


def _draw(axes: Axes, found: list[Point]) -> None:
    """One line per method through its best settings."""
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
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="#eeeeee")
