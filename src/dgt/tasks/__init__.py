"""What can be trained: one row of the table `TASKS` for each task, naming its Lightning module and its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from dgt.data.classification import ClassificationData
from dgt.data.detection import DetectionData
from dgt.data.module import ImageData
from dgt.data.segmentation import SegmentationData
from dgt.tasks.base import TrainingTask
from dgt.tasks.classify import ClassificationTask
from dgt.tasks.detect import HEADLINE, DetectionTask, build_detector
from dgt.tasks.network import ModelSettings, build_classifier
from dgt.tasks.segment import SegmentationTask, build_segmenter

__all__ = ["TASKS", "ClassificationTask", "TaskRow", "TrainingTask"]


@dataclass(frozen=True)
class TaskRow:
    """One task that a recipe can name.

    Args:
        task: the Lightning module with loss and metrics.
        data: the Lightning data module; its constructor's arguments are the recipe's section `data`.
        build: makes the network from the recipe's model, the number of classes and the side of the training images in
            pixels; a network with a backbone has it as its attribute `backbone`, a `FeatureBackbone`.
        headline: the metrics that are printed, with their names for people. The first, the larger the better, chooses
            the best checkpoint.
    """

    task: type[TrainingTask]
    data: type[ImageData]
    build: Callable[[ModelSettings, int, int], nn.Module]
    headline: Mapping[str, str]

    @property
    def monitor(self) -> str:
        """The logged name of the metric that chooses the best checkpoint."""
        return f"val/{next(iter(self.headline))}"

    def summary(self, metrics: Mapping[str, float]) -> str:
        """The headline metrics in percent, as far as they are there: `top-1 81.20 %  top-5 95.00 %`."""
        shown = [f"{label} {100 * metrics[key]:.2f} %" for key, label in self.headline.items() if key in metrics]
        return "  ".join(shown)


TASKS = {
    "classify": TaskRow(
        task=ClassificationTask,
        data=ClassificationData,
        build=build_classifier,
        headline={"top1": "top-1", "top5": "top-5"},
    ),
    "segment": TaskRow(
        task=SegmentationTask,
        data=SegmentationData,
        build=build_segmenter,
        headline={"miou": "mIoU", "accuracy": "pixel accuracy"},
    ),
    "detect": TaskRow(task=DetectionTask, data=DetectionData, build=build_detector, headline=HEADLINE),
}
