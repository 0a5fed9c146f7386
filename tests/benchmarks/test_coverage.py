"""The raw results of which models can be accelerated match timm and transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
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
    """Its results."""
    return json.loads(coverage.RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("part", ["architectures", "encoders"])
def test_every_model_is_handled_or_refused_with_a_reason(results: Any, part: str) -> None:
    rows = results[part]
    assert all(row["grouped"] == row["attentions"] > 0 or row["reasons"] for row in rows.values())
    assert not any("not tried" in reason for row in rows.values() for reason in row["reasons"])
    assert sum(row["grouped"] > 0 for row in rows.values()) > 5


def test_the_results_are_of_the_registries(coverage: ModuleType, results: Any) -> None:
    """Families are not listed by hand."""
    if any(results[name] != version(name) for name in ("timm", "transformers")):
        pytest.skip("the results are of other versions of timm or transformers")
    known = {"architectures": coverage.architectures(), "encoders": coverage.registered()}
    for part, names in known.items():
        assert set(results[part]) <= set(names)
        assert results["registered"][part] == len(names)
    assert results["architectures"]["qwen3_vit_88m"]["grouped"] == 12
    assert results["architectures"]["deepseek_vit_412m"]["grouped"] == 32


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("architectures", "vit_small_patch16_dinov3"),
        ("architectures", "swin_tiny_patch4_window7_224"),
        ("architectures", "sam2_hiera_tiny"),
        ("architectures", "resnet18"),
        ("encoders", "dinov2"),
    ],
)
def test_the_results_are_what_is_found_today(
    coverage: ModuleType, results: Any, part: str, name: str
) -> None:
    look = coverage.look_at_architecture if part == "architectures" else coverage.look_at_encoder
    assert results[part][name] == look(name)
