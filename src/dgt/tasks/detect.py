"""Object detection and instance segmentation: the losses of Mask R-CNN, COCO's average precision of
boxes and masks.

Precision is averaged over recall, over IoU from 0.5 to 0.95 and over categories, at most `COUNTED`
detections of each in an image, by faster-coco-eval; crowd regions count neither for nor against. A size
without a single object has, as in COCO's own code, the value -1.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dgt.data.coco import Entry, coco_places
from dgt.data.detection import DetectionData
from dgt.data.transforms import IMAGENET_MEAN, IMAGENET_STD, check_scale
from dgt.models.heads.mask_rcnn import build_mask_rcnn, mask_rcnn_cost
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
from dgt.utils.atomic_write import json_text
from dgt.utils.distributed import gather_objects
from dgt.utils.errors import UserError
from dgt.utils.extras import require

KINDS = {"box": "bbox", "mask": "segm"}
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
COUNTED = 100  # detections of a category in an image that COCO's average precision looks at
# Table 4 (a)
PAPER = {"dgt_tiny": (42.0, 272.0), "dgt_small": (70.0, 386.0), "dgt_base": (108.0, 540.0)}


def build_detector(settings: ModelSettings, num_classes: int, image_size: int) -> nn.Module:
    """Build the recipe's model as the backbone of a Mask R-CNN.

    Args:
        settings: the recipe's model; its `head` holds keyword arguments of `dgt.build_mask_rcnn`.
        num_classes: without background.
        image_size: what the shorter side of images is resized to, in pixels.

    Raises:
        UserError: there is no such model, it or the head does not take these arguments, or mean and
            deviation of the images are those of bytes.
    """
    settings.check_head(
        "max_size", "fpn_channels", "box_channels", "mask_channels", "anchor_sizes", "options"
    )
    options = settings.head.get("options")
    if isinstance(options, Mapping):
        mean = options.get("image_mean") or IMAGENET_MEAN
        std = options.get("image_std") or IMAGENET_STD
        check_scale("model.head.options.image_", mean, std)
    arguments = {"image_size": image_size, **settings.head, **settings.arguments()}
    try:
        detector: nn.Module = build_mask_rcnn(settings.name, num_classes + 1, **arguments)
    except TypeError as error:
        raise UserError(f"model.head of the recipe: {error}") from error
    return detector


def losses(network: nn.Module, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Losses:
    """The proposal, class, box and mask losses of one batch, and their sum."""
    parts: Losses = network(images, targets)
    return {"loss": torch.stack([part.float() for part in parts.values()]).sum(), **parts}


class DetectionMetrics(Metrics):
    """COCO's averages of precision, `box_ap` to `mask_ap_large`; `results` are the detections they
    are of.

    Images that could not be read are left out.
    """

    def __init__(self, data: Any) -> None:
        require("average precision", ("faster_coco_eval",), "detect")
        self.data = data
        self.results: list[Entry] = []
        self.image_ids: list[int] = []
        self.has_masks = True  # of the network
        self.most = COUNTED  # detections that it gives of an image

    def update(
        self, network: nn.Module, images: list[Tensor], targets: list[dict[str, Tensor]]
    ) -> None:
        """Add the detections in one batch of images (3, H, W) of several sizes."""
        numbers = [int(target["image_id"]) for target in targets]
        self.image_ids += numbers
        detections = network(images)
        heads: Any = network.roi_heads
        self.most = heads.detections_per_img
        self.has_masks = all("masks" in each for each in detections)
        self.results += coco_results(detections, numbers, self.data.reader.category_ids)

    def compute(self) -> dict[str, float]:
        """Average precision over the images of all processes; UserError where none that could be read has an object."""
        results, image_ids = zip(*gather_objects((self.results, self.image_ids)), strict=True)
        self.results, self.image_ids = [*chain(*results)], [*chain(*image_ids)]
        truth = self.data.datasets["val"].reader.ground_truth()
        self.remarks = note_on_many_objects(truth, self.image_ids, self.most)
        kinds = KINDS if self.has_masks else ("box",)
        metrics = average_precision(truth, self.results, self.image_ids, kinds)
        if "box_ap" not in metrics:
            raise UserError(
                "the validation images that could be read hold no object, so AP cannot be computed"
            )
        return metrics


def note_on_many_objects(
    ground_truth: Mapping[str, Sequence[Entry]], image_ids: Iterable[int], most: int
) -> list[str]:
    """A sentence on images with more objects than a detector gives of one, `most`, or are counted; or
    nothing.
    """
    objects = [entry for entry in ground_truth["annotations"] if not entry["iscrowd"]]
    of_images = Counter(entry["image_id"] for entry in objects)
    of_categories = Counter((entry["image_id"], entry["category_id"]) for entry in objects)
    many = {number for number, count in of_images.items() if count > most}
    many |= {number for (number, _), count in of_categories.items() if count > COUNTED}
    if not many.intersection(image_ids):
        return []
    return [
        f"{len(many.intersection(image_ids))} validation images have more objects than can be found: the "
        f"model gives at most {most} of an image (model.head.options.box_detections_per_img), and COCO's "
        f"average precision looks at {COUNTED} of each category"
    ]


def average_precision(
    ground_truth: Mapping[str, Sequence[Entry]],
    detections: Sequence[Entry],
    image_ids: Iterable[int] | None = None,
    kinds: Iterable[str] = tuple(KINDS),
) -> dict[str, float]:
    """Evaluate detections against a ground truth, as COCO defines it.

    Args:
        ground_truth: `images`, `annotations` and `categories` in COCO's format.
        detections: as from :func:`coco_results`.
        image_ids: the images to compare in; None for all.
        kinds: "box" and "mask", or one of them.

    Returns:
        `box_ap`, `box_ap50`, `box_ap75`, `box_ap_small`, `box_ap_medium`, `box_ap_large` (small is
        less than 32 x 32 pixels, large 96 x 96 and more), and the same of masks; shares in [0, 1].
        Where no object is of a size, its entry is missing.

    Raises:
        UserError: a detection is of an image that the ground truth lacks.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    known = {entry["id"] for entry in ground_truth["images"]}
    unknown = {entry["image_id"] for entry in detections} - known
    if unknown:
        raise UserError(
            f"detections must refer to images in the ground truth, got {sorted(unknown)[:5]}"
        )
    numbered = [
        entry | {"id": number} for number, entry in enumerate(ground_truth["annotations"], start=1)
    ]
    # an annotation of id 0 would count as unmatched
    truth = {**ground_truth, "annotations": numbered}
    evaluated_ids = sorted(known if image_ids is None else set(image_ids))
    metrics: dict[str, float] = {}
    for kind in kinds:
        coco_name = KINDS[kind]
        # it writes in them
        coco = COCO({name: [dict(entry) for entry in entries] for name, entries in truth.items()})
        evaluation = COCOeval_faster(coco, coco.loadRes(_entries(detections, coco_name)), coco_name)
        evaluation.params.imgIds = evaluated_ids
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        metrics |= {
            f"{kind}_{name}": float(value)
            for name, value in zip(NAMES, evaluation.stats, strict=False)
            if value >= 0  # -1 where there is nothing to find
        }
    return metrics


def _entries(detections: Sequence[Entry], coco_name: str) -> list[Entry]:
    """Detections as COCO's code takes them.

    Without boxes for masks, or a box's area would become the mask's.
    """
    entries = [dict(entry) for entry in detections]
    if coco_name == "segm":
        for entry in entries:
            entry.pop("bbox", None)
    return entries


def coco_results(
    detections: Sequence[Mapping[str, Tensor]],
    image_ids: Sequence[int],
    category_ids: Sequence[int],
) -> list[Entry]:
    """Detections in the format of COCO's results, ready for JSON; a pixel of probability above 0.5
    is in the mask.

    Args:
        detections: for each image `boxes` (N, 4) x0 y0 x1 y1, `labels` (N,) from 1 on, `scores`
            (N,) and maybe `masks` (N, 1, H, W) probabilities, as torchvision's detectors return
            them.
        image_ids, category_ids: the data set's numbers of each image, and of each label, that of
            label 1 first.
    """
    entries = []
    for image_id, output in zip(image_ids, detections, strict=True):
        masks = _masks(output)
        places = coco_places(output["boxes"].float().tolist(), masks)
        for label, score, place in zip(
            output["labels"].tolist(), output["scores"].tolist(), places, strict=True
        ):
            entries.append(
                {
                    "image_id": image_id,
                    "category_id": category_ids[label - 1],
                    "score": score,
                    **place,
                }
            )
    return entries


def _masks(output: Mapping[str, Tensor]) -> NDArray[np.uint8] | None:
    """The masks (N, H, W) of detections, 1 inside; None for boxes alone."""
    if "masks" not in output:
        return None
    masks: NDArray[np.uint8] = (output["masks"][:, 0] > 0.5).byte().cpu().numpy()
    return masks


@torch.inference_mode()
def predict(run: LoadedRun, image: Source, top_k: int) -> Prediction:
    """The objects in an image, by descending score. UserError also for an image that the network rejects,
    and for a network that answers NaN, of which torchvision makes no objects.
    """
    from dgt.figures.detections import Detections

    pixels = read_bytes(image, run.recipe.data.bits)
    network: Any = run.network
    answers: list[Tensor] = []
    hooks = [
        part.register_forward_hook(lambda _, __, output: answers.extend(tree_leaves(output)))
        for part in (network.rpn.head, network.roi_heads.box_predictor)
    ]
    try:
        output = network([pixels.float() / 255])[0]
    except ValueError as error:
        raise UserError(f"{name_of(image)}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if any(answer.isnan().any() for answer in answers):
        raise UserError(f"{name_of(image)}: the model's output is not a number")
    boxes, labels, scores = output["boxes"], output["labels"] - 1, output["scores"]
    objects = [
        {"category": run.class_names[label], "score": score, "box": box}
        for label, score, box in zip(labels.tolist(), scores.tolist(), boxes.tolist(), strict=True)
    ]
    masks = _masks(output)
    detections = Detections(
        boxes.numpy(), labels.numpy(), scores.numpy(), None if masks is None else masks > 0
    )
    return Prediction(
        objects=objects, pixels=pixels.permute(1, 2, 0).numpy(), detections=detections
    )


def draw(run: LoadedRun, prediction: Prediction) -> Image.Image:
    """The image with the masks, boxes and names of confident detections."""
    from dgt.figures.detections import draw_detections

    return draw_detections(
        Image.fromarray(prediction.pixels), prediction.detections, run.class_names
    )


def files(run: LoadedRun, prediction: Prediction, drawing: Image.Image) -> dict[str, bytes]:
    """The drawing, and all objects as COCO's results have them, with the category's name for a data
    set's number.
    """
    from dgt.figures.colors import png

    objects = prediction.objects or []
    masks = prediction.detections.masks
    boxes = [each["box"] for each in objects]
    places = coco_places(boxes, None if masks is None else masks.astype("uint8"))
    placed = zip(objects, places, strict=True)
    entries = [
        {"category": each["category"], "score": each["score"], **place} for each, place in placed
    ]
    return {
        "objects.png": png(drawing),
        "objects.json": (json_text(entries, indent=2) + "\n").encode(),
    }


DETECT = Task(
    name="detect",
    cost=CostSpec(mask_rcnn_cost, (800, 1280), PAPER),
    data=DetectionData,
    build=build_detector,
    headline={
        "box_ap": "box AP",
        "box_ap50": "box AP50",
        "mask_ap": "mask AP",
        "mask_ap50": "mask AP50",
    },
    losses=losses,
    metrics=DetectionMetrics,
    predict=predict,
    draw=draw,
    files=files,
    has_results=True,
    outputs=(),  # lists of objects
    has_backbone=True,
    class_layers=("roi_heads.box_predictor", "roi_heads.mask_predictor.mask_fcn_logits"),
    # torchvision's detectors normalize images themselves
    input_keys=("image_size",),
)
