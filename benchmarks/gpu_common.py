"""What the GPU benchmarks share: rows that are on disk as soon as they are measured, and times of the device alone.

Imports nothing but torch, Triton and `dgt.utils`, so that no missing package of training or serving can cost a result.
"""

import datetime
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench, do_bench_cudagraph

from dgt.utils.atomic_write import write_json


def machine() -> dict[str, Any]:
    """Date, device, versions and command."""
    on_gpu = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "capability": list(torch.cuda.get_device_capability()) if on_gpu else [],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": shlex.join(sys.argv),
    }


class Rows:
    """A JSON file of measured rows, whole after every row; an earlier file of that name is replaced."""

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.part = path, part
        self.document: dict[str, Any] = {"machine": machine(), "rows": []}

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row on disk, then print it."""
        self.document["rows"].append({"part": self.part, **row})
        write_json(self.path, self.document)
        print(*(f"{name}={value}" for name, value in row.items() if not isinstance(value, dict)), flush=True)


def times(name: str, step: Callable[[], object], graph: bool = True) -> dict[str, Any]:
    """Median milliseconds of a step: launched by the host, after the L2 cache was cleared, and replayed one after the
    other as a CUDA graph, without host time and with what is in the cache.

    A step that synchronises cannot be captured, and torch 2.11 captures nothing more after one that failed: `graph`
    is False for it.
    """
    row: dict[str, Any] = {f"{name}_ms": do_bench(step, warmup=25, rep=200, return_mode="median")}
    if graph:
        row |= attempt(
            f"{name}_graph", lambda: {f"{name}_graph_ms": do_bench_cudagraph(step, rep=50, return_mode="median")}
        )
    return row


def attempt(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a measurement gives, or its error, which costs no other measurement."""
    try:
        return measure()
    except Exception as error:
        return {f"{name}_error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def ratios(row: dict[str, Any], names: list[str]) -> dict[str, float]:
    """How many times as fast the kernels are as others, by either way of launching, where both were measured."""
    found = {}
    for name in names:
        for way in ("_ms", "_graph_ms"):
            if f"triton{way}" in row and f"{name}{way}" in row:
                found[f"times_as_fast_as_{name}{way.removesuffix('_ms')}"] = row[f"{name}{way}"] / row[f"triton{way}"]
    return found
