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
    """Left: mean top-1 by image size. Then, for each kind but "nothing", which is far below the others,
    points ahead of all keys, a line for each seed.
    """
    figure = Figure(figsize=(12.5, 3.4), layout="constrained", facecolor="white")
    compared = [kind for kind in KINDS if kind not in ("all keys", "nothing")]
    widths = [1.6] + [1.0] * len(compared)
    accuracy, *panels = figure.subplots(1, 1 + len(compared), width_ratios=widths)
    for kind in KINDS:
        draw_top1(accuracy, tested(content, kind))
    accuracy.set_title("Top-1, %, mean over seeds", loc="left", fontsize=10)
    accuracy.legend(frameon=False, fontsize=8, loc="lower left")
    for kind, axes in zip(compared, panels, strict=True):
        axes.sharey(panels[0])
        axes.axhline(0, color=COLORS["all keys"], linewidth=1)
        rows = tested(content, kind)
        for seed in sorted({seed for row in rows for seed in row["seeds"]}):
            draw_ahead(axes, rows, seed)
        axes.set_title(kind, loc="left", fontsize=10, color=COLORS[kind])
        axes.tick_params(labelleft=kind == compared[0])
    panels[0].set_ylabel("points ahead of all keys")
    train_size = content["settings"]["train_size"]
    for axes in (accuracy, *panels):
        axes.axvline(train_size, color="#cccccc", linewidth=1, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    sizes = f"pixels a side (trained at {train_size}, above {STORED_SIZE} enlarged)"
    figure.supxlabel(f"{sizes}; line style: seed; bars: 95 % over images", fontsize=10)
    return figure


def tested(content: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The rows of a kind of attention, tested as it was trained, by image size."""
    return [row for row in content["rows"] if (row["kind"], row["test"]) == (kind, AS_TRAINED)]


def draw_top1(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """The mean accuracy of one kind by image size."""
    if not rows:
        return
    kind = rows[0]["kind"]
    sizes = [row["size"] for row in rows]
    values = [100 * row["mean"] for row in rows]
    axes.plot(sizes, values, marker="o", color=COLORS[kind], label=kind, markersize=4)


def draw_ahead(axes: Axes, rows: list[dict[str, Any]], seed: int) -> None:
    """How far one kind is ahead of all keys with one seed, by image size."""
    pairs = [(row["size"], row["beside all keys"]) for row in rows if row["beside all keys"]]
    here = [
        (size, pair, pair["seeds"].index(seed)) for size, pair in pairs if seed in pair["seeds"]
    ]
    if not here:
        return
    sizes = [size for size, _, _ in here]
    values = [pair["by_seed"][at] for _, pair, at in here]
    bars = [pair["half_over_images_by_seed"][at] for _, pair, at in here]
    color = COLORS[rows[0]["kind"]]
    style = LINES[seed % len(LINES)]
    axes.errorbar(
        sizes, values, bars, linestyle=style, marker="o", markersize=3, color=color, capsize=2
    )
