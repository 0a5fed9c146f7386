"""Every command printed in the docs is accepted by its program as written: names, options, and values."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from dgt.runs.recipe import load_recipe
from dgt_command.cli import dgt as command_line

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^```(?:sh|bash)\n(.*?)^```|(?<=\n\n)((?:    [^\n]*\n|\n(?=    ))+)", re.DOTALL | re.MULTILINE
)
KEYS_OF = {
    "ablate": "cifar10_ablation",
    "evaluate": "imagenette_nano",
}  # a recipe with the keys passed to these


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
        lines = (block[1] or block[2]).replace("\\\n", " ").splitlines()
        for line in lines:
            yield from _programs(page.name, line, whole=True)
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", BLOCK.sub("", text)):
        yield from _programs(page.name, " ".join(span.split()), whole=False)


def _programs(page: str, line: str, whole: bool) -> Iterator[Command]:
    line = re.split(r"\s+#\s|\s{4,}\(", line)[0].replace("--size H W", "--size 224 224")
    if "[-" in line:
        line = line.replace("[-", "-").replace("]", "")
    for part in re.split(r"&&|[;|&]|\bdo\b", line):
        try:
            words = shlex.split(part)
        except ValueError:  # an apostrophe: a sentence, not a command
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*|taskset|-c|\$core", words[0]):
            words.pop(0)
        ours = words[:1] == ["dgt"] and len(words) > 1 and words[1].isalpha() and words[1].islower()
        script = words[:1] == ["python"] and re.match(
            r"(?:benchmarks|studies)/\S+\.py$", "".join(words[1:2])
        )
        module = words[:2] == ["python", "-m"] and re.match(
            r"studies\.[a-z]\w*$", "".join(words[2:3])
        )
        if ours or script or module:
            yield Command(page, tuple(words), whole)


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))


def named(chosen: Sequence[Command]) -> Any:
    """The same test for each of these commands."""
    return pytest.mark.parametrize(
        "command", chosen, ids=[f"{one.page}: {' '.join(one.words)}" for one in chosen]
    )


class Parsed(BaseException):
    """A program has accepted its command line, which is all that is tested."""


@pytest.fixture
def stop_when_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make programs stop after parsing their options: in argparse or, for a study, in `read_words`."""
    import studies.report

    parse, parse_known, read_words = (
        argparse.ArgumentParser.parse_args,
        argparse.ArgumentParser.parse_known_args,
        studies.report.read_words,
    )
    depth = 0

    def known(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal depth
        depth += 1  # parsers of subcommands are called inside this one
        found, rest = parse_known(self, *arguments, **named)
        depth -= 1
        if depth == 0 and all(re.match(r"--\w+\.\w+", word) for word in rest[::2]):
            load_recipe("imagenette_nano", rest)
            raise Parsed
        return found, rest

    def whole(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal depth
        depth += 1
        parse(self, *arguments, **named)
        raise Parsed

    def read(words: Sequence[str], **options: Any) -> Any:
        read_words(words, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", whole)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", known)
    monkeypatch.setattr(studies.report, "read_words", read)


def test_the_pages_have_commands() -> None:
    words = [command.words for command in COMMANDS if command.whole]
    assert ("dgt", "train", "scenes_detect") in words
    assert any(command[:3] == ("python", "-m", "studies.content_selection") for command in words)
    assert len(words) > 50


@named([command for command in COMMANDS if command.words[0] == "python"])
def test_a_program_takes_its_command(
    command: Command,
    stop_when_parsed: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, program, *words = command.words
    monkeypatch.setattr(sys, "path", [str(ROOT), str((ROOT / program).parent), *sys.path])
    try:
        if program == "-m":
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_module(words[0], run_name="__main__", alter_sys=False)
        else:
            monkeypatch.setattr(sys, "argv", [program, *words])
            runpy.run_path(str(ROOT / program), run_name="__main__")
    except Parsed:
        return
    except SystemExit:
        told = capsys.readouterr().err
        if not command.whole and "the following arguments are required" in told:
            return
        pytest.fail(told)
    pytest.fail("it ran without reading its words")


@named([command for command in COMMANDS if command.words[0] == "dgt"])
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
    except click.MissingParameter:
        assert not command.whole
        return
    except click.ClickException as error:  # the last check: whether named files exist
        if command.whole and "there is no" not in error.message:
            pytest.fail(error.message)
        return
    keys = given.params.get("keys", ())
    recipe = given.params.get("recipe") or ""
    if keys:
        load_recipe(KEYS_OF.get(name) or (recipe if recipe.islower() else "imagenette_nano"), keys)
    elif recipe.islower():
        load_recipe(recipe)
