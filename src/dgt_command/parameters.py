"""Types and checks that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

WITH_KEYS = {"ignore_unknown_options": True}
"""Settings of a command that takes keys of a recipe among its words, `--section.key value`."""
AT_LEAST_0 = click.IntRange(min=0)
AT_LEAST_1 = click.IntRange(min=1)
FOLDER = click.Path(exists=True, file_okay=False)


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
            self.fail(f"must be four integers B,H,L,D, got {value!r}", param, ctx)
        return tuple(int(part) for part in parts)


def no_option(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Refuse an argument that is an option or a key: a command that takes keys lets them through.

    Raises:
        click.NoSuchOption: for an option that does not exist.
        Mistake: for a key of a recipe, which must come after the argument.
    """
    if value is None or not value.startswith("--") or Path(value).exists():
        return value
    key = value[2:].partition("=")[0]
    if "." in key:
        name = (parameter.name or "").upper()
        usage = f"{context.command_path} {name} --{key} ..."
        raise Mistake(f"{name} must come before its keys, got {value!r} first; write {usage}")
    raise click.NoSuchOption(value, ctx=context)
