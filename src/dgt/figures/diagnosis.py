"""How much of global attention the selected keys cover in a trained model, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dgt.figures.drawing import tidy
from dgt.models import BlockDiagnosis
from dgt.utils.errors import UserError

# Head of the table's column, name in the figure, one of Okabe and Ito's colors, marker and its
# area; the model's own
# choice stands out, what it is measured against stays quiet.
CHOICES = {
    "selected": ("selected", "selected by the group", "#d55e00", "o", 26),
    "random": ("random", "random keys", "#3d3d3d", "|", 90),
    "window": ("window", "window around the query", "#56b4e9", "s", 46),
    "best_for_all": ("best/all", "best for all queries", "#cc79a7", "X", 60),
    "best_for_group": ("best/group", "best for each group", "#009e73", "D", 66),
    "best_for_query": ("best/query", "best for each query", "#9a9a9a", ">", 130),
}


def diagnosis_table(blocks: Sequence[BlockDiagnosis]) -> str:
    """The numbers as text, a line for each block; masses in percent.

    Where a block has residual keys, a last column says how much of its attention goes to them.
    """
    heads = ("block", "L", "G", "k", *(head for head, *_ in CHOICES.values()))
    has_residual = any(block.residual is not None for block in blocks)
    balance = ("perplexity", "an image", "distinct keys", "overlap")
    rows = [(*heads, *balance, *(["residual"] if has_residual else []))]
    for block in blocks:
        counts = (str(count) for count in (block.tokens, block.groups, block.top_k))
        shares = (_percent(getattr(block, choice)) for choice in CHOICES)
        rows.append(
            (
                block.name,
                *counts,
                *shares,
                f"{block.perplexity:.1f}",
                f"{block.perplexity_per_image:.1f}",
                f"{block.distinct_keys:.0f}",
                _percent(block.overlap),
                *([_percent(block.residual)] if has_residual else []),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def figure_diagnosis(blocks: Sequence[BlockDiagnosis]) -> Figure:
    """Left, the share of global attention that each choice of k keys holds; right, how balanced the
    groups are.

    Blocks whose k reaches all tokens hold everything whatever is chosen, and say so in the place of
    marks. Raises UserError without blocks.
    """
    if len(blocks) == 0:
        raise UserError("blocks must hold at least one BlockDiagnosis, got none")
    figure = Figure(
        figsize=(8.6, 1.25 + 0.3 * len(blocks)), layout="constrained", facecolor="white"
    )
    masses, balance = figure.subplots(1, 2, sharey=True, width_ratios=(2.2, 1))
    places = range(len(blocks))
    _draw_masses(masses, blocks)
    masses.set(
        xlim=(0, 1.02), xlabel="share of global attention held", ylim=(len(blocks) - 0.4, -0.6)
    )
    masses.set_yticks(
        places, [f"{block.name}\nL {block.tokens}, k {block.top_k}" for block in blocks]
    )
    balance.barh(
        places, [block.perplexity / block.groups for block in blocks], 0.5, color="#cfe6f5"
    )
    balance.scatter(
        [block.perplexity_per_image / block.groups for block in blocks],
        places,
        26,
        "#0072b2",
        zorder=3,
    )
    balance.set(xlim=(0, 1), xticks=(0, 0.5, 1))
    balance.set_xlabel("perplexity of group sizes / G\nbar: all images, dot: per image")
    tidy(masses, balance, size=7)
    if masses.get_legend_handles_labels()[0]:
        figure.legend(
            loc="outside upper center",
            ncols=len(CHOICES),
            fontsize=7.5,
            columnspacing=1.1,
            frameon=False,
            handletextpad=0.2,
        )
    return figure


def _draw_masses(axes: Axes, blocks: Sequence[BlockDiagnosis]) -> None:
    """A mark for each choice of keys in each block, on a line from the least to the most."""
    for choice, (_, label, color, marker, area) in reversed(CHOICES.items()):
        places = [place for place, block in enumerate(blocks) if block.top_k < block.tokens]
        masses = {place: getattr(blocks[place], choice) for place in places}
        known = {place: mass for place, mass in masses.items() if mass is not None}
        if known:
            line = 1.4 if marker == "|" else 0
            axes.scatter(
                list(known.values()),
                list(known),
                area,
                color,
                marker=marker,
                label=label,
                linewidths=line,
                zorder=3,
            )
    for place, block in enumerate(blocks):
        if block.top_k < block.tokens:
            ends = (min(block.random, block.selected), block.best_for_query)
            axes.plot(ends, (place, place), color="#d9d9d9", linewidth=2, zorder=1)
        else:
            text = f"k = {block.top_k} covers all {block.tokens} tokens"
            axes.text(0.5, place, text, ha="center", va="center", fontsize=7.5, color="#9a9a9a")
