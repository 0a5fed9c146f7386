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


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees, for what it needs next: any model on a CPU, in training
    and in prediction.

    glibc, the C library of most Linux systems, returns freed memory to the system when much of it lies
    together, and the largest pieces at once. A step frees what the next one needs, and would be given it anew,
    page by page. Results stay as they are; the process stays as large as it once was. Only the memory of the
    main thread is kept, in which PyTorch allocates its tensors unless models are called in other threads.

    Returns:
        Whether that is so from now on. False, and nothing happens, where the C library is another, or where
        `MALLOC_...` or `GLIBC_TUNABLES` in the environment say what it does.

    Example:
        >>> dgt.keep_freed_memory()
        True
    """
    said = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if said or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    is_taken = mallopt(MMAP_THRESHOLD, MOST) or mallopt(MMAP_THRESHOLD, MOST_OF_OLD)
    return bool(is_taken and mallopt(TRIM_THRESHOLD, NEVER))
