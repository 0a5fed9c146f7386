"""The pages: their generated tables are current, numbers in the text are those of tables, README's code runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tables(load_script: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    """benchmarks/tables.py; its parts are in the same folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield load_script(ROOT / "benchmarks" / "tables.py")


def test_pages_are_current(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 12.5 ms.", ["12.5"]),
        ("It takes 4.4 ms, so 2.3 times as long, in 3 of 4 runs.", ["2.3"]),
        ("Accuracies of 91.0, 17.2 and 12.5 %.", ["12.5"]),
        ("In the paper it takes 12.5 ms. Here `12.5 ms` in code, [a link](x.md#9.9)", []),
        ("    dgt demo   # 8 minutes", []),
        ("An upper bound at 95 % for Python 3.11.", []),
    ],
)
def test_a_number_that_no_table_has_is_found(
    tables: ModuleType, text: str, found: list[str]
) -> None:
    page = f"{text}\n\n<!-- table: x -->\n\n| 4.42 | 91.0 | 17.24 |\n<!-- end -->\n"
    problems = list(tables.unfounded(ROOT / "README.md", page))
    assert len(problems) == len(found)
    assert all(number in problem for number, problem in zip(found, problems, strict=True))


def test_the_first_lines_of_the_readme_run() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first, *_ = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    seen: dict[str, Any] = {}
    exec(first, seen)
    assert seen["result"].output.shape == seen["query"].shape
    assert seen["tokens"].shape == (1, 64, 64, 64)
    assert [tuple(part.shape[2:]) for part in seen["maps"]] == [
        (56, 56),
        (28, 28),
        (14, 14),
        (7, 7),
    ]


def test_a_detector_of_torchvision_takes_our_backbone() -> None:
    text = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    *_, last = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    seen: dict[str, Any] = {}
    exec(last.replace("dgt_tiny", "dgt_nano"), seen)
    targets = [{"boxes": torch.tensor([[10.0, 10.0, 90.0, 80.0]]), "labels": torch.tensor([1])}]
    losses = seen["detector"]([torch.rand(3, 96, 128)], targets)
    assert all(loss.isfinite() for loss in losses.values())
