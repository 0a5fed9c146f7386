"""What a task is: one row that says how its network is built, what it minimises and how it is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor, nn

from dgt.data.module import ImageData
from dgt.models.cost import Cost
from dgt.tasks.network import ModelSettings
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
class Counted:
    """How the models of a task are counted, and what the paper prints.

    Args:
        count: cost of the task's network over a timm model, at a height and width.
        models: those that are listed when none is named.
        image_size: height and width of the paper's FLOPs.
        paper: model -> parameters in millions and GFLOPs as printed.
    """

    count: Callable[[str, tuple[int, int]], Cost]
    models: tuple[str, ...]
    image_size: tuple[int, int]
    paper: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Task:
    """One task that a recipe can name.

    Args:
        name: its key in `TASKS`.
        counted: how `dgt info` counts its models.
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
    counted: Counted
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

    @property
    def monitor(self) -> str:
        """The logged name of the metric that chooses the best checkpoint."""
        return f"val/{next(iter(self.headline))}"

    def summary(self, metrics: Mapping[str, float]) -> str:
        """The headline metrics in percent, as far as they are there: `top-1 81.20 %  top-5 95.00 %`."""
        shown = [f"{label} {100 * metrics[key]:.2f} %" for key, label in self.headline.items() if key in metrics]
        return "  ".join(shown)
