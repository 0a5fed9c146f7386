"""Build and run the C++ check of the native kernels: every instruction set here, and three sanitizers.

    python tests/native/run.py [NAME ...]

Names are those in the printed table; the default is all. The check of an instruction set is linked with the
library that the package has, if that is newer than its source, or else with one compiled for it. `CXX` names
the compiler; without a compiler nothing is checked, and a line says so. The exit status is 1 if a build or a
check failed.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "native_check"
CHECK = ROOT / "tests" / "native" / "native_check.cpp"
PACKAGE = ROOT / "src" / "dgt"
LIBRARIES = PACKAGE / "ops" / "cpu"
FOLDERS = (LIBRARIES / "kernels", PACKAGE / "inference" / "cpu" / "kernels")
KERNELS = tuple(str(source) for folder in FOLDERS for source in sorted(folder.glob("*.cpp")))
LIMIT = 300.0  # seconds per build or run
ENVIRONMENT = {
    **os.environ,
    "TSAN_OPTIONS": "halt_on_error=1",
}  # a program may hang after a data race

# The language as in CMakeLists.txt. The two disabled warnings come from GCC 12's own AVX-512 headers.
LANGUAGE = (
    "-std=c++17",
    "-pthread",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-ffp-contract=fast",
)
WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Wno-unknown-warning-option",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)

# Compiler macros of the features that each level adds to the one before.
X86_LEVELS = {
    "x86-64-v2": ("__SSE4_2__", "__POPCNT__"),
    "x86-64-v3": ("__AVX2__", "__FMA__", "__BMI2__"),
    "x86-64-v4": ("__AVX512BW__", "__AVX512DQ__", "__AVX512VL__"),
    "x86-64-v4-bf16": ("__AVX512BF16__",),
    "x86-64-v4-amx": ("__AMX_TILE__", "__AMX_BF16__"),
}
# Sanitizers, and how bfloat16 is multiplied without an instruction for it.
SANITIZERS = {
    "address, undefined": ("address,undefined", "-DDGT_BFLOAT16_PAIRS"),
    "address, undefined; tiles": ("address,undefined", "-DDGT_TILES"),
    "thread": ("thread", "-DDGT_BFLOAT16_PAIRS"),
}


class Build(NamedTuple):
    """One program: its name, the compiler flags of its kernels, its command line arguments, and the
    library it checks, unless that is compiled for it.
    """

    name: str
    flags: tuple[str, ...]
    words: tuple[str, ...]
    library: Path | None = None


class Failure(Exception):
    """A command failed; the message includes its output."""


class Outcome(NamedTuple):
    """The result of a build and its run: one word, seconds, and details to print."""

    name: str
    result: str
    seconds: float
    details: str


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler, or None if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named if shutil.which(named[0]) else None
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    return None


def levels_here(compiler: list[str]) -> list[str]:
    """Return the levels that this processor supports, in ascending order; `baseline` if it is not x86."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["baseline"]
    command = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    macros = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    found = []
    for level, needed in X86_LEVELS.items():
        if not macros.issuperset(needed):
            break
        found.append(level)
    return found


def builds_of(levels: list[str]) -> list[Build]:
    """Return every program to try: the sanitizers, which take longest, and one per level at full optimization.

    The sanitizers check the kernels of the highest level below AVX-512, on reduced cases, because they
    slow them down by a factor of ten or more; bfloat16 products are computed there in pairs or in
    tiles, without the instructions.
    """
    builds = []
    below = [level for level in levels if not level.startswith("x86-64-v4")]
    for name, (sanitizer, products) in SANITIZERS.items():
        checks = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
        flags = ("-O1", "-g", *checks, products)
        builds.append(Build(name, (*flags, *_architecture(below[-1])), ("reduced",)))
    for level in levels:
        builds.append(Build(level, ("-O3", *_architecture(level)), (), current_library(level)))
    return builds


def current_library(level: str) -> Path | None:
    """Return the package's library for a level, or None if there is none or a source file is newer."""
    library = LIBRARIES / f"dgt_native_{level}.kernels"
    if not library.exists():
        return None
    changed = max(source.stat().st_mtime for folder in FOLDERS for source in folder.iterdir())
    return library if library.stat().st_mtime > changed else None


def compile_check(compiler: list[str]) -> Path:
    """Compile the check itself, which all programs share.

    Raises:
        Failure: If it does not compile.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    target = BUILD / "native_check.o"
    run_command([*compiler, *LANGUAGE, *_warnings(), "-O2", "-c", str(CHECK), "-o", str(target)])
    return target


def try_build(compiler: list[str], check: Path, build: Build) -> Outcome:
    """Compile the kernels for one program, unless a library has them; link it with the check and run it."""
    start = time.perf_counter()
    program = BUILD / re.sub(r"\W+", "_", build.name)
    kernels = [*LANGUAGE, *_warnings(), *build.flags, *KERNELS]
    if build.library:
        kernels = [str(build.library), f"-Wl,-rpath,{build.library.parent}", "-pthread"]
    result = "passed"
    details = ""
    try:
        run_command([*compiler, str(check), *kernels, "-o", str(program)])
        run_command([str(program), *build.words])
    except Failure as failure:
        result = "FAILED"
        details = str(failure)
    return Outcome(build.name, result, time.perf_counter() - start, details)


def run_command(command: list[str]) -> None:
    """Run a command.

    Raises:
        Failure: If it fails or takes too long; the message has its first lines.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT, env=ENVIRONMENT
        )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{shlex.join(command)} took more than {LIMIT:.0f} s") from error
    if done.returncode:
        lines = [
            line for line in (done.stdout + done.stderr).splitlines() if "gradients " not in line
        ]
        heading = f"{shlex.join(command)} exited with {done.returncode}:"
        raise Failure("\n".join([heading, *lines[:80]]))


def main(names: Iterable[str]) -> int:
    """Run the named builds, print the table, and return the exit status."""
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        which = f"no C++ compiler {named!r}" if named else "no C++ compiler"
        print(f"skipped: there is {which}, the native kernels are not checked")
        return 0
    levels = levels_here(compiler)
    builds = builds_of(levels)
    known = [build.name for build in builds]
    unknown = [name for name in names if name not in known]
    if unknown:
        message = f"error: no build is named {', '.join(unknown)}; there are {', '.join(known)}"
        print(message, file=sys.stderr)
        return 2
    chosen = [build for build in builds if not names or build.name in names]
    try:
        check = compile_check(compiler)
    except Failure as failure:
        print(failure)
        return 1
    with ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = list(pool.map(lambda build: try_build(compiler, check, build), chosen))
    for outcome in outcomes:
        print(f"{outcome.result:<8}{outcome.seconds:7.1f} s  native kernels, {outcome.name}")
    linked = [build.name for build in chosen if build.library]
    if linked:
        print(f"linked with the package's libraries: {', '.join(linked)}")
    if "baseline" not in levels:
        for level in X86_LEVELS:
            if level not in levels:
                print(
                    f"skipped            native kernels, {level}: not supported by this processor"
                )
    failed = [outcome for outcome in outcomes if outcome.result != "passed"]
    for outcome in failed:
        print(f"\n{outcome.name}: {outcome.details}")
    return int(bool(failed))


def _architecture(level: str) -> tuple[str, ...]:
    if level == "baseline":
        return ()
    if level.endswith("-bf16"):
        return (f"-march={level.removesuffix('-bf16')}", "-mavx512bf16")
    if level.endswith("-amx"):
        flags = ("-mavx512bf16", "-mamx-tile", "-mamx-bf16")
        return (f"-march={level.removesuffix('-amx')}", *flags)
    return (f"-march={level}",)


def _warnings() -> tuple[str, ...]:
    # Newer compilers may have more warnings.
    return (*WARNINGS, "-Werror") if os.environ.get("CI") else WARNINGS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
