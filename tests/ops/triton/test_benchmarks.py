"""The GPU scripts only need torch, torchvision, Triton, timm, Lightning, and NumPy."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
ABSENT = (
    "faster_coco_eval",
    "fastapi",
    "uvicorn",
    "starlette",
    "datasets",
    "pycocotools",
)


def test_scripts_need_few_packages(tmp_path: Path) -> None:
    """They can be imported, write a row, and build a model when everything else is missing."""
    code = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import gpu_attention, gpu_common, gpu_memcheck, gpu_models, gpu_transformers, timm
from pathlib import Path
rows = gpu_common.Rows(Path({str(tmp_path / "rows.json")!r}), "forward")
rows.add({{"case": "one", "ms": 1.0}})
rows.add({{"case": "two", "ms": 2.0}})
later = gpu_common.Rows(Path({str(tmp_path / "rows.json")!r}), "forward")
assert later.has(case="one") and not later.has(case="three")
other = gpu_common.Rows(Path({str(tmp_path / "rows.json")!r}), "backward")
assert not other.has(case="one")
timm.create_model("dgt_tiny", num_classes=10)
"""
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert '"case": "two"' in (tmp_path / "rows.json").read_text()


PLANNED = """
import os, sys, time
sys.path.insert(0, BENCHMARKS)
import gpu_common
from pathlib import Path

def fail():
    raise RuntimeError("no")

steps = {
    "good": lambda: {"ms": 1.0},
    "wrong": fail,
    "hanging": lambda: time.sleep(60),
    "crashing": lambda: os._exit(9),
    "uncaptured": lambda: {"torch_graph_error": "RuntimeError: no capture"},
    "last": lambda: {"ms": 2.0},
}

def call(again):
    process = os.fork()
    if not process:
        rows = gpu_common.Rows(FILE, "forward", again)
        os._exit(rows.measure((({"case": name}, step) for name, step in steps.items()), 60, 1.0))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

FILE = Path(sys.argv[1])
statuses = [call(again=False)]
while '"begun"' in FILE.read_text():
    statuses.append(call(again=True))
print(statuses, flush=True)
FILE.with_name("first.json").write_text(FILE.read_text())
call(again=False)
"""


def test_a_case_that_breaks_its_process_costs_no_other(tmp_path: Path) -> None:
    """It hangs, crashes, or fails in a capture: another process goes on behind it, as the shell script lets it."""
    code = PLANNED.replace("BENCHMARKS", repr(str(ROOT / "benchmarks")))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, str(tmp_path / "rows.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    statuses = next((line for line in run.stdout.splitlines() if line.startswith("[")), "none")
    assert statuses == "[1, 9, 1, 1]", run.stderr
    rows = json.loads((tmp_path / "first.json").read_text())["rows"]
    failed = {row["case"]: any(name.endswith("_error") for name in row) for row in rows}
    assert failed == {
        "good": False, "wrong": True, "hanging": True, "crashing": True, "uncaptured": True, "last": False,
    }  # fmt: skip
    # A later call tries again what failed, and nothing else.
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["good", "last", "wrong"]


def run_gpu(request: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The shell script for a part, which here starts nothing and prints the commands that would list its rows."""
    environment = os.environ | {"DRY_RUN": "1", "OUT": str(tmp_path), "PYTHON": "true"}
    script = str(ROOT / "benchmarks" / "run_gpu.sh")
    return subprocess.run(
        ["bash", script, request], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("first", "first: B128 H2 L3136 k98 G48 bfloat16, scenes"),
        ("transformers", "part accelerate size 4096"),
        ("training", "part train size 1024"),
        (
            "models224",
            "dgt_tiny beside swin_tiny_patch4_window7_224 size 224 training True compiled True",
        ),
        ("memcheck", "racecheck"),
    ],
)
def test_the_shell_script_tells_what_it_would_measure(
    part: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run_gpu(part, tmp_path)
    assert found.returncode == 0, found.stderr
    told = found.stdout
    for command in found.stdout.splitlines():
        if not command.startswith("== true "):
            continue
        script, *arguments = shlex.split(command.removeprefix("== true "))
        assert "--dry-run" in arguments
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(
            str(ROOT / script), run_name="__main__"
        )  # here, as a process takes seconds to start
        told += capsys.readouterr().out
    assert words in told


def test_the_shell_script_refuses_an_unknown_part(tmp_path: Path) -> None:
    found = run_gpu("forwards", tmp_path)
    assert found.returncode == 2
    assert "no part 'forwards'; there are first, 30, 45" in found.stderr


def test_predictions_are_those_of_the_version_of_triton(
    tmp_path: Path, load_script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are none of it, those of the newest."""
    script = load_script(ROOT / "benchmarks" / "gpu_common.py")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    row = {"shape": "L3136 k98", "inputs": "random", "pass": "forward", "step": "all"}

    def predicted(version: str) -> dict[str, float]:
        monkeypatch.setattr(script.triton, "__version__", version)
        found: dict[str, float] = script.predicted(3136, 98, "random", "forward")
        return found

    assert predicted("3.6.0") == {}
    for name, microseconds in (("gpu_model", 300.0), ("gpu_model_triton36", 200.0)):
        rows = [{**row, "us": microseconds}, {**row, "pass": "backward", "us": 1.0}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    assert predicted("3.6.0") == {"all": 200.0}
    assert predicted("3.9.0") == {"all": 300.0}
