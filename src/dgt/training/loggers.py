"""The curves of a training on the disk: `metrics.csv` and TensorBoard's events. A full disk costs only them.

Lightning's own loggers end the training where a write fails; TensorBoard's does so with a thread's traceback, and the
one for CSV may leave half a table. Here a failure is told once, and writing goes on as soon as there is room.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray

from dgt.training.files import write_whole

ROOM = 1 << 16  # bytes that must fit on the disk before TensorBoard is tried again


class MetricsTable(CSVLogger):
    """`metrics.csv`: rows that cannot be written now are kept and written later, with the columns they need."""

    _told = False

    @rank_zero_only
    def save(self) -> None:
        """Append the new rows, all of them or none; a failure is told once in a row."""
        path = Path(self.log_dir) / "metrics.csv"
        size: int | None = None
        try:
            self._widen(path)
            size = path.stat().st_size if path.is_file() else 0
            super().save()
            self._told = False
        except OSError as error:
            with suppress(OSError):
                if size:
                    os.truncate(path, size)
                elif size == 0:
                    path.unlink()
            if not self._told:
                _tell(f"{path} could not be written, its rows are kept for later", error)
            self._told = True

    def _widen(self, path: Path) -> None:
        """Give the table the columns that the new rows need, whole or not at all."""
        table = self.experiment
        names = sorted({*table.metrics_keys, *(name for row in table.metrics for name in row)})
        if names == table.metrics_keys or not path.is_file():
            return
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        write_whole(path, table_text(names, rows))
        table.metrics_keys = names


class Board(TensorBoardLogger):
    """TensorBoard's curves and pictures; after a failed write a new file of events begins once there is room."""

    _lost = False

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log numbers."""
        with self._putting_up_with_failures():
            if self._has_room():
                super().log_metrics(metrics, step)

    def add_image(self, name: str, picture: NDArray[np.uint8], step: int) -> None:
        """Log a picture (H, W, 3)."""
        with self._putting_up_with_failures():
            if self._has_room():
                self.experiment.add_image(name, picture, step, dataformats="HWC")

    def save(self) -> None:
        """Flush."""
        with self._putting_up_with_failures():
            if self._has_room():
                super().save()

    def finalize(self, status: str) -> None:
        """Flush and close."""
        with self._putting_up_with_failures():
            if self._has_room():
                super().finalize(status)

    def _has_room(self) -> bool:
        if self._lost:
            with suppress(OSError), tempfile.TemporaryFile(dir=self.log_dir) as file:
                file.write(bytes(ROOM))
                file.flush()
                os.fsync(file.fileno())
                self._lost = False
        return not self._lost

    @contextmanager
    def _putting_up_with_failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # Lightning wraps whatever the writer raises in a ValueError
            reason = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(reason, OSError):
                raise
            _tell("TensorBoard's events could not be written, some are missing", reason)
            self._lost, self._experiment = True, None
            self._kwargs.pop("purge_step", None)  # the next file must not take back what this one holds


@contextmanager
def quiet_writer_threads() -> Iterator[None]:
    """Print no traceback where TensorBoard's thread meets a full disk: the next call of its writer raises the error."""
    usual = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__name__ == "_AsyncWriterThread"):
            usual(failure)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = usual


def table_text(names: list[str], rows: list[dict[str, str]]) -> str:
    """A CSV table with these columns; what else is in the rows is left out."""
    text = StringIO(newline="")
    table = csv.DictWriter(text, fieldnames=names, extrasaction="ignore")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _tell(what: str, error: OSError) -> None:
    print(f"dgt: warning: {what}: {error}", file=sys.stderr, flush=True)
