"""What tables and numbers of the documentation share: raw results, registries, processors."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that tables can import from studies
RESULTS = ROOT / "benchmarks" / "results"
Cells = list[list[str]]
TABLES: dict[str, Callable[[], Cells]] = {}
NUMBERS: dict[str, Callable[..., str]] = {}
USED: set[str] = set()
"""Names of the raw results that were read."""
NAMES = {
    "dgt_tiny": "DGT-T",
    "dgt_small": "DGT-S",
    "dgt_base": "DGT-B",
    "dgt_nano": "DGT-Nano",
    "resnet50": "ResNet-50",
    "swin_tiny_patch4_window7_224": "Swin-T",
}
GENERATIONS = {"family 25, model 17": "Zen 4", "family 26, model 2": "Zen 5"}
UNKNOWN = "AMD EPYC, generation not recorded"


def table(make: Callable[[], Cells]) -> Callable[[], Cells]:
    """Register a table under its function's name, with blanks for underscores."""
    TABLES[make.__name__.replace("_", " ").strip()] = make
    return make


def number_of_text(make: Callable[..., str]) -> Callable[..., str]:
    """Register a number of the text under its function's name, with blanks for underscores."""
    NUMBERS[make.__name__.replace("_", " ").strip()] = make
    return make


@cache
def read(name: str) -> Any:
    """The content of `benchmarks/results/NAME.json`, or of another file if the name has a slash."""
    USED.add(name)
    path = ROOT / f"{name}.json" if "/" in name else RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


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


def generation(processor: str) -> str:
    """The generation of an AMD EPYC by family and model, as a page calls it."""
    return next((name for found, name in GENERATIONS.items() if found in processor), UNKNOWN)


def generations(name: str) -> list[str]:
    """The generations of processor that a raw result was measured on, sorted."""
    return sorted({generation(processor) for processor in processors(read(name))})


def bold(text: str) -> str:
    """Text in bold face."""
    return f"**{text}**"


def span(values: list[float], places: int) -> str:
    """The range of some values: `19.9 to 25.9`, or one number if they print the same."""
    low, high = f"{min(values):.{places}f}", f"{max(values):.{places}f}"
    return low if low == high else f"{low} to {high}"


def relative(row: dict[str, Any], name: str) -> str:
    """A relative error and half of its interval over images, if known; "0" for rounding alone."""
    value, half = row[f"{name}_error"], row.get(f"{name}_half")
    if value < 1e-5:
        return "0"
    interval = f" ± {100 * half:.1g}" if half else ""
    return f"{100 * value:.2g}{interval} %"


def off(row: dict[str, Any]) -> str:
    """How far the predicted error is from that of unseen images."""
    predicted, found = row["predicted_error"], row["unseen_error"]
    return f"{100 * (predicted / found - 1):+.0f} %" if found > 1e-5 else "0"


def numbers_in(text: str) -> list[str]:
    """The numbers of a cell, in order."""
    return re.findall(r"[-+]?\d[\d.,]*(?: ± [\d.]+)?", text)
