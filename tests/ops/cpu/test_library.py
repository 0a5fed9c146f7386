"""The native library: which build is used, and that an unusable one causes only a warning."""

from __future__ import annotations

import _ctypes
import ctypes
import importlib
import os
import platform
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dgt
from dgt.ops.cpu import library
from dgt.utils.errors import UserError
from dgt_command.info import native_line

LANES = {
    "x86-64-v2": 4,
    "x86-64-v3": 8,
    "x86-64-v4": 16,
    "x86-64-v4-bf16": 16,
    "x86-64-v4-amx": 16,
    "baseline": 4,
}
ON_LINUX = platform.system() == "Linux"


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing has been loaded yet, and no level is forced."""
    with monkeypatch.context() as patch:
        patch.delenv(library.VARIABLE, raising=False)
        importlib.reload(library)
        yield
    importlib.reload(library)


@pytest.fixture(scope="module")
def built() -> None:
    """The library of this checkout, which exists wherever there is a compiler."""
    if library.status().available:
        return
    reason = library.why_not()
    # `none` if the package was deliberately installed without the kernels.
    named = os.environ.get("CXX")
    compilers = [named] if named else ["c++", "g++", "clang++"]
    if any(shutil.which(name) for name in compilers):
        pytest.fail(f"{reason}; `pip install --verbose --no-deps --editable .` tells more")
    pytest.skip(f"no C++ compiler: {reason}")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder instead of the package's own."""
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    return tmp_path


def file_in(folder: Path) -> Path:
    return folder / f"dgt_native_{library.level()}.kernels"


def warnings_of_loading() -> list[str]:
    """The warnings of three calls, none of which may return a library."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [library.load() for _ in range(3)] == [None, None, None]
    assert all(issubclass(each.category, RuntimeWarning) for each in caught)
    return [str(each.message) for each in caught]


def assert_refused(reason: str) -> None:
    """One warning, None, and the reason, which `dgt.native_status` and `dgt info` report, too."""
    (message,) = warnings_of_loading()
    assert re.search(reason, message)
    assert message.startswith("no native CPU kernels: ")
    told = library.why_not()
    assert told is not None
    assert told in message
    status = dgt.native_status()
    assert (status.available, status.lanes, status.reason) == (False, None, told)
    assert native_line() == f"native CPU kernels: none ({told})"


def test_the_library_is_loaded_once_and_described(built: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = library.load()
    assert loaded is library.load()
    assert loaded is not None
    assert loaded.dgt_abi_version() == library.ABI_VERSION
    status = dgt.native_status()
    assert status.available
    assert status.reason is None
    assert library.why_not() is None
    assert status.level == library.level()
    assert status.file is not None
    assert status.file.is_file()
    assert status.lanes == LANES[status.level]
    described = f"native CPU kernels: {status.level}, {status.lanes} lanes"
    assert native_line() == f"{described} ({library.choose_level().why})"


def test_a_library_that_was_not_built_is_named(folder: Path) -> None:
    assert_refused(rf"{file_in(folder).name} was not built; reinstall dgt with a C\+\+ compiler")


def test_a_file_that_is_no_library_is_refused(folder: Path) -> None:
    file_in(folder).write_bytes(b"not a library")
    assert_refused(rf"{file_in(folder).name} cannot be loaded")


@pytest.mark.skipif(not ON_LINUX, reason="changes the header of an ELF file")
def test_a_library_for_another_processor_is_refused(folder: Path) -> None:
    content = bytearray(Path(_ctypes.__file__).read_bytes())
    content[18:20] = (0xF3).to_bytes(2, sys.byteorder)  # RISC-V
    file_in(folder).write_bytes(content)
    assert_refused(rf"{file_in(folder).name} cannot be loaded")


@pytest.mark.skipif(not ON_LINUX, reason="cuts an ELF file short")
def test_a_file_that_is_cut_short_is_not_loaded(folder: Path) -> None:
    """The system's loader would crash the process with a bus error."""
    content = Path(_ctypes.__file__).read_bytes()
    file_in(folder).write_bytes(content[: len(content) // 4])
    assert_refused("is truncated; reinstall dgt")


def test_a_library_of_something_else_is_refused(folder: Path) -> None:
    shutil.copy(_ctypes.__file__, file_in(folder))
    assert_refused("is not a dgt library; reinstall dgt")


def test_a_library_of_another_version_is_refused(
    built: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", version + 1)
    assert_refused(
        rf"is from another version of dgt \(interface {version}, expected {version + 1}\)"
    )


@pytest.mark.parametrize("name", library.X86_LEVELS)
def test_a_level_can_be_forced(name: str, built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = library.X86_LEVELS if library.level() in library.X86_LEVELS else ()
    if name not in levels[: levels.index(library.level()) + 1 if levels else 0]:
        pytest.skip(f"this processor has {library.level()}")
    monkeypatch.setenv("DGT_NATIVE_ISA", name)
    status = dgt.native_status()
    assert (status.available, status.level, status.lanes) == (True, name, LANES[name])
    assert native_line().endswith("(DGT_NATIVE_ISA asks for it)")


def answer_processes_that_ask_for_matrix_units(
    granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux does."""
    system = SimpleNamespace(syscall=lambda *_: 0 if granted else -1)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: system)


@pytest.mark.parametrize(
    ("machine", "capability", "found", "expected"),
    [
        ("x86_64", "AVX512", {"avx512_bf16": True, "amx_bf16": True}, "x86-64-v4-amx"),
        ("x86_64", "AVX2", {"avx512_bf16": True, "amx_bf16": True}, "x86-64-v3"),
        ("x86_64", "AVX512", {"avx512_bf16": True}, "x86-64-v4-bf16"),
        ("x86_64", "AVX512", {"avx512_bf16": False}, "x86-64-v4"),
        ("x86_64", "AVX512", {}, "x86-64-v4"),
        ("AMD64", "AVX2", {"avx512_bf16": True}, "x86-64-v3"),  # as ATEN_CPU_CAPABILITY says
        ("x86_64", "DEFAULT", {}, "x86-64-v2"),
        ("aarch64", "DEFAULT", {"bf16": True}, "baseline"),
        ("arm64", "SVE256", {}, "baseline"),
    ],
)
def test_the_level_is_what_pytorch_finds(
    machine: str,
    capability: str,
    found: dict[str, bool],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    monkeypatch.setattr(library, "PROCESSORS", tmp_path / "cpuinfo of another system")
    answer_processes_that_ask_for_matrix_units(True, monkeypatch)
    assert library.level() == expected


def test_compilers_know_the_architecture_of_every_level() -> None:
    found = {library.architecture_of(name) for name in library.X86_LEVELS}
    assert found == {"x86-64-v2", "x86-64-v3", "x86-64-v4"}


@pytest.mark.parametrize(
    ("maker", "matrix_units", "expected"),
    [
        ("GenuineIntel", True, "x86-64-v4-amx"),
        ("GenuineIntel", False, "x86-64-v4"),  # the system does not grant them, or there are none
        ("AuthenticAMD", False, "x86-64-v4-bf16"),
    ],
)
def test_products_of_bfloat16_are_taken_where_they_are_faster(
    maker: str,
    matrix_units: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    about = tmp_path / "cpuinfo"
    about.write_text(f"processor\t: 0\nvendor_id\t: {maker}\n")
    found = {"avx512_bf16": True, "amx_bf16": True}
    monkeypatch.setattr(library, "PROCESSORS", about)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    answer_processes_that_ask_for_matrix_units(matrix_units, monkeypatch)
    choice = library.choose_level()
    assert choice.level == expected
    assert ("matrix units" in choice.why) == (expected == "x86-64-v4")
    assert library.has_level("x86-64-v4-bf16")  # which DGT_NATIVE_ISA may still ask for


def test_a_level_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be loaded, but the first call would crash the process."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("DGT_NATIVE_ISA", "x86-64-v4")
    assert_refused(
        "DGT_NATIVE_ISA requests x86-64-v4, which this processor lacks: PyTorch found x86-64-v3"
    )


def test_none_switches_the_library_off_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGT_NATIVE_ISA", "none")
    assert warnings_of_loading() == []
    reason = "the environment variable DGT_NATIVE_ISA is 'none'"
    assert dgt.native_status() == (False, "none", None, None, reason)


def test_an_unknown_level_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("DGT_NATIVE_ISA", "avx2")
    levels = "x86-64-v2, x86-64-v3, x86-64-v4, x86-64-v4-bf16, x86-64-v4-amx"
    expected = f"DGT_NATIVE_ISA must be one of {levels}, none, got 'avx2'"
    for function in (library.level, library.load, library.why_not, library.status):
        with pytest.raises(UserError, match=expected):
            function()


def test_threads_that_load_at_once_are_warned_once(folder: Path) -> None:
    barrier = threading.Barrier(8)

    def load() -> None:
        barrier.wait()
        library.load()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caught) == 1


def test_pytorch_parallel_for_covers_its_range() -> None:
    address = library.parallel_for()
    assert address is not None  # available since PyTorch 2.10, the oldest supported version
    body_type = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    parts: list[range] = []
    body = body_type(lambda begin, end, _: parts.append(range(begin, end)))
    arguments = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, body_type, ctypes.c_void_p)
    function = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address)
    assert function(3, 11, 1, body, None) == 0
    assert sorted(number for part in parts for number in part) == list(range(3, 11))


def test_without_pytorch_parallel_for_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert library.parallel_for() is None


@pytest.mark.skipif(not ON_LINUX, reason="reads the names in an ELF file")
def test_the_library_needs_the_library_of_c_alone(built: None) -> None:
    """Such a wheel runs with its glibc or a newer one, whatever compiled it."""
    for file in library.FOLDER.glob("dgt_native_*.kernels"):
        needed = set(re.findall(rb"\0(lib[\w+.-]+\.so[\w.]*)", file.read_bytes()))
        assert needed <= {b"libc.so.6", b"libm.so.6"}, file.name
