"""Tables and numbers of docs/dinov2.md: residual keys beside other approximations at equal measured
time.
"""

from __future__ import annotations

from functools import cache

from tables_shared import Cells, number_of_text, read, table

from studies.rival_summary import Cell, cells, rows_of_table

SHORT = {
    "merged tokens (ToMe)": "ToMe",
    "blocks (SpargeAttn)": "SpargeAttn",
    "blocks of clusters (SVG 2)": "SVG 2",
    "with compensation (SVG-EAR)": "SVG-EAR",
}


SMALL = {"CamVid": "residual_rivals_camvid", "Imagenette": "residual_rivals_imagenette"}


@cache
def found(raw: str = "residual_rivals") -> list[Cell]:
    """Every comparison of the raw results."""
    return cells(read(raw))


@table
def rivals() -> Cells:
    """A row for each size, layer, and time allowed: errors in percent."""
    heads, *rows = rows_of_table(found())
    return [[SHORT.get(head, head) for head in heads], *rows]


@table
def rivals_in_small_vits() -> Cells:
    """The same for two small ViTs, each of which was measured at one size."""
    lines: list[list[str]] = []
    for data, raw in SMALL.items():
        heads, *rows = rows_of_table(found(raw))
        lines += [[data, *row[1:]] for row in rows]
    return [["ViT of", *(SHORT.get(head, head) for head in heads[1:])], *lines]


@number_of_text
def cells_won(raw: str = "residual_rivals") -> str:
    """In how many of the comparisons residual keys are equal or better."""
    decided = [cell for cell in found(raw) if cell.decided]
    return f"{sum(cell.won for cell in decided)} of {len(decided)}"
