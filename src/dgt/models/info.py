"""Rows of ``dgt info``: parameters and FLOPs of the models beside the paper's."""

from typing import Any

from dgt.models.cost import PAPER, Cost, cost

MODELS = ("dgt_tiny", "dgt_small", "dgt_base", "dgt_nano")


def model_rows(model: str | None = None, image_size: tuple[int, int] = (224, 224)) -> list[dict[str, Any]]:
    """Return one row a model, ready for JSON.

    Args:
        model: the name of any timm model; None for all of ours.
        image_size: height and width in pixels.

    Returns:
        Rows with ``model``, ``params``, ``flops`` (multiply-adds of one image), ``paper_params``, ``paper_flops``
        (in units, None where the paper has none: other models, or other sizes for FLOPs), ``image_size`` and
        ``stages`` (name, params, flops).

    Raises:
        ValueError: for an unknown name.
    """
    return [_row(name, cost(name, image_size), image_size) for name in (MODELS if model is None else (model,))]


def _row(name: str, counted: Cost, image_size: tuple[int, int]) -> dict[str, Any]:
    paper_params, paper_flops = PAPER.get(name, (None, None))
    return {
        "model": name,
        "params": counted.params,
        "flops": counted.flops,
        "paper_params": None if paper_params is None else round(paper_params * 1e6),
        "paper_flops": round(paper_flops * 1e9) if paper_flops is not None and image_size == (224, 224) else None,
        "image_size": list(image_size),
        "stages": [stage._asdict() for stage in counted.stages],
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
