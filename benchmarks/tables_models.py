"""Tables of whole models with native layers."""

from __future__ import annotations

from tables_shared import NAMES, Cells, bold, read, table

from dgt.utils.records import number


@table
def native_layers_on_zen_4() -> Cells:
    """Models in PyTorch as it comes, with the native layers: inference and a training step."""
    columns = {
        "batch 1": "models_zen4_batch1",
        "batch 8": "models_zen4_batch8",
        "training step, batch 8": "models_zen4_training",
    }
    models: dict[str, list[str]] = {}
    for name in columns.values():
        for row in read(name)["rows"]:
            cells = models.setdefault(row["model"], [])
            ratio = bold(number(row["relative_time"], 2))
            cells.append(f"{row['ms_per_image']:.0f} ({ratio})")
    rows = []
    for model, cells in models.items():
        missing = ["-"] * (len(columns) - len(cells))
        rows.append([NAMES.get(model, model), *cells, *missing])
    return [["224 px; ms per image (times Swin-T's)", *columns], *rows]
