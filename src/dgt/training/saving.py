"""When a training is saved, what is kept, and how it stops when it is asked to.

A checkpoint is taken only where nothing is under way, so that a training that goes on from it is the same to the last
bit as one that never stopped: between two optimizer steps, at the end of an epoch, or before a validation. There are

```
step-00001234.ckpt    after so many optimizer steps; the newest `checkpoint.keep` of them
last.ckpt             the newest again (a hard link where the file system has them)
best.ckpt             the best validation
```
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from dgt.training.callbacks import WeightEma
from dgt.training.files import remove_leftovers, sync_folder
from dgt.training.finite import FiniteSteps
from dgt.training.recipe import CheckpointSettings
from dgt.training.signals import Preempted, StopWish
from dgt.training.storage import SafeCheckpointIO

STEP_FILES = "step-*.ckpt"


def step_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run that a training can go on from, the newest first.

    Args:
        folder: the run's folder.
    """
    return sorted((folder / "checkpoints").glob(STEP_FILES), reverse=True)


class RunCheckpoints(Checkpoint):
    """Save by epochs, steps and minutes, keep the best, and save and stop where a signal asks for it.

    Args:
        folder: the run's folder.
        settings: how often, and how many are kept.
        monitor: logged name of the metric, the larger the better, that chooses the best.
        steps: the guard of the steps, which can undo one that broke off.
        io: what writes; its failure makes a stop end with status 1.
        say: tells the user a sentence, in the run's log as well.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSettings,
        monitor: str,
        steps: FiniteSteps,
        io: SafeCheckpointIO,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.settings, self.monitor = folder / "checkpoints", settings, monitor
        self.steps, self.io, self.say = steps, io, say
        self.wish = StopWish()
        self.best: float | None = None
        self.saved_step = 0
        self._saved_at = time.monotonic()
        self._saved_epoch = 0
        self._place = "step"

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the best value so far."""
        self.best = state_dict["best"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals, remove what a killed write left, and let the loader go on at its place."""
        self.wish.listen()
        trainer.fit_loop._load_combined_loader_states()  # Lightning forgets where the schedule asked for the length
        self._saved_at = time.monotonic()
        if trainer.is_global_zero and self.folder.is_dir():
            remove_leftovers(self.folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after a step, where it is time. The last step of an epoch waits for its validation.

        Raises:
            Preempted: a signal asked to stop.
        """
        if trainer.fit_loop._should_accumulate() or trainer.is_last_batch or trainer.should_stop:
            return
        if _any(trainer, self._is_due(trainer) or bool(self.wish)):
            self._save(trainer, "step")
            self._stop_if_asked(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop before a validation, where a signal asked to."""
        if trainer.state.fn == "fit" and _any(trainer, bool(self.wish)):
            self._save(trainer, "validation")
            self._stop_if_asked(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Stop in the middle of a validation, which is then run again; several processes stop at its end."""
        if trainer.state.fn == "fit" and trainer.world_size == 1 and self.wish:
            self._save_in_validation(trainer, pl_module)
            self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the best."""
        score = trainer.callback_metrics.get(self.monitor)
        if trainer.state.fn != "fit" or score is None:
            return
        if self.best is None or float(score) > self.best:
            self.best = float(score)
            self._place = "validation"
            trainer.save_checkpoint(self.folder / "best.ckpt")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save at the end of an epoch, where it is time; always at the end of the training."""
        every, epoch = self.settings.every_epochs, trainer.current_epoch + 1
        due = epoch == trainer.max_epochs or trainer.should_stop or (every is not None and epoch % every == 0)
        if _any(trainer, due or self._is_due(trainer) or bool(self.wish)):
            self._save(trainer, "epoch")
            self._saved_epoch = epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop between two epochs, now that the loggers have what the last one came to.

        Raises:
            Preempted: a signal asked to stop.
        """
        if self._saved_epoch == trainer.current_epoch > 0:
            self._stop_if_asked(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what an error in the middle of a step or a validation leaves whole, if this is the only process."""
        if not isinstance(exception, Exception) or isinstance(exception, FloatingPointError) or trainer.world_size > 1:
            return
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        between = done > 0 and done % trainer.accumulate_grad_batches == 0 and not self.steps.in_optimizer
        if trainer.validating and trainer.state.fn == "fit":
            self._save_in_validation(trainer, pl_module)
        elif trainer.training and between:
            self.steps.rewind(pl_module)
            self._save(trainer, "broken step")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write down the loops' place so that Lightning goes on exactly there."""
        checkpoint["world_size"] = trainer.world_size
        loops = checkpoint["loops"]["fit_loop"]
        if self._place == "validation":
            _before_validation(loops)
        elif self._place == "broken step":
            _before_step(loops)

    def _save_in_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightEma):
                callback.unswap(pl_module)
        self._save(trainer, "validation")

    def _save(self, trainer: Trainer, place: str) -> None:
        """Write a checkpoint, link it as the last one, and remove those that are too many."""
        self._place = place
        path = self.folder / f"step-{trainer.global_step:08d}.ckpt"
        trainer.save_checkpoint(path)
        self._saved_at = time.monotonic()
        if not trainer.is_global_zero or self.io.failure is not None:
            return
        self.saved_step = trainer.global_step
        _link(path, self.folder / "last.ckpt")
        for old in step_checkpoints(self.folder.parent)[self.settings.keep :]:
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)

    def _is_due(self, trainer: Trainer) -> bool:
        steps, minutes = self.settings.every_steps, self.settings.every_minutes
        if steps is not None and trainer.global_step % steps == 0:
            return True
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def _stop_if_asked(self, trainer: Trainer) -> None:
        """Stop, in all processes, where one was asked to.

        Raises:
            Preempted: then.
        """
        if not _any(trainer, bool(self.wish)):
            return
        failed = _any(trainer, self.io.failure is not None)
        place = f"after step {trainer.global_step} (epoch {trainer.current_epoch + 1})"
        kept = "its state could NOT be saved" if failed else f"saved in {self.folder}"
        if trainer.is_global_zero:
            self.say(f"stopped by {self.wish.name} {place}, {kept}; `--resume auto` goes on from the last checkpoint")
        raise Preempted(1 if failed else self.wish.exit_status)


def _any(trainer: Trainer, decision: bool) -> bool:
    """Whether any process decides so; all must ask at the same place."""
    return bool(trainer.strategy.reduce_boolean_decision(decision, all=False))


def _link(path: Path, name: Path) -> None:
    """Let `name` be the same file, or where the file system has no links a copy, without a moment with none."""
    temporary = name.with_name(f".{name.name}.new")
    temporary.unlink(missing_ok=True)
    if path.is_dir():
        with suppress(OSError):
            temporary.symlink_to(path.name)
    else:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
    os.replace(temporary, name)
    sync_folder(name.parent)


def _before_validation(loops: dict[str, Any]) -> None:
    """All steps of the epoch are done, its validation has not begun: Lightning then runs it from its first batch."""
    for part in ("total", "current"):
        loops["epoch_loop.val_loop.batch_progress"][part].update(ready=1, started=1, processed=0, completed=0)
        steps = loops["epoch_loop.batch_progress"][part]
        steps.update(dict.fromkeys(steps, steps["processed"]))


def _before_step(loops: dict[str, Any]) -> None:
    """The step that broke off has not begun; the one before it has just ended."""
    for part in ("total", "current"):
        steps = loops["epoch_loop.batch_progress"][part]
        steps.update(dict.fromkeys(steps, steps["completed"]), completed=steps["completed"] - 1)
    loops["epoch_loop.batch_progress"]["is_last_batch"] = False
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    batch = loops["epoch_loop.batch_progress"]["current"]["ready"]
    for state in loops["state_dict"].get("combined_loader", []):
        state.update(epoch=loops["epoch_progress"]["current"]["processed"], batch=batch)
