"""Table of docs/accelerate.md: how far a sample of images may be off."""

from __future__ import annotations

from dgt.utils.records import number

from .shared import Cells, read, table


@table
def how_many_images() -> Cells:
    """How often the error of some unseen images is more than 20 % off that of all of them."""
    counts = ("32", "64", "128", "256")
    rows = []
    for row in read("accelerate_imagenette")["rows"]:
        if row["unseen_error"] > 1e-5:
            cells = [f"{100 * row['asked_error']:.2g} %", str(row["unseen_images"])]
            shares = [number(row["missed"][count], 1, 100) + " %" for count in counts]
            rows.append([*cells, number(row["varies"], 1), *shares])
    heads = ["target error", "images", "spread"]
    return [[*heads, *(f"sample of {count}" for count in counts)], *rows]
