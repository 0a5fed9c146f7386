"""The record of a measurement as a file."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest

from dgt.utils.records import write_record


def test_a_record_has_a_row_a_line_and_says_the_same_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "of a run" / "record.json"
    rows = [{"name": f"row {number}", "ms": [number / 3, math.nan]} for number in range(3)]
    write_record(path, {"machine": {"threads": 2}, "rows": rows, "none": [], "steps": 12345678})
    text = path.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if "ms" in line] == [
        '  {"name": "row 0", "ms": [0.0, null]},',
        '  {"name": "row 1", "ms": [0.3333333, null]},',
        '  {"name": "row 2", "ms": [0.6666667, null]}',
    ]
    found = json.loads(text)
    assert list(found) == ["machine", "rows", "none", "steps"]
    assert (found["machine"], found["none"], found["steps"]) == ({"threads": 2}, [], 12345678)
    again = path.with_name("again.json")
    write_record(again, found)
    assert again.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("module", ["package", "package.module"])
def test_a_module_is_recorded_as_it_is_started(module: str, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name in ("__main__", "module"):
        (folder / f"{name}.py").write_text(
            "from dgt.utils.records import command_line\nfound = command_line()\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["", "work", "a folder"])
    found = runpy.run_module(module, run_name="__main__", alter_sys=True)["found"]
    assert found == f"python -m {module} work 'a folder'"
