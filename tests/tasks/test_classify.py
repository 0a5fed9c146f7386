"""The loss against its definition, and the accuracies of a task."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dgt.tasks import ClassificationTask
from dgt.tasks.classify import classification_loss
from dgt.tasks.optim import OptimizerSettings, ScheduleSettings


def test_loss_of_labels_and_of_distributions() -> None:
    logits = torch.randn(6, 5, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    hard = torch.nn.functional.one_hot(labels, 5).double()
    mixed = 0.3 * hard + 0.7 * hard.flip(0)
    expected = -(mixed * logits.log_softmax(-1)).sum(-1).mean()
    assert classification_loss(logits, mixed) == pytest.approx(float(expected), rel=1e-6)
    assert classification_loss(logits, labels) == pytest.approx(float(classification_loss(logits, hard)), rel=1e-6)


def test_loss_of_half_precision_is_computed_in_float32() -> None:
    logits = torch.full((1, 3), 60000.0, dtype=torch.float16)
    loss = classification_loss(logits, torch.tensor([1]))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(torch.tensor(3.0).log()))


class _Same(nn.Module):
    """Reads the logits off the "images"."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


@pytest.mark.parametrize("num_classes", [3, 8])
def test_validation_counts_top1_and_top5_over_uneven_batches(num_classes: int) -> None:
    logits = torch.randn(21, num_classes)
    labels = torch.randint(num_classes, (21,))
    batches = [(logits[i : i + 8].view(-1, num_classes, 1, 1), labels[i : i + 8]) for i in range(0, 21, 8)]
    task = ClassificationTask(_Same(), num_classes, OptimizerSettings(), ScheduleSettings(), 8)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    found = pl.Trainer(accelerator="cpu", devices=1, **quiet).validate(
        task, DataLoader(batches, batch_size=None), verbose=False
    )[0]
    rank = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert found["val/top1"] == pytest.approx(float((rank < 1).float().mean()))
    assert found["val/top5"] == pytest.approx(float((rank < 5).float().mean()))
    assert found["val/loss"] == pytest.approx(float(classification_loss(logits, labels)), rel=1e-5)
