"""Progress of an acceleration: model runs done, and estimated time left."""

import time

from dgt.utils.errors import LOGGER


class Progress:
    """Logs every run of the model before it starts.

    Args:
        total: how many there will be at most.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.start = time.monotonic()

    def step(self, work: str) -> None:
        """Log the purpose of the next run."""
        left = ""
        if self.done:
            seconds = (time.monotonic() - self.start) * (self.total / self.done - 1)
            left = f"; at most about {max(seconds, 0):.0f} s left"
        self.done += 1
        LOGGER.info("run %d of %d: %s%s", self.done, self.total, work, left)
