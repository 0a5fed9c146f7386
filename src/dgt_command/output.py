"""Standard output and standard error that end no command: a disk that is full, a reader that has
closed, a stream that was never there.
"""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Output:
    """A stream like the one that it is made of, whose errors are kept in `failure` and end nothing.

    After the first error what is written is dropped.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write a text; returns its length."""
        if self.failure is None:
            try:
                self.stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        if self.failure is None:
            try:
                self.stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.failure = error
        # what is buffered goes there when Python ends, in place of an error then
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        if self is sys.stdout and not isinstance(error, BrokenPipeError):
            reason = error.strerror or error
            print(
                f"dgt: warning: standard output cannot be written, the command goes on: {reason}",
                file=sys.stderr,
            )


@contextmanager
def lasting_output() -> Iterator[Output]:
    """Put an `Output` in the place of each of the two standard streams; gives that of standard
    output. Names that a stream cannot show are escaped.
    """
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        # closed by whoever started this process: the next file that is opened would get its number
        stream: Any = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Output(stream))
    output: Any = sys.stdout
    try:
        yield output
    finally:
        output.flush()
        sys.stdout, sys.stderr = before
        if output.failure is not None:
            sys.stdout = None  # which Python would flush at its end


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print plain values as JSON, with null for what is no finite number."""
    from dgt.utils.atomic_write import json_text

    print(json_text(value, indent))


@contextmanager
def json_list() -> Iterator[Callable[[Any], None]]:
    """Gives a function that prints the next entry of a list as JSON; the list is closed however the
    block ends.
    """
    from dgt.utils.atomic_write import json_text

    count = 0

    def add(entry: Any) -> None:
        nonlocal count
        lines = textwrap.indent(json_text(entry, indent=2), "  ")
        print(f"{',' if count else '['}\n{lines}", end="", flush=True)
        count += 1

    try:
        yield add
    finally:
        print("\n]" if count else "[]")
