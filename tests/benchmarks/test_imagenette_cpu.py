"""benchmarks/imagenette_cpu.py without training: what it rejects, what it starts, and rows of finished runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from PIL import Image

from dgt.runs.model import export_model, make_record
from dgt.tasks import TASKS
from dgt.training import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
KEPT = {
    "model": "any",
    "seed": 0,
    "parameters": 5,
    "epochs": 2,
    "seconds": 1.5,
    "versions": {},
    "device": "a core",
}


@pytest.fixture
def script(
    load_script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ModuleType:
    """The script, which writes its rows to ROWS.json and does not change the threads of this process."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = load_script(FOLDER / "imagenette_cpu.py")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "rows.json")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(
        sys, "argv", ["imagenette_cpu.py", str(tmp_path), "--out", str(tmp_path / "runs")]
    )
    return module


def write_images(folder: Path) -> None:
    """Two classes with one image each in each split."""
    for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (folder / place).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(folder / place / "0.png")


def test_a_folder_without_images_is_refused_in_a_sentence(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(script, "train", lambda *_: pytest.fail("began a training"))
    with pytest.raises(SystemExit):
        script.main()
    assert capsys.readouterr().err.endswith(f"error: there is no folder {tmp_path / 'train'}\n")


def test_both_trainings_are_begun_and_one_that_was_stopped_is_told(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[list[str]] = []

    def begin(command: list[str], env: dict[str, str]) -> Any:
        begun.append(command)
        return SimpleNamespace(pid=env["OMP_NUM_THREADS"], wait=lambda: 0)

    monkeypatch.setattr(subprocess, "Popen", begin)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    write_images(tmp_path)
    with pytest.raises(
        SystemExit, match="error: dgt_nano and edgenext_x_small stopped before the end"
    ):
        script.main()
    for command, (model, epochs) in zip(begun, script.EPOCHS.items(), strict=True):
        assert command[:7] == [
            sys.executable,
            "-m",
            "dgt",
            "train",
            "imagenette_nano",
            "--resume",
            "auto",
        ]
        recipe = load_recipe("imagenette_nano", command[7:])
        assert (recipe.model.name, recipe.schedule.epochs, recipe.data["root"]) == (
            model,
            epochs,
            str(tmp_path),
        )
        assert recipe.out == str(tmp_path / "runs" / f"{model}_1")
        assert timm.is_model(model)


def test_rows_are_made_of_finished_runs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "train", lambda *_: pytest.fail("began a training"))
    write_images(tmp_path)
    keys = ["--model.name=test_resnet", f"--data.root={tmp_path}", "--data.num_workers=0"]
    recipe = load_recipe("imagenette_nano", keys)
    network = TASKS["classify"].build(recipe.model, 2, 96)
    lines = [{"step": epoch, "epoch": epoch, "val/top1": epoch / 4} for epoch in (1, 2)]
    for model in script.EPOCHS:
        run = tmp_path / "runs" / f"{model}_1"
        export_model(run / "model", network, make_record(recipe, ["cat", "dog"]))
        (run / "results.json").write_text(
            json.dumps({**KEPT, "model": model, "metrics": {"top1": 0.5}})
        )
        (run / "metrics.jsonl").write_text(
            "\n".join(map(json.dumps, [{"step": 1, "lr": 0.1}, *lines]))
        )
    other = {"hours": 2, "model": "dgt_nano"}
    script.RESULTS.write_text(json.dumps({"rows": [other, {"hours": 1, "model": "replaced"}]}))
    script.main()
    found = {**KEPT, "hours": 1, "validated": [1, 2], "curve": [0.25, 0.5]}
    first, *rows = json.loads(script.RESULTS.read_text())["rows"]
    assert first == other
    assert [row["model"] for row in rows] == list(script.EPOCHS)
    for row in rows:
        assert {**row, "model": "any"}.items() >= found.items()
        assert row["at_96"]["images"] == row["at_128"]["images"] == 2
        assert {row[size]["top5"] for size in ("at_96", "at_128")} == {1.0}
