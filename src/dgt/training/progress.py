"""What a person sees of a training: the bar, a log that needs no tools, and the state that `dgt status` reads.

```
RUN/log.txt        a line for each epoch, and for whatever else happened: resumed, stopped, interrupted, failed
RUN/status.json    where the training is now, rewritten every few seconds
```
"""

from __future__ import annotations

import math
import os
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar

from dgt.training.files import write_json
from dgt.training.signals import Interrupted

STATUS = "status.json"
LOG = "log.txt"
SECONDS_BETWEEN = 10.0
RECENT = 50  # batches that the rate is measured over

Shown: TypeAlias = dict[str, int | str | float | dict[str, float]]


class Journal:
    """The run's log: sentences for people, each a line with its time; printed as well.

    Args:
        folder: the run's folder; None for a process that only trains along.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def say(self, sentence: str) -> None:
        """Print a sentence and add it to the log; a log that cannot be written costs a warning, not the training."""
        if self.folder is None:
            return
        print(sentence, flush=True)
        self.note(sentence)

    def note(self, sentence: str) -> None:
        """Add a sentence to the log without printing it."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(f"{datetime.now().astimezone().isoformat(' ', 'seconds')}  {sentence}\n")
        except OSError as error:
            print(f"dgt: warning: the log could not be written: {error}", file=sys.stderr, flush=True)

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Note what ends the training early: an error, which whoever called shows, or a second Ctrl-C."""
        try:
            yield
        except Interrupted:
            self.say("interrupted at once; `--resume auto` goes on from the last checkpoint, where there is one")
            raise
        except Exception as error:
            self.note(f"failed: {str(error).partition(chr(10))[0] or type(error).__name__}")
            raise


class Pace(Callback):
    """How fast a training goes: images a second, and the time left at the speed so far, validations included.

    Args:
        images_per_batch: images of one batch over all processes.
    """

    def __init__(self, images_per_batch: int) -> None:
        self.images_per_batch = images_per_batch
        self.seconds_before = 0.0
        self._start: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._batches = 0

    def state_dict(self) -> dict[str, float]:
        """Seconds trained so far, over all processes that took turns."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Go on counting the seconds."""
        self.seconds_before = state_dict["seconds"]

    @property
    def seconds(self) -> float:
        """Wall time of the training, the times between a stop and its resumption left out."""
        return self.seconds_before + (0.0 if self._start is None else time.perf_counter() - self._start)

    @property
    def images_per_second(self) -> float:
        """Over the last batches; 0 before the second."""
        if len(self._recent) < 2:
            return 0.0
        return (len(self._recent) - 1) * self.images_per_batch / max(self._recent[-1] - self._recent[0], 1e-9)

    def seconds_left(self, trainer: Trainer) -> float | None:
        """Until the training's end; None before the first batch of this process."""
        if self._start is None or not self._batches:
            return None
        done = trainer.fit_loop.total_batch_idx + 1
        return (time.perf_counter() - self._start) / self._batches * max(0, total_batches(trainer) - done)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave what was between two epochs out of the rate."""
        self._recent.clear()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Count."""
        self._recent.append(time.perf_counter())
        self._batches += 1


class StatusFile(Callback):
    """Rewrites `status.json` every few seconds while training goes on, and at its end.

    Args:
        folder: the run's folder.
        pace: of the training.
        headline: names of the metrics to keep there, without the prefix `val/`.
    """

    def __init__(self, folder: Path, pace: Pace) -> None:
        self.folder, self.pace = folder, pace
        self._written = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say that it began."""
        self.write(trainer, "training")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Say where it is, now and then."""
        if time.monotonic() - self._written >= SECONDS_BETWEEN:
            self.write(trainer, "training")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """The same."""
        if trainer.state.fn == "fit" and time.monotonic() - self._written >= SECONDS_BETWEEN:
            self.write(trainer, "validating")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say where it is."""
        self.write(trainer, "training")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say that it stopped, or failed and why."""
        stopped = isinstance(exception, SystemExit | KeyboardInterrupt)
        self.write(trainer, "stopped" if stopped else "failed", None if stopped else str(exception))

    def write(self, trainer: Trainer, state: str, error: str | None = None) -> None:
        """Write the file, from the first process; a full disk does not stop a training here."""
        self._written = time.monotonic()
        if not trainer.is_global_zero:
            return
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        steps = trainer.global_step
        content = {
            "state": state,
            "error": error,
            "time": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "epoch": trainer.current_epoch + (trainer.current_epoch < epochs(trainer)),
            "epochs": epochs(trainer),
            "step": steps,
            "steps": -(-total_batches(trainer) // trainer.accumulate_grad_batches),
            "loss": metrics.get("train/loss_step"),
            "metrics": {key.removeprefix("val/"): value for key, value in metrics.items() if key.startswith("val/")},
            "images_per_second": round(self.pace.images_per_second, 2),
            "memory_bytes": memory_in_use(),
            "seconds": round(self.pace.seconds, 1),
            "seconds_left": self.pace.seconds_left(trainer),
        }
        with suppress(OSError):
            write_json(self.folder / STATUS, content)


class RunBar(RichProgressBar):
    """Lightning's bar with loss, learning rate, images a second, memory, and the time that the whole training has left.

    Args:
        pace: of the training.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.pace = pace

    def _get_train_description(self, current_epoch: int) -> str:
        """Where the training is, counted as in the log: Lightning counts from 0, and to -2 for a length in steps."""
        description = f"Epoch {current_epoch + 1}/{epochs(self.trainer)}"
        return f"{description:{len(self.validation_description)}}"

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> Shown:
        """What stands at the bar's end."""
        logged = super().get_metrics(trainer, pl_module)
        left = self.pace.seconds_left(trainer)
        shown: Shown = {
            key.removeprefix("train/").removesuffix("_step"): value for key, value in logged.items() if key != "v_num"
        }
        shown["lr"] = f"{trainer.callback_metrics.get('lr', torch.zeros(())).item():.2e}"
        return {
            **shown,
            "images/s": f"{self.pace.images_per_second:.0f}",
            "memory": f"{memory_in_use() / 2**30:.1f}GiB",
            **({} if left is None else {"left": duration(left)}),
        }


def progress_callbacks(folder: Path, pace: Pace) -> list[Callback]:
    """The pace, the status file, and a progress bar where someone watches a terminal."""
    seen: list[Callback] = [pace, StatusFile(folder, pace)]
    return [*seen, RunBar(pace)] if sys.stdout.isatty() else seen


def batches_per_epoch(trainer: Trainer) -> int:
    """Batches of an epoch on each process; 0 before the loader is known, where Lightning says infinity."""
    batches = trainer.num_training_batches
    return int(batches) if math.isfinite(batches) else 0


def total_batches(trainer: Trainer) -> int:
    """Batches of the whole training on each process."""
    limit = step_limit(trainer)
    return limit * trainer.accumulate_grad_batches if limit else (trainer.max_epochs or 0) * batches_per_epoch(trainer)


def epochs(trainer: Trainer) -> int:
    """Epochs of the whole training, where its length is given in steps too; 0 before the loader is known."""
    batches = batches_per_epoch(trainer)
    return -(-total_batches(trainer) // batches) if batches else 0


def step_limit(trainer: Trainer) -> int | None:
    """The length in optimizer steps, where the recipe gives that."""
    limits = [callback.steps for callback in trainer.callbacks if isinstance(callback, StepLimit)]  # type: ignore[attr-defined]
    return limits[0] if limits else None


class StepLimit(Callback):
    """Ends the training after a number of optimizer steps, in the middle of an epoch too, with a validation.

    Lightning's `max_steps` would repeat the end of an epoch that a checkpoint was taken at.

    Args:
        steps: length of the training.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing is left to do where a checkpoint of the last step is gone on from."""
        trainer.should_stop = trainer.global_step >= self.steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Stop after the last step."""
        if trainer.global_step >= self.steps:
            trainer.should_stop = True


def memory_in_use() -> int:
    """Bytes: the most that was allocated on the GPU, or without one the most that this process held in memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def duration(seconds: float) -> str:
    """A length of time for people: `42 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes:.0f} min"
    if hours < 24:
        return f"{int(hours)} h {int(minutes % 60):02d} min"
    return f"{int(days)} d {int(hours % 24)} h"
