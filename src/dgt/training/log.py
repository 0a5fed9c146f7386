"""What a training writes while it goes on, what one sees of it, and `dgt status`, which reads it from the run's folder.

A full disk costs a line of the log, the metrics or the curves, not the training.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from dgt.tasks import Losses
from dgt.training.run import finished_results, is_run, read_json
from dgt.training.state import Progress, step_checkpoints
from dgt.utils.atomic_write import atomic_write, write_json
from dgt.utils.errors import LOGGER

LOG, METRICS, STATUS = "log.txt", "metrics.jsonl", "status.json"
SECONDS_BETWEEN = 10.0
NEEDED = (
    *("state", "error", "time", "pid", "host", "epoch", "epochs", "step", "steps", "loss", "metrics"),
    *("images_per_second", "memory_bytes", "seconds"),
)
SILENT_AFTER = 300.0  # seconds without a sign of life: a step, or a validation's batch, may take long


class Report(logging.Handler):
    """Tells how a training goes: log lines, `metrics.jsonl`, TensorBoard, `status.json`, and a bar in a terminal.

    Inside its `with` block it prints what the package's logger gets, from INFO on, and adds it to the log of the run in
    `folder`; None is for a process that only trains along: it tells warnings and writes nothing. What cannot be written
    is told once, and costs no more than its numbers.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__(logging.DEBUG if folder is not None else logging.WARNING)
        self.folder, self.status_at, self.start = folder, 0.0, time.perf_counter()
        self.progress, self.first_step = Progress(), 0
        self.facts: dict[str, Any] = {"epochs": 0, "steps": 0, "loss": None, "images_per_second": 0.0}
        self.told: set[str] = set()
        self.board: Any = None
        self.bar = tqdm(disable=True)

    def __enter__(self) -> Report:
        self.before = LOGGER.level, LOGGER.propagate
        LOGGER.setLevel(logging.DEBUG)
        LOGGER.propagate = False
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        LOGGER.removeHandler(self)
        level, LOGGER.propagate = self.before
        LOGGER.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a sentence, a warning on standard error; keep the others."""
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            tqdm.write(f"dgt: warning: {text}", file=sys.stderr)
            return
        if record.levelno >= logging.INFO:
            tqdm.write(text, file=sys.stdout)
        if self.folder is not None and self.folder.is_dir():
            try:
                with (self.folder / LOG).open("a", encoding="utf-8") as log:
                    log.write(f"{datetime.now().astimezone().isoformat(' ', 'seconds')}  {text}\n")
            except OSError as error:
                tqdm.write(f"dgt: warning: the log could not be written: {error}", file=sys.stderr)

    def begin(self, progress: Progress, steps: int, epochs: int, images: int) -> None:
        """Report on a training of so many steps of so many images from here on; rows that lie beyond are taken back."""
        self.progress, self.images, self.first_step = progress, images, progress.step
        self.start = time.perf_counter() - progress.seconds
        self.facts |= {"epochs": epochs, "steps": steps}
        if self.folder is not None:
            self.bar = tqdm(total=steps, initial=progress.step, disable=None, dynamic_ncols=True)
            now = (progress.step, progress.epoch)
            rows = [row for row in read_metrics(self.folder) if row["step"] <= now[0] and row.get("epoch", 0) <= now[1]]
            with self._tolerating("metrics"):
                atomic_write(self.folder / METRICS, "".join(json.dumps(row) + "\n" for row in rows))
        self.write_status("training")

    def begin_epoch(self) -> None:
        """Measure the speed of an epoch from here."""
        self.epoch_start, self.epoch_first_step = time.perf_counter(), self.progress.step

    @property
    def seconds(self) -> float:
        """Wall time of the training, the times between a stop and its resumption left out."""
        return time.perf_counter() - self.start

    def step(self, losses: Losses, rate: float, every: int) -> None:
        """After each step: its numbers every few steps, the bar, and the status now and then."""
        if self.folder is None:
            return
        steps = self.progress.step - self.epoch_first_step
        self.facts["images_per_second"] = round(steps * self.images / (time.perf_counter() - self.epoch_start), 2)
        if self.progress.step % every == 0:
            numbers = {f"train/{name}": float(value) for name, value in losses.items()}
            self.facts["loss"] = numbers["train/loss_step"] = numbers.pop("train/loss")
            self.write_row({"step": self.progress.step, **numbers, "lr": rate})
        loss = "" if self.facts["loss"] is None else f"loss {self.facts['loss']:.4f}, "
        self.bar.set_description(f"epoch {self.progress.epoch + 1}/{self.facts['epochs']}", refresh=False)
        self.bar.set_postfix_str(f"{loss}lr {rate:.2e}, {self._speed()}", refresh=False)
        self.bar.update()
        self.write_status("training", only_if_due=True)

    def epoch(self, loss: float, rate: float, metrics: dict[str, float], summary: str) -> None:
        """After each epoch: its row of numbers and its line; of a validation, if there was one, metrics and summary."""
        epoch, validation = self.progress.epoch, {f"val/{name}": value for name, value in metrics.items()}
        self.write_row({"step": self.progress.step, "epoch": epoch, "train/loss_epoch": loss, **validation})
        parts = [f"epoch {epoch}/{self.facts['epochs']}", f"loss {loss:.4f}", summary, f"lr {rate:.2e}"]
        parts += [f"{time.perf_counter() - self.epoch_start:.1f} s", self._speed()]
        LOGGER.info("  ".join(filter(None, parts)))
        self.write_status("training")

    def write_row(self, row: dict[str, Any]) -> None:
        """Add a row of numbers; its key `step` counts optimizer steps, all but it and `epoch` are curves."""
        if self.folder is None:
            return
        after_half_a_line = "\n" * ("metrics" in self.told)
        with self._tolerating("metrics"), (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(f"{after_half_a_line}{json.dumps(row)}\n")
        with self._tolerating("events"):
            for name in row.keys() - {"step", "epoch"}:
                self._events().add_scalar(name, row[name], row["step"])

    def write_image(self, name: str, image: NDArray[np.uint8]) -> None:
        """Show an image (H, W, 3) in TensorBoard."""
        with self._tolerating("events"):
            self._events().add_image(name, image, self.progress.step, dataformats="HWC")

    def write_status(self, state: str, error: BaseException | None = None, only_if_due: bool = False) -> None:
        """Say in `status.json` where the training is."""
        if self.folder is None or (only_if_due and time.monotonic() - self.status_at < SECONDS_BETWEEN):
            return
        self.status_at = time.monotonic()
        step, left = self.progress.step, self.facts["steps"] - self.progress.step
        self.facts |= {"time": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        self.facts |= {
            "state": state,
            "error": error and str(error),
            "epoch": min(self.progress.epoch + 1, self.facts["epochs"]),
            "step": step,
            "metrics": self.progress.metrics,
            "memory_bytes": memory_in_use(),
            "seconds": round(self.seconds, 1),
            "seconds_left": round(self.seconds / step * left, 1) if step else None,
        }
        with suppress(OSError):
            write_json(self.folder / STATUS, self.facts)

    def close(self) -> None:
        """Write what is left, and take the bar away."""
        super().close()
        self.bar.close()
        with self._tolerating("events"):
            if self.board is not None:
                self.board.close()

    def _speed(self) -> str:
        return f"{self.facts['images_per_second']:.0f} images/s  {memory_in_use() / 2**30:.2f} GiB"

    def _events(self) -> Any:
        if self.board is None:
            from torch.utils.tensorboard import SummaryWriter

            resumed = self.first_step > 0 and "events" not in self.told
            self.board = SummaryWriter(str(self.folder), purge_step=self.first_step + 1 if resumed else None)
        return self.board

    @contextmanager
    def _tolerating(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if what not in self.told:
                LOGGER.warning(f"{self.folder}: {what} could not be written, training goes on: {error}")
            self.told.add(what)
            if what == "events" and self.board is not None:
                board, self.board = self.board, None  # the next row begins another file
                with suppress(OSError):
                    board.close()  # its thread may still hold rows that can be written


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics, none before the first; a line that a kill or a full disk cut off is left out."""
    rows, path = [], folder / METRICS
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def memory_in_use() -> int:
    """Bytes: the most that was allocated on the GPU, or without one the most that this process held in memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def duration(seconds: float) -> str:
    """A human-readable length of time: `0:12:05`, `2 days, 4:00:00`."""
    return str(timedelta(seconds=round(seconds)))


def run_status(folder: str | Path) -> dict[str, Any]:
    """What is known of a run: what `status.json` holds, and `folder`, `age`, `checkpoints` (newest first) and `log`.

    `state` is "begun" (no step yet), "training", "validating", "finished", "stopped" (asked to), "failed" (see
    `error`), "killed" (its process is gone) or "silent" (no sign of life). FileNotFoundError for what is not the folder
    of a run, UserError where a file in it is damaged.
    """
    folder, now = Path(folder), time.time()
    if not is_run(folder):
        raise FileNotFoundError(f"{str(folder)!r} is not the folder of a run: it has no recipe.yaml")
    status: dict[str, Any] = {"state": "begun", "time": (folder / "recipe.yaml").stat().st_mtime}
    if (folder / STATUS).is_file():
        status = read_json(folder / STATUS, NEEDED)
    status |= {"folder": str(folder), "age": now - status["time"]}
    if finished_results(folder) is not None:
        status["state"] = "finished"
    elif status["state"] in ("training", "validating"):
        gone = status["host"] == socket.gethostname() and not _is_alive(status["pid"])
        status["state"] = "killed" if gone else "silent" if status["age"] > SILENT_AFTER else status["state"]
    files = [(path.name, path.stat()) for path in step_checkpoints(folder)]
    status["checkpoints"] = [{"name": name, "age": now - at.st_mtime, "bytes": at.st_size} for name, at in files]
    log = folder / LOG
    status["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:] if log.is_file() else []
    return status


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # somebody else's
    return True


def status_text(status: dict[str, Any]) -> str:
    """`run_status` in human-readable lines."""
    ago = f" {duration(status['age'])}"
    after = {
        **dict.fromkeys(("training", "validating"), f", {duration(status.get('seconds_left') or 0.0)} left"),
        **dict.fromkeys(("stopped", "killed"), f"{ago} ago; the same command with `--resume auto` resumes"),
        **{"silent": f": no sign of life for{ago}", "failed": f"{ago} ago: {status.get('error')}"},
    }
    lines = [f"{status['folder']}: {status['state']}{after.get(status['state'], f'{ago} ago')}"]
    if "step" in status:
        lines += [f"  epoch {status['epoch']}/{status['epochs']}, step {status['step']}/{status['steps']}"]
        lines[-1] += "" if status["loss"] is None else f", loss {status['loss']:.4f}"
        lines[-1] += f", {status['images_per_second']:.0f} images/s, {status['memory_bytes'] / 2**30:.2f} GiB"
        lines[-1] += f", trained for {duration(status['seconds'])}"
        lines += ["  " + "  ".join(f"{name} {value:.4f}" for name, value in status["metrics"].items())]
    for last in status["checkpoints"][:1]:
        lines += [f"  last checkpoint {last['name']}, {duration(last['age'])} ago, {last['bytes'] / 2**20:.1f} MiB"]
    return "\n".join([line for line in [*lines, *(f"  {line}" for line in status["log"])] if line.strip()])
