"""The figure of `studies.retrieval`: the law of G and k with the measurements, and other attentions."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dgt.figures.drawing import tidy
from dgt.utils.errors import UserError

# Okabe and Ito's colors.
GROUPS = {1: ("#cc79a7", "D"), 4: ("#e69f00", "^"), 16: ("#009e73", "s"), 48: ("#0072b2", "o")}
BARS = {  # rows in the right panel and their labels
    "global": "global",
    "DG, G 48, k 16": "groups: G 48, k 16",
    "DG, G 16, k 16": "G 16, k 16",
    "DG, G 4, k 16": "G 4, k 16",
    "DG, G 1, k 16": "G 1, k 16",
    "best keys of each query, k 16": "each query's best 16",
    "random keys, k 16": "16 random keys",
    "reduced 4 x 4 (CMT)": "reduced (CMT)",
    "stripes": "stripes (CSWin)",
    "stripes, two blocks": "stripes, two blocks",
    "windows 4 x 4": "windows (Swin)",
    "windows, two blocks, shifted": "windows, two, shifted",
}
TICKS = ("1/64", "", "1/16", "", "1/4", "", "1", "2", "4", "8", "16", "32")
NOTE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}


def figure_retrieval(content: dict[str, Any]) -> Figure:
    """Left: accuracy against k G / codes, and the law. Right: one bar per entry of `BARS`, one dot per seed.

    `content` is from `retrieval.json`. Raises UserError if a row is missing.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for run in content["runs"]:
        found.setdefault(run["row"], []).append(run)
    missing = [name for name in ("global", *BARS) if name not in found]
    if missing:
        raise UserError(
            f"content must hold the row {missing[0]!r}, got {', '.join(found) or 'none'}"
        )
    figure = Figure(figsize=(9.2, 3.9), layout="constrained", facecolor="white")
    law, rows = figure.subplots(1, 2, width_ratios=(1.45, 1))
    chance = 100 / content["settings"]["values"]
    _law(law, found, content["settings"]["codes"], chance)
    for place, name in enumerate(BARS):
        values = [run["accuracy"] for run in found[name]]
        color = "#0072b2" if name.startswith("DG") else "#3d3d3d"
        rows.barh(place, statistics.fmean(values), 0.62, color=color, alpha=0.22, zorder=2)
        rows.scatter(values, [place] * len(values), 15, color, linewidths=0, zorder=3)
        rows.text(
            max(values) + 2.5,
            place,
            f"{statistics.fmean(values):.0f}",
            va="center",
            fontsize=8,
            color=color,
        )
    rows.axvline(chance, color="#6b6b6b", linewidth=1, linestyle=(0, (4, 3)), zorder=4)
    rows.annotate("chance", (chance, -0.62), (3, 0), color="#6b6b6b", **NOTE)
    rows.set(xlim=(0, 104), ylim=(len(BARS) - 0.4, -0.85), xlabel="right answers, %")
    rows.set_yticks(range(len(BARS)), list(BARS.values()))
    rows.set_title("By kind of attention", loc="left", fontsize=10)
    tidy(law, rows, size=8)
    return figure


def _law(axes: Axes, found: dict[str, list[dict[str, Any]]], codes: int, chance: float) -> None:
    """The law as a line, and the rows of k 16 measured at every k: means as points, bars over seeds."""
    best = statistics.fmean(run["accuracy"] for run in found["global"])
    ratio = np.geomspace(0.7 / codes, 45, 400)
    axes.plot(
        ratio,
        chance + np.minimum(1, ratio) * (best - chance),
        color="#c2410c",
        linewidth=1.8,
        zorder=2,
    )
    law = "predicted, if groups\nshare codes evenly:\nchance + min(1, k G / codes)\n    x (global - chance)"
    axes.annotate(law, (0.7 / codes, 55), (6, 0), color="#c2410c", **NOTE)
    for level, name, place in ((best, "global attention", 5), (chance, "chance", -11)):
        axes.axhline(level, color="#6b6b6b", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(name, (0.7 / codes, level), (6, place), color="#6b6b6b", **NOTE)
    for groups, (color, marker) in GROUPS.items():
        runs = found.get(f"DG, G {groups}, k 16", [])
        if runs:
            x = np.array([at["top_k"] for at in runs[0]["by_top_k"]]) * groups / codes
            values = np.array([[at["accuracy"] for at in run["by_top_k"]] for run in runs])
            axes.vlines(x, values.min(0), values.max(0), color, linewidth=1.6, zorder=4)
            axes.scatter(
                x,
                values.mean(0),
                30,
                color,
                marker=marker,
                linewidths=0,
                zorder=5,
                label=f"G {groups}",
            )
    axes.grid(axis="y", color="#eeeeee")
    axes.set_xscale("log", base=2)
    axes.set_xticks([2.0**power for power in range(-6, 6)], TICKS)
    axes.set(xlim=(0.7 / codes, 45), ylim=(0, 104), ylabel="right answers, %")
    axes.set_xlabel("k G / codes: keys that all groups together select, over the codes to be found")
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 0.16), fontsize=8.5, frameon=False, handletextpad=0.2
    )
    axes.set_title("How much selection is enough", loc="left", fontsize=10)
