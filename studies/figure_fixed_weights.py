"""The figure of `studies.key_choice` and `studies.replacement`: how a model's answers change, by selector and k."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from dgt.figures.drawing import tidy
from dgt.utils.errors import UserError

# Okabe and Ito's colors; our methods in blue and red, drawn on top.
STYLES: dict[str, tuple[str, str, str]] = {  # color, marker, line
    "groups, remainder": ("#c2410c", "o", "-"),
    "groups": ("#0072b2", "o", "-"),
    "random, remainder": ("#c2410c", "x", ":"),
    "best of each query": ("#111111", "s", "-"),
    "best one for all": ("#8a8a8a", "s", "-"),
    "window": ("#cc79a7", "^", "-"),
    "random, each query": ("#009e73", "x", ":"),
    "random, one for all": ("#8a8a8a", "x", ":"),
    "strided": ("#e69f00", "D", "--"),
    "pooled": ("#56b4e9", "v", "--"),
    "merged (ToMe)": ("#7a5ca8", "P", "--"),
    "blocks": ("#8b5a2b", "*", "--"),
}


def figure_fixed_weights(content: dict[str, Any]) -> Figure:
    """Left: agreement with the labels from all keys. Right: divergence of probabilities. By k.

    `content` is from `key_choice.json` or `replacement.json`. Both panels show intervals. Raises
    UserError if there are no rows.
    """
    rows = content["rows"]
    if not rows:
        raise UserError("content must hold at least one row, got none")
    figure = Figure(figsize=(9.6, 3.9), layout="constrained", facecolor="white")
    labels, divergence = figure.subplots(1, 2)
    titles = {"agreement": "Answers that stay", "divergence": "How far probabilities move"}
    for axes, (measure, title), factor in zip(
        (labels, divergence), titles.items(), (100, 1), strict=True
    ):
        for choice in (name for name in STYLES if any(row["choice"] == name for row in rows)):
            found = sorted(
                (row for row in rows if row["choice"] == choice), key=itemgetter("top_k")
            )
            _line(axes, choice, found, measure, factor)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            counts := sorted({row["top_k"] for row in rows}),
            _ticks(content["tokens"].values(), counts),
        )
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("keys of every query, k")
        axes.set_title(title, loc="left", fontsize=10)
    labels.set(ylim=(None, 101), ylabel="labels as with all keys")
    labels.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    divergence.set(yscale="log", ylabel="KL divergence from all keys")
    tidy(labels, divergence, size=8)
    figure.legend(
        *labels.get_legend_handles_labels(), loc="outside right center", fontsize=8.5, frameon=False
    )
    return figure


def _ticks(tokens: Any, counts: list[int]) -> list[str]:
    """Every k, with its share of the keys if all layers have the same number of them."""
    alike = next(iter(tokens)) if len(set(tokens)) == 1 else None
    return [f"{k}" if alike is None else f"{k}\n{100 * k / alike:.0f} %" for k in counts]


def _line(axes: Axes, choice: str, rows: list[dict[str, Any]], measure: str, factor: float) -> None:
    color, marker, line = STYLES[choice]
    x, y = [row["top_k"] for row in rows], [max(factor * row[measure], 1e-7) for row in rows]
    bars = [factor * (row[f"{measure}_half"] or 0.0) for row in rows]
    style: dict[str, Any] = {
        "markersize": 4.5,
        "linewidth": 2.2 if choice.startswith("groups") else 1.2,
        "capsize": 0,
    }
    over = 4 if choice.startswith("groups") else 3
    # a logarithmic axis cannot show values below 0
    low = [min(bar, 0.9 * value) for bar, value in zip(bars, y, strict=True)]
    axes.errorbar(
        x,
        y,
        [low, bars],
        None,
        marker + line,
        color=color,
        label=choice,
        elinewidth=0.8,
        zorder=over,
        **style,
    )
