"""Evaluate the logits of `content_selection.py`: accuracy, paired differences, and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dgt.figures import save_figure
from dgt.utils.atomic_write import atomic_write, write_json
from dgt.utils.records import command_line, interval, markdown_table, processor
from studies.content_selection_models import KINDS

AS_TRAINED = "as-trained"
STORED_SIZE = 128  # pixels: the shorter side of the stored images; larger tests enlarge them
COLORS = dict(
    zip(KINDS, ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#777777"), strict=True)
)

Answers = dict[tuple[str, int, str], dict[int, NDArray[np.bool_]]]
"""(kind, size, test) -> seed -> for every test image, whether the prediction is correct."""


def read_answers(out: Path) -> Answers:
    """The tests done so far, by kind, size, and test, in a fixed order."""
    answers: Answers = {}
    for kind in KINDS:
        folder = out / "logits" / slug(kind)
        for path in sorted(folder.glob("seed-*/*.npz"), key=place_of):
            seed, size, test = place_of(path)
            with np.load(path) as content:
                right = content["logits"].argmax(axis=1) == content["labels"]
            answers.setdefault((kind, size, test), {})[seed] = right
    return answers


def place_of(path: Path) -> tuple[int, int, str]:
    """Seed, image size, and test that a file with logits belongs to."""
    size, _, test = path.stem.partition("-")
    return int(path.parent.name.removeprefix("seed-")), int(size), test


def slug(kind: str) -> str:
    """The kind as a folder name."""
    return kind.replace(" ", "-")


def over_images(differences: Iterable[NDArray[np.float64]]) -> float:
    """Half of the 95 % interval over images, in points, of a mean over seeds and images.

    The mean over seeds of each image is one observation, because the seeds share their images.
    """
    means = np.mean(list(differences), axis=0)
    return float(100 * 1.96 * means.std(ddof=1) / math.sqrt(len(means)))


def compare(first: dict[int, Any], second: dict[int, Any]) -> dict[str, Any] | None:
    """How many points `first` is ahead of `second`, paired by seed, with intervals.

    None if they share no seed.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    pairs = [first[seed].astype(float) - second[seed].astype(float) for seed in seeds]
    by_seed = [100 * float(pair.mean()) for pair in pairs]
    ahead, half = interval(by_seed)
    return {
        "ahead": ahead,
        "by_seed": by_seed,
        "half_over_seeds": half,
        "half_over_images": over_images(pairs),
        "seeds": len(seeds),
    }


def summarize(out: Path, settings: dict[str, Any]) -> None:
    """Write the summary of the tests done so far: JSON, Markdown, and a figure."""
    answers = read_answers(out)
    train_size = settings["train_size"]
    losses = [loss_of(answers, train_size, place) for place in answers if place[1] != train_size]
    content = {
        "command": command_line(),
        "processor": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "settings": settings,
        "enlarged_above": STORED_SIZE,
        "rows": [row_of(answers, place) for place in answers],
        "losses": [loss for loss in losses if loss is not None],
    }
    write_json(out / "summary.json", content)
    atomic_write(out / "summary.md", written(content))
    save_figure(draw(content), out / "summary.png")


def row_of(answers: Answers, place: tuple[str, int, str]) -> dict[str, Any]:
    """Accuracy of one test, compared with all keys and nothing at the same size."""
    kind, size, test = place
    top1 = [float(right.mean()) for right in answers[place].values()]
    row: dict[str, Any] = {"kind": kind, "size": size, "test": test, "top1": top1}
    row["mean"] = statistics.fmean(top1)
    row["half_over_seeds"] = interval(top1)[1]
    for other in ("all keys", "nothing"):
        row[f"beside {other}"] = compare(answers[place], answers.get((other, size, AS_TRAINED), {}))
    return row


def loss_of(
    answers: Answers, train_size: int, place: tuple[str, int, str]
) -> dict[str, Any] | None:
    """How much more a test loses from the training size to another size than all keys lose.

    Paired by seed; positive losses are points lost at the other size.
    """
    kind, size, test = place
    own = lost(answers, (kind, train_size, test), place)
    dense = lost(answers, ("all keys", train_size, AS_TRAINED), ("all keys", size, AS_TRAINED))
    seeds = sorted(own.keys() & dense.keys())
    if not seeds:
        return None
    more, half = interval([own[seed] - dense[seed] for seed in seeds])
    found = {"kind": kind, "size": size, "test": test, "lost": [own[seed] for seed in seeds]}
    return {**found, "more_than_all_keys": more, "half_over_seeds": half}


def lost(
    answers: Answers, before: tuple[str, int, str], after: tuple[str, int, str]
) -> dict[int, float]:
    """Points of top-1 accuracy that each seed loses between two tests."""
    first, second = answers.get(before, {}), answers.get(after, {})
    seeds = first.keys() & second.keys()
    return {seed: 100 * float(first[seed].mean() - second[seed].mean()) for seed in seeds}


def points(found: dict[str, Any] | None) -> str:
    """A difference with its two intervals."""
    if found is None:
        return "-"
    seeds = "-" if found["half_over_seeds"] is None else f"{found['half_over_seeds']:.2f}"
    return f"{found['ahead']:+.2f} ± {seeds} (± {found['half_over_images']:.2f})"


def written(content: dict[str, Any]) -> str:
    """The summary in Markdown."""
    heads = [
        "kind",
        "pixels",
        "test",
        "top-1, %",
        "beside all keys, points",
        "beside nothing, points",
    ]
    rows = []
    for row in content["rows"]:
        enlarged = " (enlarged)" if row["size"] > content["enlarged_above"] else ""
        cells = [row["kind"], f"{row['size']}{enlarged}", row["test"], f"{100 * row['mean']:.2f}"]
        rows.append([*cells, points(row["beside all keys"]), points(row["beside nothing"])])
    told = "± half of the 95 % interval over pairs of seeds (in brackets: over images).\n\n"
    return told + markdown_table(heads, rows)


def draw(content: dict[str, Any]) -> Figure:
    """Left: top-1 by image size. Right: how far kinds are ahead of all keys, paired by seed."""
    train_size = content["settings"]["train_size"]
    figure = Figure(figsize=(9.6, 3.9), layout="constrained", facecolor="white")
    accuracy, ahead = figure.subplots(1, 2)
    for kind in KINDS:
        rows = [row for row in content["rows"] if (row["kind"], row["test"]) == (kind, AS_TRAINED)]
        sizes = [row["size"] for row in rows]
        means = [100 * row["mean"] for row in rows]
        accuracy.plot(sizes, means, "o-", color=COLORS[kind], label=kind, markersize=4)
        if kind not in ("all keys", "nothing"):  # which is far below the others
            draw_pairs(ahead, kind, rows)
    accuracy.set_title("Top-1, %", loc="left", fontsize=10)
    ahead.set_title(
        "Points ahead of all keys (bars: 95 % over images; dots: seeds)", loc="left", fontsize=10
    )
    ahead.axhline(0, color=COLORS["all keys"], linewidth=1)
    for axes in (accuracy, ahead):
        axes.set_xlabel(f"pixels a side (trained at {train_size}; above {STORED_SIZE} enlarged)")
        axes.axvline(train_size, color="#cccccc", linewidth=1, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    handles = accuracy.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", frameon=False, fontsize=9)
    return figure


def draw_pairs(axes: Axes, kind: str, rows: list[dict[str, Any]]) -> None:
    """How far one kind is ahead of all keys, by size, and every seed by itself."""
    found = [(row["size"], row["beside all keys"]) for row in rows if row["beside all keys"]]
    sizes = [size for size, _ in found]
    values = [pair["ahead"] for _, pair in found]
    bars = [pair["half_over_images"] for _, pair in found]
    axes.errorbar(sizes, values, bars, fmt="-", color=COLORS[kind], capsize=2)
    for size, pair in found:
        seeds = pair["by_seed"]
        axes.plot([size] * len(seeds), seeds, "o", color=COLORS[kind], markersize=3)
