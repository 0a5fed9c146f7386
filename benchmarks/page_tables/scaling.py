"""Tables of docs/scaling.md: the loader, and what 300 epochs of ImageNet would take."""

from __future__ import annotations

from dgt.utils.records import number

from .shared import Cells, read, table


@table
def loaders() -> Cells:
    """Images per second of this loader and of timm's."""
    files = {
        "128 px": "loaders_shared_cpu",
        "128 px, before": "loaders_small_cpu",
        "500 x 375, before": "loaders_cpu",
    }
    found = [
        {row["loader"]: row["images_per_second"] for row in read(name)["rows"]}
        for name in files.values()
    ]
    names = dict.fromkeys(name for rates in found for name in rates if "shards" not in name)
    rows = [[name, *(number(rates.get(name), 0) for rates in found)] for name in names]
    return [["images/s", *files], *rows]


@table
def needs_of_training() -> Cells:
    """What 300 epochs of ImageNet compute and move, model by model: derived."""
    needs: Cells = read("scaling")["needs"]
    return needs


@table
def steps_of_training() -> Cells:
    """The parts of a step on many GPUs: derived."""
    steps: Cells = read("scaling")["steps"]
    return steps
