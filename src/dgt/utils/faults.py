"""What PyTorch says of a machine or of a model that does not fit, as sentences that say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dgt.utils.errors import UserError

FEWER = "use fewer worker processes (data.num_workers) or a smaller data.batch_size"
RESUME = "`--resume auto` resumes from the last checkpoint"
# Patterns of PyTorch's messages; the first that is found counts.
MACHINE = {
    r"shared memory|No space left on device|unable to write to file </torch": "shared memory "
    "(/dev/shm) is full, through which worker processes hand over images: give it more space, or "
    f"{FEWER}; {RESUME}",
    r"ancdata|Too many open files": f"too many files are open: raise `ulimit -n`, or {FEWER}; {RESUME}",
    r"DataLoader worker \(pid": "a worker process that loads images was ended by the system, as "
    f"when memory or shared memory (/dev/shm) runs out: {FEWER}; {RESUME}",
    r"DefaultCPUAllocator|out of memory": "memory ran out: use a smaller data.batch_size or "
    "data.image_size, or smaller images",
}
CHANNELS = re.compile(
    r"weight of size \[.*expected input.* to have (\d+) channels, but got (\d+) channels"
)
NOT_DETERMINISTIC = re.compile(r"(\w+) does not have a deterministic implementation")


def explain(error: BaseException) -> Exception | None:
    """The error to raise in place of one of PyTorch's.

    Returns:
        OSError for the machine's limits, UserError for a model and images that do not fit; None for
        any other error.
    """
    if not isinstance(error, RuntimeError | ValueError | OSError | MemoryError):
        return None
    message = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        message = "out of memory"
    if "Expected more than 1 value per channel" in message:
        return UserError(
            "BatchNorm needs more than one value of each channel in training, and gets one from a "
            "batch of one image whose map has one pixel: raise data.batch_size or data.image_size"
        )
    if operation := NOT_DETERMINISTIC.search(message):
        return UserError(
            f"trainer.deterministic must be false here: {operation[1]} of this model or its losses has no "
            "deterministic form on this device"
        )
    channels = CHANNELS.search(message)
    if channels:
        takes, got = channels.groups()
        return UserError(
            f"the model takes images of {takes} channel{'s' * (takes != '1')}, and they have {got}: "
            f"build it with in_chans {got}, or use another model"
        )
    if isinstance(error, OSError) and not re.search("Too many open files", message):
        return None
    for pattern, sentence in MACHINE.items():
        if re.search(pattern, message):
            return OSError(f"{sentence} ({message[:200]})")
    return None


@contextmanager
def explaining_faults() -> Iterator[None]:
    """Raise what `explain` finds in place of an error of the block."""
    try:
        yield
    except Exception as error:
        better = explain(error)
        if better is None:
            raise
        raise better from error
