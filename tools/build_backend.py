"""The build backend: scikit-build-core, with two additions.

If there is no C++ compiler, the one in the PyPI package `ziglang` is requested and used. An
editable install is a `.pth` file, which `PYTHONPATH` overrides, and the libraries are written next
to their loader.
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
# The ones that CMake looks for and that support vector extensions.
COMPILERS = (
    "c++",
    "g++",
    "clang++",
)
ZIG_PROCESSORS = ("x86_64", "amd64", "aarch64", "arm64")

Settings = dict[str, Any] | None


def needs_zig() -> bool:
    """Return whether no compiler is set or found, on a processor that `ziglang` supports."""
    if os.environ.get("CXX"):
        return False
    if any(shutil.which(compiler) for compiler in COMPILERS):
        return False
    return platform.machine().lower() in ZIG_PROCESSORS


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return CMake, Ninja, and the compiler as requirements, each if it is missing."""
    return _build.get_requires_for_build_wheel(config_settings) + _zig_requirement()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return the requirements of an editable install, which are the same."""
    return _build.get_requires_for_build_editable(config_settings) + _zig_requirement()


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel with the libraries, or without them if nothing can compile them."""
    with _compiler():
        return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel that only holds the path of `src/`, and the libraries next to their loader."""
    shutil.rmtree(BUILD / "native", ignore_errors=True)  # may refer to tools that no longer exist
    for library in (ROOT / "src" / "dgt" / "ops" / "cpu").glob("*.kernels"):
        library.unlink()  # if nothing compiles, an old one would remain
    BUILD.mkdir(exist_ok=True)
    (BUILD / "editable.pth").write_text(f"{ROOT / 'src'}\n", encoding="utf-8")
    with _environment(DGT_EDITABLE="1"), _compiler():
        return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def _zig_requirement() -> list[str]:
    return ["ziglang"] if needs_zig() else []


@contextmanager
def _compiler() -> Iterator[None]:
    """Make CMake use Zig if it is needed and installed."""
    package = importlib.util.find_spec("ziglang") if needs_zig() else None
    if package is None or package.origin is None:
        yield
        return
    # The C++ standard library is not used, and compiling it would take a minute. By default Zig
    # targets the processor it runs on; these libraries must also run on others.
    command = f'"{Path(package.origin).with_name("zig")}" c++ -nostdlib++ -mcpu=baseline'
    with (
        tempfile.TemporaryDirectory() as cache,  # the home folder may be read-only
        _environment(CXX=command, ZIG_GLOBAL_CACHE_DIR=cache, ZIG_LOCAL_CACHE_DIR=cache),
    ):
        yield


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables inside a context."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
