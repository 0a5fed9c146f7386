"""Rows of ``dgt info``: parameters and FLOPs of the models beside the paper's, for each of the
paper's tasks.

Below them, which kernels are in use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dgt
from dgt.ops.cpu.library import choose_level
from dgt.tasks import TASKS, Task
from dgt.utils.errors import UserError

# of each task: rows of Tables 2, 3 and 4 (a), in M and G
COMPARATORS = Path(__file__).with_name("comparators.json")


def model_rows(
    model: str | None = None, image_size: tuple[int, int] | None = None, task: str = "classify"
) -> list[dict[str, Any]]:
    """Return one row a model, ready for JSON; its FLOPs are multiply-adds of one image.

    `model` names any timm model, for another task than classification one that can be its backbone;
    None for all of ours. `image_size` is (height, width); None for that of the paper's FLOPs.
    `task` is a key of `TASKS`. Numbers of the paper are None where it has none: other models, or
    other sizes. Raises UserError for an unknown name or task.
    """
    spec = _known(task).cost
    names = spec.models if model is None else (model,)
    return [
        _row(name, task, image_size or spec.image_size, *_printed(name, task, image_size))
        for name in names
    ]


def comparator_rows(task: str = "classify") -> list[dict[str, Any]]:
    """Return every row of the paper's table of this task, in its order.

    As in :func:`model_rows`, with the row's name in the table.
    """
    spec = _known(task).cost
    rows = []
    for printed in json.loads(COMPARATORS.read_text(encoding="utf-8"))[task]:
        size = (printed["size"],) * 2 if "size" in printed else spec.image_size
        row = _row(printed["model"], task, size, printed["params"], printed["flops"])
        rows.append({"row": printed["row"], **row})
    return rows


GPU_LINE = (
    "GPU: Triton kernels on NVIDIA's, compute capability 8.0 or later; else PyTorch's operations"
)


def native_line() -> str:
    """Return which native CPU kernels are in use and why, or why none are, as a line of text."""
    status = dgt.native_status()
    if status.available:
        return f"native CPU kernels: {status.level}, {status.lanes} lanes ({choose_level().why})"
    return f"native CPU kernels: none ({status.reason})"


def _known(task: str) -> Task:
    if task not in TASKS:
        raise UserError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    return TASKS[task]


def _printed(
    name: str, task: str, image_size: tuple[int, int] | None
) -> tuple[float | None, float | None]:
    spec = TASKS[task].cost
    params, flops = spec.paper.get(name, (None, None))
    return params, flops if image_size in (None, spec.image_size) else None


def _row(
    name: str,
    task: str,
    image_size: tuple[int, int],
    paper_params: float | None,
    paper_flops: float | None,
) -> dict[str, Any]:
    total = TASKS[task].cost.count(name, image_size)
    return {
        "model": name,
        "task": task,
        "params": total.params,
        "flops": total.flops,
        "paper_params": None if paper_params is None else round(paper_params * 1e6),
        "paper_flops": None if paper_flops is None else round(paper_flops * 1e9),
        "image_size": list(image_size),
        "stages": [stage._asdict() for stage in total.stages],
    }


def model_table(rows: list[dict[str, Any]]) -> str:
    """Lay the rows of :func:`model_rows` or :func:`comparator_rows` out as text; for one model with its stages."""
    lines = [
        f"{'model':<44}{'params M':>10}{'paper':>8}{'GFLOPs':>10}{'paper':>8}   at; FLOPs are multiply-adds"
    ]
    for row in rows:
        keys = (
            ("params", 1e6, 10),
            ("paper_params", 1e6, 8),
            ("flops", 1e9, 10),
            ("paper_flops", 1e9, 8),
        )
        cells = ["" if row[key] is None else f"{row[key] / unit:.2f}" for key, unit, _ in keys]
        name = f"{row['row']:<16}{row['model']}" if "row" in row else row["model"]
        numbers = "".join(
            f"{cell:>{width}}" for cell, (_, _, width) in zip(cells, keys, strict=True)
        )
        lines.append(f"{name:<44}{numbers}   {' x '.join(map(str, row['image_size']))}")
    if len(rows) == 1:
        for stage in rows[0]["stages"]:
            lines.append(
                f"  {stage['name']:<42}{stage['params'] / 1e6:>10.2f}{'':>8}{stage['flops'] / 1e9:>10.3f}"
            )
    return "\n".join([*lines, "FLOPs count a multiply-add as one."])
