"""What a training writes while it goes on, and what one sees of it. A full disk costs a line, not the training.

```
RUN/log.txt          a line for each epoch, and for whatever else happened: resumed, stopped, interrupted, failed
RUN/metrics.jsonl    a JSON object for every few steps and every epoch: step, losses, learning rate, validation
RUN/events.*         the same for TensorBoard
RUN/status.json      where the training is now, rewritten every few seconds; `dgt status` reads it
```
"""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dgt.utils.atomic_write import atomic_write, write_json
from dgt.utils.errors import LOGGER

LOG, METRICS, STATUS = "log.txt", "metrics.jsonl", "status.json"
QUIET = {"quiet": True}  # `extra` of a record that goes into the log alone, as whoever called shows it
SECONDS_BETWEEN = 10.0
NOTHING_YET: dict[str, Any] = {
    **{"epoch": 0, "epochs": 0, "step": 0, "steps": 0, "loss": None, "metrics": {}},
    **{"images_per_second": 0.0, "memory_bytes": 0, "seconds": 0.0, "seconds_left": None},
}
RECENT = 50  # batches that the rate is measured over


class RunLog(logging.Handler):
    """Inside its `with` block, prints what the package's logger gets, and adds it to the run's log.

    Args:
        folder: the run's folder; None for a process that only trains along, and tells warnings alone.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__(logging.INFO if folder is not None else logging.WARNING)
        self.folder = folder

    def __enter__(self) -> RunLog:
        self.before = LOGGER.level, LOGGER.propagate
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        LOGGER.removeHandler(self)
        level, LOGGER.propagate = self.before
        LOGGER.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a sentence, a warning on standard error, and keep it."""
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            print(f"dgt: warning: {text}", file=sys.stderr, flush=True)
        elif not getattr(record, "quiet", False):
            print(text, flush=True)
        if self.folder is not None and self.folder.is_dir() and record.levelno < logging.WARNING:
            try:
                with (self.folder / LOG).open("a", encoding="utf-8") as log:
                    log.write(f"{datetime.now().astimezone().isoformat(' ', 'seconds')}  {text}\n")
            except OSError as error:
                print(f"dgt: warning: the log could not be written: {error}", file=sys.stderr, flush=True)


class MetricsLog:
    """Rows of numbers in `metrics.jsonl` and TensorBoard; what cannot be written is told once, and later caught up.

    Args:
        folder: the run's folder.
        step: optimizer steps taken where the training begins or goes on.
        epoch: epochs completed there; rows that lie beyond are taken back.
    """

    def __init__(self, folder: Path, step: int = 0, epoch: int = 0) -> None:
        self.path, self.step = folder / METRICS, step
        self.waiting: list[str] = []
        self.told: set[str] = set()
        self.board: Any = None
        if self.path.is_file():
            rows = read_metrics(folder)
            kept = [row for row in rows if row["step"] <= step and row.get("epoch", 0) <= epoch]
            atomic_write(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, row: dict[str, Any]) -> None:
        """Add a row; its key `step` counts optimizer steps, all other numbers are curves."""
        self.waiting.append(json.dumps(row) + "\n")
        self._try("metrics", self._append)
        for name in row.keys() - {"step", "epoch"}:
            self._try("events", partial(self._add_scalar, name, row[name], row["step"]))

    def add_image(self, name: str, image: NDArray[np.uint8], step: int) -> None:
        """Show an image (H, W, 3) in TensorBoard."""
        self._try("events", lambda: self._events().add_image(name, image, step, dataformats="HWC"))

    def close(self) -> None:
        """Write what is left."""
        if self.board is not None:
            self._try("events", self.board.close)

    def _append(self) -> None:
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(self.waiting)
            self.waiting = []
        except OSError:
            with suppress(OSError), self.path.open("r+b") as file:
                file.truncate(size)  # no half lines
            raise

    def _add_scalar(self, name: str, value: float, step: int) -> None:
        self._events().add_scalar(name, value, step)

    def _events(self) -> Any:
        if self.board is None:
            from torch.utils.tensorboard import SummaryWriter

            purge = {"purge_step": self.step + 1} if self.step and "events" not in self.told else {}
            self.board = SummaryWriter(str(self.path.parent), **purge)
        return self.board

    def _try(self, what: str, write: Callable[[], Any]) -> None:
        try:
            write()
            self.told.discard(what) if what == "metrics" else None
        except OSError as error:
            if what == "events":
                self.board = None  # the next row begins another file
            if what not in self.told:
                LOGGER.warning(f"{self.path.parent}: {what} could not be written, training goes on: {error}")
            self.told.add(what)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics; a last line that a kill cut off is left out.

    Args:
        folder: the run's folder.
    """
    rows = []
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


class Throughput:
    """How fast a training goes: images a second, and the time left at the speed so far, validations included.

    Args:
        images_per_batch: images of one batch over all processes.
        seconds: trained so far.
    """

    def __init__(self, images_per_batch: int, seconds: float = 0.0) -> None:
        self.images_per_batch, self.seconds_before = images_per_batch, seconds
        self.start = time.perf_counter()
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.batches = 0

    def count(self, batches: int) -> None:
        """Count batches that are done now."""
        self.batches += batches
        self.recent.extend([time.perf_counter()] * batches)

    @property
    def seconds(self) -> float:
        """Wall time of the training, the times between a stop and its resumption left out."""
        return self.seconds_before + time.perf_counter() - self.start

    @property
    def images_per_second(self) -> float:
        """Over the last batches; 0 before the second."""
        if len(self.recent) < 2:
            return 0.0
        return (len(self.recent) - 1) * self.images_per_batch / max(self.recent[-1] - self.recent[0], 1e-9)

    def seconds_left(self, batches: int) -> float | None:
        """Until so many more batches are done; None before the first of this process."""
        return (time.perf_counter() - self.start) / self.batches * batches if self.batches else None


class StatusFile:
    """`status.json`: rewritten every few seconds while a training goes on, and at its end.

    Args:
        folder: the run's folder; None for a process that only trains along.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.written = folder, 0.0
        self.facts: Callable[[], dict[str, Any]] = lambda: dict(NOTHING_YET)  # set once there is a training

    def is_due(self) -> bool:
        """Whether the last one is some seconds old."""
        return self.folder is not None and time.monotonic() - self.written >= SECONDS_BETWEEN

    def write(self, state: str, error: BaseException | None = None) -> None:
        """Say where the training is; a full disk does not stop it here."""
        if self.folder is None:
            return
        self.written = time.monotonic()
        place = {"time": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        with suppress(OSError):
            write_json(self.folder / STATUS, {"state": state, "error": error and str(error), **place, **self.facts()})


class ProgressBar:
    """Inside its `with` block, a bar with the numbers of the last step, where someone watches a terminal.

    Args:
        total: optimizer steps of the whole training.
        shown: whether to show it at all; it needs a terminal besides.
    """

    def __init__(self, total: int, shown: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        texts = TextColumn("{task.description}"), TextColumn("{task.fields[numbers]}")
        self.bar = Progress(
            texts[0], BarColumn(), MofNCompleteColumn(), texts[1], disable=not (shown and sys.stdout.isatty())
        )
        self.task = self.bar.add_task("", total=total, numbers="")

    def __enter__(self) -> ProgressBar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, step: int, description: str, numbers: dict[str, str]) -> None:
        """Move to a step."""
        text = "  ".join(f"{name} {value}" for name, value in numbers.items())
        self.bar.update(self.task, completed=step, description=description, numbers=text)


def memory_in_use() -> int:
    """Bytes: the most that was allocated on the GPU, or without one the most that this process held in memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def duration(seconds: float) -> str:
    """A human-readable length of time: `42 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes:.0f} min"
    if hours < 24:
        return f"{int(hours)} h {int(minutes % 60):02d} min"
    return f"{int(days)} d {int(hours % 24)} h"
