"""The offline compiler: what it walks, what it reports, when it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dgt.ops.triton import compile as offline

SOURCE = Path(__file__).resolve().parents[3] / "src"


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code where kernels are compiled, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SOURCE)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


def test_walk_reaches_every_kernel() -> None:
    """All that the code launches, and all masked variants."""
    code = "\n".join(file.read_text(encoding="utf-8") for file in (SOURCE / "dgt" / "ops" / "triton").glob("*.py"))
    launches = [launch for stage in offline.STAGES for launch in offline.walk(stage)]
    launched = {launch.kernel.__name__ for launch in launches}
    masked = {launch.kernel.__name__ for launch in launches if launch.options.get("MASKED")}
    assert masked == {launch.kernel.__name__ for launch in launches if "MASKED" in launch.options}
    assert launched == set(re.findall(r"\blaunch\(\s*(\w+), ", code))


def test_a_kernel_compiles_without_spilling() -> None:
    code = """
from dgt.ops.triton import compile as offline
launch = next(l for l in offline.walk("stage 3") if l.kernel.__name__ == "attend_tiles")
print(*offline.compile_launch(launch, "stage 3", 90)[3:])
"""
    run = python(code)
    assert run.returncode == 0, run.stderr
    registers, shared, spilled = map(int, run.stdout.split())
    assert 16 <= registers <= 255
    assert shared > 0
    assert spilled == 0


@pytest.mark.parametrize(("spilled", "error", "status"), [(0, "", 0), (8, "", 1), (-1, "CompilationError: no", 1)])
def test_exit_status(
    spilled: int, error: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = offline.Report("attend_tiles", "stage 1", 4, 100, 2048, spilled, error)
    monkeypatch.setattr(offline, "reports", lambda arch: iter([row]))
    monkeypatch.setattr(offline, "interpreting", lambda: False)
    assert offline.main(["--arch", "80", "--json"]) == status
    out, err = capsys.readouterr()
    assert json.loads(out)["kernels"][0]["kernel"] == "attend_tiles"
    assert bool(err) == bool(status)


def test_refuses_to_compile_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "interpreting", lambda: True)
    with pytest.raises(SystemExit):
        offline.main([])
