"""The package as tools see it that import all modules."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path

import dgt


def test_no_library_looks_like_a_python_module() -> None:
    """Importing a library that was compiled for other processors ends the process."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    files = Path(dgt.__file__).parent.rglob("*")
    assert not [file for file in files if file.name.endswith((*suffixes, ".pyd"))]
