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
        self.signal: signal.Signals | None = None
        self.usual: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        """The signal's name; "another process" where the request came from there."""
        return "another process" if self.signal is None else self.signal.name

    @property
    def exit_status(self) -> int:
        """What the process ends with once all is saved."""
        return 130 if self.signal == signal.SIGINT else 0

    def __enter__(self) -> PreemptionHandler:
        if threading.current_thread() is threading.main_thread():
            self.usual = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.usual.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number:
            raise Interrupted(130)
        self.signal = signal.Signals(number)
        again = " (Ctrl-C again: at once)" if number == signal.SIGINT else ""
        LOGGER.warning(f"{self.signal.name}: saving after this step{again}")
