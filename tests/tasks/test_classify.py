"""The loss against its definition, and the accuracies of a task."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dgt.tasks.classify import ClassificationMetrics, losses


def classification_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of a network that gives these logits."""
    return losses(nn.Identity(), logits, targets)["loss"]


def test_loss_of_labels_and_of_distributions() -> None:
    logits = torch.randn(6, 5, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    hard = torch.nn.functional.one_hot(labels, 5).double()
    mixed = 0.3 * hard + 0.7 * hard.flip(0)
    expected = -(mixed * logits.log_softmax(-1)).sum(-1).mean()
    assert classification_loss(logits, mixed) == pytest.approx(float(expected), rel=1e-6)
    assert classification_loss(logits, labels) == pytest.approx(
        float(classification_loss(logits, hard)), rel=1e-6
    )


def test_loss_of_half_precision_is_computed_in_float32() -> None:
    logits = torch.full((1, 3), 60000.0, dtype=torch.float16)
    loss = classification_loss(logits, torch.tensor([1]))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(torch.tensor(3.0).log()))


class _Same(nn.Module):
    """Returns the "images" as logits."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


@pytest.mark.parametrize("num_classes", [3, 8])
def test_validation_counts_top1_and_top5_over_uneven_batches(num_classes: int) -> None:
    logits = torch.randn(21, num_classes)
    labels = torch.randint(num_classes, (21,))
    batches = [
        (logits[i : i + 8].view(-1, num_classes, 1, 1), labels[i : i + 8]) for i in range(0, 21, 8)
    ]
    metrics = ClassificationMetrics(None)
    for images, targets in batches:
        metrics.update(_Same(), images, targets)
    found = metrics.compute()
    rank = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert found["top1"] == pytest.approx(float((rank < 1).float().mean()))
    assert found["top5"] == pytest.approx(float((rank < 5).float().mean()))
    assert found["loss"] == pytest.approx(float(classification_loss(logits, labels)), rel=1e-5)


def test_an_output_of_nan_is_never_right() -> None:
    metrics = ClassificationMetrics(None)
    logits = torch.tensor([[9.0, 0, 0], [torch.nan, 0, 0], [torch.nan] * 3])
    metrics.update(_Same(), logits.view(3, 3, 1, 1), torch.zeros(3, dtype=torch.int64))
    assert metrics.compute()["top1"] == 1 / 3
