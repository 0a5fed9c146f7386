"""The tables and numbers of the documentation are what `benchmarks/results` holds, to the last digit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
TYPED = {  # how many numbers of a page are typed that look measured: may only fall
    **{"README.md": 0, "docs/evidence.md": 0, "docs/results.md": 0, "docs/start.md": 0, "docs/accelerate.md": 0},
    **{"docs/remainder.md": 0, "docs/training.md": 0, "docs/export.md": 0, "docs/accelerate_models.md": 0},
    **{"CONTRIBUTING.md": 0, "CHANGELOG.md": 0},
    **{"docs/kernels.md": 27, "docs/paper.md": 0, "docs/scaling.md": 0},
}
UNIT = r"(?:%|[mun]?s|seconds|minutes|hours|[KMGT]i?B|images/s|[GT]?FLOPs?(?:/s)?|times|points|[MG])(?![\w/])"
NO_TEXT = r"^```.*?^```|(?<=\n\n)(?:    [^\n]*\n?)+|^#[^\n]*|^!\[[^\n]*|`[^`]*`|\]\([^)]*\)|<!--.*?-->"
NO_MEASURES = "|".join(
    [
        *(r"tau = [\d.]+", r"\bsections? \d[\d., ]*", r"95 % interval", r"\d+ GiB, Python [\d.]+"),
        r"(?:Python|Triton|transformers|timm|onnxruntime|[Nn]um[Pp]y(?: below)?|torch|torchvision) \d[\d.]*",
    ]
)


def typed_numbers(tables: ModuleType, text: str) -> list[str]:
    """Numbers of a page that look measured, and stand neither in a table nor before a mark."""
    one = tables.ONE
    text = tables.MARKED.sub("", text)
    for start, end, _ in reversed(list(tables.numbers(text))):
        text = text[:start] + text[end:]
    joint = r"(?:,|;| and| to| or| /|)\s+"  # a list has one mark, behind its last number
    text = re.sub(rf"(?<![\w.])(?:{one}{joint})*{one}<!-- (?:paper|setting|predicted) -->", "", text)
    for pattern in (NO_TEXT, NO_MEASURES):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    measured = rf"(?<![\w.-])(?:{one}\s±\s{one}|[-+]?\d[\d,]*\.\d+(?:e-?\d+)?(?![\w.]*\.\d)|\d(?:[\d,]*\d)?\s{UNIT})"
    return [" ".join(found.split()) for found in re.findall(measured, text)]


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


@pytest.mark.parametrize("page", TYPED)
def test_measured_numbers_are_marked(tables: ModuleType, page: str) -> None:
    """Deviations, decimal fractions and numbers with a unit come from a file, or say that nobody measured them."""
    typed = typed_numbers(tables, (ROOT / page).read_text("utf-8"))
    assert len(typed) <= TYPED[page], typed


def test_a_typed_number_is_found(tables: ModuleType) -> None:
    text = "It takes 12.5 ms, 3 times, of 4 (9.1<!-- paper --> in print), tau = 0.1, Python 3.11, `0.5`, 91.0 ± 0.2 %."
    assert typed_numbers(tables, text) == ["12.5", "3 times", "91.0 ± 0.2"]
    marked = "Right 1.0 ± 9.9<!-- is right: global --> and\n2.0 ±\n3.0<!-- is retrieval: global; right, % --> %."
    assert typed_numbers(tables, marked) == []
    right = tables.TABLES["retrieval"]()[1][1]
    assert tables.written(marked) == marked.replace("1.0 ± 9.9", right).replace("2.0 ±\n3.0", right)


@pytest.mark.parametrize(
    "mark", ["is right: nothing", "is retrieval: global; no head", "is sizes.json: rows/99/params"]
)
def test_a_mark_that_leads_nowhere_is_refused(tables: ModuleType, mark: str) -> None:
    with pytest.raises((LookupError, ValueError)):
        tables.written(f"1.0<!-- {mark} -->")
    with pytest.raises(ValueError, match="before <!-- is right: global -->"):
        tables.written("1.0 and words<!-- is right: global -->")


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
