"""The C structures of linear layers, depthwise convolutions and the feed-forward network.

As in ``kernels/convolution_interface.h``. Everything is float32.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from dgt.ops.cpu import library
from dgt.ops.cpu.interface import NO_MEMORY


class BatchNorm(ctypes.Structure):
    """``dgt_batch_norm``: all null where there is none."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("variance", ctypes.c_void_p),
        ("epsilon", ctypes.c_double),
    ]


class LinearProblem(ctypes.Structure):
    """``dgt_linear_problem``."""

    _fields_ = [
        ("tokens", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("prepared", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel_for", ctypes.c_void_p),
    ]


class ConvolutionProblem(ctypes.Structure):
    """``dgt_convolution_problem``."""

    _fields_ = [
        ("images", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("with_gelu", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("taps_last", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("norm", BatchNorm),
        ("output", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel_for", ctypes.c_void_p),
    ]


class DepthwiseProblem(ctypes.Structure):
    """``dgt_depthwise_problem``."""

    _fields_ = [
        ("images", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("with_input", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("grad_output", ctypes.c_void_p),
        ("grad_input", ctypes.c_void_p),
        ("grad_weight", ctypes.c_void_p),
        ("grad_bias", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel_for", ctypes.c_void_p),
    ]


class FeedForwardProblem(ctypes.Structure):
    """``dgt_feed_forward_problem``."""

    _fields_ = [
        ("images", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("expand_weight", ctypes.c_void_p),
        ("expand_bias", ctypes.c_void_p),
        ("norm1", BatchNorm),
        ("depthwise_weight", ctypes.c_void_p),
        ("depthwise_bias", ctypes.c_void_p),
        ("norm2", BatchNorm),
        ("project_weight", ctypes.c_void_p),
        ("project_bias", ctypes.c_void_p),
        ("norm3", BatchNorm),
        ("prepared", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel_for", ctypes.c_void_p),
    ]


class TrainingNorm(ctypes.Structure):
    """``dgt_training_norm``."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("epsilon", ctypes.c_double),
        ("mean", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("variance", ctypes.c_void_p),
        ("grad_weight", ctypes.c_void_p),
        ("grad_bias", ctypes.c_void_p),
    ]


class TrainingProblem(ctypes.Structure):
    """``dgt_training_problem``."""

    _fields_ = [
        ("images", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("expand_weight", ctypes.c_void_p),
        ("expand_bias", ctypes.c_void_p),
        ("norm1", TrainingNorm),
        ("depthwise_weight", ctypes.c_void_p),
        ("depthwise_bias", ctypes.c_void_p),
        ("norm2", TrainingNorm),
        ("project_weight", ctypes.c_void_p),
        ("project_bias", ctypes.c_void_p),
        ("norm3", TrainingNorm),
        ("expanded", ctypes.c_void_p),
        ("convolved", ctypes.c_void_p),
        ("projected", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("grad_output", ctypes.c_void_p),
        ("grad_input", ctypes.c_void_p),
        ("grad_expand_weight", ctypes.c_void_p),
        ("grad_expand_bias", ctypes.c_void_p),
        ("grad_depthwise_weight", ctypes.c_void_p),
        ("grad_depthwise_bias", ctypes.c_void_p),
        ("grad_project_weight", ctypes.c_void_p),
        ("grad_project_bias", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel_for", ctypes.c_void_p),
    ]


def run(name: str, problem: Any) -> None:
    """Call a kernel on PyTorch's threads.

    Raises:
        MemoryError: where there is no room for what the kernel keeps.
    """
    problem.threads = torch.get_num_threads()
    problem.parallel_for = library.parallel_for()
    loaded: Any = library.load()
    if getattr(loaded, name)(ctypes.byref(problem)) == NO_MEMORY:
        raise MemoryError(f"out of memory for the workspace of {name}")


def new_prepared(name: str, problem: Any) -> Tensor:
    """Return memory for prepared weights, as large as a function of the library says; bytes."""
    loaded: Any = library.load()
    count = getattr(loaded, name)
    count.restype = ctypes.c_int64
    return torch.empty(count(ctypes.byref(problem)), dtype=torch.uint8)
