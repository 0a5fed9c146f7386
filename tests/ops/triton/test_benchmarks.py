"""The GPU scripts only need torch, torchvision, Triton, timm, Lightning, and NumPy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ABSENT = ("jsonargparse", "faster_coco_eval", "fastapi", "uvicorn", "starlette", "datasets", "pycocotools")


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
again = gpu_common.Rows(Path({str(tmp_path / "rows.json")!r}), "forward")
assert again.has(case="one") and not again.has(case="three")
other = gpu_common.Rows(Path({str(tmp_path / "rows.json")!r}), "backward")
assert not other.has(case="one")
timm.create_model("dgt_tiny", num_classes=10)
"""
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert '"case": "two"' in (tmp_path / "rows.json").read_text()


def run_gpu(request: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The shell script, which here only prints what it would measure."""
    environment = os.environ | {"DRY_RUN": "1", "OUT": str(tmp_path), "PYTHON": sys.executable}
    script = str(ROOT / "benchmarks" / "run_gpu.sh")
    return subprocess.run(["bash", script, request], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("first", "first: B128 H2 L3136 k98 G48 bfloat16, scenes"),
        ("transformers", "part accelerate size 4096"),
        ("training", "part train size 1024"),
        ("models224", "dgt_tiny beside swin_tiny_patch4_window7_224, 224 px, training"),
        ("memcheck", "racecheck"),
    ],
)
def test_the_shell_script_tells_what_it_would_measure(part: str, words: str, tmp_path: Path) -> None:
    found = run_gpu(part, tmp_path)
    assert found.returncode == 0, found.stderr
    assert words in found.stdout


def test_the_shell_script_refuses_an_unknown_part(tmp_path: Path) -> None:
    found = run_gpu("forwards", tmp_path)
    assert found.returncode == 2
    assert "no part 'forwards'; there are first, 30, 45" in found.stderr
