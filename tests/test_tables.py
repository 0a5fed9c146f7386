"""Tables and numbers in the documentation match `benchmarks/results` to the last digit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tables(load_script: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    """benchmarks/tables.py; its parts are in the same folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield load_script(ROOT / "benchmarks" / "tables.py")


def test_pages_hold_what_the_results_hold(tables: ModuleType) -> None:
    stale = [
        page.name
        for page in tables.PAGES
        if tables.written(page.read_text("utf-8")) != page.read_text("utf-8")
    ]
    assert stale == [], "run: python benchmarks/tables.py"


def test_every_table_has_its_place_and_every_mark_its_table(tables: ModuleType) -> None:
    """Every marker is closed and names one table of the module, and no table of the module is missing."""
    text = "\n".join(page.read_text("utf-8") for page in tables.PAGES)
    named = [found[1] for found in tables.MARKED.finditer(text)]
    assert len(named) == text.count("<!-- table:") == text.count("<!-- end -->")
    assert set(named) == set(tables.TABLES)


def test_nothing_is_left_without_a_source(tables: ModuleType) -> None:
    """All measured numbers, settings, fractions in words, and processors in every page, and all raw files."""
    found = [
        f"{page.name}: {problem}"
        for page in tables.PAGES
        for problem in tables.tables_audit.problems(
            tables.unmarked(page.read_text("utf-8")), page.name != "CHANGELOG.md"
        )
    ]
    assert found == []
    text = "\n".join(page.read_text("utf-8") for page in tables.PAGES)
    for name in tables.TABLES:
        tables.render(name)
    assert tables.tables_audit.unused_results(text, tables.USED) == []


def test_a_typed_number_is_found(tables: ModuleType) -> None:
    def typed(text: str) -> list[str]:
        return tables.tables_audit.typed_numbers(tables.unmarked(text))

    text = (
        "It takes 12.5 ms, 3 times, of 4 (9.1<!-- paper --> in print), tau = 0.1, Python 3.11, "
        "`0.5`, 91.0 ± 0.2 %."
    )
    assert typed(text) == ["12.5", "3 times", "91.0 ± 0.2"]
    marked = (
        "Right 1.0 ± 9.9<!-- is right: global --> and\n"
        "2.0 ±\n3.0<!-- is retrieval: global; right, % --> %."
    )
    assert typed(marked) == []
    right = tables.TABLES["retrieval"]()[1][1]
    expected = marked.replace("1.0 ± 9.9", right).replace("2.0 ±\n3.0", right)
    assert tables.written(marked) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("off by 18<!-- setting --> %", "a setting without its file: 18"),
        ("off by 18<!-- setting: Makefile --> %", "18 is no setting in Makefile"),
        (
            "off by 18<!-- setting: no/such.py --> %",
            "the file of a setting is not there: no/such.py",
        ),
        ("it took a quarter longer", "no source for a quarter"),
        ("measured on Zen 5, one thread", "no raw result named for Zen 5"),
        ("it took 4.2 ms", "no source for 4.2"),
        ("right in 59 of 64 images", "no source for 59 of 64"),
        ("twice as fast as before", "no source for twice as fast"),
        ("takes six times its time", "no source for six times"),
        ("words\n\n## 7.5 times as fast", "no source for 7.5"),
        ("words\n\n![A curve that rises to 91.3 %](images/x.png)", "no source for 91.3"),
        ("words\n\n    dgt demo    # takes 8.5 minutes", "no source for 8.5"),
        ("words\n\n```python\nrun()  # 12.5 ms\n```", "no source for 12.5"),
        ("the paper has 83.9<!-- paper --> %", "83.9 is not printed in paper"),
        ("others 93.65<!-- printed: imagenette --> %", "93.65 is not printed in imagenette"),
        ("a model says 131<!-- predicted --> us", "no source for 131 us"),
    ],
)
def test_what_nothing_stands_behind_is_refused(tables: ModuleType, text: str, problem: str) -> None:
    assert problem in list(tables.tables_audit.problems(f"Words {text} and words.\n"))


@pytest.mark.parametrize(
    "text",
    [
        "the paper has 83.8, 84.6, 85.0<!-- paper --> %",
        "Table 3, 50.2 / 50.8<!-- paper --> % mIoU",
        "k 2, that is 16 of 256 keys, three times at most",
        "words\n\n    dgt demo --seconds 8.5\n",
        "`4.2 ms` in code, [a link](x.md#4.2)",
    ],
)
def test_what_is_no_measured_number_is_accepted(tables: ModuleType, text: str) -> None:
    assert list(tables.tables_audit.problems(f"Words {text} and words.\n")) == []


def test_older_versions_may_be_predicted_in_the_changelog(tables: ModuleType) -> None:
    assert list(tables.tables_audit.problems("131<!-- predicted --> us", of_today=False)) == []


def test_a_setting_that_its_file_has_is_accepted(tables: ModuleType) -> None:
    text = (
        "crops with at most 75<!-- setting: src/dgt/recipes/ade20k_dgt_tiny.yaml --> % of a class"
    )
    assert list(tables.tables_audit.problems(text)) == []


def test_a_processor_is_that_of_the_raw_file(tables: ModuleType) -> None:
    """A page with the wrong processor is corrected; files from two processors, or none, are rejected."""
    assert tables.written("Zen 5<!-- is ran on: attention_zen4 -->").startswith("Zen 4<!--")
    for files in ("attention_cpu; attention_zen4", "exported_cpu", "sizes"):
        with pytest.raises(ValueError, match="ran on"):
            tables.written(f"Zen 5<!-- is ran on: {files} -->")


def test_files_of_the_native_kernel_become_its_table(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the README's first row and the numbers in the text are also those of the native kernel."""
    shared, speed = sys.modules["tables_shared"], sys.modules["tables_speed"]
    kept = shared.RESULTS
    for path in kept.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    for path in tmp_path.glob("native_*.json"):
        path.unlink()
    times = {"sdpa": 500.0, "dense": 400.0, "grouped": 8.0}
    row = {
        "case": "1x2x16384x32:98",
        "threads": 2,
        "backward": False,
        "fastest_ms": times,
        "sdpa_to_grouped": 62.5,
        "dense_to_grouped": 50.0,
        "sdpa_to_dense": 1.25,
        "share_of_bound": 0.45,
    }
    single = {**row, "threads": 1, "sdpa_to_grouped": 60.0}
    trained = {**row, "backward": True, "sdpa_to_grouped": 70.0}
    content = {
        "machine": {"processor": "AMD EPYC (family 25, model 17)"},
        "rows": [row, single, trained],
    }
    (tmp_path / "native_attention_zen4.json").write_text(json.dumps(content))
    for module in (shared, speed):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    shared.read.cache_clear()
    try:
        _, cells = tables.TABLES["native kernel"]()
        _, first, *_ = tables.TABLES["three numbers"]()
    finally:
        shared.read.cache_clear()
    assert cells[0] == "B1 H2 L16384 D32 k98, Zen 4"
    assert cells[1:] == ["500.00, 400.00, 8.00", "**62.5**", "1.2", "50.0 (45 %)", "60.0"]
    assert first[1:] == ["**62**; **70**", "PyTorch, all keys: 1", "Zen 4, two cores, 1 run"]


@pytest.mark.parametrize(
    "mark", ["is right: nothing", "is retrieval: global; no head", "is sizes.json: rows/99/params"]
)
def test_a_mark_that_leads_nowhere_is_refused(tables: ModuleType, mark: str) -> None:
    with pytest.raises((LookupError, ValueError)):
        tables.written(f"1.0<!-- {mark} -->")
    with pytest.raises(ValueError, match="before <!-- is right: global -->"):
        tables.written("1.0 and words<!-- is right: global -->")


def test_a_changed_number_is_noticed_and_mended(
    tables: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page.md"
    good = f"Before.\n\n<!-- table: attention -->\n\n{tables.render('attention')}\n<!-- end -->\n\nAfter.\n"
    page.write_text(good.replace("**", "**9", 1), "utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", [page])
    monkeypatch.setattr(tables, "TABLES", {"attention": lambda: cells})
    # One page does not use all raw files; which have been read depends on earlier tests.
    monkeypatch.setattr(tables.tables_audit, "unused_results", lambda *_: [])
    cells = [
        row.strip("| ").split(" | ")
        for row in good.splitlines()
        if row.startswith("|") and "---" not in row
    ]
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 1
    assert page.read_text("utf-8") != good
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    assert tables.main() == 0
    assert page.read_text("utf-8") == good
    assert capsys.readouterr().out.split() == ["page.md:", "differs", "page.md:", "written"]
