"""Being asked to stop: SIGTERM, SIGUSR1 or Ctrl-C as a wish that the training heeds between two steps."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

WISHES = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)  # Windows has no SIGUSR1


class Preempted(SystemExit):
    """The training was asked to stop, and its state is saved; ends the process if nobody catches it.

    The exit status is 0 (130 after Ctrl-C), or 1 where the state could not be written.
    """


class Interrupted(Preempted):
    """A second Ctrl-C: the training ended at once, where its state could not be saved."""


class StopWish:
    """Remembers that a signal asked this process to stop. A second Ctrl-C raises `Interrupted` at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        """The signal's name; "another process" where the wish came from there."""
        return "another process" if self.signal is None else self.signal.name

    @property
    def exit_status(self) -> int:
        """What the process ends with once all is saved."""
        return 130 if self.signal == signal.SIGINT else 0

    def listen(self) -> None:
        """Take the signals; whoever had them before gets them back from Lightning at the training's end."""
        if threading.current_thread() is threading.main_thread():
            for wish in WISHES:
                signal.signal(wish, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number:
            raise Interrupted(130)  # a KeyboardInterrupt Lightning would end with status 1, without a word
        self.signal = signal.Signals(number)
        again = " (Ctrl-C again: at once)" if number == signal.SIGINT else ""
        print(f"dgt: {self.signal.name}: saving after this step{again}", file=sys.stderr, flush=True)
