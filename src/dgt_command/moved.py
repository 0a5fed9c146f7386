"""What earlier versions had as commands and is now a script in the checkout.

Said in a sentence for one version.
"""

from __future__ import annotations

import click

from dgt_command.parameters import Mistake

STUDIES = ("retrieval",)
"""Experiments that `dgt ablate` had beside the paper's tables, and that are modules of `studies/`
now.
"""


def moved(command: str, now: str) -> Mistake:
    """The error for a command that is a script now."""
    return Mistake(f"`dgt {command}` was moved: in a checkout of the project run `{now}`")


def refuse_moved_study(table: str | None) -> None:
    """Say where an experiment went that `dgt ablate` had."""
    if table in STUDIES:
        raise moved(f"ablate {table}", f"python -m studies.{table} --help")


@click.command(
    hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []}
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def bench(words: tuple[str, ...]) -> None:
    """Time the attention, or whole models: moved to `benchmarks/bench.py`."""
    raise moved(
        "bench", "python benchmarks/bench.py attention` or `python benchmarks/bench.py models"
    )


@click.command(
    hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []}
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def make_weights(words: tuple[str, ...]) -> None:
    """Pack a finished run: moved to `tools/weights.py`."""
    raise moved("weights make", "python -m tools.weights make RUN --out DIR")


@click.command(
    hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []}
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def publish_weights(words: tuple[str, ...]) -> None:
    """Publish a folder of weights: moved to `tools/weights.py`."""
    raise moved("weights publish", "python -m tools.weights publish FOLDER --repo USER/NAME")
