"""The command line of a study: its options, its output, and its error messages."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dgt.figures import save_figure
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
