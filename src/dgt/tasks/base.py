"""A task: how its network is built, its losses, its metrics, and its predictions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor

from dgt.data.image_io import open_image
from dgt.data.module import ImageData
from dgt.models.cost import Cost
from dgt.tasks.network import ModelSettings

Losses = dict[str, Tensor]
"""Scalars by name: "loss" is what is minimized, the others are its parts, logged as `train/NAME`.
"""

Source = str | Path | Tensor
"""An image file, or the bytes (3, H, W) of an image as the network gets it: cropped, not yet
normalized.
"""


@dataclass(frozen=True)
class LoadedRun:
    """A trained network and its training configuration.

    Args:
        network: in evaluation mode, on the CPU; averaged weights where the recipe keeps an average.
        recipe: the complete `dgt.runs.Recipe`.
        class_names: name of each class, in the order of the logits.
        source: the file that the weights came from.
    """

    network: nn.Module
    recipe: Any
    class_names: list[str]
    source: Path


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for one image.

    Args:
        image: path as it was given; empty where there is none.
        classes: (class name, probability, or share of the pixels), the largest first; empty where
            there are none.
        error: why the image could not be read, or None.
        objects: of a detector, {category, score, box (x0, y0, x1, y1)}, by falling score.
        pixels: uint8 (H, W, 3), what the network looked at.
        label_map: of a segmenter, uint8 (H, W).
        detections: of a detector, its `dgt.figures.detections.Detections`.
    """

    image: str = ""
    classes: list[tuple[str, float]] = field(default_factory=list)
    error: str | None = None
    objects: list[dict[str, Any]] | None = None
    pixels: Any = field(default=None, repr=False, compare=False)
    label_map: Any = field(default=None, repr=False, compare=False)
    detections: Any = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: `image`, `error`, and `classes` or `objects`."""
        answer = {"classes": self.classes} if self.objects is None else {"objects": self.objects}
        return {"image": self.image, "error": self.error, **answer}


class Metrics(ABC):
    """The metrics of one validation, over the images of all processes.

    Example:
        >>> metrics.update(network, images, targets)  # for each batch
        >>> metrics.compute()["top1"]  # in every process
    """

    results: list[dict[str, Any]] | None = None
    """Entries for a file of predictions, for a task that has one; after `compute` those of all processes."""
    remarks: Sequence[str] = ()
    """What the images showed that should be said, in sentences; after `compute`."""

    @abstractmethod
    def update(self, network: nn.Module, images: Any, targets: Any) -> None:
        """Run the network, in evaluation mode, on one batch of validation images and accumulate the metrics."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """The metrics by name, shares in [0, 1]; all processes must call it."""


@dataclass(frozen=True)
class CostSpec:
    """How the cost of a task's models is counted, and the paper's numbers.

    Args:
        count: cost of the task's network over a timm model, at a height and width.
        image_size: height and width of the paper's FLOPs.
        paper: model -> parameters in millions and GFLOPs as printed.
        models: those that are listed when none is named.
    """

    count: Callable[[str, tuple[int, int]], Cost]
    image_size: tuple[int, int]
    paper: Mapping[str, tuple[float, float]]
    models: tuple[str, ...] = ("dgt_tiny", "dgt_small", "dgt_base")


def count_images(network: nn.Module, images: Any, targets: Any) -> Tensor:
    """The number of a batch's images, on their device."""
    return torch.tensor(float(len(images)), device=images[0].device)


@dataclass(frozen=True)
class Task:
    """One task that a recipe can name.

    Args:
        name: its key in `TASKS`.
        cost: how `dgt info` counts its models.
        data: the data module; its constructor's arguments are the recipe's section `data`.
        build: makes the network from the recipe's model, the number of classes and the side of the
            training images in pixels.
        headline: the metrics that are printed, with their human-readable names. The first, the
            larger the better, chooses the best checkpoint.
        losses: network in training mode, images and targets of one batch -> losses.
        metrics: data module, set up -> the `Metrics` of one validation.
        predict: trained model, image file or bytes, number of classes to give -> its prediction;
            raises FileNotFoundError or UserError for a file that cannot be read.
        draw: trained model and its prediction -> the image with it.
        files: trained model, its prediction and the drawing -> what `dgt predict` writes, by the
            end of its name; None where it only prints.
        has_results: whether its metrics gather `results`.
        outputs: names of the tensors that the network returns for images, as an exported file has
            them; none where it returns what no tensor of one shape holds.
        shares: the headline metrics that are shares of the images.
        has_backbone: whether the network is a head on a backbone, its attribute `backbone`, a
            `FeatureBackbone`; else it is timm's classifier itself, and its data has the
            classifier's `crop_ratio`.
        class_layers: names in a network with a backbone of the layers whose weights have rows for
            classes.
        input_keys: settings of its data that say how images are prepared for the network; those in
            a section of it with its name and a dot.
        weight: network, images and targets of one batch -> scalar: what its loss is a mean over,
            images by default. A step's loss is the mean over all of its batches and processes.
    """

    name: str
    cost: CostSpec
    data: type[ImageData]
    build: Callable[[ModelSettings, int, int], nn.Module]
    headline: Mapping[str, str]
    losses: Callable[[nn.Module, Any, Any], Losses]
    metrics: Callable[[Any], Metrics]
    predict: Callable[[LoadedRun, Source, int], Prediction]
    draw: Callable[[LoadedRun, Prediction], Image.Image]
    files: Callable[[LoadedRun, Prediction, Image.Image], dict[str, bytes]] | None = None
    has_results: bool = False
    outputs: tuple[str, ...] = ("logits",)
    shares: tuple[str, ...] = ()
    has_backbone: bool = False
    class_layers: tuple[str, ...] = ()
    input_keys: tuple[str, ...] = ("mean", "std", "image_size")
    weight: Callable[[nn.Module, Any, Any], Tensor] = count_images

    def summary(self, metrics: Mapping[str, float]) -> str:
        """The available headline metrics in percent: `top-1 81.20 %  top-5 95.00 %`."""
        shown = (
            f"{label} {100 * metrics[key]:.2f} %"
            for key, label in self.headline.items()
            if key in metrics
        )
        return "  ".join(shown)


def read_bytes(image: Source, bits: int | None) -> Tensor:
    """uint8 (3, H, W) of an image file of `bits`, or of an image as it is. Raises as `open_image`."""
    return image if isinstance(image, Tensor) else pil_to_tensor(open_image(image, bits))


def name_of(image: Source) -> str:
    """How an error names an image."""
    return "the image" if isinstance(image, Tensor) else repr(str(image))
