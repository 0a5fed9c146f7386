"""OpenVINO on CPUs, with DG-Attention as one operator if the file uses it.

The operator is a library in C++, `openvino_extension.cpp` with the kernels of
`dgt.ops.cpu.kernels`. OpenVINO's interface for such libraries is bound to its version, so the
library is compiled where it is used, from the headers in OpenVINO's own wheel, once: the file in
the cache folder is named after the version, the processor's instruction set level and its sources.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgt.inference.formats import Runner, check_libraries, check_size
from dgt.ops import lloyd
from dgt.ops.cpu import library
from dgt.utils.atomic_write import replacing
from dgt.utils.cache import cache_folder
from dgt.utils.errors import UserError

SOURCE = Path(__file__).with_suffix(".cpp")
KERNELS = Path(library.__file__).with_name("kernels")
COMPILERS = ("c++", "g++", "clang++")
HEADER = "include/openvino/core/op_extension.hpp"
NAME = re.compile(r"dgt_openvino-(?P<version>[^-]+)-(?P<level>.+)-[0-9a-f]{8}\.so")

COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-w")
# As CMakeLists.txt has them: no run time of C++, fused products and sums, NaN keeps its meaning.
FOR_KERNELS = (
    "-O3",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-ffp-contract=fast",
)
FOR_OPERATORS = (
    "-O2",
    f"-DDGT_CLUSTER_STEPS={lloyd.STEPS}",
    f"-DDGT_CLUSTER_EVERY={lloyd.EVERY}",
    f"-DDGT_CLUSTER_LEAST={lloyd.LEAST_OF_CLUSTER}",
    f"-DDGT_CLUSTER_GOLDEN={lloyd.GOLDEN}u",
)


class _Wheel(NamedTuple):
    """The OpenVINO that is installed, as its wheel has it."""

    version: str
    folder: Path

    @property
    def libraries(self) -> list[Path]:
        """What an extension is linked with: OpenVINO and its threads, versions in their names."""
        folder = self.folder / "libs"
        return [*folder.glob("libopenvino.so.*"), *folder.glob("libtbb.so.*")]

    @property
    def definitions(self) -> list[str]:
        """The macros that OpenVINO was compiled with, from its CMake files."""
        text = (self.folder / "cmake" / "OpenVINOTargets.cmake").read_text(encoding="utf-8")
        found = re.findall(r'INTERFACE_COMPILE_DEFINITIONS "([^"]*)"', text)
        names = {name for names in found for name in names.split(";")}
        return [f"-D{name}" for name in sorted(names)]


def openvino_extension_path() -> Path:
    """Return the library that adds DG-Attention to the installed OpenVINO; compile it if need be.

    It is compiled once for a version of OpenVINO, in some ten seconds, and kept in the user's cache
    folder (`$XDG_CACHE_HOME/dgt`, by default `~/.cache/dgt`). It works with this version of
    OpenVINO alone, and on processors that have the instruction set level of this one; its file name
    says both.

    Returns:
        Path: the library.

    Raises:
        UserError: OpenVINO is not installed, or without its C++ headers; there is no C++ compiler,
            or it fails; this is not Linux.
        OSError: the cache folder cannot be written to.

    Example:
        >>> core = openvino.Core()
        >>> core.add_extension(dgt.openvino_extension_path())
        >>> compiled = core.compile_model("model.onnx", "CPU")
    """
    wheel = _find_wheel()
    path = cache_folder() / _file_name(wheel)
    if not path.is_file():
        _build(wheel, path)
    return path


def add_openvino_extension(core: Any, path: str | Path | None = None) -> Path:
    """Teach an `openvino.Core` the files of `dgt export --openvino-extension`.

    Args:
        core: an `openvino.Core`.
        path: the library, where it is not to be :func:`openvino_extension_path`.

    Returns:
        Path: the library that was added.

    Raises:
        UserError: the library is missing, of another version of OpenVINO, for another processor, or
            none of ours; or as :func:`openvino_extension_path`.

    Example:
        >>> core = openvino.Core()
        >>> path = add_openvino_extension(core)
        >>> compiled = core.compile_model("model.onnx", "CPU")
    """
    path = openvino_extension_path() if path is None else Path(path)
    _check_library(path)
    try:
        core.add_extension(str(path))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(
            f"OpenVINO {_find_wheel().version} cannot load the extension {path}: {reason}; {_HINT}"
        ) from error
    return path


def open_openvino(
    content: bytes, threads: int | None = None, extended: bool = False, in_float32: bool = True
) -> Runner:
    """Return a function that runs an ONNX file in OpenVINO, on the CPU.

    Args:
        content: of the file.
        threads: how many; None leaves it to OpenVINO.
        extended: whether the file has DG-Attention as one operator.
        in_float32: False leaves the precision to OpenVINO, which takes bfloat16 on processors with
            units for it.

    Returns:
        A function from (B, 3, H, W) images to the list of the file's outputs.

    Raises:
        UserError: OpenVINO is not installed; or as :func:`openvino_extension_path`.

    Example:
        >>> run = open_openvino(Path("model.onnx").read_bytes(), extended=True)
        >>> (logits,) = run(torch.zeros(1, 3, 224, 224))
    """
    check_libraries("OpenVINO", ("openvino",), "openvino")
    import openvino

    core = openvino.Core()
    if extended:
        add_openvino_extension(core)
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads or 0}
    if in_float32:
        options["INFERENCE_PRECISION_HINT"] = "f32"
    compiled = core.compile_model(core.read_model(io.BytesIO(content)), "CPU", options)
    request = compiled.create_infer_request()
    shape = compiled.input(0).partial_shape
    sizes = [side.get_length() if side.is_static else None for side in shape]

    def run(images: Tensor) -> list[Tensor]:
        check_size(images, sizes)
        # OpenVINO 2026.4 loses the errors of operators in `infer`, and returns memory as it was.
        request.start_async([images.float().numpy()], share_inputs=True)
        request.wait()
        found = request.results
        return [torch.from_numpy(found[output].copy()) for output in compiled.outputs]

    return run


_HINT = "dgt.openvino_extension_path() compiles one for the installed version"


def _check_library(path: Path) -> None:
    """Reject a library that is missing or whose name shows another OpenVINO version or processor."""
    if not path.is_file():
        raise UserError(f"OpenVINO extension {path} does not exist; {_HINT}")
    named = NAME.fullmatch(path.name)
    if named is None:  # renamed: OpenVINO itself finds out
        return
    version = _find_wheel().version
    if named["version"] != version:
        raise UserError(
            f"the extension {path} is for OpenVINO {named['version']}, but {version} is installed; "
            f"{_HINT}"
        )
    if not library.has_level(named["level"]):
        raise UserError(
            f"the extension {path} needs a processor with {named['level']}, which this one lacks; "
            f"{_HINT}"
        )


def _find_wheel() -> _Wheel:
    check_libraries("the OpenVINO extension", ("openvino",), "openvino")
    import openvino

    version = openvino.__version__.partition("-")[0]
    folder = Path(openvino.__file__).parent
    if not sys.platform.startswith("linux"):
        raise UserError(f"the OpenVINO extension supports only Linux, this is {sys.platform}")
    wheel = _Wheel(version, folder)
    if not (folder / HEADER).is_file() or len(wheel.libraries) < 2:
        raise UserError(
            f"the OpenVINO {version} in {folder} has no C++ headers or libraries for its "
            "extension: install the wheel from PyPI, pip install openvino"
        )
    return wheel


def _level() -> str:
    """The instruction set level to compile for; without the products of bfloat16."""
    level = library.level()
    if level == library.NONE:
        level = library.processor_level()
    return library.architecture_of(level)


def _sources() -> list[Path]:
    return [SOURCE, *sorted(KERNELS.glob("*.h")), *sorted(KERNELS.glob("*.cpp"))]


def _file_name(wheel: _Wheel) -> str:
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.read_bytes())
    flags = (COMMON, FOR_KERNELS, FOR_OPERATORS, wheel.definitions)
    digest.update(repr((flags, str(wheel.folder))).encode())
    return f"dgt_openvino-{wheel.version}-{_level()}-{digest.hexdigest()[:8]}.so"


def _build(wheel: _Wheel, path: Path) -> None:
    """Compile the extension, and put it in place as a whole."""
    compiler = _find_compiler()
    level = _level()
    march = () if level == library.BASELINE else (f"-march={level}",)
    headers = (f"-I{KERNELS}", "-isystem", str(wheel.folder / "include"))
    interface = (*FOR_OPERATORS, *headers, *wheel.definitions)
    linked = (*map(str, wheel.libraries), f"-Wl,-rpath,{wheel.folder / 'libs'}")
    with tempfile.TemporaryDirectory() as trial:
        kernels = f"{trial}/kernels.o"
        operator = f"{trial}/operator.o"
        source = str(KERNELS / "dgt_native.cpp")
        _run((*compiler, *COMMON, *FOR_KERNELS, *march, "-c", source, "-o", kernels), wheel)
        _run((*compiler, *COMMON, *interface, "-c", str(SOURCE), "-o", operator), wheel)
        with replacing(path) as partial:
            objects = (kernels, operator)
            _run((*compiler, "-shared", "-s", *objects, *linked, "-o", str(partial)), wheel)


def _find_compiler() -> tuple[str, ...]:
    """The C++ compiler that `CXX` names, else the first that is installed."""
    named = os.environ.get("CXX")
    if named:
        return tuple(shlex.split(named))
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return (found,)
    raise UserError(
        "the OpenVINO extension needs a C++ compiler, and none was found: "
        "install g++ or clang++, or set CXX"
    )


def _run(command: Sequence[str], wheel: _Wheel) -> None:
    """Run the compiler; UserError, with the compiler's first error, if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        reason = error.strerror
        raise UserError(f"the C++ compiler {command[0]!r} cannot be run: {reason}") from error
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[0]).strip()
        raise UserError(
            f"{command[0]} cannot compile the extension for OpenVINO {wheel.version}: {reason}"
        )
