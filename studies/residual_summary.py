"""Compares the kinds of attention of `studies.residual_training`, from the records of its runs.

    python -m studies.residual_summary

reads all records in `benchmarks/results/residual_training/`, and writes `residual_training.json`
beside that folder and the figure `docs/images/residual-training.png`. Runs of one data set and seed
are compared with all keys image by image, if they were trained for as many epochs, in the same
precision, on the same kind of processor; others are left out, and named. Seeds may differ in
precision and processor, and need not all be there; rows of other epochs are rows of their own.

A kind is **on par** with all keys if the 95 % interval of its difference over seeds lies above -0.5
points, **behind** if it lies below that, and **undecided** otherwise; then it is estimated how many
seeds would decide, if differences vary as they did so far.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter
from torch import Tensor

from dgt.figures import save_figure
from dgt.figures.drawing import tidy
from dgt.models.variants import NANO
from dgt.tasks.segment import segmentation_scores
from dgt.utils.errors import UserError
from dgt.utils.records import STUDENT, interval, markdown_table, write_record
from studies.residual_training import (
    ALL_KEYS,
    DATA_SETS,
    KINDS,
    RANDOM_KEYS,
    RECORDS,
    RESIDUAL_KEYS,
)

MARGIN = -0.5  # points: what still counts as on par
MOST_SEEDS = 8  # a comparison that needs more is left undecided
SAME = ("epochs", "precision", "processor")  # of runs that are compared
COLORS = dict(zip(KINDS, ("#0072b2", "#d55e00", "#009e73", "#7a5ca8", "#777777"), strict=True))
SIDE = {"imagenette": lambda size: (size, size), "camvid": lambda size: (size * 3 // 4, size)}
"""Data set -> size of a test -> height and width of its images in pixels."""


class Pair(NamedTuple):
    """A run and one of all keys with the same seed, tested at one size.

    Attributes:
        seed: of both.
        score: top-1 or mIoU of the run, in %.
        ahead: points by which it is ahead of all keys.
        half: of the 95 % interval of `ahead` over images.
    """

    seed: int
    score: float
    ahead: float
    half: float


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All records of the study.

    Raises:
        UserError: If there are none, or a file is no record.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("study") != "residual_training" or record["kind"] not in KINDS:
            raise UserError(f"--records must hold records of this study, {path} is something else")
        records.append(record)
    if not records:
        raise UserError(f"--records must hold records, {folder} has none")
    return records


def correct(test: dict[str, Any]) -> Tensor:
    """(images,): 1 for every image of a test that was classified correctly, else 0."""
    right = torch.ones(test["images"], dtype=torch.float64)
    right[[int(index) for index in test["wrong"].split()]] = 0
    return right


def confusion(test: dict[str, Any]) -> Tensor:
    """(images, classes, classes): the confusion matrix of every image of a test."""
    rows = torch.tensor([[int(word) for word in text.split()] for text in test["confusions"]])
    classes = math.isqrt(rows.shape[1])
    return rows.view(-1, classes, classes)


def miou_left_out(test: dict[str, Any]) -> Tensor:
    """(images + 1,): mIoU of all images, and with each of them left out."""
    counts = confusion(test)
    total = counts.sum(0)
    matrices = [total, *(total - one for one in counts)]
    return torch.stack([segmentation_scores(matrix)["miou"] for matrix in matrices])


def compare(test: dict[str, Any], dense: dict[str, Any]) -> tuple[float, float, float]:
    """Score of a test, how far it is ahead of another on the same images, and half of that interval.

    The interval over images is that of the mean of differences for a classifier, and a jackknife's
    for a segmenter, whose mIoU is one of all images together. All in % or points.
    """
    if "wrong" in test:
        right = correct(test)
        pairs = right - correct(dense)
        score, ahead = float(right.mean()), float(pairs.mean())
        half = 1.96 * float(pairs.std()) / math.sqrt(len(pairs))
    else:
        scores = miou_left_out(test)
        ahead, *left_out = (scores - miou_left_out(dense)).tolist()
        score = float(scores[0])
        # a jackknife's interval is (n - 1) times that of its values
        half = (len(left_out) - 1) * (interval(left_out)[1] or 0.0)
    return 100 * score, 100 * ahead, 100 * half


def share_of_products(data_set: str, kind: str, size: int) -> float:
    """Multiply-adds of the attention of both compared layers, as a share of those with all keys.

    Per channel, L tokens that attend in G groups to k keys and M residual keys take (k + M) L twice
    and G L twice, 3 G L for the residual keys (scores of the mean queries and two sums), and for
    M > 1 the clusters of keys, (1 + 5/8) M L; all keys take L squared twice.
    """
    if kind == ALL_KEYS:
        return 1.0
    height, width = SIDE[data_set](size)
    top_k = DATA_SETS[data_set].top_k
    residual = RESIDUAL_KEYS.get(kind, 0)
    products = dense = 0.0
    for stage in (0, 1):
        tokens = math.ceil(height / (4 << stage)) * math.ceil(width / (4 << stage))
        channels = NANO["dims"][stage]
        per_token = 2.0 * (min(top_k, tokens) + residual)
        if kind != RANDOM_KEYS:
            per_token += (5 if residual else 2) * NANO["num_groups"]
        if residual > 1:
            per_token += 1.625 * residual
        products += per_token * tokens * channels
        dense += 2.0 * tokens * tokens * channels
    return products / dense


def seeds_to_decide(ahead: Sequence[float]) -> int | None:
    """With how many seeds the interval would leave out the margin, if differences go on as they are.

    None if that takes more than `MOST_SEEDS`, or if there are too few differences to tell.
    """
    if len(ahead) < 2:
        return None
    away = abs(statistics.fmean(ahead) - MARGIN)
    for count in range(len(ahead) + 1, MOST_SEEDS + 1):
        if STUDENT[count - 2] * statistics.stdev(ahead) / math.sqrt(count) < away:
            return count
    return None


def verdict(ahead: Sequence[float]) -> str:
    """On par, behind, or undecided."""
    mean, half = interval(ahead)
    if half is None:
        return "undecided"
    if mean - half > MARGIN:
        return "on par"
    return "behind" if mean + half < MARGIN else "undecided"


def pairs_of(records: list[dict[str, Any]], data_set: str, kind: str, size: str) -> Iterator[Pair]:
    """Every run of a kind beside the one of all keys with its seed, where both may be compared."""
    dense = dense_runs(records)
    for record in sorted(records, key=lambda record: int(record["seed"])):
        if (record["data_set"], record["kind"]) != (data_set, kind):
            continue
        beside = dense.get((data_set, record["seed"]))
        if beside is None or differences(record, beside):
            continue
        yield Pair(record["seed"], *compare(record["tests"][size], beside["tests"][size]))


def dense_runs(records: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs with all keys, by data set and seed."""
    return {
        (record["data_set"], record["seed"]): record
        for record in records
        if record["kind"] == ALL_KEYS
    }


def differences(record: dict[str, Any], beside: dict[str, Any]) -> list[str]:
    """In what two runs differ that should be the same."""
    return [name for name in SAME if record[name] != beside[name]]


def left_out(records: list[dict[str, Any]]) -> list[str]:
    """The runs that are compared with none of all keys, each with the reason."""
    found = []
    dense = dense_runs(records)
    for record in records:
        beside = dense.get((record["data_set"], record["seed"]))
        name = f"{record['data_set']}, {record['kind']}, seed {record['seed']}"
        if beside is None:
            found.append(f"{name}: all keys were not trained with this seed")
        elif different := differences(record, beside):
            found.append(f"{name}: not as all keys in {', '.join(different)}")
    return found


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Every data set, size and kind: scores, differences to all keys, and the verdict."""
    rows = []
    for data_set, epochs in sorted({(record["data_set"], record["epochs"]) for record in records}):
        own = [
            record
            for record in records
            if (record["data_set"], record["epochs"]) == (data_set, epochs)
        ]
        for size in sorted({size for record in own for size in record["tests"]}, key=int):
            for kind in KINDS:
                pairs = list(pairs_of(own, data_set, kind, size))
                if pairs:
                    about = about_runs(own, kind, [pair.seed for pair in pairs])
                    rows.append(row_of(data_set, int(size), kind, pairs) | about)
    return {"margin": MARGIN, "rows": rows, "left_out": left_out(records)}


def about_runs(records: list[dict[str, Any]], kind: str, seeds: list[int]) -> dict[str, Any]:
    """Epochs of some runs of one data set, and the precisions, processors and commits of these and of all keys."""
    compared = [
        record
        for record in records
        if record["kind"] in (kind, ALL_KEYS) and record["seed"] in seeds
    ]
    about: dict[str, Any] = {
        name: sorted({record[name] for record in compared})
        for name in ("precision", "processor", "commit")
    }
    return {"epochs": compared[0]["epochs"], **about}


def row_of(data_set: str, size: int, kind: str, pairs: list[Pair]) -> dict[str, Any]:
    """What the pairs of one data set, size and kind say."""
    ahead = [pair.ahead for pair in pairs]
    mean, half = interval(ahead)
    found = "-" if kind == ALL_KEYS else verdict(ahead)
    return {
        "data_set": data_set,
        "size": size,
        "kind": kind,
        "share_of_products": share_of_products(data_set, kind, size),
        "seeds": [pair.seed for pair in pairs],
        "score": [pair.score for pair in pairs],
        "ahead": ahead,
        "half_over_images": [pair.half for pair in pairs],
        "mean_ahead": mean,
        "half_over_seeds": half,
        "verdict": found,
        "seeds_to_decide": seeds_to_decide(ahead) if found == "undecided" else None,
    }


def cells(summary: dict[str, Any]) -> list[list[str]]:
    """The heads of the table, then a row for each data set, size and kind."""
    heads = ["data, px", "epochs, precision", "stages one and two attend to", "products, %"]
    heads += ["top-1 or mIoU, %", "points ahead of all keys (over images)", "mean (over seeds)"]
    heads += ["verdict"]
    table = [heads]
    for row in summary["rows"]:
        score = ", ".join(f"{score:.1f}" for score in row["score"])
        place = f"{row['data_set']}, {row['size']}"
        trained = f"{row['epochs']}, {' and '.join(row['precision'])}"
        line = [place, trained, row["kind"], f"{100 * row['share_of_products']:.1f}", score]
        table.append([*line, *(compared(row) if row["kind"] != ALL_KEYS else ["-"] * 3)])
    return table


def compared(row: dict[str, Any]) -> list[str]:
    """The last cells of a row: differences by seed, their mean, and the verdict."""
    pairs = zip(row["ahead"], row["half_over_images"], strict=True)
    by_seed = ", ".join(f"{ahead:+.1f} ± {half:.1f}" for ahead, half in pairs)
    mean = f"{row['mean_ahead']:+.2f}"
    if row["half_over_seeds"] is not None:
        mean += f" ± {row['half_over_seeds']:.2f}"
    return [by_seed, mean, row["verdict"] + needed(row)]


def needed(row: dict[str, Any]) -> str:
    """How many seeds would decide, behind the verdict of an undecided row."""
    if row["verdict"] != "undecided" or len(row["seeds"]) < 2:
        return ""
    count = row["seeds_to_decide"]
    return f" (more than {MOST_SEEDS} seeds)" if count is None else f" ({count} seeds)"


def written(summary: dict[str, Any]) -> str:
    """The table in Markdown, and the runs that were left out."""
    heads, *lines = cells(summary)
    return markdown_table(heads, lines) + "".join(
        f"\nleft out: {one}" for one in summary["left_out"]
    )


def draw(summary: dict[str, Any]) -> Figure:
    """A row of panels for each data set, one panel a size: points ahead of all keys over the share of products."""
    panels_of: dict[tuple[str, int], list[tuple[int, list[dict[str, Any]]]]] = {}
    for (data_set, epochs, size), of_size in itertools.groupby(summary["rows"], key=place_of):
        panels_of.setdefault((data_set, epochs), []).append((size, list(of_size)))
    columns = max(map(len, panels_of.values()))
    shape = (1.2 + 2.2 * max(columns, 3), 0.9 + 2.3 * len(panels_of))
    figure = Figure(figsize=shape, layout="constrained", facecolor="white")
    panels = figure.subplots(len(panels_of), columns, squeeze=False, sharex=True, sharey="row")
    labels: dict[str, Any] = {}
    for line, ((data_set, epochs), found) in zip(panels, panels_of.items(), strict=True):
        for axes in line[len(found) :]:
            axes.set_visible(False)
        for axes, (size, rows) in zip(line, found, strict=False):
            draw_size(axes, rows)
            dense = next(row for row in rows if row["kind"] == ALL_KEYS)
            mean = statistics.fmean(dense["score"])
            axes.set_title(f"{data_set}, {size} px\nall keys: {mean:.1f} %", loc="left", fontsize=9)
            axes.tick_params(labelbottom=True)
            labels |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        score = "mIoU" if data_set == "camvid" else "top-1"
        line[0].set_ylabel(f"points of {score}, {epochs} epochs,\nahead of all keys")
    for axes in panels[-1]:
        axes.set_xlabel("products, of all keys'")
    tidy(*panels.flat, size=8)
    figure.legend(
        list(labels.values()),
        list(labels),
        loc="outside lower center",
        ncols=5,
        fontsize=8,
        frameon=False,
    )
    return figure


def place_of(row: dict[str, Any]) -> tuple[str, int, int]:
    """Data set, epochs and size of a row: those of one panel."""
    return row["data_set"], row["epochs"], row["size"]


def draw_size(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw how far the kinds are ahead of all keys at one size, every seed and their mean.

    Bars are 95 % intervals of the mean: over seeds from three on, before that of the first seed
    over images.
    """
    axes.axhline(0.0, color=COLORS[ALL_KEYS], linewidth=1.0, label=ALL_KEYS)
    axes.axhline(
        MARGIN,
        color=COLORS[ALL_KEYS],
        linewidth=0.8,
        linestyle=":",
        label=f"{abs(MARGIN)} points behind",
    )
    for row in rows:
        if row["kind"] == ALL_KEYS:
            continue
        color, share = COLORS[row["kind"]], row["share_of_products"]
        half = row["half_over_seeds"] if len(row["seeds"]) > 2 else row["half_over_images"][0]
        axes.errorbar(
            share,
            row["mean_ahead"],
            half,
            fmt="o",
            markersize=5,
            capsize=2,
            color=color,
            label=row["kind"],
        )
        if len(row["seeds"]) > 1:
            beside = [share * 1.12] * len(row["ahead"])
            axes.plot(beside, row["ahead"], "o", markersize=2, color=color, alpha=0.6)
    axes.set_xscale("log")
    axes.set_xlim(0.005, 1.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_minor_formatter(NullFormatter())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.residual_summary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    images = RECORDS.parents[2] / "docs" / "images"
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--json", type=Path, default=RECORDS.with_suffix(".json"))
    parser.add_argument("--figure", type=Path, default=images / "residual-training.png")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, write the numbers and the figure, and print the table."""
    options = parse(arguments)
    try:
        summary = summarize(read_records(options.records))
        write_record(options.json, summary)
        if summary["rows"]:
            save_figure(draw(summary), options.figure)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(written(summary))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
