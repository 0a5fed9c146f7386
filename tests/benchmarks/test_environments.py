"""Sizes of environments: all files, PyTorch's share, and no link counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def test_files_are_counted_and_pytorchs_apart(
    load_script: Callable[[Path], ModuleType], tmp_path: Path
) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    sizes = {
        "torch/lib.so": 9,
        "torch-2.dist-info/RECORD": 1,
        "nvidia_cublas-1.dist-info/RECORD": 1,
        "torchvision/ops.so": 3,
        "timm/models.py": 2,
    }
    for name, megabytes in sizes.items():
        (packages / name).parent.mkdir(parents=True)
        (packages / name).write_bytes(bytes(megabytes * 10**6))
    (tmp_path / "lib64").symlink_to("lib")
    measured = load_script(ROOT / "benchmarks" / "environments.py").measure(tmp_path)
    assert measured == {"megabytes": 16, "of_pytorch": 11, "packages": 2}
