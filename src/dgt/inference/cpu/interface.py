"""The C structures of the layers that only predict, as in ``kernels/layers.h``. Everything is float32."""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from dgt.ops.cpu import library
from dgt.ops.cpu.interface import NO_MEMORY, pointer


def numbers(*names: str) -> list[tuple[str, type]]:
    """Fields of ``int64_t``."""
    return [(name, ctypes.c_int64) for name in names]


def pointers(*names: str) -> list[tuple[str, type]]:
    """Fields of pointers."""
    return [(name, ctypes.c_void_p) for name in names]


class BatchNorm(ctypes.Structure):
    """``dgt_batch_norm``: all null where there is none."""

    _fields_ = [
        *pointers("weight", "bias", "mean", "variance"),
        ("epsilon", ctypes.c_double),
    ]


class LinearProblem(ctypes.Structure):
    """``dgt_linear_problem``."""

    kernel = "linear"
    _fields_ = [
        *numbers("tokens", "inputs", "outputs"),
        *pointers("input", "weight", "bias", "prepared", "output"),
        *numbers("threads"),
        *pointers("parallel_for"),
    ]


class ConvolutionProblem(ctypes.Structure):
    """``dgt_convolution_problem``."""

    kernel = "convolution"
    _fields_ = [
        *numbers("images", "height", "width", "channels", "outputs", "stride", "with_gelu"),
        *pointers("input", "mask", "weight", "bias"),
        ("norm", BatchNorm),
        *pointers("prepared", "output"),
        *numbers("threads"),
        *pointers("parallel_for"),
    ]


class DepthwiseProblem(ctypes.Structure):
    """``dgt_depthwise_problem``."""

    kernel = "depthwise"
    _fields_ = [
        *numbers("images", "height", "width", "channels"),
        *pointers("input", "weight", "bias", "prepared", "output"),
        *numbers("threads"),
        *pointers("parallel_for"),
    ]


class FeedForwardProblem(ctypes.Structure):
    """``dgt_feed_forward_problem``."""

    kernel = "feed_forward"
    _fields_ = [
        *numbers("images", "height", "width", "channels", "hidden"),
        *pointers("input", "mask", "expand_weight", "expand_bias"),
        ("norm1", BatchNorm),
        *pointers("depthwise_weight", "depthwise_bias"),
        ("norm2", BatchNorm),
        *pointers("project_weight", "project_bias"),
        ("norm3", BatchNorm),
        *pointers("prepared", "output"),
        *numbers("threads"),
        *pointers("parallel_for"),
    ]


PROBLEMS = (LinearProblem, ConvolutionProblem, DepthwiseProblem, FeedForwardProblem)


def check_sizes(loaded: Any) -> None:
    """Check that a library has the structures of this module.

    Raises:
        RuntimeError: one has another size there: calling it would read and write past its end.
    """
    for problem in PROBLEMS:
        size = getattr(loaded, f"dgt_{problem.kernel}_problem_size")()
        if size != ctypes.sizeof(problem):
            raise RuntimeError(
                f"the native kernels are from another version of dgt (a problem of {problem.kernel} "
                f"of {size} bytes, expected {ctypes.sizeof(problem)}); reinstall dgt"
            )


def describe_norm(norm: nn.BatchNorm2d | None) -> BatchNorm:
    """Describe a BatchNorm with running statistics; nothing for None."""
    if norm is None:
        return BatchNorm()
    parts = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return BatchNorm(*map(pointer, parts), norm.eps)


def prepare(problem: Any) -> Tensor:
    """Return the weights that a problem names, in the kernel's layout: bytes."""
    loaded: Any = library.load()
    check_sizes(loaded)
    count = getattr(loaded, f"dgt_{problem.kernel}_bytes")
    count.restype = ctypes.c_int64
    prepared = torch.empty(count(ctypes.byref(problem)), dtype=torch.uint8, device="cpu")
    run(f"dgt_prepare_{problem.kernel}", problem, prepared)
    return prepared


def run(name: str, problem: Any, prepared: Tensor) -> None:
    """Call a function of the library on PyTorch's threads.

    Raises:
        MemoryError: where there is no room for what the kernel keeps.
    """
    problem.prepared = prepared.data_ptr()
    problem.threads = torch.get_num_threads()
    problem.parallel_for = library.parallel_for()
    loaded: Any = library.load()
    if getattr(loaded, name)(ctypes.byref(problem)) == NO_MEMORY:
        raise MemoryError(f"out of memory for the workspace of {name}")


def layout() -> tuple[int, int] | None:
    """Return what the layout of prepared weights depends on; None where there is no library."""
    loaded: Any = library.load()
    return None if loaded is None else (library.ABI_VERSION, int(loaded.dgt_lanes()))
