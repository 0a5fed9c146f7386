"""Which functions of a kernel call which.

Triton 3.6 does not record where it inlines a function; the source says who can have called it.
"""

import ast
from functools import cache
from pathlib import Path

import dgt.ops.triton

PACKAGE = Path(dgt.ops.triton.__file__).parent


@cache
def callees() -> dict[str, set[str]]:
    """For each function of the Triton kernels, the others that it calls."""
    functions = [
        node
        for path in sorted(PACKAGE.glob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    names = {function.name for function in functions}
    return {function.name: names & _names_called(function) for function in functions}


def _names_called(function: ast.FunctionDef) -> set[str]:
    """The names that a function calls, those of other modules without the module."""
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    plain = {node.id for node in called if isinstance(node, ast.Name)}
    return plain | {node.attr for node in called if isinstance(node, ast.Attribute)}


def callers_of(function: str, kernel: str) -> list[str]:
    """The functions around a call of ``function`` in a kernel, the innermost first.

    The list ends where several functions call the same one, since any of them may be meant.
    """
    inside = _functions_of(kernel)
    found: list[str] = []
    while True:
        callers = [name for name in inside if function in callees()[name]]
        if len(callers) != 1 or callers[0] in found:
            return found
        function = callers[0]
        found.append(function)


@cache
def _functions_of(kernel: str) -> tuple[str, ...]:
    """The functions that a kernel consists of, itself first."""
    found = [kernel]
    for name in found:
        found += sorted(callees()[name] - set(found))
    return tuple(found)
