"""The offline compiler: what it visits, what it reports, and when it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import compile_kernels as offline

SOURCE = Path(__file__).resolve().parents[3] / "src"


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process where kernels are compiled, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{SOURCE}{os.pathsep}{SOURCE.parent / 'benchmarks'}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )


def test_walk_reaches_every_kernel() -> None:
    """Everything that the code launches, and all masked variants."""
    code = "\n".join(
        file.read_text(encoding="utf-8")
        for file in (SOURCE / "dgt" / "ops" / "triton").glob("*.py")
    )
    launches = [launch for stage in offline.STAGES for launch in offline.walk(stage)]
    launched = {launch.kernel.__name__ for launch in launches}
    masked = {launch.kernel.__name__ for launch in launches if launch.options.get("MASKED")}
    assert masked == {launch.kernel.__name__ for launch in launches if "MASKED" in launch.options}
    assert launched == set(re.findall(r"\blaunch\(\s*(\w+), ", code))


def test_a_kernel_compiles_without_spilling() -> None:
    code = """
import compile_kernels as offline
launch = next(l for l in offline.walk("stage 1") if l.kernel.__name__ == "attend_tiles")
row = offline.compile_launch(launch, "stage 1", 90)
assert offline.over_budget(row, 90) == "", row
print(*row[3:6])
"""
    run = python(code)
    assert run.returncode == 0, run.stderr
    registers, shared, spilled = map(int, run.stdout.split())
    assert 16 <= registers <= 255
    assert shared > 0
    assert spilled == 0


@pytest.mark.parametrize(
    ("registers", "spilled", "error", "status"),
    [(100, 0, "", 0), (100, 8, "", 1), (100, -1, "CompilationError: no", 1), (200, 0, "", 1)],
)
def test_exit_status(
    registers: int,
    spilled: int,
    error: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = offline.Report("attend_tiles", "stage 1", 4, registers, 2048, spilled, 300, 4, error)
    monkeypatch.setattr(offline, "reports", lambda *_: iter([row]))
    monkeypatch.setattr(offline, "interpreting", lambda: False)
    assert offline.main(["--arch", "90", "--json"]) == status
    out, err = capsys.readouterr()
    assert json.loads(out)["kernels"][0]["kernel"] == "attend_tiles"
    assert bool(err) == bool(status)


def test_refuses_to_compile_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "interpreting", lambda: True)
    with pytest.raises(SystemExit):
        offline.main([])
