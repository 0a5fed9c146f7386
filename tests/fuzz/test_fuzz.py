"""A few corrupted files; `run.py` tries a thousand."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from check import check_image, check_recipe


def test_images_are_read_or_refused() -> None:
    outcomes = [check_image(seed) for seed in range(2000, 2060)]
    assert [fault for _, fault in outcomes if fault] == []
    assert {outcome for outcome, _ in outcomes} == {"read", "refused"}


def test_recipes_are_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    outcomes = [check_recipe(seed, tmp_path) for seed in range(2000, 2080)]
    assert [fault for _, fault in outcomes if fault] == []
    assert {outcome for outcome, _ in outcomes} == {"read", "refused"}
