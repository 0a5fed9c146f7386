"""Image classification: cross entropy against hard or soft labels, top-1 and top-5 accuracy.

Mixup, CutMix and label smoothing are part of the data module: under them a target is a distribution over
the classes, (B, classes), without them a plain label, (B,).
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from dgt.data.classification import ClassificationData
from dgt.data.image_io import open_image
from dgt.models.cost import PAPER, cost
from dgt.tasks.base import (
    CostSpec,
    LoadedRun,
    Losses,
    Metrics,
    Prediction,
    Source,
    Task,
    name_of,
)
from dgt.tasks.network import build_classifier
from dgt.utils.class_names import readable
from dgt.utils.errors import UserError


def losses(network: nn.Module, images: Tensor, targets: Tensor) -> Losses:
    """Mean cross entropy, in float32, of images (B, 3, H, W) against labels (B,) or distributions
    (B, classes).
    """
    targets = targets.float() if targets.is_floating_point() else targets
    return {"loss": F.cross_entropy(network(images).float(), targets)}


class ClassificationMetrics(Metrics):
    """`loss`, and the shares `top1` and `top5` of images whose class is among the one or five most
    probable.

    Args:
        data: the data module, set up.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.counts: dict[str, Any] = {}  # of torchmetrics, from the first batch on

    def _begin(self, classes: int, device: Any) -> None:
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassStatScores

        self.counts = {"loss": MeanMetric(nan_strategy="disable").to(device)}
        for name, top_k in (("top1", 1), ("top5", min(5, classes))):
            # counts, whose ratio has all digits: accuracies of torchmetrics are float32
            found = MulticlassStatScores(classes, top_k, average="micro", validate_args=False)
            self.counts[name] = found.to(device)

    def update(self, network: nn.Module, images: Tensor, targets: Tensor) -> None:
        """Add images (B, 3, H, W) with labels (B,)."""
        logits = network(images).float()
        if not self.counts:
            self._begin(logits.shape[1], logits.device)
        self.counts["loss"].update(F.cross_entropy(logits, targets, reduction="none"))
        # NaN is no answer, so never the right one
        wrong = -F.one_hot(targets, logits.shape[1]).to(logits.dtype)
        logits = torch.where(logits.isnan().any(dim=1, keepdim=True), wrong, logits)
        for name in ("top1", "top5"):
            self.counts[name].update(logits, targets)

    def compute(self) -> dict[str, float]:
        """Means over all images; NaN if there are none."""
        if not self.counts:  # no batch in this process
            self._begin(self.data.num_classes, "cpu")
        values = {"loss": float(self.counts["loss"].compute())}
        for name in ("top1", "top5"):
            found, *_, images = self.counts[name].compute().tolist()
            values[name] = found / images if images else math.nan
        return values


def read_image(run: LoadedRun, image: Source) -> tuple[Tensor, NDArray[np.uint8]]:
    """Prepare an image as a classifier sees it; a file is resized and cropped.

    Args:
        run: a trained classifier.
        image: a file, or the bytes of an image.

    Returns:
        Normalized (1, 3, H, W), and the pixels (H, W, 3).

    Raises:
        FileNotFoundError, UserError: as `open_image`.
        UserError: the model is of another task.
    """
    if run.recipe.task != CLASSIFY.name:
        raise UserError(
            f"only classifiers can be inspected, but {run.source} has task {run.recipe.task!r}"
        )
    data = run.recipe.data
    transform = data.transforms["val"]
    if isinstance(image, Tensor):
        return data.normalize(image)[None], image.permute(1, 2, 0).numpy()
    pixels = transform(open_image(image, data.bits)).contiguous()
    return data.normalize(pixels)[None], pixels.permute(1, 2, 0).numpy()


@torch.inference_mode()
def predict(run: LoadedRun, image: Source, top_k: int) -> Prediction:
    """The `top_k` most probable classes of an image; UserError, too, for a model that answers NaN."""
    images, seen = read_image(run, image)
    shares = run.network(images).float().softmax(dim=-1)[0]
    if shares.isnan().any():
        raise UserError(f"{name_of(image)}: the model's output is not a number")
    best = shares.topk(min(top_k, len(run.class_names)))
    classes = [
        (readable(run.class_names[i]), p)
        for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return Prediction(classes=classes, pixels=seen)


def draw(run: LoadedRun, prediction: Prediction) -> Image.Image:
    """The image under its most probable class."""
    from dgt.figures import figure_titled, raster

    (name, share), *_ = prediction.classes
    return raster(figure_titled(prediction.pixels, f"{name}\n{100 * share:.0f} %"), dpi=100)


CLASSIFY = Task(
    name="classify",
    cost=CostSpec(cost, (224, 224), PAPER, (*PAPER, "dgt_nano")),
    data=ClassificationData,
    build=build_classifier,
    headline={"top1": "top-1", "top5": "top-5"},
    losses=losses,
    metrics=ClassificationMetrics,
    predict=predict,
    draw=draw,
    shares=("top1", "top5"),
    input_keys=("mean", "std", "image_size", "crop_ratio", "augmentation.interpolation"),
)
