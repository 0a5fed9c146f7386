"""Table of docs/dinov2.md: DINOv2-S with trained weights, accelerated within several errors."""

from __future__ import annotations

from typing import Any

from tables_shared import Cells, bold, number_of_text, read, table

from dgt.utils.records import number

HEADS = (
    "px",
    "error asked",
    "layers in groups",
    "bound at 95 %",
    "unseen images",
    "cosine: mean, lowest hundredth",
    "attention",
    "model",
    "without attention",
    "batch 4",
    "batch 8",
    "minutes",
)


def _rows() -> list[dict[str, Any]]:
    """Rows of the raw results by size and error."""
    rows = read("accelerate_dinov2")["rows"]
    return sorted(rows, key=lambda row: (row["size"], row["asked_error"]))


def _percent(error: float) -> str:
    """An error in percent, with two digits; of exact attention only rounding is left."""
    return f"{100 * error:.2g} %" if error > 1e-4 else "0"


def _faster(row: dict[str, Any], batch: int) -> str:
    """Times as fast at a batch size."""
    times = row["batches"][str(batch)]
    return number(times["ms_before"] / times["ms_after"], 2)


@table
def dinov2() -> Cells:
    """Errors asked, bounded, and measured on images that chose nothing; speed in times."""
    rows = []
    for row in _rows():
        in_groups = sum(layer["choice"] == "groups" for layer in row["layers"])
        cosines = (row["unseen_cosine_mean"], row["unseen_cosine_low"])
        rows.append(
            [
                str(row["size"]),
                _percent(row["asked_error"]),
                f"{in_groups} of {len(row['layers'])}",
                _percent(row["error_bound"]),
                _percent(row["unseen_error"]),
                ", ".join(number(cosine, 4) for cosine in cosines),
                bold(number(row["attention_speedup"], 1)),
                bold(number(row["model_speedup"], 2)),
                number(row["bound"], 2),
                _faster(row, 4),
                _faster(row, 8),
                number(row["seconds"] / 60, 1),
            ]
        )
    return [list(HEADS), *rows]


@number_of_text
def dinov2_value(size: str, error: str, name: str, digits: str) -> str:
    """A number of one row: pixels, error asked, name of the value, decimals."""
    for row in _rows():
        if row["size"] == int(size) and row["asked_error"] == float(error):
            return number(row[name], int(digits))
    raise KeyError(f"accelerate_dinov2.json has no row of {size} px at {error}")
