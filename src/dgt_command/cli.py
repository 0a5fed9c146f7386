"""All commands under one name, and what becomes of their errors."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

import click

from dgt_command import looking, measuring, training, using
from dgt_command.output import lasting_output

COMMANDS = (
    training.demo,
    training.train,
    training.status,
    training.ablate,
    using.evaluate,
    using.predict,
    using.accelerate,
    using.weights,
    using.export,
    looking.visualize,
    looking.diagnose,
    looking.explore,
    measuring.info,
    measuring.profile,
)
TO_FOLDERS = ("demo", "train", "ablate")
"""Commands whose results are files: nothing is lost with what they print."""


class Commands(click.Group):
    """The commands, listed in the order of `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which they were added."""
        return list(self.commands)


@click.group(
    cls=Commands,
    commands=COMMANDS,
    epilog="Run `dgt COMMAND --help` for details. Start with `dgt demo`.",
    no_args_is_help=False,
    context_settings={"max_content_width": 120},
)
def dgt() -> None:
    """Dynamic Group Transformer: train, use and look into vision transformers with dynamic groups."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors of the user's are printed in one sentence, and any other is a bug and
    raised.

    Args:
        arguments: the words after `dgt`; None for those of this process.

    Returns:
        The exit status; 1 where the results could not be printed, though the command did its work.
    """
    words = [_with_home(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    with lasting_output() as output:
        status = _run(words)
        output.flush()
        lost = output.failure is not None and words[:1] and words[0] not in TO_FOLDERS
    return status or int(bool(lost))


def _with_home(word: str) -> str:
    """An option `--out=~/runs` with the home folder, which shells put in only where a word begins."""
    name, equals, value = word.partition("=")
    if not re.fullmatch(r"--[a-z-]+", name) or not value.startswith("~/"):
        return word
    return name + equals + os.path.expanduser(value)


def _run(words: list[str]) -> int:
    """The exit status of one command. Raises as `run`."""
    try:
        with dgt.make_context("dgt", words) as context:
            return int(dgt.invoke(context) or 0)
    except click.exceptions.Exit as finished:  # after --help
        return finished.exit_code
    except click.ClickException as error:
        _print_usage_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("dgt: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of a process of the command's: its output has no errors
        raise
    except Exception as error:
        status, sentence = _explain(error, f"`dgt {next(iter(words), '')}`")
        if sentence is None:
            raise
        print(f"dgt: error: {sentence}", file=sys.stderr)
        return status


def _print_usage_error(error: click.ClickException) -> None:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        print(error.ctx.get_usage(), file=sys.stderr)
    print(f"dgt: error: {error.format_message()}", file=sys.stderr)


def _explain(error: Exception, what: str) -> tuple[int, str | None]:
    """Return the exit status of an error, and its sentence if it is the user's or the machine's, not a bug."""
    if isinstance(error, OSError):
        return 2, str(error)
    # the command that failed has loaded them
    from dgt.utils.errors import Disagreement, LostProcess, UserError
    from dgt.utils.extras import explain_missing
    from dgt.utils.faults import explain

    error = explain(error) or error
    if isinstance(error, UserError | OSError):
        return 2, str(error)
    if isinstance(error, LostProcess | Disagreement | FloatingPointError):
        return 1, str(error)
    if isinstance(error, ModuleNotFoundError):
        return 2, explain_missing(error, what)
    return 1, None
