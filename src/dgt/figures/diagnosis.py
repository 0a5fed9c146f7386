"""What the selection of keys is worth in a trained model, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from dgt.models import BlockDiagnosis
from dgt.utils.errors import UserError

# Okabe and Ito's colours; the model's own choice stands out, what it is measured against stays quiet.
CHOICES = {
    "window": ("window around the query", "#56b4e9", "s", 46),
    "random": ("random keys", "#3d3d3d", "|", 90),
    "best_for_all": ("best for all queries", "#cc79a7", "X", 60),
    "best_for_query": ("best for each query", "#9a9a9a", ">", 130),
    "best_for_group": ("best for each group", "#009e73", "D", 66),
    "selected": ("selected by the group", "#d55e00", "o", 26),
}
HEADS = (
    *("block", "L", "G", "k", "selected", "random", "window"),
    *("best/all", "best/group", "best/query", "perplexity", "an image"),
)


def diagnosis_table(blocks: Sequence[BlockDiagnosis]) -> str:
    """The numbers as text, a line for each block; masses in percent."""
    rows: list[tuple[str, ...]] = [HEADS]
    for block in blocks:
        best = (block.best_for_all, block.best_for_group, block.best_for_query)
        masses = (block.selected, block.random, block.window, *best)
        shares = ["-" if mass is None else f"{100 * mass:.1f} %" for mass in masses]
        balance = (f"{block.perplexity:.1f}", f"{block.perplexity_per_image:.1f}")
        rows.append((block.name, str(block.tokens), str(block.groups), str(block.top_k), *shares, *balance))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join(lines)


def figure_diagnosis(blocks: Sequence[BlockDiagnosis]) -> Figure:
    """Left, the share of global attention that each choice of k keys holds; right, how balanced the groups are.

    Blocks whose k reaches all tokens hold everything whatever is chosen, and say so in the place of marks.

    Args:
        blocks: from `dgt.diagnose`; at least one.

    Raises:
        UserError: there is none.
    """
    if len(blocks) == 0:
        raise UserError("blocks must hold at least one BlockDiagnosis, got none")
    figure = Figure(figsize=(8.6, 1.25 + 0.3 * len(blocks)), layout="constrained", facecolor="white")
    masses, balance = figure.subplots(1, 2, sharey=True, width_ratios=(2.2, 1))
    places = range(len(blocks))
    for choice, (label, colour, marker, area) in CHOICES.items():
        found = [(getattr(block, choice), place) for place, block in enumerate(blocks) if block.top_k < block.tokens]
        points = [(value, place) for value, place in found if value is not None]
        if points:
            masses.scatter(
                *zip(*points, strict=True),
                area,
                colour,
                marker=marker,
                label=label,
                linewidths=1.4 if marker == "|" else 0,
                zorder=3,
            )
    for place, block in enumerate(blocks):
        if block.top_k < block.tokens:
            ends = (min(block.random, block.selected), block.best_for_query)
            masses.plot(ends, (place, place), color="#d9d9d9", linewidth=2, zorder=1)
        else:
            text = f"k = {block.top_k} takes all {block.tokens} tokens"
            masses.text(0.5, place, text, ha="center", va="center", fontsize=7.5, color="#9a9a9a")
    masses.set(xlim=(0, 1.02), xlabel="share of global attention held", ylim=(len(blocks) - 0.4, -0.6))
    masses.set_yticks(places, [f"{block.name}\nL {block.tokens}, k {block.top_k}" for block in blocks], fontsize=7)
    masses.grid(axis="x", color="#eeeeee")
    balance.barh(places, [block.perplexity / block.groups for block in blocks], 0.5, color="#cfe6f5")
    image = [block.perplexity_per_image / block.groups for block in blocks]
    balance.scatter(image, places, 26, "#0072b2", zorder=3)
    balance.set(
        xlim=(0, 1), xticks=(0, 0.5, 1), xlabel="perplexity of group sizes / G\nbar: all images, dot: in an image"
    )
    for axes in (masses, balance):
        axes.tick_params(labelsize=7, length=0)
        axes.xaxis.label.set_size(8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    if masses.get_legend_handles_labels()[0]:
        figure.legend(
            loc="outside upper center", ncols=6, fontsize=7.5, columnspacing=1.1, frameon=False, handletextpad=0.2
        )
    return figure
