"""Beside the training loop: the average of the weights, the record in every checkpoint, one line per epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor

from dgt.layers import renormalize_centroids
from dgt.training.finite import FiniteSteps
from dgt.training.progress import Pace, epochs, memory_in_use

RECORD_KEY = "dgt"
EMA_REFERENCE_BATCH = 1024


def ema_decay(decay: float, global_batch: int) -> float:
    """Decay per step that forgets, image for image, as fast as `decay` does at batch 1024.

    Args:
        decay: share of the average kept at each step of 1024 images.
        global_batch: images per optimizer step.
    """
    return math.pow(decay, global_batch / EMA_REFERENCE_BATCH)


def _moving_average(decay: float) -> Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], None]:
    """Update for `AveragedModel`: floating tensors are averaged in place, counters and flags are copied."""

    @torch.no_grad()
    def update(averaged: Sequence[Tensor], current: Sequence[Tensor], _: Tensor) -> None:
        if averaged[0].is_floating_point():
            torch._foreach_lerp_(list(averaged), list(current), 1 - decay)
        else:
            torch._foreach_copy_(list(averaged), list(current))

    return update


class WeightEma(WeightAveraging):
    """Lightning's weight averaging with an exponential moving average that keeps centroids on the unit sphere.

    During validation and after the training the network holds the averaged weights; checkpoints hold them as
    `state_dict`, and the weights in training as `current_model_state`.

    Args:
        decay: share of the average kept at each optimizer step.
        steps: the guard of the steps; one that it skipped does not count for the average.
    """

    def __init__(self, decay: float, steps: FiniteSteps | None = None) -> None:
        super().__init__(multi_avg_fn=_moving_average(decay))
        self.steps = steps
        self._swapped = False

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the network the averaged weights."""
        super().on_validation_epoch_start(trainer, pl_module)
        self._swapped = self._average_model is not None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the network the weights in training again."""
        self.unswap(pl_module)

    def unswap(self, pl_module: LightningModule) -> None:
        """Give the network the weights in training again, where it holds the average for a validation."""
        if self._swapped:
            self._swap_models(pl_module)
        self._swapped = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Average the weights after an optimizer step."""
        before = self._latest_update_step
        if self.steps is not None and self.steps.skips_this_step:
            self._latest_update_step = trainer.global_step
            return
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._average_model is not None and self._latest_update_step > before:
            renormalize_centroids(self._average_model.module)


class CheckpointRecord(Callback):
    """Put what is needed to rebuild the network into every checkpoint: recipe, class names, version.

    Args:
        record: plain values.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the record under the key "dgt"."""
        checkpoint[RECORD_KEY] = self.record


class EpochReport(Callback):
    """Print one line per epoch, and stop with a clear error when the loss is no longer a number.

    Args:
        summary: the metrics of a validation, without the prefix `val/`, as text.
        say: where the line goes.
        pace: of the training; None leaves rate and memory out.
    """

    def __init__(
        self,
        summary: Callable[[dict[str, float]], str],
        say: Callable[[str], None] = print,
        pace: Pace | None = None,
    ) -> None:
        self.summary, self.say, self.pace = summary, say, pace
        self.validated_step: int | None = None
        self._start = time.perf_counter()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the epoch."""
        self._start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember after how many steps this was."""
        self.validated_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print loss, metrics, learning rate, seconds, rate and memory of the epoch.

        Raises:
            FloatingPointError: the mean training loss is NaN or infinite.
        """
        epoch = trainer.current_epoch + 1
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        loss = metrics.get("train/loss_epoch")
        if loss is None:  # not logged where an epoch goes on from its last step
            mean: Any = pl_module.train_loss
            loss = float(mean.mean_value / mean.weight)
            pl_module.log("train/loss_epoch", loss)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the training loss became {loss} in epoch {epoch}: lower optimizer.lr or set optimizer.clip_grad"
            )
        if trainer.is_global_zero:
            seconds = time.perf_counter() - self._start
            measured = {key.removeprefix("val/"): value for key, value in metrics.items() if key.startswith("val/")}
            validated = measured and (trainer.should_stop or epoch % (trainer.check_val_every_n_epoch or 1) == 0)
            parts = [f"epoch {epoch}/{epochs(trainer)}", f"loss {loss:.4f}"]
            parts += [self.summary(measured)] if validated else []
            lr = metrics["lr"] if "lr" in metrics else trainer.optimizers[0].param_groups[0]["lr"]  # nor is this there
            parts += [f"lr {lr:.2e}", f"{seconds:.1f} s"]
            if self.pace is not None:
                parts += [f"{self.pace.images_per_second:.0f} images/s", f"{memory_in_use() / 2**30:.2f} GiB"]
            self.say("  ".join(parts))
