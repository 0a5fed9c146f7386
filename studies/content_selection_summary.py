"""Evaluate the logits of `content_selection.py`: accuracy, paired differences, and a figure."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

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

LINES = ("-", "--", ":", "-.")  # by seed
OTHERS = ("all keys", "nothing")  # the kinds that every test is compared with

Place = tuple[str, int, str]
"""Kind, image size, and test."""

Answers = dict[Place, dict[int, NDArray[np.bool_]]]
"""Place -> seed -> for every test image, whether the prediction is correct."""


class Found(NamedTuple):
    """One test of one model.

    Attributes:
        top1: fraction of the test images that are predicted correctly.
        ahead: for each kind of `OTHERS` tested with the same seed and image size, how many points
            of top-1 the test is ahead, and half of the 95 % interval of these points over images.
    """

    top1: float
    ahead: dict[str, tuple[float, float]]


Results = dict[Place, dict[int, Found]]
"""Place -> seed -> what the test found."""


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


def points_ahead(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> tuple[float, float]:
    """How many points of top-1 `first` is ahead of `second`, paired by image.

    Returns:
        The points, and half of their 95 % interval over images.
    """
    pairs = first.astype(float) - second.astype(float)
    half = 1.96 * pairs.std(ddof=1) / math.sqrt(len(pairs))
    return 100 * float(pairs.mean()), 100 * float(half)


def results_of(answers: Answers) -> Results:
    """Compare every test with the other kinds at the same seed and image size."""
    results: Results = {}
    for (kind, size, test), seeds in answers.items():
        for seed, right in seeds.items():
            ahead = {}
            for other in OTHERS:
                beside = answers.get((other, size, AS_TRAINED), {}).get(seed)
                if beside is not None:
                    ahead[other] = points_ahead(right, beside)
            found = Found(float(right.mean()), ahead)
            results.setdefault((kind, size, test), {})[seed] = found
    return results


def read_earlier(summary: Path) -> Results:
    """The results in the `summary.json` of an earlier part of the study.

    Raises:
        KeyError, TypeError, ValueError: If the file is no such summary.
    """
    results: Results = {}
    for row in json.loads(summary.read_text(encoding="utf-8"))["rows"]:
        seeds = results.setdefault((row["kind"], row["size"], row["test"]), {})
        for seed, top1 in zip(row["seeds"], row["top1"], strict=True):
            seeds[seed] = Found(top1, earlier_pairs(row, seed))
    return results


def earlier_pairs(row: dict[str, Any], seed: int) -> dict[str, tuple[float, float]]:
    """How far a row of a summary is ahead of each of `OTHERS` that was tested with this seed."""
    ahead = {}
    for other in OTHERS:
        pair = row[f"beside {other}"]
        if pair is not None and seed in pair["seeds"]:
            at = pair["seeds"].index(seed)
            ahead[other] = (pair["by_seed"][at], pair["half_over_images_by_seed"][at])
    return ahead


def merged(results: Results, earlier: Results) -> Results:
    """Both parts of a study, ordered by kind, size, and seed; `results` count where both have a seed."""
    both: Results = {}
    places = sorted({*earlier, *results}, key=lambda place: (KINDS.index(place[0]), place[1:]))
    for place in places:
        seeds = {**earlier.get(place, {}), **results.get(place, {})}
        both[place] = dict(sorted(seeds.items()))
    return both


def summarize(out: Path, settings: dict[str, Any], earlier: Results | None = None) -> None:
    """Write the summary of the tests done so far: JSON, Markdown, and a figure.

    Args:
        out: folder of the study.
        settings: what is the same in all runs.
        earlier: results of seeds that were run in another folder.
    """
    results = merged(results_of(read_answers(out)), earlier or {})
    train_size = settings["train_size"]
    losses = [loss_of(results, train_size, place) for place in results if place[1] != train_size]
    content = {
        "command": command_line(),
        "processor": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "settings": settings,
        "enlarged_above": STORED_SIZE,
        "rows": [row_of(place, seeds) for place, seeds in results.items()],
        "losses": [loss for loss in losses if loss is not None],
    }
    write_json(out / "summary.json", content)
    atomic_write(out / "summary.md", written(content))
    save_figure(draw(content), out / "summary.png")


def row_of(place: Place, seeds: dict[int, Found]) -> dict[str, Any]:
    """Accuracy of one test, compared with all keys and nothing at the same size."""
    kind, size, test = place
    top1 = [found.top1 for found in seeds.values()]
    row: dict[str, Any] = {"kind": kind, "size": size, "test": test}
    row["seeds"] = list(seeds)
    row["top1"] = top1
    row["mean"] = statistics.fmean(top1)
    row["half_over_seeds"] = interval(top1)[1]
    for other in OTHERS:
        row[f"beside {other}"] = compare(seeds, other)
    return row


def compare(seeds: dict[int, Found], other: str) -> dict[str, Any] | None:
    """How many points a test is ahead of another kind, paired by seed, with intervals.

    The interval over images is the mean of those of the seeds: the seeds share their images, and
    the interval of their mean is at most that wide. None if no seed is paired.
    """
    paired = {seed: found.ahead[other] for seed, found in seeds.items() if other in found.ahead}
    if not paired:
        return None
    by_seed = [points for points, _ in paired.values()]
    halves = [half for _, half in paired.values()]
    ahead, half_over_seeds = interval(by_seed)
    return {
        "ahead": ahead,
        "seeds": list(paired),
        "by_seed": by_seed,
        "half_over_seeds": half_over_seeds,
        "half_over_images": statistics.fmean(halves),
        "half_over_images_by_seed": halves,
    }


def loss_of(results: Results, train_size: int, place: Place) -> dict[str, Any] | None:
    """How much more a test loses from the training size to another size than all keys lose.

    Paired by seed; positive losses are points lost at the other size.
    """
    kind, size, test = place
    own = lost(results, (kind, train_size, test), place)
    dense = lost(results, ("all keys", train_size, AS_TRAINED), ("all keys", size, AS_TRAINED))
    seeds = sorted(own.keys() & dense.keys())
    if not seeds:
        return None
    more, half = interval([own[seed] - dense[seed] for seed in seeds])
    found = {"kind": kind, "size": size, "test": test, "lost": [own[seed] for seed in seeds]}
    return {**found, "more_than_all_keys": more, "half_over_seeds": half}


def lost(results: Results, before: Place, after: Place) -> dict[int, float]:
    """Points of top-1 accuracy that each seed loses between two tests."""
    first, second = results.get(before, {}), results.get(after, {})
    seeds = first.keys() & second.keys()
    return {seed: 100 * (first[seed].top1 - second[seed].top1) for seed in seeds}


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
    """Left: top-1 by image size. Right: points ahead of all keys. A line for each kind and seed."""
    train_size = content["settings"]["train_size"]
    figure = Figure(figsize=(9.6, 3.9), layout="constrained", facecolor="white")
    accuracy, ahead = figure.subplots(1, 2)
    for kind in KINDS:
        rows = [row for row in content["rows"] if (row["kind"], row["test"]) == (kind, AS_TRAINED)]
        for seed in sorted({seed for row in rows for seed in row["seeds"]}):
            draw_top1(accuracy, rows, seed)
            if kind not in ("all keys", "nothing"):  # which is far below the others
                draw_ahead(ahead, rows, seed)
    accuracy.set_title("Top-1, %", loc="left", fontsize=10)
    ahead.set_title("Points ahead of all keys (bars: 95 % over images)", loc="left", fontsize=10)
    ahead.axhline(0, color=COLORS["all keys"], linewidth=1)
    for axes in (accuracy, ahead):
        axes.set_xlabel(f"pixels a side (trained at {train_size}; above {STORED_SIZE} enlarged)")
        axes.axvline(train_size, color="#cccccc", linewidth=1, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    handles = accuracy.get_legend_handles_labels()
    title = "line style: seed"
    figure.legend(*handles, loc="outside right center", frameon=False, fontsize=9, title=title)
    return figure


def draw_top1(axes: Axes, rows: list[dict[str, Any]], seed: int) -> None:
    """The accuracy of one kind and seed by image size; the first seed is in the legend."""
    here = [row for row in rows if seed in row["seeds"]]
    sizes = [row["size"] for row in here]
    values = [100 * row["top1"][row["seeds"].index(seed)] for row in here]
    kind = here[0]["kind"]
    label = kind if seed == 0 else None
    style = LINES[seed % len(LINES)]
    axes.plot(sizes, values, style, marker="o", color=COLORS[kind], label=label, markersize=4)


def draw_ahead(axes: Axes, rows: list[dict[str, Any]], seed: int) -> None:
    """How far one kind is ahead of all keys with one seed, by image size."""
    pairs = [(row["size"], row["beside all keys"]) for row in rows if row["beside all keys"]]
    here = [(size, pair, pair["seeds"].index(seed)) for size, pair in pairs if seed in pair["seeds"]]
    if not here:
        return
    sizes = [size for size, _, _ in here]
    values = [pair["by_seed"][at] for _, pair, at in here]
    bars = [pair["half_over_images_by_seed"][at] for _, pair, at in here]
    color = COLORS[rows[0]["kind"]]
    style = LINES[seed % len(LINES)]
    axes.errorbar(sizes, values, bars, linestyle=style, marker="o", markersize=3, color=color, capsize=2)
