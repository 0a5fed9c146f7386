"""The native library: which build suits this processor, loaded once, and why there is none.

The package holds one build per instruction set level. What PyTorch finds the processor to have, which
`ATEN_CPU_CAPABILITY` may lower, picks one; `DGT_NATIVE_ISA` names another, or `none` for no
library. Intel's processors without matrix units multiply bfloat16 at half of float32's rate, so they
take the level without such products. Where no build can be used, one warning says so, and the callers
take PyTorch's operations instead. Nothing is loaded before the first call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dgt.ops.cpu.structures import SIZES
from dgt.utils.errors import UserError

ABI_VERSION = 15  # of the C interface, as DGT_ABI_VERSION there: an old build is never called
X86_LEVELS = (
    "x86-64-v2",
    "x86-64-v3",
    "x86-64-v4",
    "x86-64-v4-bf16",
    "x86-64-v4-amx",
)  # each holds those before it
BASELINE = "baseline"  # the one level of every other processor
NONE = "none"
VARIABLE = "DGT_NATIVE_ISA"
FOLDER = Path(__file__).parent
PROCESSORS = Path("/proc/cpuinfo")  # of Linux

_FIRST_CALL = threading.Lock()  # threads that call first at once get one library and one warning


class NativeStatus(NamedTuple):
    """What is in use of the native CPU kernels.

    Attributes:
        available: whether the library is loaded.
        level: instruction set level: `"x86-64-v2"`, `"x86-64-v3"` (AVX2), `"x86-64-v4"` (AVX-512),
            `"x86-64-v4-bf16"` (with products of bfloat16), `"x86-64-v4-amx"` (with matrix units for
            these), `"baseline"` on other processors, or `"none"` where `DGT_NATIVE_ISA` says so.
        file: the library of this level, whether it exists or not; None for the level `"none"`.
        lanes: float32 numbers in a vector register; None without a library.
        reason: why there is no library, without a full stop; None where there is one.
    """

    available: bool
    level: str
    file: Path | None
    lanes: int | None
    reason: str | None


class _Loaded(NamedTuple):
    """The library, or the reason for not having it."""

    library: ctypes.CDLL | None
    reason: str | None


class Choice(NamedTuple):
    """A level, and why it is taken."""

    level: str
    why: str


def level() -> str:
    """Return the level to load: the fastest here, or the one that `DGT_NATIVE_ISA` names.

    Raises:
        UserError: where `DGT_NATIVE_ISA` names no level of this kind of processor.
    """
    return choose_level().level


def choose_level() -> Choice:
    """Return the level to load, and why.

    Raises:
        UserError: where `DGT_NATIVE_ISA` names no level of this kind of processor.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return _fastest_level()
    known = (*_levels(), NONE)
    if asked not in known:
        raise UserError(
            f"the environment variable {VARIABLE} must be one of {', '.join(known)}, got {asked!r}"
        )
    return Choice(asked, f"{VARIABLE} asks for it")


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, or None, with one warning in a process, where none can be used.

    There is no warning where `DGT_NATIVE_ISA` is `none`.

    Raises:
        UserError: where `DGT_NATIVE_ISA` names no level of this kind of processor.
    """
    with _FIRST_CALL:
        return _load_or_warn()


def why_not() -> str | None:
    """Return why there is no library, without a full stop; None where there is one.

    Raises:
        UserError: where `DGT_NATIVE_ISA` names no level of this kind of processor.
    """
    return _loaded().reason


def status() -> NativeStatus:
    """Return what is in use, without a warning.

    Returns:
        NativeStatus: a named tuple of `available`, `level`, `file`, `lanes` and `reason`.

    Raises:
        UserError: where `DGT_NATIVE_ISA` names no level of this kind of processor.

    Example:
        >>> dgt.native_status().available
        True
    """
    loaded = _loaded()
    name = level()
    return NativeStatus(
        available=loaded.library is not None,
        level=name,
        file=None if name == NONE else _file(name),
        lanes=None if loaded.library is None else loaded.library.dgt_lanes(),
        reason=loaded.reason,
    )


@functools.cache
def parallel_for() -> int | None:
    """Return the address of `torch_parallel_for`, or None where it is missing.

    It is a function of PyTorch's stable C interface. The kernels run in PyTorch's threads through
    it; without it they run in the caller's thread alone.
    """
    suffix = "dylib" if platform.system() == "Darwin" else "so"
    name = f"libtorch_cpu.{suffix}"
    beside_torch = Path(torch.__file__).parent / "lib" / name
    for place in (str(beside_torch), name):  # by its name: the one that is loaded, wherever it is
        try:
            function = ctypes.CDLL(place).torch_parallel_for
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


@functools.cache
def _load_or_warn() -> ctypes.CDLL | None:
    loaded = _loaded()
    if loaded.library is None and level() != NONE:
        warnings.warn(
            f"no native CPU kernels: {loaded.reason} (slower PyTorch operations are used instead)",
            RuntimeWarning,
            stacklevel=3,
        )
    return loaded.library


@functools.cache
def _loaded() -> _Loaded:
    name = level()
    if name == NONE:
        return _refused(f"the environment variable {VARIABLE} is 'none'")
    has = processor_level()
    if not has_level(name):
        return _refused(
            f"{VARIABLE} requests {name}, which this processor lacks: PyTorch found {has}"
        )
    file = _file(name)
    if not file.is_file():
        return _refused(f"{file.name} was not built; reinstall dgt with a C++ compiler such as g++")
    if not _is_whole(file):
        return _refused(f"{file} is truncated; reinstall dgt")
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        return _refused(f"{file.name} cannot be loaded ({error})")
    return _checked(library, file)


def _checked(library: ctypes.CDLL, file: Path) -> _Loaded:
    """Refuse a library with another C interface than the one that is called."""
    try:
        found = library.dgt_abi_version()
        library.dgt_lanes.restype = ctypes.c_int
    except AttributeError:
        return _refused(f"{file} is not a dgt library; reinstall dgt")
    if found != ABI_VERSION:
        return _refused(
            f"{file} is from another version of dgt (interface {found}, expected {ABI_VERSION}); "
            "reinstall dgt"
        )
    for function, structure in SIZES.items():
        size = getattr(library, function)()
        if size != ctypes.sizeof(structure):
            return _refused(
                f"{file} is from another version of dgt (a problem of {size} bytes, expected "
                f"{ctypes.sizeof(structure)}); reinstall dgt"
            )
    return _Loaded(library, None)


def _refused(reason: str) -> _Loaded:
    return _Loaded(library=None, reason=reason)


def _is_whole(file: Path) -> bool:
    """Tell whether a 64-bit ELF file is as long as its header says.

    Loading a shorter one may end the process with a bus error.
    """
    header = file.read_bytes()[:64]
    if header[:5] != b"\x7fELF\x02" or len(header) < 64:
        return True  # of another kind, or nothing: the system's loader has its own words for it
    order = "<" if header[5] == 1 else ">"
    (table,) = struct.unpack_from(f"{order}Q", header, 0x28)  # the sections' headers stand last
    size, count = struct.unpack_from(f"{order}HH", header, 0x3A)
    return file.stat().st_size >= table + size * count


def _file(name: str) -> Path:
    return FOLDER / f"dgt_native_{name}.kernels"


def _levels() -> tuple[str, ...]:
    """All levels of this kind of processor, in ascending order."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return X86_LEVELS
    return (BASELINE,)


def cpu_capabilities() -> Mapping[str, Any]:
    """What this processor has, by PyTorch's names; torch 2.10 knows two of those that we ask for."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    return {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx_bf16": torch.cpu._is_amx_tile_supported(),
    }


def processor_level() -> str:
    """Return the highest level that this processor has, as PyTorch finds it."""
    if _levels() == (BASELINE,):
        return BASELINE
    capability = torch.backends.cpu.get_cpu_capability()
    has = cpu_capabilities()
    if capability == "AVX512" and has.get("avx512_bf16", False):
        matrix_units = has.get("amx_bf16", False) and _ask_for_matrix_units()
        return "x86-64-v4-amx" if matrix_units else "x86-64-v4-bf16"
    by_capability = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
    return by_capability.get(capability, "x86-64-v2")


def _fastest_level() -> Choice:
    highest = processor_level()
    if highest == "x86-64-v4-bf16" and _is_from_intel():
        why = "without matrix units, Intel multiplies float32 twice as fast as bfloat16"
        return Choice("x86-64-v4", why)
    return Choice(highest, "the highest that PyTorch finds here")


def _is_from_intel() -> bool:
    """Tell whether Intel made this processor; False where the system is not Linux."""
    if not PROCESSORS.is_file():
        return False
    with PROCESSORS.open(encoding="utf-8") as file:
        return "GenuineIntel" in file.read(4096)  # which the first of them says


def _ask_for_matrix_units() -> bool:
    """Ask Linux to let this process use AMX, and tell whether it does; to ask again changes nothing.

    The registers are so large that they are saved for those processes alone that asked.
    """
    if platform.system() != "Linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def architecture_of(name: str) -> str:
    """What a compiler calls a level: x86-64-v4 without what some processors add to it."""
    return name.removesuffix("-bf16").removesuffix("-amx")


def has_level(name: str) -> bool:
    """Tell whether this processor has a level; False for one of another kind of processor."""
    levels = _levels()
    return name in levels and levels.index(name) <= levels.index(processor_level())
