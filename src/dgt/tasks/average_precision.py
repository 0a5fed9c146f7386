"""Average precision of boxes and masks as COCO defines it, computed by faster-coco-eval.

Precision averaged over recall, over IoU from 0.5 to 0.95 and over categories, at most 100 detections an image; crowd
regions count neither for nor against. A size without a single object has, as in COCO's own code, the value -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dgt.data.coco import encode_masks
from dgt.utils.errors import UserError

Entry = dict[str, Any]
KINDS = {"box": "bbox", "mask": "segm"}
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def average_precision(
    ground_truth: Mapping[str, Sequence[Entry]], detections: Sequence[Entry], image_ids: Iterable[int] | None = None
) -> dict[str, float]:
    """Compare detections with the ground truth.

    Args:
        ground_truth: `images`, `annotations` and `categories` in COCO's format.
        detections: in the format of COCO's results: `image_id`, `category_id`, `bbox` (x, y, width, height), `score`,
            `segmentation` (run-length code).
        image_ids: the images to look at; None for all.

    Returns:
        `box_ap`, `box_ap50`, `box_ap75`, `box_ap_small`, `box_ap_medium`, `box_ap_large` (small is less than 32 x 32
        pixels, large 96 x 96 and more), and the same of masks; shares in [0, 1], or -1 where no object is of that size.

    Raises:
        ValueError: a detection of an image that the ground truth lacks.
    """
    known = {entry["id"] for entry in ground_truth["images"]}
    strangers = {entry["image_id"] for entry in detections} - known
    if strangers:
        raise UserError(f"detections must be of images in the ground truth, got {sorted(strangers)[:5]}")
    wanted = sorted(known if image_ids is None else set(image_ids))
    return {
        f"{kind}_{name}": value
        for kind, coco_name in KINDS.items()
        for name, value in zip(NAMES, _evaluate(ground_truth, detections, coco_name, wanted), strict=True)
    }


def _evaluate(
    ground_truth: Mapping[str, Sequence[Entry]], detections: Sequence[Entry], kind: str, image_ids: list[int]
) -> list[float]:
    """AP, AP50, AP75, and AP of small, medium and large objects."""
    from faster_coco_eval import COCO, COCOeval_faster

    # The library writes into its entries; where it finds a box beside a mask, the box's area becomes the mask's; and it
    # takes an annotation with the id 0, which many programs count from, for one that no detection has met.
    left_out = {"bbox"} if kind == "segm" else set()
    given = [{key: value for key, value in entry.items() if key not in left_out} for entry in detections]
    copies = {name: [dict(entry) for entry in entries] for name, entries in ground_truth.items()}
    for number, entry in enumerate(copies["annotations"], start=1):
        entry["id"] = number
    truth = COCO(copies)
    evaluation = COCOeval_faster(truth, truth.loadRes(given), kind)
    evaluation.params.imgIds = image_ids
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return [float(value) for value in evaluation.stats[: len(NAMES)]]


def coco_results(
    detections: Sequence[Mapping[str, Tensor]], image_ids: Sequence[int], category_ids: Sequence[int]
) -> list[Entry]:
    """Detections in the format of COCO's results, ready for JSON.

    Args:
        detections: for each image `boxes` (N, 4) x0 y0 x1 y1, `labels` (N,) from 1 on, `scores` (N,) and `masks`
            (N, 1, H, W) probabilities, as torchvision's detectors return them.
        image_ids: the data set's number of each image.
        category_ids: the data set's number of each label, that of label 1 first.

    Returns:
        One entry for each detection. A pixel belongs to a mask where its probability is above 0.5.
    """
    entries = []
    for image_id, found in zip(image_ids, detections, strict=True):
        boxes = found["boxes"].float().cpu()
        corners, sides = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
        masks = encode_masks((found["masks"][:, 0] > 0.5).byte().cpu().numpy())
        rows = zip(
            *(column.tolist() for column in (corners, sides, found["labels"], found["scores"].float())), strict=True
        )
        for (corner, side, label, score), mask in zip(rows, masks, strict=True):
            place = {"bbox": corner + side, "segmentation": mask}
            entries.append({"image_id": image_id, "category_id": category_ids[label - 1], "score": score, **place})
    return entries
