"""Being asked to stop: SIGTERM, SIGUSR1 or Ctrl-C as a request that the loop grants between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from dgt.utils.errors import LOGGER

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))


class Preempted(SystemExit):
    """The training was asked to stop, and its state is saved; ends the process if nobody catches it.

    The exit status is 0 (130 after Ctrl-C), or 1 where the state could not be written.
    """


class Interrupted(Preempted):
    """A second Ctrl-C: the training ended at once, where its state could not be saved."""


class PreemptionHandler:
    """Inside its `with` block, remembers that a signal asked this process to stop; truthy from then on.

    A second Ctrl-C raises `Interrupted` at once. Signals reach the main thread alone; in another nothing is changed.
    """

    def __init__(self) -> None:
        self.name, self.exit_status = "", 0
        self.usual: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.name != ""

    def __enter__(self) -> PreemptionHandler:
        if threading.current_thread() is threading.main_thread():
            self.usual = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.usual.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.exit_status and number == signal.SIGINT:
            raise Interrupted(130)
        self.name, self.exit_status = signal.Signals(number).name, 130 if number == signal.SIGINT else 0
        LOGGER.warning(f"{self.name}: saving after this step" + " (Ctrl-C again: at once)" * bool(self.exit_status))
