"""docs/accelerate_models.md is what benchmarks/results/accelerate_coverage.json says, and that is what timm is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def coverage(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    """benchmarks/accelerate_coverage.py."""
    return load_script(ROOT / "benchmarks" / "accelerate_coverage.py")


@pytest.fixture(scope="module")
def results(coverage: ModuleType) -> Any:
    """What it found."""
    return json.loads(coverage.RESULTS.read_text(encoding="utf-8"))


def test_the_page_says_what_the_results_say(coverage: ModuleType, results: Any) -> None:
    assert coverage.PAGE.read_text(encoding="utf-8") == coverage.page(results)


def test_every_architecture_is_handled_or_refused_with_a_reason(results: Any) -> None:
    rows = results["architectures"]
    assert all(row["grouped"] == row["attentions"] > 0 or row["reasons"] for row in rows.values())
    assert not any("not tried" in reason for row in rows.values() for reason in row["reasons"])
    assert sum(row["grouped"] > 0 for row in rows.values()) > 150


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "swin_tiny_patch4_window7_224", "sam2_hiera_tiny"])
def test_the_results_are_what_is_found_today(coverage: ModuleType, results: Any, name: str) -> None:
    row = results["architectures"][name]
    assert {key: value for key, value in row.items() if key not in ("family", "tags")} == coverage.look(name)
