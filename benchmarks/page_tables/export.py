"""Tables of docs/export.md: accuracy in int8."""

from __future__ import annotations

from dgt.utils.records import number, wilson

from .shared import Cells, read, table


@table
def accuracy_in_int8() -> Cells:
    """Top-1 on Imagenette of each way that works, and what the others say."""
    results = read("int8")
    rows = []
    for name, row in results["rows"].items():
        if problem := row.get("problem"):
            rows.append([name, "-", "-", "-", "-", problem])
            continue
        low, high = (f"{100 * share:.1f}" for share in wilson(row["top1"], results["images"]))
        shares = [number(row[key], 1, 100) for key in ("top1", "as_float32")]
        rows.append(
            [name, shares[0], f"{low} to {high}", shares[1], number(row["bytes"], 1, 1e-6), ""]
        )
    heads = [
        "weights and products",
        "top-1, %",
        "interval, %",
        "as in float32, %",
        "file, MB",
        "problem",
    ]
    return [heads, *rows]
