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
from torch import Tensor
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
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": shlex.join(sys.argv),
    }


class Rows:
    """A JSON file of measured rows, whole after every row; rows of other parts that it holds already stay."""

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.part = path, part
        self.document: dict[str, Any] = {"machine": machine(), "rows": []}

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row on disk, then print it."""
        self.document["rows"].append({"part": self.part, **row})
        write_json(self.path, self.document)
        print(*(f"{name}={value}" for name, value in row.items() if not isinstance(value, dict)), flush=True)


def times(name: str, step: Callable[[], object], leaves: list[Tensor] | None = None, rep: int = 200) -> dict[str, Any]:
    """Median milliseconds of a step, launched by the host and replayed as a CUDA graph, whose host time is nothing."""
    row: dict[str, Any] = {f"{name}_ms": do_bench(step, warmup=25, rep=rep, grad_to_none=leaves, return_mode="median")}
    try:
        row[f"{name}_graph_ms"] = do_bench_cudagraph(step, rep=rep // 4, grad_to_none=leaves, return_mode="median")
    except RuntimeError as error:  # what cannot be captured is worth a word, not the other numbers
        row[f"{name}_graph_error"] = str(error).splitlines()[0]
        torch.cuda.synchronize()
    return row
