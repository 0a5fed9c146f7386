"""What a study writes as it runs: its rows as JSON and Markdown, in a folder that one process locks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dgt.runs.environment import environment
from dgt.utils.atomic_write import atomic_write, exclusive_lock, write_json
from dgt.utils.errors import UserError


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
