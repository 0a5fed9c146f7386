"""What ``backend="auto"`` does where a kernel does not compile or cannot be launched; no Triton is needed here."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
failures: list[Exception] = []  # the first one: why ``"auto"`` takes kernels no more


class KernelError(RuntimeError):
    """A kernel does not compile, or cannot be launched."""


def falls_back(step: Callable[P, R]) -> Callable[P, R]:
    """Let ``"auto"`` be ``"torch"`` from the first kernel on that fails, with one warning; a named backend raises."""

    @functools.wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return step(*args, **kwargs)
        except KernelError as error:
            if failures:
                raise
            failures.append(error)
            warnings.warn(f'{error}; backend="auto" is "torch" from here on', RuntimeWarning, stacklevel=2)
        return step(*args, **kwargs)

    return run
