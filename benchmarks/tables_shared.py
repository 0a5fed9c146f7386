"""What every table and number of the documentation is made with: the raw results, and the register of tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Cells = list[list[str]]
TABLES: dict[str, Callable[[], Cells]] = {}
NUMBERS: dict[str, Callable[..., str]] = {}
NAMES = {"dgt_tiny": "DGT-T", "dgt_small": "DGT-S", "dgt_base": "DGT-B", "dgt_nano": "DGT-Nano"}
NAMES |= {"resnet50": "ResNet-50", "swin_tiny_patch4_window7_224": "Swin-T"}


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
    """The content of `benchmarks/results/NAME.json`, or of another file where the name has a slash."""
    path = ROOT / f"{name}.json" if "/" in name else ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def bold(text: str) -> str:
    """Text in bold face."""
    return f"**{text}**"


def relative(row: dict[str, Any], name: str) -> str:
    """A relative error and half of its interval over images, if known; "0" where it is that of rounding."""
    value, half = row[f"{name}_error"], row.get(f"{name}_half")
    if value < 1e-5:
        return "0"
    return f"{100 * value:.2g}" + (f" ± {100 * half:.1g}" if half else "") + " %"


def off(row: dict[str, Any]) -> str:
    """How far the predicted error is from that of unseen images."""
    predicted, found = row["predicted_error"], row["unseen_error"]
    return f"{100 * (predicted / found - 1):+.0f} %" if found > 1e-5 else "0"
