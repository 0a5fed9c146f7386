"""The measurements for a GPU, tried on a CPU at small sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
MEASURED = {
    "L64": {"all_keys", "torch", "torch_residual"},
    "residual key": {"dgt", "dgt_residual"},
    "snapshot": {"dgt", "swin", "snapshot"},
    "accelerated": {"dinov2", "dinov2_accelerated"},
    " px": {"dgt", "dgt_all_keys"},
    "peers": {"test_convnext"},
}
"""What rows have whose name contains a word."""
ROW = "backward random B2 H2 L64 k8"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    return gpu


def test_every_row_has_times(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for name in script.rows("cpu"):
        assert script.main(["--device", "cpu", "--row", name]) == 0
        row = json.loads(capsys.readouterr().out)
        assert not script.failed(row), row
        kinds = (expected for word, expected in MEASURED.items() if word in name)
        expected = next(kinds, {"dgt", "swin"})
        assert expected <= row.keys()
        assert all(row[each]["ms"] > 0 for each in expected)
        if name.startswith("profile"):
            assert row["dgt"]["kernel_ms"] == pytest.approx(
                sum(kernel["ms"] for kernel in row["dgt"]["kernels"]), rel=0.2
            )


def test_a_row_that_takes_too_long_is_an_error_and_measured_by_the_next_call(
    script: ModuleType, tmp_path: Path
) -> None:
    call = ["--device", "cpu", "--out", str(tmp_path / "rows.json"), "--only", ROW]
    assert script.main([*call, "--seconds", "0.1"]) == 1
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["rows"] == [{"name": ROW, "error": "took more than 0.1 seconds"}]
    assert {"processor", "torch", "commit", "command"} <= document["machine"].keys()
    assert script.main(call) == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["torch"]["ms"] > 0
    assert script.main([*call, "--seconds", "0.1"]) == 0  # nothing is left to measure


def test_one_attention_in_this_process(script: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    call = ["--device", "cpu", "--out", str(file), "--only", ROW, "--here"]
    assert script.main([*call, "--attentions", "torch"]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row.keys() == {"name", "torch"}
    with pytest.raises(SystemExit):
        script.main([*call, "--attentions", "flsh"])


def test_the_shell_script_measures_on_a_cpu_until_its_time_is_up(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "MINUTES": "0"}
    command = ["bash", str(ROOT / "benchmarks" / "run_gpu.sh"), "--device", "cpu", "--only", ROW]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert "left for another call: profile inference and what follows" in run.stdout
    assert not (tmp_path / "gpu_tests.log").exists()


def test_without_a_gpu_the_shell_script_says_so(tmp_path: Path) -> None:
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OUT": str(tmp_path),
        "PYTHON": sys.executable,
    }
    command = ["bash", str(ROOT / "benchmarks" / "run_gpu.sh")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 1
    assert "no CUDA device" in run.stderr
