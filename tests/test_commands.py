"""Every command printed in the pages is accepted by its program as written: names, options and values."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from dgt.runs.recipe import load_recipe
from dgt_command.cli import dgt as command_line

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(ROOT / "docs" / "log.md")  # its commands run at the commit that it names
BLOCK = re.compile(
    r"^```(?:sh|bash)\n(.*?)^```|(?<=\n\n)((?:    [^\n]*\n|\n(?=    ))+)", re.DOTALL | re.MULTILINE
)
PROGRAM = re.compile(r"dgt [a-z]+\b|python (?:benchmarks|studies)/\S+\.py|python -m studies\.[a-z]")
RECIPE_OF = {"ablate": "cifar10_ablation", "evaluate": "imagenette_nano"}
"""A recipe that has the keys passed to these commands."""


class Command(NamedTuple):
    """One command in a page.

    Attributes:
        page: name of the page.
        words: command line arguments, starting with the program.
        whole: whether it is in a code block; in a sentence it may be only part of a command.
    """

    page: str
    words: tuple[str, ...]
    whole: bool


def commands_of(page: Path) -> Iterator[Command]:
    """The commands in a page that run `dgt` or a Python program of this project."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        for line in (block[1] or block[2]).replace("\\\n", " ").splitlines():
            yield from commands_in(page.name, line, whole=True)
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", BLOCK.sub("", text)):
        yield from commands_in(page.name, " ".join(span.split()), whole=False)


def commands_in(page: str, line: str, whole: bool) -> Iterator[Command]:
    """The commands in one line, without comments, settings of variables, redirections, and brackets of options."""
    line = re.split(r"\s+#\s|\s{4,}\(", line)[0].replace("--size H W", "--size 224 224")
    if "[-" in line:
        line = line.replace("[-", "-").replace("]", "")
    for part in re.split(r"&&|[;|&]|\bdo\b", line):
        part = re.sub(r"^\s*(?:[A-Z_]+=\S*\s+|taskset -c \S+\s+)*", "", part)
        part = re.sub(r"\$\w+", "1", re.sub(r"\s> \S+", "", part))
        if PROGRAM.match(part):
            yield Command(page, tuple(shlex.split(part)), whole)


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))


def each(program: str) -> Any:
    """The same test for each command of `dgt`, or of `python`."""
    chosen = [command for command in COMMANDS if command.words[0] == program]
    names = [f"{command.page}: {' '.join(command.words)}" for command in chosen]
    return pytest.mark.parametrize("command", chosen, ids=names)


class Parsed(BaseException):
    """A program has accepted its command line, which is all that is tested."""


@pytest.fixture
def stop_when_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make programs stop after parsing their options."""
    parse_known = argparse.ArgumentParser.parse_known_args
    parsers = 0

    def known(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal parsers
        parsers += 1  # those of subcommands are called inside this one
        found, rest = parse_known(self, *arguments, **named)
        parsers -= 1
        if parsers or not all(re.match(r"--\w+\.\w+", word) for word in rest[::2]):
            return found, rest
        load_recipe("imagenette_nano", rest)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", known)


def test_the_pages_have_commands() -> None:
    words = [command.words for command in COMMANDS if command.whole]
    assert ("dgt", "train", "scenes_detect") in words
    assert any(command[0] == "python" for command in words)
    assert len(words) > 30


@each("python")
def test_a_program_takes_its_command(
    command: Command,
    stop_when_parsed: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, program, *words = command.words
    monkeypatch.setattr(sys, "path", [str(ROOT), str((ROOT / program).parent), *sys.path])
    monkeypatch.setattr(sys, "argv", words if program == "-m" else [program, *words])
    try:
        if program == "-m":
            runpy.run_module(words[0], run_name="__main__", alter_sys=False)
        else:
            runpy.run_path(str(ROOT / program), run_name="__main__")
    except Parsed:
        return
    except SystemExit:
        told = capsys.readouterr().err
        if command.whole or "the following arguments are required" not in told:
            pytest.fail(told)
        return
    pytest.fail("it ran without reading its words")


@each("dgt")
def test_dgt_takes_its_command(command: Command) -> None:
    """Its options, and recipe keys with their values; the files it would open do not exist."""
    name, rest = command.words[1], list(command.words[2:])
    context, found = click.Context(command_line), command_line.commands.get(name)
    while isinstance(found, click.Group) and rest:
        context, name = click.Context(found, parent=context), rest.pop(0)
        found = found.commands.get(name)
    assert found is not None
    assert not found.hidden
    try:
        given = found.make_context(name, rest, parent=context)
    except click.ClickException as error:
        if command.whole:
            pytest.fail(error.message)
        return
    keys = given.params.get("keys", ())
    recipe = given.params.get("recipe") or ""
    if keys:
        recipe = recipe if recipe.islower() else "imagenette_nano"
        load_recipe(RECIPE_OF.get(name, recipe), keys)
    elif recipe.islower():
        load_recipe(recipe)
