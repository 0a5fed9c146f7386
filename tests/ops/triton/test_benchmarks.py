"""The GPU scripts work where only torch, torchvision, Triton, timm, Lightning and NumPy are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ABSENT = ("jsonargparse", "faster_coco_eval", "fastapi", "uvicorn", "starlette", "datasets", "pycocotools")


def test_scripts_need_few_packages(tmp_path: Path) -> None:
    """They are imported, a row is written and a model is built with all else missing."""
    code = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import gpu_attention, gpu_common, gpu_memcheck, gpu_models, timm
from pathlib import Path
rows = gpu_common.Rows(Path({str(tmp_path / "rows.json")!r}), "forward")
rows.add({{"case": "one", "ms": 1.0}})
rows.add({{"case": "two", "ms": 2.0}})
timm.create_model("dgt_tiny", num_classes=10)
"""
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert '"case": "two"' in (tmp_path / "rows.json").read_text()


def test_the_shell_script_names_its_parts() -> None:
    script = ROOT / "benchmarks" / "run_gpu.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    for part in ("tests", "attention", "accelerated", "backward", "models224", "models512", "memcheck", "profile"):
        assert part in script.read_text()
