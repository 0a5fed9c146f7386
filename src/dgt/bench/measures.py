"""What every benchmark shares: the machine, times taken in turns, processes of their own and peaks of memory."""

import datetime
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import timm
import torch

# An allocator under which freed memory goes back to the system at once, so that peaks add up.
QUIET_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}


def machine() -> dict[str, Any]:
    """Describe where and with what a benchmark ran: date, processor or GPU, threads, versions, command."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    on_gpu = torch.cuda.is_available()
    program = Path(sys.argv[0])
    return {
        "date": datetime.date.today().isoformat(),
        "processor": torch.cuda.get_device_name() if on_gpu else (names or [platform.processor()])[0],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "command": shlex.join([*(["python", str(program)] if program.suffix == ".py" else ["dgt"]), *sys.argv[1:]]),
    }


def medians(rounds: int, device: torch.device, **candidates: Callable[[], object]) -> dict[str, float]:
    """Let the candidates take turns and return the median time of each in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            taken = milliseconds(run, device)
            if turn:  # the first turn warms up
                times[name].append(taken)
    return {name: sorted(taken)[len(taken) // 2] for name, taken in times.items()}


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Time one call, to the end of what it starts on a GPU."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


@contextmanager
def own_process(environment: dict[str, str] | None = None) -> Iterator[ProcessPoolExecutor]:
    """A process for functions of modules to be submitted to; it keeps what they leave in their modules.

    Args:
        environment: variables that differ there.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as process, patch.dict(os.environ, environment or {}):
        process.submit(torch.set_num_threads, torch.get_num_threads()).result()
        yield process


def memory_peak(run: Callable[[], object]) -> float | None:
    """Return the MiB that a call adds to the memory of this process at the highest point; None where no system tells.

    Linux alone does: the high-water mark of the process is reset first.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
