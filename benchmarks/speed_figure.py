"""The figure of attention's speed by number of tokens, from the raw results of
`benchmarks/attention.py`.

    python benchmarks/speed_figure.py [--results FILE] [--out FILE]

Cases differ in the number of images and heads, so times are divided by images, heads, and tokens:
what one query costs. The cost of a query in dense attention grows with the number of keys; in a
group it does not. The bound is the time of our dense attention times the share of its products that
groups leave.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from dgt.figures import save_figure
from dgt.figures.drawing import tidy

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "native_attention_zen4.json"
IMAGE = ROOT / "docs" / "images" / "speed.png"
TOP_K, CHANNELS, THREADS = 98, 32, 2
LINES = {  # color, marker, line, label
    "sdpa": ("#8a8a8a", "s", "-", "PyTorch, all keys"),
    "dense": ("#0072b2", "D", "-", "ours, all keys"),
    "grouped": ("#c2410c", "o", "-", f"ours, in groups, k {TOP_K}"),
    "bound": ("#c2410c", "", ":", "bound: fewer products, at the speed of all keys"),
}


class Case(NamedTuple):
    """A size of the operator."""

    images: int
    heads: int
    tokens: int
    channels: int
    top_k: int


class Speed(NamedTuple):
    """Nanoseconds of one query by candidate, in the case with so many queries and tokens."""

    queries: int
    tokens: int
    nanoseconds: dict[str, float]


def read_case(text: str) -> Case:
    """Read ``BxHxLxD:k``."""
    return Case(*map(int, text.replace(":", "x").split("x")))


def speeds(rows: list[dict[str, Any]], backward: bool) -> list[Speed]:
    """What a query costs by number of tokens, in the largest case with that number.

    Only rows in float32 on two threads without background load count.
    """
    largest: dict[int, Speed] = {}
    for row in rows:
        if not is_shown(row) or row["backward"] != backward:
            continue
        speed = speed_of(row)
        if speed.tokens not in largest or speed.queries > largest[speed.tokens].queries:
            largest[speed.tokens] = speed
    return [largest[tokens] for tokens in sorted(largest)]


def is_shown(row: dict[str, Any]) -> bool:
    """Whether a row is of the cases and conditions that the figure shows."""
    case = read_case(row["case"])
    conditions = (case.top_k, case.channels, row["dtype"], row["threads"], bool(row["busy"]))
    return conditions == (TOP_K, CHANNELS, "float32", THREADS, False)


def speed_of(row: dict[str, Any]) -> Speed:
    """What a query costs in a row, and what it would cost at the bound."""
    case = read_case(row["case"])
    queries = case.images * case.heads * case.tokens
    cost = {name: 1e6 * ms / queries for name, ms in row["fastest_ms"].items()}
    cost["bound"] = cost["dense"] / row["bound"]
    return Speed(queries, case.tokens, cost)


def figure_speed(content: dict[str, Any]) -> Figure:
    """The figure: forward on the left, with gradients on the right; both axes logarithmic."""
    figure = Figure(figsize=(9.2, 3.6), layout="constrained", facecolor="white")
    plots = figure.subplots(1, 2, sharey=True)
    for axes, backward in zip(plots, (False, True), strict=True):
        draw(axes, speeds(content["rows"], backward))
        title = "forward and backward" if backward else "forward"
        axes.set_title(f"Attention, {title}", loc="left", fontsize=10)
        axes.set_xlabel("tokens")
    plots[0].set_ylabel("time of one query in one head")
    tidy(*plots, size=8)
    figure.legend(
        *plots[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8.5,
    )
    return figure


def draw(axes: Axes, found: list[Speed]) -> None:
    """Draw a line for every candidate, and how much faster groups are at the right end."""
    tokens = [speed.tokens for speed in found]
    for name, (color, marker, line, label) in LINES.items():
        times = [speed.nanoseconds[name] for speed in found]
        width = 2.2 if name == "grouped" else 1.4
        axes.plot(
            tokens, times, marker + line, color=color, label=label, linewidth=width, markersize=4.5
        )
    last = found[-1].nanoseconds
    axes.annotate(
        "",
        (tokens[-1] * 1.13, last["grouped"]),
        (tokens[-1] * 1.13, last["sdpa"]),
        arrowprops={"arrowstyle": "<->", "color": "#555555", "linewidth": 1},
        annotation_clip=False,
    )
    middle = (last["grouped"] * last["sdpa"]) ** 0.5
    ratio = f"{last['sdpa'] / last['grouped']:.0f} x"
    axes.text(tokens[-1] * 1.22, middle, ratio, fontsize=9, va="center", color="#333333")
    axes.set(xscale="log", yscale="log", xlim=(tokens[0] * 0.8, tokens[-1] * 2.1))
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_units(value)))
    axes.grid(color="#eeeeee")


def in_units(nanoseconds: float) -> str:
    """A time with its unit."""
    if nanoseconds >= 1000:
        return f"{nanoseconds / 1000:g} µs"
    return f"{nanoseconds:g} ns"


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=IMAGE)
    options = parser.parse_args()
    content = json.loads(options.results.read_text(encoding="utf-8"))
    save_figure(figure_speed(content), options.out, dpi=130)


if __name__ == "__main__":
    main()
