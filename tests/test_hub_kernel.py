"""The kernel package for the hub: loaded without a network or `dgt`, it gives the same results as `dgt`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.hub_kernel import DEVICES, main, write_package

PROGRAM = """
import sys
sys.modules["dgt"] = None  # no import of it succeeds
from pathlib import Path
import torch
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
torch.manual_seed(0)
query, key, value = torch.randn(3, 2, 2, 60, 16)
centroids = torch.nn.functional.normalize(torch.randn(2, 5, 16), dim=-1)
exact = kernel.dynamic_group_attention(query, key, value, centroids, 7, backend="reference")
for backend in ("auto", "torch", "triton"):
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    found = kernel.dynamic_group_attention(*inputs, centroids, 7, backend=backend)
    assert torch.equal(found.group_ids, exact.group_ids), backend
    torch.testing.assert_close(found.output, exact.output)
    found.output.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in inputs)
import importlib, pkgutil
for module in pkgutil.walk_packages(kernel.__path__, kernel.__name__ + "."):
    importlib.import_module(module.name)  # also what only a GPU asks for
assert not [name for name in dir(torch.ops.dgt) if "attend" in name]
print("equal")
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "kernel"
    write_package(out)
    return out


def test_the_package_loads_offline_and_is_right(package: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(package)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert process.stdout.strip().endswith("equal"), process.stderr


def test_the_package_imports_nothing_of_dgt(package: Path) -> None:
    files = [*package.rglob("*.py")]
    assert len(files) > 20 * len(DEVICES)
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert not [
            line for line in lines if line.strip().startswith(("from dgt", "import dgt"))
        ], path
        assert not [
            line for line in lines if 'import_module("dgt' in line or "torch.ops.dgt." in line
        ], path
    assert (package / "LICENSE").is_file()
    assert (package / "README.md").is_file()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    done = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "must be an empty folder or not there" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
