"""The command line of a study, and what it writes as it runs: its rows as JSON and Markdown, in a
folder that one process locks.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dgt.figures import save_figure
from dgt.runs.environment import environment
from dgt.utils.atomic_write import atomic_write, exclusive_lock, write_json
from dgt.utils.errors import UserError

Measure = Callable[[Sequence[str], int, str | None], Path]
"""Options, number of seeds, and output folder -> the folder with `NAME.json` and `NAME.md`."""


def run_study(
    name: str,
    about: str,
    measure: Measure,
    draw: Callable[[Any], Any] | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a study from the command line: measure what is missing, draw it, and print its table.

    Args:
        name: name of the study and of the files that it writes.
        about: its description, for `--help`.
        measure: runs the measurements and returns the folder.
        draw: draws a figure from the content of `NAME.json`, or returns None while there is nothing
            to draw; None for no figure.
        arguments: command line arguments; None for those of this process.

    Returns:
        The exit status, which is 2 for bad input.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m studies.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="how often random choices are drawn (default: 3)"
    )
    parser.add_argument("--out", help=f"folder (default: runs/ablate-{name}); resumes where it was")
    options, words = parser.parse_known_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        path = measure(words, options.seeds, options.out) / f"{name}.json"
        written = path
        figure = None if draw is None else draw(json.loads(path.read_text(encoding="utf-8")))
        if figure is not None:
            written = path.with_suffix(".png")
            save_figure(figure, written, dpi=130)
    except (UserError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    print(path.with_suffix(".md").read_text(encoding="utf-8") + f"\n{written}")
    return 0


def write_results(
    path: Path,
    settings: dict[str, Any],
    find: Callable[[Any], Iterator[None]],
    text: Callable[[Any], str],
) -> Path:
    """Write an experiment's results to `path` as JSON, and its ``text`` as Markdown next to it.

    ``find`` adds what is missing to the content that an earlier process left, and yields whenever
    it should be written. Returns the folder. Raises UserError for a file with other settings or
    other content, and FileExistsError like :func:`alone`.
    """
    with exclusive_lock(path.parent):
        try:
            content = (
                json.loads(path.read_text(encoding="utf-8"))
                if path.is_file()
                else {"settings": settings}
            )
            theirs = content["settings"]
        except (ValueError, KeyError, TypeError) as error:
            wrong = (
                f"{path} does not hold results of this experiment: move it, or give another --out"
            )
            raise UserError(wrong) from error
        if theirs != settings:
            raise UserError(
                f"{path} has other settings, {theirs}, than {settings}: give another folder with --out"
            )
        for _ in find(content):
            write_json(path, {**content, **environment()})
        atomic_write(path.with_suffix(".md"), text(content))
    return path.parent


def read_words(words: Sequence[str], **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Parse command line options, and separate those that set recipe keys, `--data.KEY VALUE`.

    ``options`` are the defaults: a string, an integer, or a tuple of them. Raises UserError for any
        other option.
    """
    parts = [
        part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    keys: list[str] = []
    for word, value in zip_longest(parts[::2], parts[1::2], fillvalue=""):
        name, known = word.removeprefix("--"), ", ".join(f"--{name}" for name in options)
        if name.startswith("data."):
            keys += [word, value]
            continue
        try:
            kind = type(options[name])
            options[name] = tuple(map(int, value.split(","))) if kind is tuple else kind(value)
        except (KeyError, ValueError) as error:
            wrong = f"{word} {value}".rstrip()
            raise UserError(
                f"expected {known} or --data.KEY, each with its value, got {wrong}"
            ) from error
    return options, keys
