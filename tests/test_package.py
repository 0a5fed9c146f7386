"""The package as tools see it that walk through all modules."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from pathlib import Path

import dgt

IMPORT_ALL = """
import importlib, pkgutil
for package in ("dgt", "dgt_command"):
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, f"{package}."):
        importlib.import_module(found.name)
        print(found.name)
"""


def test_every_module_that_is_found_in_the_package_can_be_imported() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found = run.stdout.split()
    written = Path(dgt.__file__).parent.rglob("*.py")
    assert len(found) > 100
    assert {path.stem for path in written if path.name != "__init__.py"} <= {
        name.rpartition(".")[2] for name in found
    }


def test_no_library_looks_like_a_python_module() -> None:
    """Importing a library that was compiled for other processors ends the process."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    files = Path(dgt.__file__).parent.rglob("*")
    assert not [file for file in files if file.name.endswith((*suffixes, ".pyd"))]
