"""Semantic segmentation: cross entropy of UperNet, 0.4 times that of its auxiliary head, mean
intersection over union.

As in the paper's ADE20K experiments. Pixels without a label are excluded from the loss and the
metrics; padding is kept out of the attention too, through the mask of real pixels. Label maps have
the size of their image whatever the network looked at: scaled, in sliding windows, several times
over. The mean over scales and mirroring is taken in the order of mmsegmentation: logits are brought
to the image's size, then turned to probabilities, then averaged.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from dgt.data.label_maps import IGNORED
from dgt.data.segmentation import LabelMaps, SegmentationData, SegmentationTest, fitting_size
from dgt.models.cost import Cost, cost
from dgt.models.heads.upernet import build_upernet
from dgt.models.padding import real_pixels
from dgt.tasks.base import (
    CostSpec,
    LoadedRun,
    Losses,
    Metrics,
    Prediction,
    Source,
    Task,
    name_of,
    read_bytes,
)
from dgt.tasks.network import ModelSettings
from dgt.utils.errors import LOGGER, UserError
from dgt.utils.extras import explain_missing

AUXILIARY_WEIGHT = 0.4
NO_CLASS = -1
LOGITS_AT_ONCE = 2**26  # brought to an image's size at a time, 256 MiB of them
# Table 3
PAPER = {"dgt_tiny": (52.5, 954.0), "dgt_small": (81.9, 1074.0), "dgt_base": (122.2, 1234.0)}


def segmentation_loss(
    logits: Tensor, labels: Tensor, class_weights: Sequence[float] | None = None
) -> Tensor:
    """Compute the mean cross entropy of the labeled pixels, in float32; 0 where no pixel has a label.

    Args:
        logits: (B, classes, H, W).
        labels: int64 (B, H, W), 255 where there is none.
        class_weights: what a pixel of each class counts; None for 1.
    """
    weights = _weights(class_weights, labels)[: logits.shape[1]]
    total = F.cross_entropy(logits.float(), labels, weights, ignore_index=IGNORED, reduction="sum")
    return total / _labeled(class_weights, labels)


def _weights(class_weights: Sequence[float] | None, labels: Tensor) -> Tensor:
    """What a pixel of each label counts, float32 (256,); 0 for `IGNORED`."""
    weights = torch.ones(256, device=labels.device)
    if class_weights is not None:
        weights[: len(class_weights)] = weights.new_tensor(class_weights)
    weights[IGNORED] = 0
    return weights


def _labeled(class_weights: Sequence[float] | None, labels: Tensor) -> Tensor:
    """What all labeled pixels count together; above 0 where there is none, too."""
    return _weights(class_weights, labels)[labels].sum().clamp(min=1e-6)


def weigh_labels(network: Any, images: Tensor, targets: LabelMaps) -> Tensor:
    """What the labeled pixels of padded crops (B, 3, S, S) count together, in images' worth."""
    labels = targets.labels.long()
    return _labeled(network.class_weights, labels) / labels[0].numel()


def build_segmenter(settings: ModelSettings, num_classes: int, image_size: int) -> nn.Module:
    """Build UperNet over the recipe's model.

    Args:
        settings: the recipe's model; its `head` holds `class_weights` and arguments of
            `dgt.build_upernet`.
        num_classes: number of classes.
        image_size: side of the training crops in pixels.

    Raises:
        UserError: timm has no such model, it is no backbone of four stages, it or the head does not
            take these arguments, or `class_weights` are no positive number for each class.
    """
    settings.check_head("channels", "auxiliary_channels", "class_weights")
    head = {"class_weights": None, **settings.head}
    weights = head.pop("class_weights")
    positive = isinstance(weights, list) and all(
        isinstance(one, int | float) and one > 0 for one in weights
    )
    if weights is not None and not (positive and len(weights) == num_classes):
        raise UserError(
            f"model.head.class_weights must be {num_classes} numbers above 0, got {weights!r}"
        )
    network = build_upernet(
        settings.name, num_classes, image_size=image_size, **head, **settings.arguments()
    )
    network.class_weights = weights
    return network


def losses(network: Any, images: Tensor, targets: LabelMaps) -> Losses:
    """Cross entropy of both heads of a UperNet for padded crops (B, 3, S, S)."""
    labels = targets.labels.long()
    logits = network.forward_both(
        images, real_pixels(targets.sizes, (labels.shape[1], labels.shape[2]))
    )
    main, auxiliary = (segmentation_loss(part, labels, network.class_weights) for part in logits)
    return {
        "loss": main + AUXILIARY_WEIGHT * auxiliary,
        "loss_main": main,
        "loss_auxiliary": auxiliary,
    }


def segmentation_scores(confusion: Tensor) -> dict[str, Tensor]:
    """Measures of a matrix (classes, classes) of numbers of pixels, the true class by row, the
    predicted by column.

    Returns:
        Shares in [0, 1]: `iou` of each class, (classes,), NaN for one that is neither there nor
            predicted, and `miou`,
        the mean over the others; `mean_accuracy`, the mean over the classes that are there of the
        share of their pixels that is found; `accuracy`, the share of all labeled pixels that is
        right.
    """
    counts = confusion.to(torch.float64) if confusion.device.type != "mps" else confusion.float()
    correct = counts.diagonal()
    labeled = counts.sum(dim=1)
    predicted = counts.sum(dim=0)
    iou = correct / (labeled + predicted - correct)
    return {
        "iou": iou,
        "miou": iou.nanmean(),
        "mean_accuracy": (correct / labeled).nanmean(),
        "accuracy": correct.sum() / counts.sum(),
    }


class SegmentationMetrics(Metrics):
    """`miou`, `mean_accuracy`, `accuracy` and `iou/CLASS` of every class that is there or
    predicted.
    """

    def __init__(self, data: SegmentationData) -> None:
        from torchmetrics.classification import MulticlassConfusionMatrix

        self.data = data
        self.confusion = MulticlassConfusionMatrix(
            data.num_classes, ignore_index=IGNORED, validate_args=False
        )

    def update(self, network: nn.Module, images: list[Tensor], targets: list[Tensor]) -> None:
        """Add images (3, H, W) of several sizes with their labels (H, W) to the confusion matrix."""
        for size in dict.fromkeys(image.shape for image in images):
            alike = [index for index, image in enumerate(images) if image.shape == size]
            stacked = torch.stack([images[index] for index in alike])
            predicted = predict_labels(network, stacked, self.data.scale, self.data.test)
            labels = torch.stack([targets[index] for index in alike]).long()
            # NaN is no answer, so never the right one
            wrong = (labels + 1) % self.data.num_classes
            predicted = torch.where(predicted == NO_CLASS, wrong, predicted)
            self.confusion.to(predicted.device).update(predicted, labels)

    def compute(self) -> dict[str, float]:
        """The measures of all processes' images; torchmetrics sums the matrix over them.

        Raises UserError where no pixel of the validation's images has a label.
        """
        counts = self.confusion.compute()
        if not counts.any():
            raise UserError(
                "the label maps of the validation set have no labeled pixels, so mIoU cannot be computed"
            )
        self.remarks = self.data.missing_classes("validation", counts.any(dim=1).tolist())
        scores = segmentation_scores(counts)
        ious = zip(self.data.class_names, scores.pop("iou").tolist(), strict=True)
        overall = {name: float(mean) for name, mean in scores.items()}
        return overall | {f"iou/{name}": value for name, value in ious if not math.isnan(value)}


def predict_labels(
    network: nn.Module, images: Tensor, scale: tuple[int, int], test: SegmentationTest
) -> Tensor:
    """Predict the most probable class of every pixel, `NO_CLASS` where the network's output is NaN.

    Args:
        network: in evaluation mode; gives logits (B, classes, h, w) of images (B, 3, h, w).
        images: normalized, (B, 3, H, W) of any size.
        scale: longer and shorter side of the frame that images are scaled to fit.
        test: scales, mirroring and windows.

    Returns:
        int64 (B, H, W).
    """
    if len(test.scales) > 1 or test.flip:
        best, classes = predict_probabilities(network, images, scale, test).max(dim=1)
        return classes.masked_fill_(best.isnan(), NO_CLASS)
    # No mean to take: the largest logit is the most probable class.
    logits = _forward_scaled(network, images, scale, test, test.scales[0], flip=False)
    return _argmax_at(logits, (images.shape[2], images.shape[3]))


def predict_probabilities(
    network: nn.Module, images: Tensor, scale: tuple[int, int], test: SegmentationTest
) -> Tensor:
    """The probability of every class at every pixel, float32 (B, classes, H, W), averaged over
    scales and mirroring; of the same arguments as :func:`predict_labels`.
    """
    views = list(product(test.scales, (False, True) if test.flip else (False,)))
    logits = (_forward_scaled(network, images, scale, test, *view) for view in views)
    parts = (
        _resize(part, (images.shape[2], images.shape[3])).float().softmax(dim=1) for part in logits
    )
    total = next(parts)
    for part in parts:
        total.add_(part)
    return total.div_(len(views))


def _forward_scaled(
    network: nn.Module,
    images: Tensor,
    scale: tuple[int, int],
    test: SegmentationTest,
    ratio: float,
    flip: bool,
) -> Tensor:
    """Logits (B, classes, h, w) of the images at one scale, flipped back if they were mirrored."""
    scaled = _resize(images, fitting_size((images.shape[2], images.shape[3]), scale, ratio))
    return (
        _sliding_window(network, scaled.flip(-1), test).flip(-1)
        if flip
        else _sliding_window(network, scaled, test)
    )


def _sliding_window(network: nn.Module, images: Tensor, test: SegmentationTest) -> Tensor:
    """Logits of the unscaled images, computed at once or as the mean of overlapping windows."""
    height, width = images.shape[2:]
    if test.window is None or max(height, width) <= test.window:
        logits: Tensor = network(images)
        return logits
    stride = test.stride or max(1, test.window * 2 // 3)
    # where the last one starts, moved back inside
    ends = (max(0, side - test.window) for side in (height, width))
    total, seen = images.new_zeros(0), images.new_zeros(1, 1, height, width)
    for top, left in product(*([*range(0, end, stride), end] for end in ends)):
        place = (..., slice(top, top + test.window), slice(left, left + test.window))
        logits = network(images[place])
        if not len(total):  # the first window shows the number of classes
            total = logits.new_zeros(len(images), logits.shape[1], height, width)
        total[place] += logits
        seen[place] += 1
    return total.div_(seen)


def _resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize bilinearly, smoothed where it shrinks, in float32 (CPUs smooth no bfloat16), unless the size fits."""
    if x.shape[2:] == size:
        return x
    shrinks = size[0] < x.shape[2] or size[1] < x.shape[3]
    return F.interpolate(
        x.float(), size=size, mode="bilinear", align_corners=False, antialias=shrinks
    ).to(x.dtype)


def _argmax_at(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """The class of the largest logit at every pixel of an image of `size`, the lowest class where
    several are, `NO_CLASS` where a logit is NaN.

    A few classes at a time: all the logits of a photograph at its own size would fill a memory.
    """
    at_once = max(1, LOGITS_AT_ONCE // (len(logits) * size[0] * size[1]))
    best, classes = _resize(logits[:, :at_once].float(), size).max(dim=1)
    for first in range(at_once, logits.shape[1], at_once):
        value, index = _resize(logits[:, first : first + at_once].float(), size).max(dim=1)
        classes = torch.where(value > best, index + first, classes)
        best = torch.maximum(best, value)
    return classes.masked_fill_(best.isnan(), NO_CLASS)


@torch.inference_mode()
def predict(run: LoadedRun, image: Source, top_k: int) -> Prediction:
    """Predict the uint8 label map (H, W) of an image at its own size, and the share of each class in it;
    UserError, too, for a model that answers NaN.
    """
    data = run.recipe.data
    pixels = read_bytes(image, data.bits)
    images = data.normalize(pixels)[None]
    classes = predict_labels(run.network, images, data.scale, data.test)[0]
    if (classes == NO_CLASS).any():
        raise UserError(f"{name_of(image)}: the model's output is not a number")
    labels = classes.to(torch.uint8)
    shares = torch.bincount(labels.flatten(), minlength=len(run.class_names)) / labels.numel()
    order = [
        index
        for index in shares.argsort(descending=True, stable=True).tolist()
        if shares[index] > 0
    ]
    return Prediction(
        classes=[(run.class_names[index], float(shares[index])) for index in order],
        pixels=pixels.permute(1, 2, 0).numpy(),
        label_map=labels.numpy(),
    )


def draw(run: LoadedRun, prediction: Prediction) -> Image.Image:
    """The image under its classes' colors, with a legend where matplotlib is installed."""
    from dgt.figures.colors import class_colors, overlay

    try:
        from dgt.figures import raster
        from dgt.figures.label_map import figure_label_map
    except ModuleNotFoundError as error:
        LOGGER.warning("%s; drawn without it", explain_missing(error, "the legend"))
        colors = class_colors(len(run.class_names))
        mixed = overlay(prediction.pixels, prediction.label_map, colors)
        return Image.fromarray((255 * mixed).round().astype(np.uint8))
    return raster(
        figure_label_map(prediction.pixels, prediction.label_map, run.class_names), dpi=150
    )


def files(run: LoadedRun, prediction: Prediction, drawing: Image.Image) -> dict[str, bytes]:
    """The label map, whose numbers are the classes, and the drawing."""
    from dgt.figures.colors import label_png, png

    return {
        "labels.png": label_png(prediction.label_map, len(run.class_names)),
        "overlay.png": png(drawing),
    }


def _count(name: str, image_size: tuple[int, int]) -> Cost:
    """UperNet with ADE20K's 150 classes; the auxiliary head has parameters but does not run."""
    with torch.device("meta"):
        return cost(build_upernet(name, num_classes=150, image_size=max(image_size)), image_size)


SEGMENT = Task(
    name="segment",
    cost=CostSpec(_count, (512, 2048), PAPER),
    data=SegmentationData,
    build=build_segmenter,
    headline={"miou": "mIoU", "accuracy": "pixel accuracy"},
    losses=losses,
    metrics=SegmentationMetrics,
    predict=predict,
    draw=draw,
    files=files,
    has_backbone=True,
    class_layers=("decode_head.classifier", "auxiliary_head.classifier"),
    input_keys=("mean", "std", "image_size", "scale", "test"),
    weight=weigh_labels,
)
