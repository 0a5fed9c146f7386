"""Imagenette in minutes of one core: DGT-Nano beside two CNNs from timm, each with three learning rates.

    python benchmarks/imagenette_peers.py IMAGENETTE [--minutes 12] [--out runs/imagenette_peers]
    python benchmarks/imagenette_peers.py IMAGENETTE --minutes 30 --models dgt_nano --rates 0.001

All models have 2.2 to 2.5 million parameters and train with the recipe `imagenette_nano`, each for as
many epochs as fit into the minutes on one core: `IMAGES_PER_SECOND` was measured in a few seconds of
each. Only the learning rate differs between the runs of a model, and all models get the same three;
longer runs may be limited to the best of them. Results are those of the last epoch. As many trainings
run at a time as there are cores. The same call again continues where it stopped. Rows are added to
benchmarks/results/imagenette_peers.json, one when each run ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from imagenette_cpu import data_parser, measure, parse_arguments, train

from dgt.utils.atomic_write import write_json
from dgt_command.measures import machine

IMAGES_PER_SECOND = {"dgt_nano": 90, "regnetx_002": 193, "mobilenetv4_conv_small": 119}
TRAINING_IMAGES = 9469
RATES = (5e-4, 1e-3, 2e-3)  # for batches of 64
RESULTS = Path(__file__).parent / "results" / "imagenette_peers.json"


class Job(NamedTuple):
    """One training: a model with a learning rate, for a number of minutes."""

    model: str
    rate: float
    minutes: int
    out: Path

    @property
    def epochs(self) -> int:
        """How many epochs fit into the minutes."""
        return round(60 * self.minutes * IMAGES_PER_SECOND[self.model] / TRAINING_IMAGES)

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.out / f"{self.model}_{self.minutes}_{self.rate:g}"

    @property
    def label(self) -> dict[str, Any]:
        """What tells its row from the others."""
        return {"minutes": self.minutes, "model": self.model, "rate": self.rate}


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """All trainings, the learning rate of the recipe first."""
    rates = sorted(options.rates, key=lambda rate: rate != 1e-3)
    pairs = itertools.product(rates, options.models)
    return [Job(model, rate, options.minutes, options.out) for rate, model in pairs]


def finish(job: Job, data: str, cores: queue.Queue[int]) -> dict[str, Any] | None:
    """Train what is not trained yet, on a free core, and measure it; None if it was stopped."""
    core = cores.get()
    try:
        if not (job.run / "results.json").is_file():
            warmup = str(min(3, job.epochs // 5))
            changes = {"optimizer.lr": f"{job.rate:g}", "schedule.warmup_epochs": warmup}
            status = train(core, job.model, job.epochs, data, job.run, changes).wait()
            if status or not (job.run / "results.json").is_file():
                return None
        return {**job.label, **measure(job.run, data)}
    finally:
        cores.put(core)


def finished_rows(jobs: list[Job], data: str) -> Iterator[tuple[Job, dict[str, Any] | None]]:
    """Work on all jobs, as many at a time as there are cores, and yield each when it ends."""
    cores: queue.Queue[int] = queue.Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)
    with ThreadPoolExecutor(cores.qsize()) as pool:
        works = {pool.submit(finish, job, data, cores): job for job in jobs}
        for work in as_completed(works):
            yield works[work], work.result()


def add_row(row: dict[str, Any], label: dict[str, Any]) -> None:
    """Write a row into the file, in place of one of the same training."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.is_file() else []
    others = [other for other in rows if not other.items() >= label.items()]
    ordered = sorted([*others, row], key=lambda row: (row["minutes"], row["model"], row["rate"]))
    write_json(RESULTS, {"machine": machine(), "rows": ordered})


def main() -> None:
    """Train and measure what is missing; exit with 1 if something was stopped or failed."""
    parser = data_parser(str(__doc__), "runs/imagenette_peers")
    parser.add_argument("--minutes", type=int, default=12, help="of one core, for each training")
    known = list(IMAGES_PER_SECOND)
    parser.add_argument("--models", nargs="+", choices=known, default=known)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="learning rates")
    options = parse_arguments(parser)
    if options.minutes < 1:
        parser.error(f"--minutes must be at least 1, got {options.minutes}")
    torch.set_num_threads(1)
    stopped = []
    for job, row in finished_rows(jobs_of(options), options.data):
        if row is None:
            stopped.append(job.run.name)
        else:
            add_row(row, job.label)
    if stopped:
        names = ", ".join(stopped)
        sys.exit(f"error: {names} stopped before the end; run the same command again to continue")


if __name__ == "__main__":
    main()
