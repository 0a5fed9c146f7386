"""Rows of ``dgt info``: parameters and FLOPs of the models beside the paper's, for each of the paper's tasks."""

from __future__ import annotations

from typing import Any

from dgt.tasks import TASKS
from dgt.utils.errors import UserError


def model_rows(
    model: str | None = None, image_size: tuple[int, int] | None = None, task: str = "classify"
) -> list[dict[str, Any]]:
    """Return one row a model, ready for JSON; its FLOPs are multiply-adds of one image.

    `model` names any timm model, for another task than classification one that can be its backbone; None for all of
    ours. `image_size` is (height, width); None for that of the paper's FLOPs. `task` is a key of `TASKS`. Numbers of
    the paper are None where it has none: other models, or other sizes. Raises UserError for an unknown name or task.
    """
    if task not in TASKS:
        raise UserError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    counted = TASKS[task].counted
    names = counted.models if model is None else (model,)
    return [_row(name, task, image_size or counted.image_size) for name in names]


def _row(name: str, task: str, image_size: tuple[int, int]) -> dict[str, Any]:
    counted = TASKS[task].counted
    total = counted.count(name, image_size)
    paper_params, paper_flops = counted.paper.get(name, (None, None))
    paper_flops = paper_flops if image_size == counted.image_size else None
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
    """Lay the rows of :func:`model_rows` out as text; for a single model its stages follow."""
    lines = [f"{'model':<28}{'params M':>10}{'paper':>8}{'GFLOPs':>10}{'paper':>8}   at"]
    for row in rows:
        paper_params = "" if row["paper_params"] is None else f"{row['paper_params'] / 1e6:.2f}"
        paper_flops = "" if row["paper_flops"] is None else f"{row['paper_flops'] / 1e9:.2f}"
        size = " x ".join(map(str, row["image_size"]))
        params = f"{row['params'] / 1e6:>10.2f}{paper_params:>8}"
        flops = f"{row['flops'] / 1e9:>10.2f}{paper_flops:>8}"
        lines.append(f"{row['model']:<28}{params}{flops}   {size}")
    if len(rows) == 1:
        for stage in rows[0]["stages"]:
            lines.append(f"  {stage['name']:<26}{stage['params'] / 1e6:>10.2f}{'':>8}{stage['flops'] / 1e9:>10.3f}")
    return "\n".join(lines)
