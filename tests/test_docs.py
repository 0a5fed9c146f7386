"""The documentation names only what exists: modules, symbols, tests, files, links and commands; its lines are short."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from dgt_command.cli import dgt as command_line
from dgt_command.training import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "dgt"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
NAMED = [
    page for page in PAGES if page.name != "CHANGELOG.md"
]  # a changelog also names what was removed
PACKAGES = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
CODE = [
    path for folder in (PACKAGE, ROOT / "studies", ROOT / "tools") for path in folder.rglob("*.py")
]
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in CODE)
TESTS = {
    node.name
    for path in (ROOT / "tests").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.FunctionDef)
}


def pages(chosen: list[Path]) -> pytest.MarkDecorator:
    """The same test for each of these pages."""
    return pytest.mark.parametrize(
        "page", chosen, ids=[str(page.relative_to(ROOT)) for page in chosen]
    )


def code_spans(page: Path) -> Iterator[str]:
    """The text between single backticks, outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    yield from (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))


def exists(dotted: str) -> bool:
    """Whether `dgt.x.y`, or `x.y` in our packages, can be imported or is an attribute of an importable module."""
    parts = dotted.split(".") if dotted.startswith("dgt.") else ["dgt", *dotted.split(".")]
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            if not hasattr(found, name) and name not in getattr(found, "__dataclass_fields__", {}):
                return False
            found = getattr(found, name, None)
        return True
    return False


@pages(NAMED)
def test_every_dotted_name_of_ours_exists(page: Path) -> None:
    spans = {re.split(r"[(\[ ]", span)[0] for span in code_spans(page)}
    ours = {
        span
        for span in spans
        if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", span)
        and span.split(".")[0] in {"dgt", *PACKAGES} - set(SECTIONS)
        and span.split(".")[-1] not in ("py", "md")
    }
    assert [span for span in sorted(ours) if not exists(span)] == []


@pages(NAMED)
def test_every_file_and_test_named_exists(page: Path) -> None:
    missing = []
    for span in code_spans(page):
        if re.fullmatch(r"test_\w+\.py", span):
            found = any((ROOT / "tests").rglob(span))
        elif re.fullmatch(r"test_\w+", span):
            found = span in TESTS
        elif re.fullmatch(r"[\w./*-]+(\.py|\.json|\.sh|/)", span) and "/" in span:
            known = (
                "src",
                "tests",
                "docs",
                "benchmarks",
                "studies",
                "tools",
                "examples",
                *PACKAGES,
            )
            found = span.split("/")[0] not in known or any(
                any(root.glob(span)) for root in (ROOT, PACKAGE)
            )
        else:
            continue
        missing += [] if found else [span]
    assert missing == []


def test_the_page_on_the_paper_names_what_the_code_still_has() -> None:
    """Every identifier in docs/paper.md occurs in the source, as a keyword, setting, class, or model."""
    words = {
        word
        for span in code_spans(ROOT / "docs" / "paper.md")
        for word in re.findall(r"[A-Za-z]\w{3,}", span)
    }
    known = SOURCES + "\n".join(path.name for path in ROOT.rglob("*") if ".git" not in path.parts)
    known += "".join(TESTS) + "Norm torch optim layer step CIFAR10"
    assert [word for word in sorted(words) if word not in known] == []


@pages(PAGES)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8")):
        path, anchor = page if not target[0] else page.parent / target[0], target[1]
        if target[0].startswith(("http:", "https:")):
            continue
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append("#".join(target))
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages(NAMED)
def test_every_command_and_flag_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [span for span in code_spans(page) if span.startswith("dgt ")]
    lines += [line.strip() for line in text.splitlines() if re.match(r" {4}dgt \w", line)]
    wrong = []
    for line in lines:
        words = re.split(r"\s{2,}|[#;|&]", line)[0].split()[1:]
        if not words or not re.fullmatch("[a-z]+", words[0]):
            continue
        command: Any = command_line.commands.get(words[0])
        if isinstance(command, click.Group) and len(words) > 1:
            command = command.commands.get(words[1])
        if command is None or command.hidden:
            wrong.append(line)
            continue
        known = {flag for option in command.params for flag in option.opts}
        takes_keys = command.context_settings.get("ignore_unknown_options", False)
        flags = {
            word.strip("[],").partition("=")[0]
            for word in words
            if word.strip("[").startswith("--")
        }
        flags -= {flag for flag in flags if takes_keys and flag[2:].split(".")[0] in SECTIONS}
        wrong += [] if flags <= {*known, "--help"} else [line]
    assert wrong == []


@pages([page for page in PAGES if page.name != "kernels.md"])
def test_lines_are_at_most_120_columns(page: Path) -> None:
    """Table rows and images cannot be wrapped; everything else can."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    long = [
        number
        for number, line in lines
        if len(line) > 120 and not line.startswith(("|", "![", "<img"))
    ]
    assert long == []


def test_the_ten_lines_of_the_readme_run() -> None:
    """As written, but with small images and few tokens."""
    blocks = re.findall(
        r"^```python\n(.*?)^```",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        flags=re.S | re.M,
    )
    (lines,) = blocks
    assert len(lines.split("\n\n")) == 3
    seen: dict[str, Any] = {}
    exec(
        lines.replace("4, 3, 512, 512", "2, 3, 64, 64")
        .replace("16384", "256")
        .replace("print(", "report = ("),
        seen,
    )
    assert seen["report"].requested_error == 0.01
    assert seen["out"].output.shape == seen["query"].shape
    assert [tuple(part.shape[2:]) for part in seen["maps"]] == [(16, 16), (8, 8), (4, 4), (2, 2)]
