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
    """Raise StudyError if `out` is no folder, holds something else, or a study with other settings."""
    if out.exists() and not out.is_dir():
        raise StudyError(f"--out must be a folder, {out} is a file")
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


def study_parser(
    name: str, about: str, data: str, epochs: int, seeds: int
) -> argparse.ArgumentParser:
    """The options that all of these studies have.

    Args:
        name: of the study's module.
        about: its description.
        data: what `--data` must be.
        epochs, seeds: the defaults.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m studies.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data", type=Path, required=True, help=data)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the study; resumed if it is there"
    )
    parser.add_argument(
        "--seeds", type=whole, default=seeds, help="from 0 on (default: %(default)s)"
    )
    parser.add_argument(
        "--epochs", type=whole, default=epochs, help="of each training (default: %(default)s)"
    )
    return parser


def parse_with_keys(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The parser's options, and the others, which change the recipe's data: `--data.KEY VALUE`."""
    options, keys = parser.parse_known_args(arguments)
    if wrong := [word for word in keys[::2] if not word.startswith("--data.")]:
        parser.error(
            f"unknown argument {wrong[0]!r}: besides these options only --data.KEY VALUE is accepted"
        )
    return options, tuple(keys)


def whole(text: str) -> int:
    """An integer of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
