"""Shared by all tests: fixed seeds, few threads, the sample data, and skipping of GPU tests."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import operator
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

# Before anything imports Triton, so that its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"

# Slowness on a busy machine says nothing about a test, so examples have no time limits.
PATIENT: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("local", **PATIENT)
hypothesis.settings.register_profile("ci", **PATIENT, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# Files that take ten CPU seconds or more, the longest first: they start first, so that they do not
# finish last.
LONGEST = (
    "training/test_parallel.py",
    "inference/test_export.py",
    "ops/triton/test_kernels.py",
    "models/test_training.py",
    "training/test_resume.py",
    "experiments/test_ablate.py",
    "ops/triton/test_products.py",
    "test_cli.py",
    "acceleration/test_accelerate.py",
    "ops/triton/test_operators.py",
    "training/test_fit.py",
    "data/test_loading.py",
    "ops/test_reference.py",
    "explorer/test_launch.py",
    "layers/test_data_parallel.py",
    "ops/test_torch_modes.py",
    "ops/test_operators.py",
    "inference/test_fixed_size.py",
    "figures/test_visualize.py",
    "examples/test_attention_tour.py",
    "test_architecture.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Use two threads unless the caller set them, as small tensors gain nothing from more, and order files as below."""
    # Pytest-xdist would start with the files that have the most tests.
    config.option.loadscopereorder = False
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with LONGEST; skip tests marked `gpu` if there is no CUDA device."""
    places = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# Patched functions of Triton's interpreter, which are not public, and their numbers of arguments.
PATCHED = {
    "_patch_lang": 1,
    "_get_np_dtype": 1,
    "GridExecutor.__call__": 3,
    "tl.block_type.__init__": 3,
    "tl.tensor.__init__": 3,
}


def changed(interpreter: ModuleType) -> list[str]:
    """The functions in PATCHED that this version of Triton lacks or that take other arguments."""
    found = []
    for name, arguments in PATCHED.items():
        try:
            count = len(inspect.signature(operator.attrgetter(name)(interpreter)).parameters)
        except AttributeError:
            count = None
        found += [name] * (count != arguments)
    return found


@pytest.fixture(scope="session", autouse=True)
def changed_in_triton() -> list[str]:
    """Make Triton's interpreter do repeated work only once; that work takes most of the time of a kernel.

    It patches its language in every call between functions, although once per launch is enough, and
    derives the attributes of a type from its name and shape for every value. If a version of Triton
    differs, the function is left unchanged and named; then a test of kernels fails, and all others
    take longer.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return []
    from triton.runtime import interpreter

    if found := changed(interpreter):
        return found
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = interpreter.tl
    kinds: dict[
        int, tuple[bool, ...]
    ] = {}  # the names under which a module knows Triton's language
    patched: set[tuple[bool, ...]] = set()

    def patch_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in kinds:
            kinds[id(names)] = tuple(
                any(v is module for v in names.values()) for module in (language, language.core)
            )
        if kinds[id(names)] in patched:
            return None
        patched.add(kinds[id(names)])
        return patch(function)

    def run_and_forget(*arguments: Any, **options: Any) -> Any:
        patched.clear()  # patches are undone when a launch ends
        return run(*arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, run_and_forget

    make_type, make_value = language.block_type.__init__, language.tensor.__init__
    find_numpy = interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    in_numpy: dict[str, np.dtype[Any]] = {}

    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (
            element_ty.name,
            *(size.value if isinstance(size, language.constexpr) else size for size in shape),
        )
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key], element_ty=element_ty)

    def value_once(self: Any, handle: Any, type: Any) -> None:
        if type.name not in values:
            make_value(self, handle, type)
            values[type.name] = dict(vars(self))
        vars(self).update(values[type.name], handle=handle, type=type, dtype=type.scalar)

    def numpy_once(type: Any) -> np.dtype[Any]:
        name = type.scalar.name
        return in_numpy[name] if name in in_numpy else in_numpy.setdefault(name, find_numpy(type))

    language.block_type.__init__, language.tensor.__init__ = type_once, value_once
    interpreter._get_np_dtype = numpy_once
    return []


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    """Start every test with the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (third-party code draws from the legacy state)
    torch.manual_seed(0)


@pytest.fixture
def at_work() -> Iterator[Callable[[Path], int]]:
    """Start a process with a child, like a data loader's, that locks a folder; returns its id."""
    begun: list[int] = []

    def begin(folder: Path) -> int:
        from dgt.utils.atomic_write import exclusive_lock

        told, tell = os.pipe()
        begun.append(os.fork())
        if begun[-1] == 0:
            try:
                os.setpgid(0, 0)
                with exclusive_lock(folder):
                    os.fork()
                    os.write(tell, b"x")
                    signal.pause()
            finally:
                os._exit(1)
        os.close(tell)
        assert os.read(told, 1)
        os.close(told)
        return begun[-1]

    yield begin
    for process in begun:
        os.killpg(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the test waited for it
            os.waitpid(process, 0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with small real data sets next to the checkout; skips the test if it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no real sample data: ../shared/data is not there")
    return SHARED_DATA


@pytest.fixture(scope="session")
def load_script() -> Callable[[Path], ModuleType]:
    """Import a Python file outside any package: scripts, and helpers next to tests."""

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"dgt_tests_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load
