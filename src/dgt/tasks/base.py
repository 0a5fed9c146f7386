"""What every task shares: the network, the optimizer and its schedule, and the names under which losses are logged."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from dgt.tasks.optim import OptimizerSettings, ScheduleSettings, build_optimizer, schedule_factor

LOSS_SUMS = ("mean_value", "weight")  # what torchmetrics' mean consists of


class TrainingTask(LightningModule):
    """A network with the optimizer and schedule of its training; a subclass adds loss and metrics.

    A subclass logs its metrics as ``val/NAME`` at the end of a validation, shares in [0, 1].

    Args:
        network: what is trained.
        num_classes: number of classes.
        optimizer: AdamW's settings.
        schedule: length and learning rates.
        global_batch: images per optimizer step over all devices and accumulated batches; scales the learning rate.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerSettings,
        schedule: ScheduleSettings,
        global_batch: int,
    ) -> None:
        super().__init__()
        self.network = network
        self.num_classes = num_classes
        self.optimizer_settings = optimizer
        self.schedule_settings = schedule
        self.global_batch = global_batch
        self.train_loss = MeanMetric(nan_strategy="disable")  # over the epoch, also over one that was interrupted

    def log_losses(self, loss: Tensor, batch_size: int, **parts: Tensor) -> None:
        """Log the loss of one training step, its mean over the epoch and the learning rate.

        Args:
            loss: scalar that is minimised.
            batch_size: images in the batch.
            parts: terms of the loss, logged as ``train/NAME`` for each step.
        """
        self.log("train/loss_step", loss, on_step=True, prog_bar=True, batch_size=batch_size)
        counts = loss.detach().isfinite()  # a step whose loss is not finite is skipped
        self.train_loss.update(loss.detach().nan_to_num(0.0, 0.0, 0.0), batch_size * counts)
        self.log("train/loss_epoch", self.train_loss, on_step=False, on_epoch=True, batch_size=batch_size)
        for name, value in parts.items():
            self.log(f"train/{name}", value, on_step=True, batch_size=batch_size)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], prog_bar=True, batch_size=batch_size)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW and its learning rate, stepped once per optimizer step."""
        optimizer = build_optimizer(self.network, self.optimizer_settings, self.global_batch)
        total_steps = self.schedule_settings.steps or int(self.trainer.estimated_stepping_batches)
        factor = schedule_factor(total_steps, self.optimizer_settings, self.schedule_settings)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def on_train_epoch_start(self) -> None:
        """Begin the sum of the epoch's losses; not called in an epoch that goes on from its middle."""
        self.train_loss.reset()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the sum of the epoch's losses so far, over all processes."""
        sums = torch.stack([getattr(self.train_loss, name) for name in LOSS_SUMS])
        sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
        checkpoint["train_loss"] = dict(zip(LOSS_SUMS, sums, strict=True))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on summing; the first process goes on from the sum of all."""
        for name, value in checkpoint.get("train_loss", {}).items():
            own = value if self.trainer.is_global_zero else torch.zeros_like(value)
            setattr(self.train_loss, name, own.to(self.train_loss.device))
