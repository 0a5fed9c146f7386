"""What the tables share: the registry, raw results, names, and how numbers are written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that tables can import from studies
RESULTS = ROOT / "benchmarks" / "results"
Cells = list[list[str]]
TABLES: dict[str, Callable[[], Cells]] = {}
NAMES = {
    "dgt_tiny": "DGT-T",
    "dgt_small": "DGT-S",
    "dgt_base": "DGT-B",
    "dgt_nano": "DGT-Nano",
    "resnet50": "ResNet-50",
    "swin_tiny_patch4_window7_224": "Swin-T",
    "vit_small_patch14_dinov2": "DINOv2-S",
    "dgt_tiny+inference": "DGT-T, `optimize_for_inference`",
    "dgt_tiny+checkpointing": "DGT-T, gradient checkpointing",
}
GENERATIONS = {
    "family 25, model 1": "Zen 3",
    "family 25, model 17": "Zen 4",
    "family 26, model 2": "Zen 5",
    "family 6, model 167": "Xeon with AMX",
}


def table(make: Callable[[], Cells]) -> Callable[[], Cells]:
    """Register a table under its function's name, with blanks for underscores."""
    TABLES[make.__name__.replace("_", " ")] = make
    return make


@cache
def read(name: str) -> Any:
    """The content of `benchmarks/results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def processors(content: Any) -> Iterator[str]:
    """Every processor that a raw result names, as it names it."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key in ("processor", "device") and isinstance(value, str):
                yield value
            else:
                yield from processors(value)
    elif isinstance(content, list):
        for value in content:
            yield from processors(value)


def generation_of(processor: str) -> str | None:
    """The generation of a processor, as records name it."""
    matching = (
        each for marker, each in GENERATIONS.items() if re.search(rf"{marker}\b", processor)
    )
    return next(matching, None)


def generation(name: str) -> str:
    """The generation of processor that a raw result was measured on."""
    found = {generation_of(processor) for processor in processors(read(name))} - {None}
    return " and ".join(sorted(map(str, found))) or "AMD EPYC, generation not recorded"


def files(start: str) -> list[str]:
    """The raw results whose names begin like this, one for each processor."""
    return sorted(path.stem for path in RESULTS.glob(f"{start}*.json"))


def percent(error: float, half: float | None = None) -> str:
    """An error in percent, with two digits; of exact attention only rounding is left."""
    if error < 1e-4:
        return "0"
    return f"{100 * error:.2g}" + (f" ± {100 * half:.1g}" if half else "") + " %"


def bold(text: str) -> str:
    """Text in bold face."""
    return f"**{text}**"


def span(values: list[float], places: int) -> str:
    """The range of some values: `19.9 to 25.9`, or one number if they print the same."""
    low, high = f"{min(values):.{places}f}", f"{max(values):.{places}f}"
    return low if low == high else f"{low} to {high}"
