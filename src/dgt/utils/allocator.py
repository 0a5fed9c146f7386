"""The C library's memory, in processes that are ours."""

import ctypes
import os
import sys

# Of glibc's malloc.h
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
MOST = 1 << 30
MOST_OF_OLD = 1 << 25  # of a glibc that refuses more
NEVER = -1


def keep_freed_memory() -> None:
    """Have this process keep the memory that it frees, for what it needs next.

    glibc returns freed memory to the system when much of it lies together, and the largest pieces at once. A
    training step frees what the next one needs, and would be given it anew, page by page. Nothing happens where
    the C library is another, or where `MALLOC_...` or `GLIBC_TUNABLES` in the environment say what it does.
    """
    said = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if said or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if mallopt(MMAP_THRESHOLD, MOST) or mallopt(MMAP_THRESHOLD, MOST_OF_OLD):
        mallopt(TRIM_THRESHOLD, NEVER)
