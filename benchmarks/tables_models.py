"""Tables of whole models in eager PyTorch."""

from __future__ import annotations

from tables_shared import NAMES, Cells, bold, read, table

from dgt.utils.records import number


@table
def eager_on_zen_4() -> Cells:
    """Models in eager PyTorch, with the native layers."""
    columns = {"batch 1": "models_zen4_batch1", "batch 8": "models_zen4_batch8"}
    models: dict[str, list[str]] = {}
    for name in columns.values():
        for row in read(name)["rows"]:
            cells = models.setdefault(row["model"], [])
            ratio = bold(number(row["relative_time"], 2))
            cells.append(f"{row['ms_per_image']:.0f} ({ratio})")
    rows = [[NAMES.get(model, model), *cells] for model, cells in models.items()]
    return [["224 px; ms per image (times Swin-T's)", *columns], *rows]
