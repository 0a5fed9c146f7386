"""A large step of the attention on CPUs as one parallel region: parts that a few Python threads take in turn.

PyTorch makes such a region of every operator, a dozen a step, and each waits for its slowest thread: beside a busy
process for a slice of the scheduler, milliseconds. Here threads wait for each other once a step, one that is held up
leaves its parts to the others, and what knows but one thread, such as numpy's sorts, runs side by side.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

LEAST, MOST = 1 << 17, 1 << 18  # elements of the largest temporary tensor of a part: worth a turn, and fits the caches
MOST_SCORES = 1 << 19  # of scores of centroids, and of whole heads: read once or twice, in steps slow to begin
# Tokens from which threads share a step: those of OpenMP keep a core for milliseconds after each operator, in case of a
# next one, unless they wait passively, and a smaller call is over by then: PyTorch's own regions are faster there.
SHARED = 0 if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" else 1 << 14


def part_size(total: int, tokens: int, most: int | None = None) -> int:
    """Elements of a part's largest temporary tensor, of ``total`` in all: half of what each thread has to do."""
    threads = torch.get_num_threads() if tokens >= SHARED else 1
    return min(most or MOST, max(LEAST, total // (2 * threads) if threads > 1 else total))


def cut(count: int, most: int) -> list[slice]:
    """Cut ``count`` items into even runs of at most ``most``, and at least one."""
    step = -(-count // max(1, -(-count // max(1, most))))
    return [slice(start, start + step) for start in range(0, count, step)]


def head_parts(batch: int, heads: int, rows: int, width: int) -> list[tuple[slice, slice, slice]]:
    """Cut (B, H, rows) whose temporary tensors have so many elements a row: some images, or heads, or rows of one."""
    size = part_size(batch * heads * rows * width, batch * heads * max(rows, width), MOST_SCORES) // width
    images, some = cut(batch, size // (heads * rows)), cut(heads, size // rows)
    return [(image, head, row) for image in images for head in some for row in cut(rows, size)]


def run_parts(work: Callable[[Any], None], parts: Sequence[Any], device: torch.device, tokens: int) -> None:
    """Do ``work`` on every part, in any order, on as many threads as PyTorch may use; no two may write to one place.

    A single part, few tokens (0 for gradients), and all on other devices run here, with PyTorch's own threads.
    """
    count = torch.get_num_threads() if device.type == "cpu" and tokens >= max(1, SHARED) else 1
    if min(count, len(parts)) == 1:
        for part in parts:
            work(part)
        return
    rest, inference = iter(parts), torch.is_inference_mode_enabled()

    def take() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            for part in rest:
                work(part)

    tasks = [_threads(count).submit(take) for _ in range(min(count, len(parts)))]
    for task in wait(tasks).done:
        task.result()


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    """So many threads, in each of which PyTorch stays on one core."""
    threads, all_ready = ThreadPoolExecutor(count, "dgt"), threading.Barrier(count)

    def settle() -> None:
        torch.get_num_threads()  # or a thread's first operator would take back what follows
        torch.set_num_threads(1)  # of this thread; and what new threads begin with, which is put right below
        all_ready.wait()

    wait([threads.submit(settle) for _ in range(count)])
    torch.set_num_threads(count)
    return threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not live on in a forked process
