"""Figures of trainings: a segmenter's validation images with truth and prediction, and the learning
curves of any runs.

    python benchmarks/training_figures.py images RUN OUT.png [--items 0 1 2 3] [--data.root DIR ...]
    python benchmarks/training_figures.py curves OUT.png NAME=RUN NAME=RUN [--measure top1]

Images are drawn as the run's recipe tests them; keys of the recipe can be changed as for
`dgt evaluate`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from dgt.data.image_io import BrokenImage
from dgt.figures import save_figure
from dgt.figures.label_map import figure_comparison
from dgt.runs import load_run
from dgt.runs.recipe import build_data, parse_recipe
from dgt.tasks.segment import predict

MEASURES = {"miou": "mIoU", "top1": "top-1"}


def draw_images(run_path: str, out: str, items: list[int], overrides: list[str]) -> None:
    """Draw a row of image, truth and prediction for some items of the validation split."""
    run = load_run(run_path)
    data = build_data(parse_recipe(run.recipe.to_dict(), overrides))
    data.setup("validate")
    rows = []
    for item in items:
        dataset = data.datasets["val"]
        sample = dataset.reader[dataset.indices[item]]
        if isinstance(sample, BrokenImage):
            raise ValueError(f"{sample.path} cannot be read: {sample.reason}")
        pixels = np.array(sample[0])
        label_map = predict(run, torch.from_numpy(pixels).permute(2, 0, 1), 0).label_map
        rows.append((pixels, sample[1], label_map))
    save_figure(figure_comparison(rows, run.class_names), out, dpi=100)


def read_curve(run: str, name: str) -> tuple[list[int], list[float]]:
    """The epochs of a run, from 1, and the values of a metric in them."""
    lines = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if name in row and "epoch" in row]
    return [row["epoch"] for row in rows], [row[name] for row in rows]


def draw_curves(out: str, runs: list[str], measure: str) -> None:
    """Draw the training loss and a measure of validation by epoch, a line for each run."""
    figure = Figure(figsize=(7.2, 2.6), facecolor="white", layout="constrained")
    loss, measured = figure.subplots(1, 2)
    for entry, color in zip(runs, ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), strict=False):
        name, _, run = entry.partition("=")
        epochs, losses = read_curve(run, "train/loss_epoch")
        loss.plot(epochs, losses, color=color, label=name)
        epochs, shares = read_curve(run, f"val/{measure}")
        measured.plot(
            epochs, [100 * share for share in shares], "o-", color=color, markersize=3, label=name
        )
    for axes, title in ((loss, "training loss"), (measured, f"validation {MEASURES[measure]}, %")):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("epoch", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_ylim(bottom=0)
    measured.legend(fontsize=8, frameon=False, loc="lower right")
    save_figure(figure, out, dpi=130)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The options of the command line, and the settings of the recipe that it changes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    images = commands.add_parser("images")
    images.add_argument("run")
    images.add_argument("out")
    images.add_argument("--items", type=int, nargs="+", default=[0, 1, 2, 3])
    curves = commands.add_parser("curves")
    curves.add_argument("out")
    curves.add_argument("runs", nargs="+", metavar="NAME=RUN")
    curves.add_argument("--measure", choices=MEASURES, default="miou")
    return parser.parse_known_args()


def main() -> None:
    """Draw the figure that was asked for."""
    options, overrides = parse_arguments()
    if options.what == "images":
        draw_images(options.run, options.out, options.items, overrides)
    else:
        draw_curves(options.out, options.runs, options.measure)


if __name__ == "__main__":
    main()
