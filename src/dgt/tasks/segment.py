"""Semantic segmentation: cross entropy of UperNet, 0.4 times that of its auxiliary head, mean intersection over union.

As in the paper's ADE20K experiments. Pixels without a label are left out of the loss and of the measures; padding is
kept out of the attention too, through the mask of real pixels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchmetrics.classification import MulticlassConfusionMatrix

from dgt.data.label_maps import IGNORED
from dgt.data.segmentation import LabelMaps, SegmentationData, SegmentationTest
from dgt.figures import png, raster
from dgt.figures.label_map import figure_label_map, label_png
from dgt.models.cost import Cost, cost
from dgt.models.heads.upernet import build_upernet
from dgt.models.padding import real_pixels
from dgt.tasks.base import Counted, Losses, Metrics, Task
from dgt.tasks.confusion import segmentation_scores
from dgt.tasks.network import ModelSettings
from dgt.tasks.prediction import Prediction, Run, Source, name_of, normalized, read_bytes, to_array
from dgt.tasks.scanning import predict_labels
from dgt.utils.errors import UserError

AUXILIARY_WEIGHT = 0.4
PAPER = {"dgt_tiny": (52.5, 954.0), "dgt_small": (81.9, 1074.0), "dgt_base": (122.2, 1234.0)}  # Table 3


def segmentation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the labelled pixels, computed in float32; 0 where no pixel has a label.

    Args:
        logits: (B, classes, H, W).
        labels: int64 (B, H, W), 255 where there is none.

    Returns:
        A scalar.
    """
    total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def build_segmenter(settings: ModelSettings, num_classes: int, image_size: int) -> nn.Module:
    """Build UperNet over the recipe's model.

    Args:
        settings: the recipe's model; `head` may have `channels` and `auxiliary_channels`.
        num_classes: classes of the label maps.
        image_size: side of the training crops in pixels.

    Raises:
        ValueError: timm knows no such model, it is no backbone of four stages, or it or the head does not take these
            arguments.
    """
    unknown = sorted(set(settings.head) - {"channels", "auxiliary_channels"})
    if unknown:
        raise UserError(f"model.head takes channels and auxiliary_channels for segmentation, got {', '.join(unknown)}")
    arguments = dict(settings.args)
    if settings.drop_path_rate is not None:
        arguments.setdefault("drop_path_rate", settings.drop_path_rate)
    return build_upernet(settings.name, num_classes, image_size=image_size, **settings.head, **arguments)


def losses(network: Any, images: Tensor, targets: LabelMaps) -> Losses:
    """Cross entropy of both heads of a UperNet for padded crops (B, 3, S, S)."""
    labels = targets.labels.long()
    logits = network.forward_both(images, real_pixels(targets.sizes, (labels.shape[1], labels.shape[2])))
    main, auxiliary = (segmentation_loss(part, labels) for part in logits)
    return {"loss": main + AUXILIARY_WEIGHT * auxiliary, "loss_main": main, "loss_auxiliary": auxiliary}


class SegmentationMetrics(Metrics):
    """`miou`, `mean_accuracy`, `accuracy` and `iou/CLASS` of every class that is there or predicted."""

    def __init__(self, data: SegmentationData) -> None:
        self.data = data
        self.confusion = MulticlassConfusionMatrix(data.num_classes, ignore_index=IGNORED, validate_args=False)

    def update(self, network: nn.Module, images: list[Tensor], targets: list[Tensor]) -> None:
        """Add images (3, H, W) of several sizes with their labels (H, W) to the confusion matrix."""
        for size in dict.fromkeys(image.shape for image in images):
            alike = [index for index, image in enumerate(images) if image.shape == size]
            stacked = torch.stack([images[index] for index in alike])
            found = predict_labels(network, stacked, self.data.scale, self.data.test)
            labels = torch.stack([targets[index] for index in alike]).long()
            self.confusion.to(found.device).update(found, labels)

    def compute(self) -> dict[str, float]:
        """The measures of all processes' images; torchmetrics sums the matrix over them.

        Raises:
            UserError: no pixel of the validation's images has a label.
        """
        counts = self.confusion.compute()
        if not counts.any():
            raise UserError("the validation's label maps hold no labelled pixel, so there is no mIoU to compute")
        scores = segmentation_scores(counts)
        overall = {name: float(getattr(scores, name)) for name in ("miou", "mean_accuracy", "accuracy")}
        ious = zip(self.data.class_names, scores.iou.tolist(), strict=True)
        return overall | {f"iou/{name}": iou for name, iou in ious if not math.isnan(iou)}


@torch.inference_mode()
def predict(run: Run, image: Source, top_k: int) -> Prediction:
    """The label map (H, W) of an image at its own size, uint8, as the recipe's test says; shares of all its classes."""
    pixels, data = read_bytes(image), run.recipe.data
    test, scale = SegmentationTest(**data["test"]), tuple(data["scale"])
    labels = predict_labels(run.network, normalized(pixels, data)[None], scale, test)[0].to(torch.uint8)
    shares = torch.bincount(labels.flatten(), minlength=len(run.class_names)) / labels.numel()
    order = [index for index in shares.argsort(descending=True, stable=True).tolist() if shares[index] > 0]
    classes = [(run.class_names[index], float(shares[index])) for index in order]
    return Prediction(name_of(image), classes, pixels=to_array(pixels), found=labels.numpy())


def draw(run: Run, prediction: Prediction) -> Image.Image:
    """The image under its classes' colours, with a legend."""
    return raster(figure_label_map(prediction.pixels, prediction.found, run.class_names), dpi=150)


def files(run: Run, prediction: Prediction, drawing: Image.Image) -> dict[str, bytes]:
    """The label map, whose numbers are the classes, and the drawing."""
    return {"labels.png": label_png(prediction.found, len(run.class_names)), "overlay.png": png(drawing)}


def _count(name: str, image_size: tuple[int, int]) -> Cost:
    """UperNet with ADE20K's 150 classes; the auxiliary head has parameters but does not run."""
    with torch.device("meta"):
        network = build_upernet(name, num_classes=150, image_size=max(image_size))
    return cost(network, image_size)


SEGMENT = Task(
    name="segment",
    counted=Counted(_count, tuple(PAPER), (512, 2048), PAPER),
    data=SegmentationData,
    build=build_segmenter,
    headline={"miou": "mIoU", "accuracy": "pixel accuracy"},
    losses=losses,
    metrics=SegmentationMetrics,
    predict=predict,
    draw=draw,
    files=files,
)
