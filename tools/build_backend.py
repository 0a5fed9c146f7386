"""The build backend: scikit-build-core, with two additions.

Where there is no C++ compiler, the one of the PyPI package `ziglang` is asked for and used. An
editable install is a `.pth` file, which `PYTHONPATH` overrides, and the libraries are written
beside their loader.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"  # pyproject.toml names native/ and editable.pth in it
COMPILERS = ("c++", "g++", "clang++")  # those that CMake looks for and that know vector extensions
ZIG_PROCESSORS = ("x86_64", "amd64", "aarch64", "arm64")

Settings = dict[str, Any] | None


def needs_zig() -> bool:
    """Tell whether no compiler is named or found, on a processor that `ziglang` is published for."""
    if os.environ.get("CXX"):
        return False
    if any(shutil.which(compiler) for compiler in COMPILERS):
        return False
    return platform.machine().lower() in ZIG_PROCESSORS


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return CMake and Ninja where they are missing, and the compiler where it is."""
    return _build.get_requires_for_build_wheel(config_settings) + _zig_requirement()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return what an editable install needs: the same."""
    return _build.get_requires_for_build_editable(config_settings) + _zig_requirement()


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel with the libraries; without them where nothing can compile them."""
    with _compiler():
        return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel that holds the path of `src/` alone, and the libraries beside their loader."""
    shutil.rmtree(BUILD / "native", ignore_errors=True)  # may name tools that are gone
    for library in (ROOT / "src" / "dgt" / "ops" / "native").glob("*.so"):
        library.unlink()  # where nothing compiles, an old one would stay
    BUILD.mkdir(exist_ok=True)
    (BUILD / "editable.pth").write_text(f"{ROOT / 'src'}\n", encoding="utf-8")
    with _environment(DGT_EDITABLE="1"), _compiler():
        return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def _zig_requirement() -> list[str]:
    return ["ziglang"] if needs_zig() else []


@contextmanager
def _compiler() -> Iterator[None]:
    """Name Zig to CMake where it is needed and there."""
    package = importlib.util.find_spec("ziglang") if needs_zig() else None
    if package is None or package.origin is None:
        yield
        return
    # C++'s own library would be compiled first, for a minute, and is not used. The compiler's
    # default
    # processor is the one it runs on; what is built here has to run on others, too.
    command = f'"{Path(package.origin).with_name("zig")}" c++ -nostdlib++ -mcpu=baseline'
    with (
        tempfile.TemporaryDirectory() as cache,  # the home folder may not be writable
        _environment(CXX=command, ZIG_GLOBAL_CACHE_DIR=cache, ZIG_LOCAL_CACHE_DIR=cache),
    ):
        yield


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
