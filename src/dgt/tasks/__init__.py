"""The trainable tasks, each defined in its own file."""

from dgt.tasks.base import Losses, Metrics, Task
from dgt.tasks.classify import CLASSIFY
from dgt.tasks.detect import DETECT
from dgt.tasks.segment import SEGMENT

__all__ = ["TASKS", "Losses", "Metrics", "Task"]

TASKS: dict[str, Task] = {task.name: task for task in (CLASSIFY, SEGMENT, DETECT)}
