"""Logging during training: log, metrics, curves, status and progress bar.

A full disk loses lines of the log, of what is printed, the metrics or the curves, but does not stop
the training; nor does a reader of its output that is gone.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from dgt.runs.checkpoints import Progress
from dgt.runs.folder import METRICS
from dgt.runs.status import INITIAL_STATUS, STATUS
from dgt.tasks import Losses
from dgt.training.tracker import Tracker
from dgt.utils.atomic_write import json_text, write_json
from dgt.utils.class_names import encodable
from dgt.utils.errors import LOGGER

LOG = "log.txt"
SECONDS_BETWEEN = 10.0
"""Seconds between two updates of the status while its state stays the same."""


class Report(logging.Handler):
    """Reports the progress of a training: log lines, `metrics.jsonl`, TensorBoard, `status.json`,
    and a bar in a terminal.

    Inside its `with` block it prints what the package's logger gets, and adds it to the log of the
    run in `folder`; None is for a process that only trains along: it prints warnings and writes
    nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__(logging.DEBUG if folder is not None else logging.WARNING)
        self.folder, self.progress, self.start = folder, Progress(), time.perf_counter()
        self.status: dict[str, Any] = dict(INITIAL_STATUS)
        self.written = 0.0
        self.reported: set[str] = set()
        self.board: Any = None
        self.tracker: Tracker | None = None
        self.bar = tqdm(disable=True)

    def __enter__(self) -> Report:
        self.before = LOGGER.level, LOGGER.propagate
        LOGGER.setLevel(logging.DEBUG)
        LOGGER.propagate = False
        LOGGER.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Record in the log and the status how it ended; the caller shows errors."""
        if error is None:
            state = "finished"
        elif isinstance(error, SystemExit | KeyboardInterrupt):
            state = "stopped"
        else:
            state = "failed"
        if kind is not None and not isinstance(error, SystemExit):
            LOGGER.debug(f"{state}: {str(error).partition(chr(10))[0] or kind.__name__}")
        self.write_status(state, str(error) if state == "failed" else None)
        with self._tolerating("the progress bar"):
            self.bar.close()
        with self._tolerating("events"):
            if self.board is not None:
                self.board.close()
        if self.tracker is not None:
            self.tracker.close()
        LOGGER.removeHandler(self)
        level, LOGGER.propagate = self.before
        LOGGER.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, warnings on stderr, and add it to the log."""
        text = encodable(record.getMessage())
        if record.levelno >= logging.WARNING:
            self._print(f"dgt: warning: {text}", "standard error", sys.stderr)
        elif record.levelno >= logging.INFO:
            self._print(text, "standard output", sys.stdout)
        if self.folder is not None and self.folder.is_dir():
            with (
                self._tolerating("the log"),
                (self.folder / LOG).open("a", encoding="utf-8") as log,
            ):
                log.write(f"{datetime.now().astimezone().isoformat(' ', 'seconds')}  {text}\n")

    def _print(self, text: str, name: str, stream: Any) -> None:
        """Print a line above the bar, where there is such a stream."""
        if stream is not None:
            with self._tolerating(name):
                tqdm.write(text, file=stream)

    def begin(self, progress: Progress, steps: int, epochs: int, images: int) -> None:
        """Start to report on a training.

        Args:
            progress: how far it is.
            steps: how many it takes in all.
            epochs: how many it takes in all.
            images: of a step, over all processes."""
        self.progress, self.images = progress, images
        self.start = time.perf_counter() - progress.seconds
        self.status |= {"epochs": epochs, "steps": steps}
        if self.folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            with self._tolerating("the progress bar"):
                self.bar = tqdm(
                    total=steps, initial=progress.step, disable=None, dynamic_ncols=True
                )
            with self._tolerating("events"):
                # what an earlier process drew of the steps to come
                self.board = SummaryWriter(
                    str(self.folder), purge_step=progress.step + 1 if progress.step else 0
                )
        self.write_status("training")

    def begin_epoch(self) -> None:
        """Measure the speed of an epoch from here."""
        self.epoch_start, self.epoch_first_step = time.perf_counter(), self.progress.step

    def step(self, losses: Losses, rate: float, every: int) -> None:
        """After each step: its numbers every few steps, the bar, and the status now and then."""
        if self.folder is None:
            return
        steps = self.progress.step - self.epoch_first_step
        seconds = time.perf_counter() - self.epoch_start
        self.status["images_per_second"] = round(steps * self.images / seconds, 2)
        if self.progress.step % every == 0:
            numbers = {f"train/{name}": float(value) for name, value in losses.items()}
            numbers["train/loss_step"] = numbers.pop("train/loss")
            self.status["loss"] = round(numbers["train/loss_step"], 4)
            self.write_row({"step": self.progress.step, **numbers, "lr": rate})
        epoch = f"epoch {self.progress.epoch + 1}/{self.status['epochs']}"
        with self._tolerating("the progress bar"):  # of a terminal that is gone
            self.bar.set_description(epoch, refresh=False)
            self.bar.set_postfix(
                loss=self.status["loss"], lr=rate, speed=self._speed(), refresh=False
            )
            self.bar.update()
        self.write_status("training")

    def epoch(
        self, loss: float | None, rate: float, metrics: dict[str, float], summary: str
    ) -> None:
        """After each epoch: its row of numbers and its line.

        The loss is None for an epoch without a step; of a validation, if there was one, metrics and
        summary.
        """
        epoch = self.progress.epoch
        validation = {f"val/{name}": value for name, value in metrics.items()}
        trained = {} if loss is None else {"train/loss_epoch": loss}
        self.write_row({"step": self.progress.step, "epoch": epoch, **trained, **validation})
        parts = [
            f"epoch {epoch}/{self.status['epochs']}",
            "no step" if loss is None else f"loss {loss:.4f}",
            summary,
            f"lr {rate:.2e}",
        ]
        parts += [f"{time.perf_counter() - self.epoch_start:.1f} s", self._speed()]
        LOGGER.info("  ".join(filter(None, parts)))

    def write_row(self, row: dict[str, Any]) -> None:
        """Add a row of numbers.

        Its key `step` counts optimizer steps, all but it and `epoch` are curves.
        """
        if self.folder is None:
            return
        after_half_a_line = "\n" * ("metrics" in self.reported)
        with (
            self._tolerating("metrics"),
            (self.folder / METRICS).open("a", encoding="utf-8") as file,
        ):
            file.write(f"{after_half_a_line}{json_text(row)}\n")
        with self._tolerating("events"):
            for name in row.keys() - {"step", "epoch"} if self.board is not None else ():
                self.board.add_scalar(name, row[name], row["step"])
        if self.tracker is not None:
            self.tracker.log({key: row[key] for key in row if key != "step"}, row["step"])

    def write_image(self, name: str, image: NDArray[np.uint8]) -> None:
        """Show an image (H, W, 3) in TensorBoard."""
        if self.board is not None:
            self.board.add_image(name, image, self.progress.step, dataformats="HWC")

    def write_status(self, state: str, error: str | None = None) -> None:
        """Write `status.json`: at once if the state has changed, else every few seconds."""
        progress, now = self.progress, time.perf_counter()
        progress.seconds = now - self.start
        # not by the time of day, which may be set back
        recent = state == self.status["state"] and now - self.written < SECONDS_BETWEEN
        if self.folder is None or recent:
            return
        self.written = now
        left = (
            progress.seconds / progress.step * (self.status["steps"] - progress.step)
            if progress.step
            else None
        )
        self.status |= {
            **asdict(progress),
            "state": state,
            "error": error,
            "time": time.time(),
            "seconds_left": left,
        }
        self.status |= {"pid": os.getpid(), "host": socket.gethostname()}
        with self._tolerating("the status"):
            write_json(self.folder / STATUS, self.status)

    def _speed(self) -> str:
        memory = (
            f"  {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
            if torch.cuda.is_available()
            else ""
        )
        return f"{self.status['images_per_second']:.0f} images/s{memory}"

    @contextmanager
    def _tolerating(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:  # TensorBoard writes in no folder of other bytes
            first, self.reported = what not in self.reported, self.reported | {what}
            if first:
                LOGGER.warning(
                    f"{self.folder}: {what} could not be written, training continues: {error}"
                )
