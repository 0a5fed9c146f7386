"""Types and checks that several commands share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from dgt_command.recipe_files import did_you_mean, known_keys, override_keys, unknown_key

WITH_KEYS = {"ignore_unknown_options": True}
"""Settings of a command that takes keys of a recipe among its words, `--section.key value`."""
AT_LEAST_0 = click.IntRange(min=0)
AT_LEAST_1 = click.IntRange(min=1)


class Mistake(click.ClickException):
    """What is wrong with the input, in one sentence, found before anything is loaded."""

    exit_code = 2


class Shape(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of Click alone
    """Four whole numbers B,H,L,D."""

    name = "shape"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Turn the text into numbers."""
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"must be four whole numbers B,H,L,D, got {value!r}", param, ctx)
        return tuple(int(part) for part in parts)


def existing_model(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Refuse a checkpoint, or one of several, that is not there."""
    paths = value if isinstance(value, tuple) else (value,)
    for path in paths:
        if path is not None and not Path(path).exists():
            raise Mistake(f"there is no checkpoint, run folder or model folder {path!r}")
    return value


def existing_folder(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Refuse a folder that is not there."""
    if not Path(value).is_dir():
        raise Mistake(f"there is no folder {value!r}")
    return value


def check_words(words: Sequence[str], task: str | None = None) -> None:
    """Refuse the words of a command line if they set a key that no recipe has.

    Args:
        words: what the command did not take for itself.
        task: of the recipe; None where it is not known yet: then any task may have the key.
    """
    tasks: Iterable[str] = ("classify", "segment", "detect") if task is None else (task,)
    known: dict[str, Any] = {}
    for name in tasks:
        known |= known_keys(name) or {}
    open_sections = tuple(f"{key}." for key, default in known.items() if default == {})
    sections = {key.rpartition(".")[0] for key in known}
    for key in sorted(override_keys(words)):
        if known and not (key in known or key in sections or key.startswith(open_sections)):
            raise Mistake(unknown_key(key, known))


def refuse_name(what: str, name: str, known: Sequence[str]) -> Mistake:
    """The error for a name that is none of those known."""
    return Mistake(
        f"there is no {what} {name!r}: {did_you_mean(name, known)}known are {', '.join(known)}"
    )
