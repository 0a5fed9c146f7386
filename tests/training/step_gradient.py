"""The gradient that a step of the training loop has for batches of its own, of a network of one weight a class."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dgt.data.segmentation import LabelMaps
from dgt.runs import load_recipe
from dgt.tasks import TASKS
from dgt.training.fabric import build_fabric
from dgt.training.loop import Batch, Objective, Training


class OneWeightPerClass(nn.Module):
    """Every image, and every pixel of both heads of a segmenter, gets the same logits."""

    def __init__(self, class_weights: list[float] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.class_weights = class_weights

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, 3) of a classifier."""
        return self.weight.expand(len(images), 3)

    def forward_both(self, images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, 3, H, W) of both heads of a segmenter."""
        logits = self.weight[None, :, None, None] + 0 * images[:, :1]
        return logits, logits


def step_gradient(
    recipe_name: str, network: OneWeightPerClass, batches: Sequence[Batch], *overrides: str
) -> Tensor:
    """The gradient of the weight after one step of `batches`, over all processes."""
    recipe = load_recipe(
        recipe_name, ["--trainer.accelerator=cpu", "--trainer.precision=32-true", *overrides]
    )
    task = TASKS[recipe.task]
    fabric = build_fabric(recipe.trainer)
    fabric.launch()
    training: Any = Training.__new__(Training)
    training.recipe, training.fabric = recipe, fabric
    training.state = SimpleNamespace(
        objective=fabric.setup_module(Objective(network, task.losses)),
        network=network,
        loss_sums=torch.zeros(2),
    )
    training.progress = SimpleNamespace(epoch=0, batch=0, step=0)
    training.backward(batches)
    gradient = network.weight.grad
    assert gradient is not None
    return gradient


def labeled_images() -> tuple[Tensor, Tensor]:
    """Three images, of which all pixels, an eighth, and none have a label."""
    labels = torch.tensor([0, 1, 2], dtype=torch.uint8)[:, None, None].repeat(1, 8, 8)
    labels[1, 1:] = 255
    labels[2] = 255
    return torch.zeros(3, 3, 8, 8), labels


def label_batches(sizes: Sequence[int]) -> list[Batch]:
    """The labeled images in batches of these sizes."""
    batches = []
    images, labels = labeled_images()
    for image, label in zip(images.split(list(sizes)), labels.split(list(sizes)), strict=True):
        own_size = torch.full((len(image), 2), 8)
        maps = LabelMaps(label, own_size, torch.zeros(len(image), 256, dtype=torch.bool))
        batches.append(Batch(image, maps))
    return batches
