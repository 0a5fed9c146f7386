"""Shared by all benchmarks: the machine, interleaved timing, separate processes, peaks of memory
and tables.
"""

import datetime
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import timm
import torch
from torch.utils.benchmark import timer  # waits for a GPU, if there is one

from dgt.utils.errors import LostProcess, UserError
from dgt.utils.records import command_line, markdown_table, processor

# An allocator under which freed memory goes back to the system at once, so that peaks add up.
QUIET_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}
Name = TypeVar("Name")


def machine() -> dict[str, Any]:
    """Describe where and with what a benchmark ran.

    Returns:
        Date, processor or GPU, threads, versions and command, by name; what the environment says of
        glibc's memory, if it says anything.

    Example:
        >>> machine()["threads"]
    """
    allocator = {name: text for name, text in os.environ.items() if name.startswith("MALLOC_")}
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "command": command_line(),
        **({"allocator": allocator} if allocator else {}),
    }


def check_usable(device: str) -> None:
    """Raise UserError for what is no device, or none that PyTorch finds here."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device must be available to PyTorch on this machine, got {device!r}: {error}"
        ) from error


def milliseconds(run: Callable[[], object]) -> float:
    """Time one call, including the work that it starts on a GPU."""
    start = timer()
    run()
    return 1e3 * (timer() - start)


def medians(rounds: int, candidates: Mapping[Name, Callable[[], float]]) -> dict[Name, float]:
    """Let candidates take turns, after a turn that warms up.

    Args:
        rounds: number of turns.
        candidates: functions that return what is measured, by name.

    Returns:
        The median of what each returned.
    """
    turns = [{name: run() for name, run in candidates.items()} for _ in range(rounds + 1)][1:]
    return {name: statistics.median(turn[name] for turn in turns) for name in candidates}


@contextmanager
def own_process(
    name: str, environment: dict[str, str] | None = None
) -> Iterator[Callable[..., Any]]:
    """Start a process for one candidate.

    Args:
        name: of the candidate, for messages.
        environment: variables that differ in it.

    Yields:
        A function that calls a function of a module in the process, with arguments, and returns its
        result; it raises LostProcess, with the reason, where the call fails.
    """

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return process.submit(function, *arguments).result()
        except Exception as error:
            # of any kind: from the model or the end of its process
            raise LostProcess(
                f"the process of {name} ended early: {type(error).__name__}: {error}"
            ) from error

    with (
        ProcessPoolExecutor(1, get_context("spawn")) as process,
        patch.dict(os.environ, environment or {}),
    ):
        ask(torch.set_num_threads, torch.get_num_threads())
        yield ask


def memory_peak(run: Callable[[], object]) -> float | None:
    """Return the MiB that a call adds to this process at its highest point; None where the system is not Linux."""

    def status(field: str) -> int:
        return int(re.findall(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())[0])

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    except OSError:
        return None
    before = status("VmRSS")
    run()
    return (status("VmHWM") - before) / 1024


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """Lay rows out as a Markdown table of columns, title and format each, without memory where it
    was not measured.
    """
    if any(row.get("peak_mib", 0) is None for row in rows):
        columns = {title: text for title, text in columns.items() if "peak_mib" not in text}
    return markdown_table(
        list(columns), [[text.format(**row) for text in columns.values()] for row in rows]
    )
