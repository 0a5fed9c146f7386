"""Accuracy in int8: what works is counted, what fails is a row with its sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from dgt.runs import load_run

ROOT = Path(__file__).resolve().parents[2]


def test_a_way_that_fails_is_a_row(
    load_script: Callable[[Path], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script(ROOT / "benchmarks" / "int8_accuracy.py")
    classes = load_run(script.MODEL).class_names[:2]
    for split in ("train", "val"):
        for name in classes:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (128, 128), "red").save(tmp_path / split / name / "red.png")

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("this is not supported\nat a place of no interest")

    monkeypatch.setattr(script, "WAYS", {"whole": script.float32, "broken": fails})
    monkeypatch.setattr(script, "CALIBRATION", 2)
    monkeypatch.setattr(script, "PACKAGES", ("torch",))
    out = tmp_path / "int8.json"
    monkeypatch.setattr("sys.argv", ["int8_accuracy.py", str(tmp_path), "--out", str(out)])
    script.main()
    found = json.loads(out.read_text())
    assert found["images"] == 2
    assert found["rows"]["broken"] == {"problem": "this is not supported"}
    whole = found["rows"]["whole"]
    assert whole["top1"] in (0, 0.5)  # two images alike, of two classes
    assert whole["as_float32"] == 1
    assert whole["bytes"] > 1e6
