"""Imagenette in hours of two cores, evaluated at 128 px: DGT-Nano beside a timm model of its size.

    python benchmarks/imagenette_cpu.py IMAGENETTE [--hours 1] [--out runs/imagenette_cpu]

Both train with the recipe `imagenette_nano` at the same time, each on a core of its own, for as many
epochs as fit into twice the hours; `EPOCHS` was set from the images per second in a minute of each.
The same call again continues where it stopped. Rows are added to
benchmarks/results/imagenette_cpu.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from training_figures import read_curve

from dgt.training import evaluate
from dgt.utils.atomic_write import write_json
from dgt_command.measures import machine

EPOCHS = {"dgt_nano": 62, "edgenext_x_small": 80}  # in an hour of two cores
RESULTS = Path(__file__).parent / "results" / "imagenette_cpu.json"


def train(
    core: int,
    model: str,
    epochs: int,
    data: str,
    run: Path,
    changes: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Start or continue a training on one core, in a process of its own; `changes` are of its recipe."""
    settings = {
        "data.root": data,
        "out": str(run),
        "model.name": model,
        "schedule.epochs": str(epochs),
        **changes,
    }
    options = [word for key, value in settings.items() for word in (f"--{key}", value)]
    command = [
        sys.executable,
        "-m",
        "dgt",
        "train",
        "imagenette_nano",
        "--resume",
        "auto",
        *options,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    training = subprocess.Popen([*command, "--trainer.accelerator", "cpu"], env=environment)
    os.sched_setaffinity(training.pid, {core})
    return training


def unfinished(runs: dict[str, Path]) -> list[str]:
    """The models whose run is not finished. One that is stopped by a signal ends without an error."""
    return [model for model, run in runs.items() if not (run / "results.json").is_file()]


def measure(run: Path, data: str) -> dict[str, Any]:
    """A row of a finished run: its curve, and the evaluation of its last weights at both sizes."""
    found = json.loads((run / "results.json").read_text(encoding="utf-8"))
    row = {
        key: found[key]
        for key in ("model", "seed", "parameters", "epochs", "seconds", "versions", "device")
    }
    row["validated"], row["curve"] = read_curve(str(run), "val/top1")
    for size in (96, 128):
        settings = ["--data.root", data, "--data.image_size", str(size)]
        metrics = evaluate(run, [*settings, "--trainer.accelerator", "cpu"])
        row[f"at_{size}"] = {key: metrics[key] for key in ("top1", "top5", "images")}
    return row


def train_all(runs: dict[str, Path], options: argparse.Namespace) -> None:
    """Train the models whose run is not finished, each on a core; exit if one of them fails."""
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    trainings = [
        train(core, model, options.hours * EPOCHS[model], options.data, runs[model])
        for model, core in zip(unfinished(runs), cores, strict=False)
    ]
    statuses = [training.wait() for training in trainings]
    if any(statuses):
        sys.exit(1)  # the training said why
    stopped = unfinished(runs)
    if stopped:
        names = " and ".join(stopped)
        sys.exit(f"error: {names} stopped before the end; run the same command again to continue")


def data_parser(about: str, out: str) -> argparse.ArgumentParser:
    """A parser of the folder of the images, and of the folder of the runs with a default."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="folder with train/CLASS and val/CLASS")
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of the command line; exits with a sentence if there are no training images."""
    options = parser.parse_args()
    train_folder = Path(options.data, "train")
    if not train_folder.is_dir():
        parser.error(f"there is no folder {train_folder}")
    return options


def main() -> None:
    """Train the models that are not trained yet, evaluate both, and add the rows to the file."""
    parser = data_parser(str(__doc__), "runs/imagenette_cpu")
    parser.add_argument("--hours", type=int, default=1, help="of two cores, for each model")
    options = parse_arguments(parser)
    runs = {model: options.out / f"{model}_{options.hours}" for model in EPOCHS}
    train_all(runs, options)
    torch.set_num_threads(1)
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.is_file() else []
    rows = [row for row in rows if row["hours"] != options.hours]
    rows += [{"hours": options.hours, **measure(run, options.data)} for run in runs.values()]
    write_json(RESULTS, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
