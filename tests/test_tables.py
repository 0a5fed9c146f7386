"""The tables of the documentation are what `benchmarks/results` holds, to the last digit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tables(load_script: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    """benchmarks/tables.py, whose parts stand beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield load_script(ROOT / "benchmarks" / "tables.py")


def test_pages_hold_what_the_results_hold(tables: ModuleType) -> None:
    stale = [page.name for page in tables.PAGES if tables.written(page.read_text("utf-8")) != page.read_text("utf-8")]
    assert stale == [], "run: python benchmarks/tables.py"


def test_every_table_has_its_place_and_every_mark_its_table(tables: ModuleType) -> None:
    """What is opened is closed, named once in the module, and no table of the module is forgotten."""
    text = "\n".join(page.read_text("utf-8") for page in tables.PAGES)
    named = [found[1] for found in tables.MARKED.finditer(text)]
    assert len(named) == text.count("<!-- table:") == text.count("<!-- end -->")
    assert set(named) == set(tables.TABLES)


def test_every_other_table_of_results_says_that_it_is_from_a_log(tables: ModuleType) -> None:
    text = tables.MARKED.sub("", (ROOT / "docs" / "results.md").read_text("utf-8"))
    before = re.findall(r"([^\n]*)\n\n(?=\|)", text)
    assert before
    assert [line for line in before if "taken from" not in line] == []


def test_a_changed_number_is_noticed_and_mended(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    good = f"Before.\n\n<!-- table: attention -->\n\n{tables.render('attention')}\n<!-- end -->\n\nAfter.\n"
    page.write_text(good.replace("**", "**9", 1), "utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", [page])
    monkeypatch.setattr(tables, "TABLES", {"attention": lambda: cells})
    cells = [row.strip("| ").split(" | ") for row in good.splitlines() if row.startswith("|") and "---" not in row]
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 1
    assert page.read_text("utf-8") != good
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    assert tables.main() == 0
    assert page.read_text("utf-8") == good
    assert capsys.readouterr().out.split() == ["page.md:", "differs", "page.md:", "written"]
