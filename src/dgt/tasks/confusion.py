"""The measures of semantic segmentation, from the exact confusion matrix of all labelled pixels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SegmentationScores(NamedTuple):
    """What :func:`segmentation_scores` returns; shares in [0, 1]."""

    iou: Tensor
    """Intersection over union of each class, (classes,); NaN for a class that is neither there nor predicted."""
    miou: Tensor
    """Mean of `iou` over the classes that it is known for; NaN where no pixel has a label."""
    mean_accuracy: Tensor
    """Mean over the classes that are there of the share of their pixels that is found."""
    accuracy: Tensor
    """Share of all labelled pixels that is right."""


def segmentation_scores(confusion: Tensor) -> SegmentationScores:
    """Measures of a confusion matrix.

    A class that is there or predicted counts in the mean; one that is neither is left out.

    Args:
        confusion: (classes, classes) numbers of pixels, the true class by row, the predicted one by column.
    """
    counts = confusion.to(torch.float64) if confusion.device.type != "mps" else confusion.float()
    right, there, predicted = counts.diagonal(), counts.sum(dim=1), counts.sum(dim=0)
    iou = right / (there + predicted - right)
    return SegmentationScores(iou, iou.nanmean(), (right / there).nanmean(), right.sum() / counts.sum())
