"""Table and numbers of docs/experiments.md: clusters shared between layers, and in two levels."""

from __future__ import annotations

from functools import cache

from tables_shared import Cells, number_of_text, read, table

from studies.cluster_variants import COMPARED, VARIANTS, Compared, compare

SIZES = {"518 px": "cluster_variants", "1036 px": "cluster_variants_1036"}


@cache
def found(raw: str) -> dict[tuple[str, float], Compared]:
    """Every variant with every budget."""
    return {(row.variant, row.share): row for row in compare(read(raw)["rows"])}


@table
def cluster_variants() -> Cells:
    """Products and errors in percent; in parentheses, compared with own clusters at equal products."""
    heads = [f"{size}, {100 * share:.0f} %" for size in SIZES for share in COMPARED]
    rows = []
    for variant in VARIANTS:
        cells = []
        for raw in SIZES.values():
            for share in COMPARED:
                row = found(raw)[variant, share]
                cells.append(f"{100 * row.products:.1f}: {100 * row.error:.1f} ({row.ratio:.2f})")
        rows.append([variant, *cells])
    return [["clusters", *heads], *rows]


@number_of_text
def compared_with_own(variant: str) -> str:
    """The least and the most of a variant's errors compared with own clusters at equal products."""
    ratios = [found(raw)[variant, share].ratio for raw in SIZES.values() for share in COMPARED]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
