"""Readability that can be counted, for the library, benchmarks, studies, and tools.

There is no limit on the total number of lines, so there is no reason to fold code.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "benchmarks", "studies", "tools")
MOST_COMPLEX = 12  # branches + 1
MOST_COMPLEX_ON_AVERAGE = 3.2  # over all functions in a folder
MOST_PARAMETERS = 8  # constructors, `forward`, kernels, and custom operators are exempt
LONGEST_FUNCTION = 60  # lines without the docstring; kernels are exempt
LONGEST_FILE = 400  # lines
WIDE = 100  # columns
MOST_WIDE = 0.03  # fraction of the lines of code and docstrings in a folder
BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.match_case,
    ast.Assert,
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finding(NamedTuple):
    """A location that exceeds a limit."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.what}"


def files(folder: str) -> list[Path]:
    """The Python files of a folder, or the file itself."""
    path = ROOT / folder
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def complexity(function: ast.AST) -> int:
    """Branches + 1, where each further operand of a boolean expression counts as one."""
    inner = [node for node in ast.walk(function) if node is not function]
    branches = sum(isinstance(node, BRANCHES) for node in inner)
    parts = sum(len(node.values) - 1 for node in inner if isinstance(node, ast.BoolOp))
    return 1 + branches + parts


def check_function(path: Path, function: Function) -> Iterator[Finding]:
    """Its branches, parameters and lines."""
    marks = [ast.unparse(mark) for mark in function.decorator_list]
    is_kernel = any("jit" in mark for mark in marks)
    is_operator = any("custom_op" in mark for mark in marks)
    branches = complexity(function)
    if branches > MOST_COMPLEX:
        yield Finding(path, function.lineno, f"{function.name} has complexity {branches}")
    arguments = function.args
    count = len(arguments.args) + len(arguments.kwonlyargs) + len(arguments.posonlyargs)
    has_limit = not (is_kernel or is_operator or function.name in ("__init__", "forward"))
    if has_limit and count > MOST_PARAMETERS:
        yield Finding(path, function.lineno, f"{function.name} has {count} parameters")
    docstring = ast.get_docstring(function, clean=False) or ""
    lines = (function.end_lineno or function.lineno) - function.lineno - docstring.count("\n")
    if lines > LONGEST_FUNCTION and not is_kernel:
        yield Finding(path, function.lineno, f"{function.name} has {lines} lines")


def splats_dict(pairs: Iterable[tuple[object, ast.expr]]) -> bool:
    """Whether a dictionary entry without a key, `**value`, has a literal value."""
    return any(key is None and isinstance(value, ast.Dict) for key, value in pairs)


def folded(node: ast.AST) -> str | None:
    """What an expression or assignment does only to save lines, or None."""
    if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
        return "a literal is splatted"
    if isinstance(node, ast.Dict) and splats_dict(zip(node.keys, node.values, strict=True)):
        return "a literal is splatted"
    if isinstance(node, ast.Call) and splats_dict(
        (keyword.arg, keyword.value) for keyword in node.keywords
    ):
        return "a literal is splatted"
    if (
        isinstance(node, ast.IfExp)
        and sum(isinstance(inner, ast.IfExp) for inner in ast.walk(node)) > 1
    ):
        return "a conditional expression is inside another"
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    ):
        values = node.value.elts
        calls = sum(isinstance(value, ast.Call) for value in values)
        if len(values) > 3 or calls > 2:
            return "many things are assigned at once"
    return None


def check_file(path: Path) -> list[Finding]:
    """Everything in a file that exceeds a limit, except for the width of lines."""
    text = path.read_text(encoding="utf-8")
    found = []
    lines = len(text.splitlines())
    if lines > LONGEST_FILE:
        found.append(Finding(path, 1, f"the file has {lines} lines"))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            found.extend(check_function(path, node))
        what = folded(node)
        if what is not None:
            found.append(Finding(path, getattr(node, "lineno", 1), what))
    return found


def share_of_wide_lines(paths: list[Path]) -> float:
    """The fraction of lines with more than `WIDE` columns; empty lines and comments are not counted."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    counted = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    return sum(len(line) > WIDE for line in counted) / max(1, len(counted))


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_is_not_folded(folder: str) -> None:
    found = [finding for path in files(folder) for finding in check_file(path)]
    assert not found, "\n".join(["", *map(str, found)])


@pytest.mark.parametrize("folder", FOLDERS)
def test_few_lines_are_wide(folder: str) -> None:
    assert share_of_wide_lines(files(folder)) <= MOST_WIDE


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_are_simple_on_average(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": complexity(node)
        for path in files(folder)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Function)
    }
    mean = sum(found.values()) / len(found)
    worst = sorted(found, key=lambda name: -found[name])[:10]
    assert mean <= MOST_COMPLEX_ON_AVERAGE, "\n".join([f"{mean:.2f}", *worst])


def test_symbols_of_contributing_exist() -> None:
    """Every name in CONTRIBUTING.md that looks like one of the code is defined there."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    named: set[str] = set()
    for span in re.findall(r"`([^`\s]+)`", prose):
        if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", span) and (
            "_" in span or re.search(r"[a-z][A-Z]", span)
        ):
            named.update(part for part in span.split(".") if not part.endswith("__"))
    defined = {path.stem for path in ROOT.rglob("*.py")} | set(dir(builtins)) | {"dgt", "top_k"}
    for header in (ROOT / "src").rglob("*.h"):
        defined.update(re.findall(r"[A-Z_]{4,}", header.read_text(encoding="utf-8")))
    for folder in (*FOLDERS, "tests"):
        for path in files(folder):
            defined.add(path.parent.name)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, Function | ast.ClassDef):
                    defined.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    defined.add(node.id)
    assert sorted(named - defined - {"py", "md"}) == []
