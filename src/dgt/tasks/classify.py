"""Image classification: cross entropy against hard or soft labels, top-1 and top-5 accuracy.

Mixup, CutMix and label smoothing are the data's matter: under them a target is a distribution over the classes,
(B, classes), without them a plain label, (B,).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from dgt.tasks.base import TrainingTask
from dgt.tasks.optim import OptimizerSettings, ScheduleSettings


def classification_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, computed in float32.

    Args:
        logits: (B, classes).
        targets: int64 (B,) labels, or float (B, classes) distributions.

    Returns:
        A scalar.
    """
    return F.cross_entropy(logits.float(), targets.float() if targets.is_floating_point() else targets)


class ClassificationTask(TrainingTask):
    """Loss and metrics of image classification.

    Args:
        network: images (B, 3, H, W) -> logits (B, num_classes).
        num_classes, optimizer, schedule, global_batch: as in `TrainingTask`.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerSettings,
        schedule: ScheduleSettings,
        global_batch: int,
    ) -> None:
        super().__init__(network, num_classes, optimizer, schedule, global_batch)
        self.val_loss = MeanMetric()
        self.val_top1 = MulticlassAccuracy(num_classes, top_k=1, average="micro")
        self.val_top5 = MulticlassAccuracy(num_classes, top_k=min(5, num_classes), average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> logits (B, classes)."""
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch of images (B, 3, H, W) and targets, (B,) or (B, classes)."""
        images, targets = batch
        loss = classification_loss(self(images), targets)
        self.log_losses(loss, len(images))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add one batch of images (B, 3, H, W) and labels (B,) to the metrics; torchmetrics sums them over ranks."""
        images, labels = batch
        logits = self(images)
        self.val_loss.update(F.cross_entropy(logits.float(), labels, reduction="none"))
        self.val_top1.update(logits, labels)
        self.val_top5.update(logits, labels)

    def on_validation_epoch_end(self) -> None:
        """Log `val/loss`, `val/top1` and `val/top5`; accuracies are shares in [0, 1]."""
        for name in ("loss", "top1", "top5"):
            metric = getattr(self, f"val_{name}")
            self.log(f"val/{name}", metric.compute(), prog_bar=name == "top1", sync_dist=True)
            metric.reset()
