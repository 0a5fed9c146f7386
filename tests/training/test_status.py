"""`dgt status`: what a run's files reveal."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dgt.runs.status import run_status, status_text
from dgt.training import Result
from dgt_command import main

NOW = 1.8e9  # seconds since 1970


@pytest.fixture(autouse=True)
def _the_clock_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages are relative to `NOW`, however long a test has to wait."""
    monkeypatch.setattr(
        "dgt.runs.status.time", SimpleNamespace(time=lambda: NOW, perf_counter=time.perf_counter)
    )


def a_run(folder: Path, **changes: Any) -> Path:
    """A run folder with a given status."""
    status = {
        "state": "training",
        "error": None,
        "time": NOW,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    status |= {
        "epoch": 2,
        "epochs": 5,
        "step": 120,
        "steps": 300,
        "loss": 0.5,
        "metrics": {"top1": 0.75},
    }
    status |= {"images_per_second": 31.5, "seconds": 75.0, "seconds_left": 7260.0}
    (folder / "recipe.yaml").write_text("name: mine\n")
    (folder / "status.json").write_text(json.dumps({**status, **changes}))
    return folder


def test_a_training_that_goes_on(tmp_path: Path) -> None:
    lines = [
        line.split(maxsplit=1) for line in status_text(run_status(a_run(tmp_path))).splitlines()
    ]
    told = dict(lines)
    assert (told["state"], told["step"], told["steps"], told["loss"]) == (
        "training",
        "120",
        "300",
        "0.5",
    )
    assert (told["seconds"], told["seconds_left"], told["metrics"]) == (
        "0:01:15",
        "2:01:00",
        "{'top1': 0.75}",
    )
    assert not {"error", "checkpoints"} & set(told)


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    status = run_status(a_run(tmp_path, pid=process.pid))
    assert status["state"] == "killed"


def test_one_of_another_machine_says_how_old_it_is(tmp_path: Path) -> None:
    status = run_status(a_run(tmp_path, host="elsewhere", time=NOW - 187200, pid=-1))
    assert status["state"] == "training"
    assert "\nage                 2 days, 4:00:00" in status_text(status)


def test_a_failure_says_why(tmp_path: Path) -> None:
    status = run_status(a_run(tmp_path, state="failed", error="disk on fire"))
    assert status_text(status).startswith(
        "state               failed\nerror               disk on fire\n"
    )


def test_a_finished_run(finished: Result) -> None:
    status = run_status(finished.folder)
    assert (status["state"], status["step"], status["epoch"]) == ("finished", 8, 2)
    assert status["checkpoints"] == ["step-00000008.ckpt", "step-00000004.ckpt"]
    assert "finished" in status_text(status)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(a_run(tmp_path))]) == 0
    assert capsys.readouterr().out.startswith("state               training\n")
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 120
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert "is not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_status_is_reported(tmp_path: Path, content: str) -> None:
    (a_run(tmp_path) / "status.json").write_text(content)
    with pytest.raises(ValueError, match=r"status\.json is damaged"):
        run_status(tmp_path)


@pytest.mark.parametrize(
    ("ahead", "age", "clock"),
    [
        (0.5, "0:00:00", None),  # clocks of two machines are never quite the same
        (90_000, "0:00:00", "the status is dated 1 day, 1:00:00 in the future"),
        (-300, "0:05:00", None),
    ],
)
def test_a_clock_that_runs_ahead(ahead: float, age: str, clock: str | None, tmp_path: Path) -> None:
    lines = status_text(run_status(a_run(tmp_path, time=NOW + ahead))).splitlines()
    told = dict(line.split(maxsplit=1) for line in lines)
    assert (told["age"], told.get("clock")) == (age, clock)
