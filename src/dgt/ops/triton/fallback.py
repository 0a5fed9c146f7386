"""When ``backend="auto"`` takes the kernels, and what it does when one fails.

Importing this needs no Triton.
"""

import contextlib
import functools
import importlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
failures: list[Exception] = []  # the first one: why ``"auto"`` takes kernels no more
_verdicts: dict[tuple[str, torch.dtype], bool] = {}
_deciding = threading.Lock()
_choice = threading.local()


class KernelError(RuntimeError):
    """A kernel does not compile, or cannot be launched."""


def give_up(error: Exception) -> None:
    """Let ``backend="auto"`` be ``"torch"`` from here on, with one warning."""
    if not failures:
        failures.append(error)
        warnings.warn(
            f'{error}; backend="auto" uses "torch" from now on', RuntimeWarning, stacklevel=3
        )


def can_trust(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Tell whether the kernels pass a small check on a device and for a type; run it if needed.

    A verdict holds for the process, and for later ones with the same device, driver, Triton and
    kernels (a file in the user's cache folder). False, with one warning, where a result is wrong or
    a kernel fails. While a CUDA graph is captured or a function is compiled nothing can be tried:
    False until it has been tried elsewhere.

    Args:
        device: where kernels would run, a CUDA device; or the CPU in Triton's interpreter.
        dtype: of queries, keys and values.
    """
    device = torch.device(device)
    known = (str(device), dtype)
    if failures:
        return False
    if known in _verdicts:
        return _verdicts[known]
    if torch.compiler.is_compiling() or (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    ):
        return False
    with _deciding:
        if known not in _verdicts:
            _verdicts[known] = False  # what the check itself asks for is no reason to check again
            _verdicts[known] = _find_verdict(device, dtype)
    return _verdicts[known]


def _find_verdict(device: torch.device, dtype: torch.dtype) -> bool:
    """Ask the file, or try."""
    try:
        # Which imports the kernels, and they this.
        self_check = importlib.import_module("dgt.ops.triton.self_check")
    except ImportError:  # no Triton
        return False
    try:
        reason = self_check.known_reason(device, dtype)
        if reason is None:
            reason = self_check.find_reason(device, dtype)
            self_check.remember(device, dtype, reason)
    # Of the compiler, the driver, or too little memory: another process may have more luck.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        told = f"the Triton kernels do not work on {device} in {dtype} ({reason})"
        warnings.warn(f'{told}; backend="auto" uses "torch" there', RuntimeWarning, stacklevel=4)
    return not reason


def chosen_automatically() -> bool:
    """Tell whether what runs in this thread was asked for as ``backend="auto"``."""
    return getattr(_choice, "automatic", False)


@contextlib.contextmanager
def _choosing(automatic: bool) -> Iterator[None]:
    """Keep for gradients how the backend was chosen."""
    before = chosen_automatically()
    _choice.automatic = automatic
    try:
        yield
    finally:
        _choice.automatic = before


def falls_back(step: Callable[P, R]) -> Callable[P, R]:
    """Switch ``"auto"`` to ``"torch"`` once a kernel fails, with one warning; named ones raise.

    The gradients of what was computed by ``backend="auto"`` then come from the plain path, too.
    """
    names = list(inspect.signature(step).parameters)
    # Without one it is always chosen by itself.
    place = names.index("backend") if "backend" in names else len(names)

    def attempt(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return step(*args, **kwargs)
        except KernelError as error:
            if failures:
                raise
            give_up(error)
        return step(*args, **kwargs)

    @functools.wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # A compiled graph is not traced again: its gradients raise.
        if torch.compiler.is_compiling():
            return attempt(*args, **kwargs)
        backend = args[place] if len(args) > place else kwargs.get("backend", "auto")
        with _choosing(backend == "auto"):
            return attempt(*args, **kwargs)

    return run
