"""What a task is: one row that says how its network is built, what it minimises and how it is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from PIL import Image
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from dgt.data.module import ImageData
from dgt.tasks.network import ModelSettings
from dgt.tasks.optim import OptimizerSettings, ScheduleSettings, build_optimizer, schedule_factor
from dgt.tasks.prediction import Prediction, Run, Source

Losses = dict[str, Tensor]
"""Scalars by name: "loss" is what is minimised, the others are its parts, logged as `train/NAME`."""


class Metrics(ABC):
    """What one validation measures, over the images of all processes."""

    results: list[dict[str, Any]] | None = None
    """Entries for a file of predictions, for a task that has one; of all processes after `compute`."""

    @abstractmethod
    def update(self, network: nn.Module, images: Any, targets: Any) -> None:
        """Run the network, in evaluation mode, on one batch of validation images and count what it finds."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """The metrics by name, shares in [0, 1]; a matter of all processes."""


@dataclass(frozen=True)
class Task:
    """One task that a recipe can name.

    Args:
        name: its key in `TASKS`.
        data: the data module; its constructor's arguments are the recipe's section `data`.
        build: makes the network from the recipe's model, the number of classes and the side of the training images in
            pixels; a network with a backbone has it as its attribute `backbone`, a `FeatureBackbone`.
        headline: the metrics that are printed, with their human-readable names. The first, the larger the better,
            chooses the best checkpoint.
        losses: network in training mode, images and targets of one batch -> losses.
        metrics: data module, set up -> the `Metrics` of one validation.
        refused_precision: value of `trainer.precision` that its operators lack.
        has_results: whether its metrics gather `results`.
        predict: trained model, image file or bytes (3, H, W) as the network gets them, number of classes to give ->
            what is found; raises FileNotFoundError or UserError for a file that cannot be read.
        draw: trained model and what was found -> the image with it.
        files: trained model, what was found and the drawing -> what `dgt predict` writes, by the end of its name; None
            where it only prints.
        outputs: names of the tensors that the network returns for images, as an exported file has them; none where it
            returns what no tensor of one shape holds.
    """

    name: str
    data: type[ImageData]
    build: Callable[[ModelSettings, int, int], nn.Module]
    headline: Mapping[str, str]
    losses: Callable[[nn.Module, Any, Any], Losses]
    metrics: Callable[[Any], Metrics]
    predict: Callable[[Run, Source, int], Prediction]
    draw: Callable[[Run, Prediction], Image.Image]
    files: Callable[[Run, Prediction, Image.Image], dict[str, bytes]] | None = None
    refused_precision: str | None = None
    has_results: bool = False
    outputs: tuple[str, ...] = ("logits",)
    task: Any = None

    @property
    def monitor(self) -> str:
        """The logged name of the metric that chooses the best checkpoint."""
        return f"val/{next(iter(self.headline))}"

    def summary(self, metrics: Mapping[str, float]) -> str:
        """The headline metrics in percent, as far as they are there: `top-1 81.20 %  top-5 95.00 %`."""
        shown = [f"{label} {100 * metrics[key]:.2f} %" for key, label in self.headline.items() if key in metrics]
        return "  ".join(shown)


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
