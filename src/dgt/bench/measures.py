"""What every benchmark shares: the machine, times taken in turns, and peaks of memory."""

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import timm
import torch


def machine() -> dict[str, Any]:
    """Describe where and with what a benchmark ran: date, processor or GPU, threads, versions."""
    from dgt.training.runs import command_line  # it imports Lightning, which the processes of the models do without

    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "command": command_line(),
    }


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


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


def quiet_allocator() -> dict[str, str]:
    """An environment in which freed memory goes back to the system at once, so that peaks add up."""
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}


@dataclass
class Peak:
    """What :func:`memory_peak` yields."""

    mib: float = 0.0
    """MiB added at the highest point."""


@contextmanager
def memory_peak() -> Iterator[Peak]:
    """Measure what this process (Linux) adds to its memory at the highest point inside the context.

    Raises:
        OSError: where the system does not tell.
    """
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")  # the high-water mark starts from here
    before, peak = _status("VmRSS"), Peak()
    yield peak
    peak.mib = (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))
