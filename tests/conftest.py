"""What all tests share: the same seeds every time, few threads, the sample data, and the skip of GPU tests."""

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

if not torch.cuda.is_available():  # before anything imports Triton: its kernels are then tested in the interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"

# A busy machine is slow, which says nothing about a test: neither one example nor all of them have a limit of time.
PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("local", **PATIENT)
hypothesis.settings.register_profile("ci", **PATIENT, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# Files of ten CPU seconds and more, the longest first: they are begun first, whose last tests none then waits for.
LONGEST = (
    *("training/test_parallel.py", "inference/test_export.py", "ops/triton/test_kernels.py", "models/test_training.py"),
    *("training/test_resume.py", "experiments/test_ablate.py", "ops/triton/test_products.py", "test_cli.py"),
    *("acceleration/test_accelerate.py", "ops/triton/test_operators.py", "training/test_fit.py"),
    *("data/test_loading.py", "studies/test_fixed_weights.py", "ops/test_reference.py", "explorer/test_launch.py"),
    *("layers/test_data_parallel.py", "ops/test_torch_attention.py", "ops/test_operators.py"),
    "inference/test_fixed_size.py",
    *("figures/test_visualize.py", "examples/test_attention_tour.py", "test_architecture.py"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Two threads, unless the caller chose: tests on small tensors gain nothing from more. Files as ordered below."""
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files of the most tests
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with LONGEST; skip tests marked `gpu` where there is no CUDA device."""
    places = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# What is patched of Triton's interpreter, which promises none of it, and how many arguments each takes.
PATCHED = {
    **{"_patch_lang": 1, "_get_np_dtype": 1, "GridExecutor.__call__": 3},
    **{"tl.block_type.__init__": 3, "tl.tensor.__init__": 3},
}


def changed(interpreter: ModuleType) -> list[str]:
    """Of PATCHED, what this version of Triton does not have, or has with other arguments."""
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
    """Let Triton's interpreter do once what it does anew each time to the same effect: most of what a kernel takes.

    It patches its language in every call of one function by another, where once a launch is enough; and it works out
    the attributes of a type from its name and shape for every value, those of a value from its type. Where anything of
    that is not as it was, it is left as it is and named; a test of kernels fails then, all others take longer.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return []
    from triton.runtime import interpreter

    if found := changed(interpreter):
        return found
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = interpreter.tl
    kinds: dict[int, tuple[bool, ...]] = {}  # of a module's names: by which it knows Triton's language
    patched: set[tuple[bool, ...]] = set()

    def patch_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in kinds:
            kinds[id(names)] = tuple(any(v is module for v in names.values()) for module in (language, language.core))
        if kinds[id(names)] in patched:
            return None
        patched.add(kinds[id(names)])
        return patch(function)

    def run_and_forget(*arguments: Any, **options: Any) -> Any:
        patched.clear()  # what was patched is restored when a launch ends
        return run(*arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, run_and_forget

    make_type, make_value = language.block_type.__init__, language.tensor.__init__
    find_numpy = interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    in_numpy: dict[str, np.dtype[Any]] = {}

    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(size.value if isinstance(size, language.constexpr) else size for size in shape))
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
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (third-party code draws from the legacy state)
    torch.manual_seed(0)


@pytest.fixture
def at_work() -> Iterator[Callable[[Path], int]]:
    """Begins a process, whose id it returns, that is alone at work in a folder, with a child as a loader has."""
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
    """The folder with small real data sets beside the checkout; skips the test where it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no real sample data: ../shared/data is not there")
    return SHARED_DATA


@pytest.fixture(scope="session")
def load_script() -> Callable[[Path], ModuleType]:
    """A Python file that no package holds, as a module: scripts, and helpers beside tests."""

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"dgt_tests_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load
