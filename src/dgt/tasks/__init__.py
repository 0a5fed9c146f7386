"""What can be trained: one row of the table `TASKS` for each task, naming its Lightning module and its data."""

from __future__ import annotations

from dataclasses import dataclass

from dgt.data.classification import ClassificationData
from dgt.tasks.classify import ClassificationTask

__all__ = ["TASKS", "ClassificationTask", "TaskRow"]


@dataclass(frozen=True)
class TaskRow:
    """One task that a recipe can name.

    Args:
        task: the Lightning module with loss, metrics, optimizer and schedule.
        data: the Lightning data module; its constructor's arguments are the recipe's section `data`.
        monitor: the logged metric, the larger the better, that chooses the best checkpoint.
    """

    task: type[ClassificationTask]
    data: type[ClassificationData]
    monitor: str


TASKS = {"classify": TaskRow(task=ClassificationTask, data=ClassificationData, monitor="val/top1")}
