"""Object detection and instance segmentation: the losses of Mask R-CNN, COCO's average precision of boxes and masks."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from dgt.data.coco import encode_masks
from dgt.data.detection import DetectionData
from dgt.figures import png
from dgt.figures.detections import Detections, draw_detections
from dgt.models.heads.mask_rcnn import PaddedMaskRCNN, build_mask_rcnn, mask_rcnn_cost
from dgt.tasks.average_precision import Entry, average_precision, coco_results
from dgt.tasks.base import Counted, Losses, Metrics, Task
from dgt.tasks.network import ModelSettings
from dgt.tasks.prediction import Prediction, Run, Source, name_of, read_bytes, to_array
from dgt.utils.distributed import gather_objects
from dgt.utils.errors import UserError


def build_detector(settings: ModelSettings, num_classes: int, image_size: int) -> nn.Module:
    """Build the recipe's model as the backbone of a Mask R-CNN.

    Args:
        settings: the recipe's model; `head` holds keyword arguments of `dgt.build_mask_rcnn`.
        num_classes: classes of the data, without background.
        image_size: length that an image's shorter side is resized to.

    Raises:
        ValueError: no such model, or it or the head does not take these arguments.
    """
    arguments = dict(settings.args)
    if settings.drop_path_rate is not None:
        arguments.setdefault("drop_path_rate", settings.drop_path_rate)
    unknown = sorted(set(settings.head) - set(HEAD_KEYS))
    if unknown:
        raise UserError(f"model.head must hold keys among {', '.join(HEAD_KEYS)}, got {', '.join(unknown)}")
    try:
        detector: PaddedMaskRCNN = build_mask_rcnn(
            settings.name, num_classes + 1, image_size=image_size, **settings.head, **arguments
        )
    except TypeError as error:
        raise UserError(f"model.head of the recipe: {error}") from error
    return detector


HEAD_KEYS = ("max_size", "fpn_channels", "box_channels", "mask_channels", "anchor_sizes", "options")


def losses(network: nn.Module, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Losses:
    """The losses of proposals, classes, boxes and masks of one batch, and their sum."""
    parts: Losses = network(images, targets)
    return {"loss": torch.stack([part.float() for part in parts.values()]).sum(), **parts}


class DetectionMetrics(Metrics):
    """COCO's twelve averages of precision, `box_ap` to `mask_ap_large`; `results` are the detections they are of.

    Images that could not be read are left out; -1 stands for a size of which there is no object.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.results: list[Entry] = []
        self.image_ids: list[int] = []

    def update(self, network: nn.Module, images: list[Tensor], targets: list[dict[str, Tensor]]) -> None:
        """Add the detections in one batch of images (3, H, W) of several sizes."""
        numbers = [int(target["image_id"]) for target in targets]
        self.image_ids += numbers
        self.results += coco_results(network(images), numbers, self.data.category_ids)

    def compute(self) -> dict[str, float]:
        """Average precision over the images of all processes."""
        found, seen = zip(*gather_objects((self.results, self.image_ids)), strict=True)
        self.results, self.image_ids = [*chain(*found)], [*chain(*seen)]
        return average_precision(self.data.ground_truth(), self.results, self.image_ids)


@torch.inference_mode()
def predict(run: Run, image: Source, top_k: int) -> Prediction:
    """The objects in an image, by falling score.

    Raises:
        UserError: also for an image that the network refuses.
    """
    pixels = read_bytes(image)
    try:
        found = run.network([pixels.float() / 255])[0]
    except ValueError as error:
        raise UserError(f"{name_of(image)!r}: {error}") from error
    boxes, labels, scores = found["boxes"], found["labels"] - 1, found["scores"]
    masks = found["masks"][:, 0] > 0.5
    objects = [
        {"category": run.class_names[label], "score": score, "box": box}
        for label, score, box in zip(labels.tolist(), scores.tolist(), boxes.tolist(), strict=True)
    ]
    detections = Detections(boxes.numpy(), labels.numpy(), scores.numpy(), masks.numpy())
    return Prediction(name_of(image), objects=objects, pixels=to_array(pixels), found=detections)


def draw(run: Run, prediction: Prediction) -> Image.Image:
    """The image with the masks, boxes and names of what is sure."""
    return draw_detections(Image.fromarray(prediction.pixels), prediction.found, run.class_names)


def files(run: Run, prediction: Prediction, drawing: Image.Image) -> dict[str, bytes]:
    """The drawing, and all objects as COCO's results have them, with the category's name for a data set's number."""
    masks = encode_masks(prediction.found.masks.astype("uint8"))
    entries = []
    for found, mask in zip(prediction.objects or (), masks, strict=True):
        x0, y0, x1, y1 = found["box"]
        bbox = [x0, y0, x1 - x0, y1 - y0]
        entries.append({"category": found["category"], "score": found["score"], "bbox": bbox, "segmentation": mask})
    return {"objects.png": png(drawing), "objects.json": (json.dumps(entries, indent=2) + "\n").encode()}


PAPER = {"dgt_tiny": (42.0, 272.0), "dgt_small": (70.0, 386.0), "dgt_base": (108.0, 540.0)}  # Table 4 (a)

DETECT = Task(
    name="detect",
    counted=Counted(mask_rcnn_cost, tuple(PAPER), (800, 1280), PAPER),
    data=DetectionData,
    build=build_detector,
    headline={"box_ap": "box AP", "box_ap50": "box AP50", "mask_ap": "mask AP", "mask_ap50": "mask AP50"},
    losses=losses,
    metrics=DetectionMetrics,
    predict=predict,
    draw=draw,
    files=files,
    refused_precision="bf16-true",  # torchvision's non-maximum suppression does not exist in it
    has_results=True,
    outputs=(),  # lists of objects
)
