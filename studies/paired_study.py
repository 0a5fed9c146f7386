"""What studies of paired trainings share: their folder, its settings, and who works on what."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dgt.utils.atomic_write import exclusive_lock
from dgt.utils.errors import UserError

ANOTHER = "give another folder with --out"


class StudyError(UserError):
    """The command or its folders are wrong; the message is one sentence."""


def check_splits(data: Path, splits: Sequence[str], expected: str) -> None:
    """Raise StudyError unless all `splits` are folders inside `data`, which should be `expected`."""
    for split in splits:
        if not (data / split).is_dir():
            raise StudyError(f"--data must be {expected}; {data / split} is missing")


def check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Raise StudyError if a folder holds something else, or a study with other settings."""
    path = out / "settings.json"
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StudyError(f"{path} is damaged: {ANOTHER}") from error
        if found != settings:
            came = f"was started with {found}, now {settings} is asked for"
            raise StudyError(f"{out} {came}: {ANOTHER}")
    elif out.is_dir() and any(out.glob("[!.]*")):
        raise StudyError(f"{out} holds files that are not this study's: {ANOTHER}")


@contextmanager
def alone(folder: Path, what: str) -> Iterator[bool]:
    """Context in which no other process works in a folder; False if one does already.

    Args:
        folder: is locked until the end of the context.
        what: a name for what is done there, which is printed.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive_lock(folder))
        except FileExistsError:
            print(f"{what}: another process is at work on it", flush=True)
            yield False
            return
        print(what, flush=True)
        yield True


def whole(text: str) -> int:
    """An integer of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
