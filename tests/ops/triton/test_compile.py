"""The compile check: it reaches every kernel, and compiles one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compile_kernels

    return compile_kernels


def test_every_kernel_is_reached(check: ModuleType) -> None:
    files = (ROOT / "src" / "dgt" / "ops" / "triton").glob("*.py")
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    launches = [launch for stage in check.STAGES for launch in check.walk(stage)]
    assert {launch.kernel.__name__ for launch in launches} == set(
        re.findall(r"\bplan_launch\(\s*(\w+), ", code)
    )
    with_masks = [launch for launch in launches if "key_mask" in launch.kernel.arg_names]
    for given in (True, False):
        found = {
            launch.kernel.__name__
            for launch in with_masks
            if (launch.arguments[launch.kernel.arg_names.index("key_mask")] is not None) == given
        }
        assert found == {launch.kernel.__name__ for launch in with_masks} != set()


def test_a_kernel_compiles_without_spilling() -> None:
    """In a process where kernels are compiled, not interpreted."""
    code = """
import compile_kernels as check
launch = next(l for l in check.walk("stage 1") if l.kernel.__name__ == "move_rows")
assert check.fault_of(launch, 90) == ""
launch.options["maxnreg"] = 24
assert check.fault_of(launch, 90).startswith("spills ")
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT / 'benchmarks'}"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
